"""512 H800, simulated: the largest published run of a model of 32 billion parameters, 8,192 answers an update.

    areal-simulate --config=configs/simulate/h800_512.py --workdir=runs/h800_512

88 engines of 4 accelerators each, and a learner on 160.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 20
    config.simulation.prices = 'roofline'
    config.simulation.chip = 'H800'
    config.simulation.model = 'R1-distill-Qwen-32B'
    config.simulation.answers = 'lognormal(9000, 0.75)'
    config.simulation.prompts = 'constant(512)'
    config.cluster.learner = 'data=20,fsdp=8'
    config.cluster.engines = '88 x tensor=4'
    config.rollout.slots = 118
    config.rollout.max_running_groups = 0  # by need: slots stay full
    config.rollout.group_size = 16
    config.rollout.max_new_tokens = 27648
    config.rollout.context_tokens = 28672
    config.rollout.block_tokens = 512
    config.rollout.prefill_buckets = (2048, 65536)
    config.rollout.decode_steps = 256
    config.learner.groups_per_update = 512
    config.learner.n_minibatches = 4
    config.learner.rows_per_microbatch = 160
    config.learner.row_tokens = 32768
    config.learner.row_loss_tokens = 32768
    config.learner.filter_equal_rewards = False
    config.staleness.eta = 4
    config.buffer.capacity = 4096
    config.checkpoint.every = 0
    config.evaluation.problems = 0
    config.telemetry.plots = False
    return config
