"""Experts as engines recorded them or as the learner chooses them, at eta 0 and 4, and a dense model; five seeds.

    python -m areal_jax.main_sweep --config=configs/sweeps/moe_routes.py --workdir=runs/moe_routes --jobs=2

All arms but the dense ones record routes, so that the report tells how many sets of experts differ, by age, and how
much of the ratio is routing. The dense model has an MLP as wide as the experts that a token reaches.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

DENSE = {'model.family': 'qwen3', 'model.experts': 0, 'rollout.record_routes': False, 'learner.routes': 'live'}


def get_config() -> config_dict.ConfigDict:
    config = load_config(str(pathlib.Path(__file__).parents[1] / 'tiny_moe.py'))
    config.run.clock = 'virtual'  # the same ages on every machine
    config.run.export = False
    config.rollout.record_routes = True
    config.diagnostics.ratio_sample = 0.1
    return config


def get_sweep() -> dict[str, dict[str, float | int | str | bool]]:
    arms = {
        f'{routes}_eta{eta}_seed{seed}': {'learner.routes': routes, 'staleness.eta': eta, 'run.seed': seed}
        for routes in ('live', 'replay')
        for eta in (0, 4)
        for seed in range(5)
    }
    return arms | {f'dense_eta4_seed{seed}': {**DENSE, 'staleness.eta': 4, 'run.seed': seed} for seed in range(5)}
