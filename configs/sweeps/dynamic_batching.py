"""Dynamic batching on and off: rows filled by the paper's Algorithm 1 against one answer a row, three seeds.

    python -m areal_jax.main_sweep --config=configs/sweeps/dynamic_batching.py --workdir=runs/dynamic_batching

Both have the same loss and micro-batches of 128 tokens: one row, or eight rows of 16, which the longest answer fits.
The clock is the real one, runs are synchronous and follow each other, so the seconds show what padding costs.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

FILLS = {
    'dynamic': {'learner.fill': 'algorithm_1', 'learner.row_tokens': 128, 'learner.row_loss_tokens': 96},
    'padded': {
        'learner.fill': 'padded', 'learner.row_tokens': 16, 'learner.row_loss_tokens': 12,
        'learner.rows_per_microbatch': 8,
    },
}  # fmt: skip


def get_config() -> config_dict.ConfigDict:
    config = load_config(str(pathlib.Path(__file__).with_name('tiny.py')))
    config.run.steps = 200
    config.run.clock = 'real'
    config.staleness.eta = 0.0
    config.learner.packing = 'ordinary'  # a prompt in front of each answer, as one answer a row has it
    config.learner.filter_equal_rewards = False
    return config


def get_sweep() -> dict[str, dict[str, int | str]]:
    return {f'{name}_seed{seed}': {**fields, 'run.seed': seed} for name, fields in FILLS.items() for seed in range(3)}
