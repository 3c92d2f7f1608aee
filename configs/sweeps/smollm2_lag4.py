"""SmolLM2-135M-Instruct on one-digit arithmetic, every batch four versions old: plain against decoupled PPO.

    python -m areal_jax.main_sweep --config=configs/sweeps/smollm2_lag4.py --workdir=runs/smollm2_lag4

Six runs of some minutes each on two cores, one after the other. Each leaves a checkpoint of 3.8 GB.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config
from areal_jax.config import default_config

METHODS = {'plain': 'behavior', 'decoupled': 'recompute'}  # loss.proximal


def get_config() -> config_dict.ConfigDict:
    config = load_config(str(pathlib.Path(__file__).parents[1] / 'arithmetic.py'))
    config.run.export = False
    config.checkpoint.every = 0  # at the end alone: 3.8 GB, five versions of the weights
    config.staleness.schedule = 'fixed(4)'
    config.staleness.eta = default_config().staleness.eta  # not read in lock-step
    config.learner.n_minibatches = 4
    config.telemetry.tensorboard = False
    return config


def get_sweep() -> dict[str, dict[str, int | str]]:
    return {
        f'{method}_seed{seed}': {'loss.proximal': proximal, 'run.seed': seed}
        for method, proximal in METHODS.items()
        for seed in range(3)
    }
