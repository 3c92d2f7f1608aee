"""32 H800 and a model of 7 billion parameters, simulated; answers grow from 2,000 to 16,000 tokens in four phases.

    areal-simulate --config=configs/simulate/moving.py --workdir=runs/moving

`cluster.reallocate='auto'` moves devices between generation and training; with 'off' they stay. An update trains 2,048
answers, so that the open answers are a small part of the run: a deep buffer does what moves would.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 150
    config.simulation.prices = 'roofline'
    config.simulation.chip = 'H800'
    config.simulation.model = 'R1-distill-Qwen-7B'
    means = 2000, 4000, 8000, 16000, 16000  # each for 30 updates
    config.simulation.answers = '; '.join(f'lognormal({mean}, 0.75)' for mean in means)
    config.simulation.prompts = 'constant(512)'
    config.simulation.passes = 5.0  # activations are computed again, and proximal log-probs
    config.cluster.learner = 'data=16'
    config.cluster.engines = '16 x tensor=1'
    config.cluster.reallocate = 'auto'
    config.cluster.reallocate_gain = 0.03  # a move takes seconds, an update minutes
    config.cluster.reallocate_updates = 2
    config.rollout.slots = 256
    config.rollout.max_running_groups = 0
    config.rollout.group_size = 16
    config.rollout.max_new_tokens = 49152
    config.rollout.context_tokens = 50176
    config.rollout.block_tokens = 512
    config.rollout.prefill_buckets = (2048, 16384)
    config.rollout.kv_policy = 'keep'  # short answers see several versions, and would be computed again under each
    config.rollout.decode_steps = 128
    config.learner.groups_per_update = 128
    config.learner.rows_per_microbatch = 232792560  # every number of devices up to 20 divides it
    config.learner.row_tokens = 50176
    config.learner.row_loss_tokens = 50176
    config.learner.filter_equal_rewards = False
    config.staleness.eta = 4  # a group waits for its longest answer: of 10,240 open answers some 2,500 decode
    config.buffer.capacity = 2048
    config.checkpoint.every = 0
    config.evaluation.problems = 0
    config.telemetry.plots = False
    return config
