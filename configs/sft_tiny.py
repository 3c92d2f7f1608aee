"""Supervised training in seconds: a two-layer model learns from given answers to reverse a string.

    python -m areal_jax.main_train --config=configs/sft_tiny.py --workdir=runs/sft_tiny

Task: five letters out of three ('abcca=' -> 'accba'), every string once; a quarter of them is held out.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 150
    config.loss.objective = 'sft'
    config.task.name = 'token_reversal'
    config.task.symbols = 3
    config.task.length = 5
    config.learner.groups_per_update = 32
    config.learner.row_tokens = 128
    config.learner.row_loss_tokens = 72
    config.learner.rows_per_microbatch = 3
    config.optimizer.learning_rate = 3e-3
    config.optimizer.schedule = 'cosine'
    config.optimizer.warmup_steps = 5
    config.sft.evaluate_every = 25
    return config
