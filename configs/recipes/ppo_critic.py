"""PPO with a critic: decoupled PPO on advantages of a value head on the trunk, whitened over the batch.

    areal-train --config=recipes/ppo_critic:tiny --workdir=runs/ppo_critic

GAE, arXiv 1506.02438, with gamma = lambda = 1 as in AReaL's Table 3; docs/critic.md.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'ppo_critic'
    config.critic.learning_rate = 1e-3 if size else 1e-5
    return config
