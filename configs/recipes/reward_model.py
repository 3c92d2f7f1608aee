"""A reward model of pairs: a value head that gives the chosen of two answers the higher score.

    areal-train --config=recipes/reward_model --config.task.path=pairs.jsonl --workdir=runs/reward_model
    areal-train --config=recipes/reward_model:tiny --workdir=runs/reward_model_tiny

Data, models and sizes are those of the recipe dpo (docs/preferences.md).
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

DPO = pathlib.Path(__file__).with_name('dpo.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{DPO}:{size}' if size else str(DPO))
    config.loss.objective = 'reward_model'
    config.critic.learning_rate = 1e-3 if size else 1e-4
    if not size:
        config.optimizer.learning_rate = 1e-5
    return config
