"""SmolLM2-135M-Instruct learns to write Python functions that pass their tests, from the result of configs/sft_code.py.

    python -m areal_jax.main_train --config=configs/sft_code.py --workdir=runs/sft_code
    python -m areal_jax.main_train --config=configs/code.py --workdir=runs/code

The reward is 1 where all visible tests pass. Answers run in a sandbox.
"""

from ml_collections import config_dict

from areal_jax import config as schema

FAMILIES = ('filter_list', 'map_list', 'filter_map_list', 'filter_sum', 'map_sum', 'filter_extreme', 'positions')


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 24
    config.model.source = 'run'
    config.model.path = 'runs/sft_code'
    config.task.name = 'code'
    config.task.datasets = FAMILIES  # those of configs/sft_code.py
    config.task.system_prompt = 'Answer with code only.'
    config.rollout.slots = 16
    config.rollout.decode_steps = 4
    config.rollout.group_size = 8
    config.rollout.max_new_tokens = 48
    config.rollout.context_tokens = 112
    config.rollout.block_tokens = 112  # on a CPU one long block is faster than two
    config.rollout.prefill_buckets = (256,)
    config.staleness.eta = 2.0
    config.learner.groups_per_update = 6
    config.learner.row_tokens = 448  # a group with answers of full length
    config.learner.row_loss_tokens = 384
    config.loss.behavior_weight_cap = 5.0
    config.evaluation.problems = 96
    config.evaluation.samples = 2
    config.checkpoint.every = 8
    return config
