"""What the recipes share: model, data and batch of AReaL's mathematics, or with ':tiny' those of configs/tiny_cpu.py.

A run of full size needs `model.path`, `task.path` and the section `cluster`; batch, lengths and optimizer are those of
AReaL, arXiv 2505.24298, Table 3, where a recipe says nothing else. run.steps and the shapes of rows are ours.
"""

import pathlib

from ml_collections import config_dict

from areal_jax import config as schema
from areal_jax.app.command_line import load_config

TINY_CPU = pathlib.Path(__file__).parents[1] / 'tiny_cpu.py'


def get_config(size: str = '') -> config_dict.ConfigDict:
    if size not in ('', 'tiny'):
        raise ValueError(f"{size!r} is no size of a recipe: use ':tiny', or nothing for the full size")
    config = _tiny() if size else _full()
    config.learner.n_minibatches = 4
    return config


def _tiny() -> config_dict.ConfigDict:
    config = load_config(str(TINY_CPU))
    config.run.steps = 100
    return config


def _full() -> config_dict.ConfigDict:
    config = schema.default_config()
    config.run.steps = 250
    config.model.source = 'hf'
    config.model.path = 'DeepSeek-R1-Distill-Qwen-1.5B'
    config.task.name = 'jsonl'
    config.task.path = 'math.jsonl'
    config.task.answer = 'math'
    config.task.verifier_workers = 16
    config.rollout.group_size = 16
    config.rollout.slots = 64
    config.rollout.decode_steps = 16
    config.rollout.max_new_tokens = 27648
    config.rollout.context_tokens = 28672
    config.rollout.block_tokens = 256
    config.rollout.prefill_buckets = (1024, 4096)
    config.staleness.eta = 4.0
    config.buffer.capacity = 2560  # (eta + 1) * groups_per_update
    config.learner.groups_per_update = 512
    config.learner.row_tokens = 28672
    config.learner.row_loss_tokens = 27648
    config.learner.dtype = 'bfloat16'
    config.learner.layers = 'stacked'
    config.learner.remat = 'full'
    config.optimizer.learning_rate = 1e-6
    config.publication.dtype = 'bfloat16'
    config.checkpoint.every = 10
    return config
