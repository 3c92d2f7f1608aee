"""64 H200 and a mixture of experts of 30 billion parameters, simulated: agents with a tool between every two turns.

    areal-simulate --config=configs/simulate/agents.py --workdir=runs/agents

An episode has 10 to 50 turns of 250 tokens, mean. Between two a tool takes 2 seconds, mean, with a long tail, and gives
350 tokens. The sizes are those of published runs on software tasks; how turns and tools are distributed is assumed.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 6
    config.simulation.prices = 'roofline'
    config.simulation.chip = 'H200'
    config.simulation.model = 'Qwen3-30B-A3B'
    config.simulation.prompts = 'lognormal(5600, 0.3)'
    config.simulation.turns = 'uniform(10, 50)'
    config.simulation.answers = 'lognormal(250, 0.75)'  # of a turn
    config.simulation.results = 'lognormal(350, 1)'
    config.simulation.tool = 'lognormal(2000, 1.5)'
    config.cluster.learner = 'data=16'
    config.cluster.engines = '12 x tensor=4'
    config.agent.max_turns = 64
    config.agent.tool_calls = 2048  # at once: the default of 8 would be what binds
    config.rollout.slots = 128
    config.rollout.max_running_groups = 0
    config.rollout.group_size = 8
    config.rollout.max_new_tokens = 24576
    config.rollout.context_tokens = 49152
    config.rollout.block_tokens = 128
    config.rollout.prefill_buckets = (2048, 16384)
    config.rollout.decode_steps = 16
    config.learner.groups_per_update = 64
    config.learner.n_minibatches = 4
    config.learner.rows_per_microbatch = 16
    config.learner.row_tokens = 49152
    config.learner.row_loss_tokens = 49152
    config.staleness.eta = 4
    config.buffer.capacity = 1024
    config.checkpoint.every = 0
    config.evaluation.problems = 0
    config.telemetry.plots = False
    return config
