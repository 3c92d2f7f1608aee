"""CISPO: a bounded ratio as a constant weight of log π, so that no token loses its gradient.

    areal-train --config=recipes/cispo:tiny --workdir=runs/cispo

MiniMax-M1, arXiv 2506.13585; bounds 0 and 5 of ScaleRL, arXiv 2510.13786.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'cispo'
    return config
