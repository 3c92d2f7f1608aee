"""A tiny model imitates one-digit arithmetic until half of its sampled answers are right, as a start for RL.

    python -m areal_jax.main_train --config=configs/sft_arithmetic.py --workdir=runs/sft_arithmetic

configs/sweeps/arithmetic.py trains the result by reinforcement learning; the questions held out are the same.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 70
    config.loss.objective = 'sft'
    config.model.characters = '0123456789+-*='
    config.task.name = 'package:configs/sweeps/arithmetic.py:build'
    config.learner.groups_per_update = 32
    config.learner.row_tokens = 128
    config.learner.row_loss_tokens = 64
    config.learner.rows_per_microbatch = 3
    config.optimizer.learning_rate = 3e-3
    config.optimizer.schedule = 'cosine'
    config.optimizer.warmup_steps = 5
    config.sft.evaluate_every = 25
    return config
