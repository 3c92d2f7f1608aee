"""Truncated importance sampling: decoupled PPO with the weight of stale and mismatched tokens capped at 2.

    areal-train --config=recipes/tis:tiny --workdir=runs/tis

The weight is π_prox / π_behav of each token; loss.correction_level='sequence' takes that of the answer.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'tis'
    return config
