"""Four fast engines and four of a third of their speed, simulated, with a learner that waits for them.

areal-simulate --config=configs/simulate/mixed.py --workdir=runs/mixed
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 16
    config.simulation.prices = 'roofline'
    config.simulation.chip = 'H800'
    config.simulation.engine_chips = '4 x H800, 4 x H800/3'
    config.simulation.model = 'R1-distill-Qwen-1.5B'
    config.simulation.answers = 'lognormal(2000, 0.75)'
    config.simulation.prompts = 'constant(512)'
    config.cluster.learner = 'data=8'
    config.cluster.engines = '8 x tensor=1'
    config.rollout.slots = 64
    config.rollout.max_running_groups = 0
    config.rollout.group_size = 16
    config.rollout.max_new_tokens = 15360
    config.rollout.context_tokens = 16384
    config.rollout.block_tokens = 128
    config.rollout.prefill_buckets = (2048, 16384)
    config.rollout.decode_steps = 64
    config.learner.groups_per_update = 16
    config.learner.rows_per_microbatch = 8
    config.learner.row_tokens = 16384
    config.learner.row_loss_tokens = 16384
    config.learner.filter_equal_rewards = False
    config.staleness.eta = float('inf')
    config.buffer.capacity = 1024
    config.checkpoint.every = 0
    config.evaluation.problems = 0
    config.telemetry.plots = False
    return config
