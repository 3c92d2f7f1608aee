"""Dr. GRPO: advantages without their deviation, a sum over tokens divided by a constant length.

    areal-train --config=recipes/dr_grpo:tiny --workdir=runs/dr_grpo

arXiv 2503.20783.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'dr_grpo'
    if not size:
        config.rollout.group_size = 8
    return config
