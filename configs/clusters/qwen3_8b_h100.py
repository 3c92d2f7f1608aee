"""Qwen3-8B on two nodes of 8 H100: one trains, eight engines of this project of one GPU each generate on the other.

    python -m launch.slurm --config=configs/clusters/qwen3_8b_h100.py --workdir=DIR --gpus_per_node=8

Everything but the engines is as in qwen3_8b_h100_sglang.py. The page docs/cluster/recipes/qwen3_8b_h100.md has every
step. It has not run on this hardware.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

SGLANG = pathlib.Path(__file__).with_name('qwen3_8b_h100_sglang.py')


def get_config() -> config_dict.ConfigDict:
    config = load_config(str(SGLANG))
    config.rollout.server = 'own'
    config.rollout.slots = 40
    config.rollout.cache_tokens = 229376  # 33.8 GB of keys and values, next to two versions of 16.4 GB
    config.publication.channel = 'stream'  # every process of the learner sends its shards
    config.publication.listen = 'own'
    config.publication.delta = True
    return config
