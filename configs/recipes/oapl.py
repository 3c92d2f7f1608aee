"""OAPL: log-ratios of whole answers are regressed on optimal advantages; engines keep a version for several updates.

    areal-train --config=recipes/oapl:tiny --workdir=runs/oapl

arXiv 2602.19362. Engines get new weights every fourth update, so that a group has one version.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'oapl'
    config.learner.n_minibatches = 1
    config.staleness.schedule = 'every(4)'
    if size:
        config.loss.entropy_coefficient = 6e-5  # the gradient of a regression is about a five-hundredth of the others'
    return config
