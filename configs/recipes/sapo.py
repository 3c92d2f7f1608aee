"""SAPO: a sigmoid of the ratio in the place of a clip, narrower where the advantage is negative.

    areal-train --config=recipes/sapo:tiny --workdir=runs/sapo

arXiv 2511.20347.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'sapo'
    return config
