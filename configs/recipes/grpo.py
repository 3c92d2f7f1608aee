"""GRPO: advantages of a group over its deviation, every answer counts the same, KL to the start in the loss.

    areal-train --config=recipes/grpo:tiny --workdir=runs/grpo

DeepSeekMath, arXiv 2402.03300. There is no weight for stale answers: keep staleness.eta small, or set loss.correction.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SIZES = pathlib.Path(__file__).with_name('_sizes.py')


def get_config(size: str = '') -> config_dict.ConfigDict:
    config = load_config(f'{SIZES}:{size}')
    config.loss.objective = 'grpo'
    return config
