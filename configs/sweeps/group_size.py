"""Answers per prompt at equal answers per update: 16 x 4, 8 x 8 and 4 x 16 prompts x answers, three seeds.

python -m areal_jax.main_sweep --config=configs/sweeps/group_size.py --workdir=runs/group_size --jobs=2
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

ANSWERS = 64  # of an update


def get_config() -> config_dict.ConfigDict:
    config = load_config(str(pathlib.Path(__file__).with_name('tiny.py')))
    config.run.steps = 200
    config.rollout.max_running_groups = 32
    config.learner.row_tokens = 256  # holds a group of 16
    config.learner.row_loss_tokens = 192
    return config


def get_sweep() -> dict[str, dict[str, int]]:
    return {
        f'group{size}_seed{seed}': {
            'rollout.group_size': size, 'learner.groups_per_update': ANSWERS // size, 'run.seed': seed,
        }
        for size in (4, 8, 16)
        for seed in range(3)
    }  # fmt: skip
