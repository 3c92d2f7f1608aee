"""RLOO: REINFORCE, each answer against the mean of the others of its group.

    areal-train --config=recipes/rloo:tiny --workdir=runs/rloo

arXiv 2402.14740. There is no weight for stale answers: keep staleness.eta small, or set loss.correction.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'rloo'
    config.learner.n_minibatches = 1
    return config
