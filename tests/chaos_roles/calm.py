"""Runs that nobody disturbs, in roles and in one process: how long each part takes, and that their weights agree."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.chaos_roles.judge import check_end
from tests.chaos_roles.recovery import Baseline, measure_baseline
from tests.chaos_roles.runs import ALONE, IN_ROLES, Record, WatchedRun, command_of

_STEPS, _EVERY = 4, 2
# sums over processes are taken in another order than those over the devices of one; four steps of Adam move a weight by
# up to 4e-3. Adam divides a gradient by its size, so eps takes out the weights whose gradient is rounding.
_TOLERANCE = 4e-6
_EPS = 1e-4


@dataclasses.dataclass(frozen=True)
class Calm:
    """What these runs have shown; no baseline where one did not finish, or there was no time for it."""

    baseline: Baseline | None
    seconds: float  # of the last
    compared: bool
    violations: list[str]


def run_calm(directory: pathlib.Path, cache: pathlib.Path, until_s: float) -> Calm:
    """All with eta=0, so that each batch is made with the weights of the update before.

    The first in roles fills the cache of compiled programs: its parts take longer than those of the runs that follow.
    """
    records: list[Record] = []
    for number, learner in enumerate((IN_ROLES, ALONE, IN_ROLES)):
        fields: dict[str, Any] = {'run__steps': _STEPS, 'checkpoint__every': _EVERY, 'staleness__eta': 0}
        fields['optimizer__eps'] = _EPS
        command = functools.partial(command_of, cache=cache, learner=learner, **fields)
        with WatchedRun(command, directory / str(number), until_s) as run:
            records.append(run.carry_out((), _STEPS))
        if records[-1].is_cut:
            return Calm(None, records[-1].ending.seconds, False, [])
        if violations := check_end(records[-1], _STEPS):
            where = f'cluster.learner={learner!r}, {records[-1].workdir}'
            return Calm(None, records[-1].ending.seconds, False, [f'{where}: {text}' for text in violations])
    first, alone, second = (load_file(record.workdir / 'export' / 'model.safetensors') for record in records)
    violations = compare_weights(first, alone) + compare_weights(second, alone)
    return Calm(measure_baseline(records[-1].marks), records[-1].ending.seconds, True, violations)


def compare_weights(in_roles: Mapping[str, np.ndarray], alone: Mapping[str, np.ndarray]) -> list[str]:
    """Which differ by more than rounding explains."""
    if in_roles.keys() != alone.keys():
        return [f'weights of other names: {sorted(in_roles.keys() ^ alone.keys())[:3]}']
    differences = {name: float(np.max(np.abs(in_roles[name] - alone[name]))) for name in alone}
    return [
        f'{name} differs from that of one process by {most:.2g}, allowed are {_TOLERANCE:g}'
        for name, most in differences.items()
        if not most <= _TOLERANCE
    ]
