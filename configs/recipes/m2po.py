"""M2PO: the tokens whose ratio strayed furthest are left out until the second moment of the rest is small.

    areal-train --config=recipes/m2po:tiny --workdir=runs/m2po

arXiv 2510.01161, made for staleness of hundreds of updates. It needs a pass before each step.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'm2po'
    config.learner.n_minibatches = 1
    config.staleness.eta = 16.0
    if not size:
        config.buffer.capacity = 8704  # (eta + 1) * groups_per_update
    return config
