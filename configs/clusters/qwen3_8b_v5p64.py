"""Qwen3-8B on 32 chips of TPU v5p: a slice of 16 trains, and engines on slices of four generate.

    python -m launch.jobset --config=configs/clusters/qwen3_8b_v5p64.py --workdir=/mnt/runs/a --claim=runs \\
        --image=IMAGE --accelerator=v5p --topology=2x2x4 --engine_topology=2x2x1

The page docs/cluster/recipes/qwen3_8b_v5p64.md has every step. It has not run on this hardware.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

MATHEMATICS = pathlib.Path(__file__).with_name('_mathematics.py')


def get_config() -> config_dict.ConfigDict:
    config = load_config(str(MATHEMATICS))
    config.model.path = 'hf:Qwen/Qwen3-8B'
    config.cluster.learner = 'hosts=4 x fsdp=16'
    config.cluster.engines = '4 x tensor=4'
    config.learner.rows_per_microbatch = 16  # a row for each chip
    config.rollout.server = 'own'
    config.rollout.slots = 256
    config.rollout.cache_tokens = 1310720
    config.publication.channel = 'stream'  # every process of the learner sends its shards
    config.publication.listen = 'own'
    config.publication.delta = True
    return config
