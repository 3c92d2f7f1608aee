"""The whole loop in under a minute: a two-layer model learns from scratch to reverse a string.

    python -m areal_jax.main_train --config=configs/tiny_cpu.py --workdir=runs/tiny

Task: four letters out of two ('abbb=' -> 'bbba'), reward = share of places that agree, the end among them.
The runs that this was tuned on, with hardware and seeds, are in docs/log/.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 200
    config.task.name = 'token_reversal'
    config.task.verifier = 'inline'
    config.rollout.slots = 16
    config.rollout.decode_steps = 2
    config.rollout.context_tokens = 16
    config.rollout.block_tokens = 16
    config.rollout.prefill_buckets = (32, 256)
    config.rollout.max_new_tokens = 8
    config.rollout.max_running_groups = 16  # stored results were made with so many
    config.learner.row_tokens = 128
    config.learner.row_loss_tokens = 96
    config.loss.entropy_coefficient = 0.03  # without it the policy settles on one answer for all prompts
    config.optimizer.learning_rate = 1e-3
    config.evaluation.problems = 4
    config.evaluation.samples = 16
    return config
