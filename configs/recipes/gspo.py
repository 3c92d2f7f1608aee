"""GSPO: one ratio an answer, the geometric mean of those of its tokens, and bounds of a few ten-thousandths.

    areal-train --config=recipes/gspo:tiny --workdir=runs/gspo

arXiv 2507.18071, equation 7 and section 5.1. loss.ratio='geometric_token' is its token form, equation 14.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'gspo'
    return config
