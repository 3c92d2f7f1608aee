"""Delightful policy gradient: a token counts by advantage times surprisal; neither ratio nor version is read.

    areal-train --config=recipes/dg:tiny --workdir=runs/dg

arXiv 2603.14608 and 2603.20521. A biased weight, at most 1/2 for failures: a heuristic, and not a default.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'dg'
    config.learner.n_minibatches = 1
    return config
