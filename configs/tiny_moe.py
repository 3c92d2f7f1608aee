"""A mixture of 8 experts learns from scratch to reverse a string, as the dense model of configs/tiny_cpu.py does.

    python -m areal_jax.main_train --config=configs/tiny_moe.py --workdir=runs/tiny_moe

A token reaches two of the experts, which together are as wide as the dense model's MLP. All else is as there.
"""

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 200
    config.model.family = 'qwen3_moe'
    config.model.experts = 8
    config.model.experts_per_token = 2
    config.model.d_expert = 64
    config.task.name = 'token_reversal'
    config.task.verifier = 'inline'
    config.rollout.slots = 16
    config.rollout.decode_steps = 2
    config.rollout.context_tokens = 16
    config.rollout.block_tokens = 16
    config.rollout.prefill_buckets = (32, 256)
    config.rollout.max_new_tokens = 8
    config.rollout.max_running_groups = 16
    config.learner.row_tokens = 128
    config.learner.row_loss_tokens = 96
    config.loss.entropy_coefficient = 0.03
    config.optimizer.learning_rate = 1e-3
    config.evaluation.problems = 4
    config.evaluation.samples = 16
    return config
