"""DAPO: a higher upper clip, groups without signal replaced, a penalty for answers near the longest length.

    areal-train --config=recipes/dapo:tiny --workdir=runs/dapo

arXiv 2503.14476, section 4.1: rewards of 1 and -1, 16,384 tokens and 4,096 more in which the penalty grows to 1, 16
steps an update.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'dapo'
    config.task.filter = 'equal_rewards'
    config.loss.overlong_tokens = 4096 if not size else 2
    config.loss.reward_bias = 0.5
    config.loss.reward_scale = 2.0
    config.loss.overlong_penalty = 1.0 / config.loss.get_ref('reward_scale')  # the scale multiplies it too
    if size:
        config.run.steps = 50  # later, or at 1e-3 sooner, the policy settles on one answer and no group has a signal
        config.optimizer.learning_rate = 3e-4
    else:
        config.rollout.max_new_tokens = 20480
        config.learner.n_minibatches = 16
        config.optimizer.weight_decay = 0.1
    return config
