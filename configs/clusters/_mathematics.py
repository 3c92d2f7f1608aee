"""What the recipes for clusters share: mathematics with long answers, its data, lengths, batch and checkpoints.

Each recipe adds the model, the devices, and what follows from their memory; docs/cluster/recipes/index.md has the
reasons.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 200
    config.run.stall_timeout_s = 1800.0  # an update of the learner takes minutes, its first one compiles
    config.run.export_dtype = 'bfloat16'
    config.distributed.command_deadline_s = 3600.0
    config.model.source = 'hf'
    config.task.name = 'jsonl'
    config.task.path = 'hf:BytedTsinghua-SIA/DAPO-Math-17k'
    config.task.columns.question = 'prompt.0.content'
    config.task.columns.answer = 'reward_model.ground_truth'
    config.task.answer = 'math'
    config.task.over_length = 'drop'
    config.task.held_out_fraction = 0.02
    config.task.verifier_workers = 16
    config.rollout.group_size = 16
    config.rollout.max_new_tokens = 15360
    config.rollout.context_tokens = 16384
    config.rollout.block_tokens = 128
    config.rollout.decode_steps = 16  # tokens of a message to the controller, too
    config.rollout.prefill_buckets = (1024, 4096)
    config.staleness.eta = 4.0
    config.buffer.capacity = 320  # (eta + 1) * groups_per_update
    config.learner.groups_per_update = 64
    config.learner.n_minibatches = 4
    config.learner.row_tokens = 16384
    config.learner.row_loss_tokens = 16384
    config.learner.dtype = 'bfloat16'
    config.learner.layers = 'stacked'
    config.learner.remat = 'full'
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup_steps = 20  # five updates
    config.publication.channel = 'files'
    config.publication.dtype = 'bfloat16'
    config.checkpoint.every = 10
    config.evaluation.problems = 64
    config.evaluation.samples = 4
    return config
