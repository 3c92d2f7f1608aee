"""A mixture of 8 experts learns from scratch to reverse a string, as the dense model of configs/tiny_cpu.py does.

    python -m areal_jax.main_train --config=configs/tiny_moe.py --workdir=runs/tiny_moe

A token reaches two of the experts, whose widths together are the width of the dense model's MLP.
"""

from ml_collections import config_dict

from configs import tiny_cpu


def get_config() -> config_dict.ConfigDict:
    config = tiny_cpu.get_config()
    config.model.family = 'qwen3_moe'
    config.model.experts = 8
    config.model.experts_per_token = 2
    config.model.d_expert = 64
    return config
