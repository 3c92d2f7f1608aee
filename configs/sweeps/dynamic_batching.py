"""Dynamic batching on and off: rows filled by the paper's Algorithm 1 against one answer a row, three seeds.

    python -m areal_jax.main_sweep --config=configs/sweeps/dynamic_batching.py --workdir=runs/dynamic_batching --jobs=2

Both have the same loss; under the virtual clock a row costs its length, padding included, so the seconds show what the
padding costs.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config


def get_config() -> config_dict.ConfigDict:
    config = load_config(str(pathlib.Path(__file__).with_name('tiny.py')))
    config.run.steps = 200
    config.learner.packing = 'ordinary'  # a prompt in front of each answer, as one answer a row has it
    return config


def get_sweep() -> dict[str, dict[str, int | str]]:
    return {
        f'{name}_seed{seed}': {'learner.fill': fill, 'run.seed': seed}
        for name, fill in (('dynamic', 'algorithm_1'), ('padded', 'padded'))
        for seed in range(3)
    }
