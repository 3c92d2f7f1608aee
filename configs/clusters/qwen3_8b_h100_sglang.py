"""Qwen3-8B on two nodes of 8 H100: one trains, eight SGLang servers of one GPU each generate on the other.

    python -m launch.slurm --config=configs/clusters/qwen3_8b_h100_sglang.py --workdir=DIR --gpus_per_node=8

The page docs/cluster/recipes/qwen3_8b_h100_sglang.md has every step. It has not run on this hardware.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

MATHEMATICS = pathlib.Path(__file__).with_name('_mathematics.py')


def get_config() -> config_dict.ConfigDict:
    config = load_config(str(MATHEMATICS))
    config.model.path = 'hf:Qwen/Qwen3-8B'
    config.cluster.learner = 'hosts=1 x fsdp=8'
    config.cluster.engines = '8 x tensor=1'
    config.staleness.eta = 2.0  # a larger one changes nothing while engines are what limits
    config.buffer.capacity = 192  # (eta + 1) * groups_per_update
    config.learner.rows_per_microbatch = 8  # a row for each GPU
    config.rollout.server = 'sglang'
    config.rollout.slots = 64
    return config
