"""Rollouts in 8 bits and in float32: plain, decoupled and capped PPO at eta 0 and 4, token reversal, five seeds each.

    python -m areal_jax.main_sweep --config=configs/sweeps/quantized.py --workdir=runs/quantized --jobs=2

Engines in 8 bits sample from another policy than the learner's. Plain PPO takes the difference for a step of the
policy, decoupled PPO corrects it by the weight π_prox / μ, and the cap bounds that weight.
"""

import pathlib

from ml_collections import config_dict

from areal_jax.app.command_line import load_config

OBJECTIVES = {
    'plain': {'loss.proximal': 'behavior'},
    'decoupled': {'loss.proximal': 'recompute'},
    'capped': {'loss.proximal': 'recompute', 'loss.behavior_weight_cap': 2.0},
}
WEIGHTS = {'full': 'published', 'int8': 'int8'}


def get_config() -> config_dict.ConfigDict:
    config = load_config(str(pathlib.Path(__file__).with_name('tiny.py')))
    config.run.steps = 100
    config.learner.n_minibatches = 4  # with one, 'decoupled' would not clip
    config.diagnostics.ratio_sample = 0.1  # the mismatch of old tokens, which were generated under earlier weights
    return config


def get_sweep() -> dict[str, dict[str, float | int | str]]:
    return {
        f'{form}_{objective}_eta{eta}_seed{seed}': {
            'rollout.weights': weights, **fields, 'staleness.eta': eta, 'run.seed': seed,
        }
        for form, weights in WEIGHTS.items()
        for objective, fields in OBJECTIVES.items()
        for eta in (0, 4)
        for seed in range(5)
    }  # fmt: skip
