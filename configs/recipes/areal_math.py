"""AReaL's mathematics: decoupled PPO, advantages whitened over the batch, rewards of 5 and -5, no critic.

    areal-train --config=recipes/areal_math:tiny --workdir=runs/areal_math

AReaL, arXiv 2505.24298, Table 3. The paper computes in float16, this in bfloat16.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'decoupled_ppo'
    config.loss.advantage = 'reward'
    config.loss.whiten = 'batch'
    config.loss.reward_bias = 0.5
    config.loss.reward_scale = 10.0
    config.loss.reward_clip = 5.0
    config.optimizer.weight_decay = 0.05
    config.optimizer.b2 = 0.95
    config.optimizer.eps = 1e-5
    if not size:
        config.optimizer.learning_rate = 2e-5
        config.optimizer.warmup_steps = 1  # a thousandth of the optimizer steps
    return config
