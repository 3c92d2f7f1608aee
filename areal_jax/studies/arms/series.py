"""The metrics of every update of an arm, under the names and in the file of a run.

Metrics of parts that a program of arms does not have are absent: seconds of a clock, engines, packing.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import numpy as np

from areal_jax import files
from areal_jax.config import CONFIG, TrackedConfig
from areal_jax.config.ranges import ConfigError
from areal_jax.control.lock_step import Schedule
from areal_jax.learning.objective.policy_loss import finalize_policy_metrics
from areal_jax.learning.optimizer.optimizer import BRAKES, mean_step_metrics
from areal_jax.studies.arms.arm import Arm
from areal_jax.studies.arms.setting import Setting
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import FILE, Line, MetricsWriter, Value, merge

_Sums = Mapping[str, float]  # of one update, see update.Sums


def make_lines(
    setting: Setting, schedule: Schedule, sums: Mapping[str, np.ndarray], versions: np.ndarray
) -> list[Line]:
    """The metrics of updates that start from `versions` [n], from their sums [n]."""
    one = lambda index: {name: float(values[index]) for name, values in sums.items()}
    age = lambda version: min(version, schedule.delay(version))
    return [make_line(setting, age(int(version)), one(index)) for index, version in enumerate(versions)]


def make_line(setting: Setting, age: int, sums: _Sums) -> Line:
    """Of an update on a batch of one age."""
    return merge(
        data=_data_metrics(setting, sums),
        ages=_age_metrics(setting, age, sums),
        loss=finalize_policy_metrics(sums),
        steps=_step_metrics(sums),
        mismatch=_mismatch_metrics(sums),
        frictions=_friction_metrics(setting, sums),
    )


def open_writer(workdir: pathlib.Path, arm: Arm) -> MetricsWriter:
    """Makes the directory of an arm with its config.json, and returns the writer of its metrics.jsonl.

    Raises ConfigError where the directory holds metrics already.
    """
    if (workdir / FILE).exists():
        raise ConfigError(f'{workdir} holds a run already: give another --workdir, or remove it')
    workdir.mkdir(parents=True, exist_ok=True)
    files.write_json(workdir / CONFIG, TrackedConfig(arm.config).as_dict())
    return MetricsWriter(workdir, tensorboard=False)


def _data_metrics(setting: Setting, sums: _Sums) -> dict[str, Value]:
    """As diagnostics.data_metrics; a reward is right symbols / (A + 1)."""
    count, unit = setting.groups * setting.group_size, setting.answer_tokens + 1
    mean = sums['right'] / count
    spread = max(sums['right_squares'] / count - mean**2, 0.0) ** 0.5
    generated = float(count * setting.answer_tokens)
    return {
        'update/groups': float(setting.groups),
        names.UPDATE_GROUPS: sums['kept'],
        names.UPDATE_FILTERED: setting.groups - sums['kept'],
        names.REWARD_MEAN: mean / unit,
        names.REWARD_STD: spread / unit,
        names.TOKENS_GENERATED: generated,
        names.TOKENS_TRAINED: _trained_tokens(setting, sums),
        names.GROUPS_TRAINED: sums['kept'],
    }


def _age_metrics(setting: Setting, age: int, sums: _Sums) -> dict[str, Value]:
    """As diagnostics.age_metrics: all tokens of a batch have one age."""
    trained = _trained_tokens(setting, sums)
    metrics: dict[str, Value] = {
        names.UPDATE_TOKENS: trained,
        names.UPDATE_TRAJECTORIES: sums['kept'] * setting.group_size,
        names.TOKENS_MASKED: 0.0,
        names.TOKEN_AGE_HISTOGRAM: [0.0] * age + [trained] if trained else [],
    }
    if trained:
        metrics |= {
            names.TOKEN_AGE_MEAN: float(age),
            names.TOKEN_AGE_MAX: float(age),
            names.VERSIONS_MEAN: 1.0,
            names.VERSIONS_MAX: 1.0,
        }
    return metrics


def _trained_tokens(setting: Setting, sums: _Sums) -> float:
    return sums['kept'] * setting.group_size * setting.answer_tokens


def _step_metrics(sums: _Sums) -> dict[str, Value]:
    """As update.train: of the optimizer steps that were made."""
    made, skipped = sums['steps'], sums['skip_count']
    loss: dict[str, Value] = {}
    if made:
        loss = {
            'loss/value': sums['loss_sum'] / made,
            'loss/sequence_effective_sample_size': sums['sample_sizes'] / made,
        }
        loss |= {f'update/{name}': sums[name] / made for name in BRAKES if name in sums}
    return {**mean_step_metrics(made, skipped, sums['grad_norm'], sums['learning_rate']), **loss}


def _friction_metrics(setting: Setting, sums: _Sums) -> dict[str, Value]:
    """As control/disturbances.py counts; nothing in a program without frictions."""
    counted = (names.FRICTION_ACTOR, names.FRICTION_REWARD, names.FRICTION_UNREWARDED)
    if 'friction_actor' not in sums:
        return {}
    found: dict[str, Value] = {name: sums[name.replace('/', '_')] for name in counted}
    if count := sums['friction_policy_count']:
        found[names.FRICTION_POLICY_REWARD] = sums['friction_policy_right'] / count / (setting.answer_tokens + 1)
    return found


def _mismatch_metrics(sums: _Sums) -> dict[str, Value]:
    count = sums['mismatch_count']
    if not count:
        return {names.MISMATCH_COUNT: 0.0}
    return {
        names.MISMATCH_COUNT: count,
        names.MISMATCH_MEAN: sums['mismatch_sum'] / count,
        names.MISMATCH_MAX: sums['mismatch_max'],
        names.MISMATCH_EXACT: sums['mismatch_exact'] / count,
    }
