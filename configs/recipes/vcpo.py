"""VCPO: REINFORCE with a capped weight an answer, the baseline of least variance, steps by the effective sample size.

    areal-train --config=recipes/vcpo:tiny --workdir=runs/vcpo

arXiv 2602.17616. The learning rate of a step falls with the root of the effective sample size of its answers.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'vcpo'
    config.optimizer.brake = 'ess'
    config.learner.n_minibatches = 1
    return config
