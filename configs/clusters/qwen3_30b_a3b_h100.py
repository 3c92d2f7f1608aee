"""Qwen3-30B-A3B on eight nodes of 8 H100: four train, 16 SGLang servers of two GPUs generate on the others.

    python -m launch.slurm --config=configs/clusters/qwen3_30b_a3b_h100.py --workdir=DIR --gpus_per_node=8

The page docs/cluster/recipes/qwen3_30b_a3b_h100.md has every step. It has not run on this hardware.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

MATHEMATICS = pathlib.Path(__file__).with_name('_mathematics.py')


def get_config() -> config_dict.ConfigDict:
    config = load_config(str(MATHEMATICS))
    config.model.path = 'hf:Qwen/Qwen3-30B-A3B'
    config.loss.objective = 'gspo'  # one ratio an answer: tokens whose experts changed have ratios far from 1
    config.cluster.learner = 'hosts=4 x fsdp=4,expert=8'  # the experts' exchange stays inside a node
    config.cluster.engines = '16 x tensor=2'
    config.checkpoint.every = 30  # 366 GB each
    config.rollout.server = 'sglang'
    config.rollout.slots = 160
    config.rollout.max_new_tokens = 7168
    config.rollout.context_tokens = 8192
    config.buffer.capacity = 640  # (eta + 1) * groups_per_update
    config.learner.groups_per_update = 128
    config.learner.row_tokens = 8192  # each device has room for the rows of its node in every layer
    config.learner.row_loss_tokens = 8192
    config.learner.rows_per_microbatch = 32  # a row for each GPU
    return config
