"""Sixteen H800, simulated: an eighth of the largest published run of a model of 1.5 billion parameters.

    areal-simulate --config=configs/simulate/sixteen.py --workdir=runs/sixteen

12 engines generate for a learner on 4 accelerators, 64 prompts with 16 answers an update. Lengths are lognormal with a
mean of 9,000 tokens, cut at 27,648. docs/simulation.md says what is modelled.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 20
    config.simulation.prices = 'roofline'
    config.simulation.chip = 'H800'
    config.simulation.model = 'R1-distill-Qwen-1.5B'
    config.simulation.answers = 'lognormal(9000, 0.75)'
    config.simulation.prompts = 'constant(512)'
    config.cluster.learner = 'data=4'
    config.cluster.engines = '12 x tensor=1'
    config.rollout.slots = 256
    config.rollout.max_running_groups = 0  # by need: slots stay full
    config.rollout.group_size = 16
    config.rollout.max_new_tokens = 27648
    config.rollout.context_tokens = 28672
    config.rollout.block_tokens = 256
    config.rollout.prefill_buckets = (2048, 16384)
    config.rollout.decode_steps = 64
    config.learner.groups_per_update = 64
    config.learner.n_minibatches = 4
    config.learner.rows_per_microbatch = 4
    config.learner.row_tokens = 32768
    config.learner.row_loss_tokens = 32768
    config.learner.filter_equal_rewards = False
    config.staleness.eta = 8
    config.buffer.capacity = 1024
    config.checkpoint.every = 0
    config.evaluation.problems = 0
    config.telemetry.plots = False
    return config
