"""IcePop: tokens whose weight lies outside [0.5, 5] are left out.

    areal-train --config=recipes/icepop:tiny --workdir=runs/icepop

The bounds are those that OpenRLHF, NeMo RL and AReaL ship.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'icepop'
    return config
