"""Qwen3-30B-A3B on 48 accelerators of 80 GB: 32 train, 16 decode in four engines.

Shapes, shardings and memory of a device, without weights and without accelerators:

    XLA_FLAGS=--xla_force_host_platform_device_count=48 \\
        python -m areal_jax.main_train --config=configs/qwen3_30b_a3b.py --dry_run

A run names the downloaded model, --config.model.path=DIR, which also has its tokenizer. Nobody has run it.
"""

import pathlib

from ml_collections import config_dict

from areal_jax import config as schema


def get_config() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.model.source = 'hf'
    config.model.path = str(pathlib.Path(__file__).parent / 'shapes' / 'qwen3_30b_a3b')
    config.cluster.learner = 'fsdp=4,expert=8'
    config.cluster.engines = '4 x expert=4'
    config.task.name = 'running_sums'
    config.rollout.record_routes = True
    config.learner.routes = 'replay'
    config.rollout.slots = 32
    config.rollout.context_tokens = 9216
    config.rollout.max_new_tokens = 8192
    config.rollout.prefill_buckets = (1024, 4096)
    config.rollout.group_size = 16
    config.learner.groups_per_update = 32
    config.learner.row_tokens = 16384
    config.learner.row_loss_tokens = 16384
    config.learner.rows_per_microbatch = 32
    config.learner.layers = 'stacked'
    config.learner.remat = 'full'
    config.learner.dtype = 'bfloat16'
    config.publication.dtype = 'bfloat16'
    config.evaluation.problems = 0
    return config
