"""REINFORCE++: advantages whitened over the batch, no group baseline, KL to the start in the reward.

    areal-train --config=recipes/reinforce_pp:tiny --workdir=runs/reinforce_pp

arXiv 2501.03262. The coefficient is that of AReaL's example.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'reinforce_pp'
    config.loss.kl_coefficient = 1e-3
    config.loss.kl_estimator = 'k1'
    config.loss.kl_in = 'reward'
    return config
