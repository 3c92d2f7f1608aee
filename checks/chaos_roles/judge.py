"""What must hold of a run: it ended with its report, trained nothing twice, left no process, recovered from strikes.

Runs that nobody disturbs, in roles and in one process, say how long each part takes; their weights agree.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from areal_jax.app.export.finished_export import holds_export
from checks import logs
from checks.chaos_roles import recovery
from checks.chaos_roles.recovery import Baseline, Bounds, Recovery, measure_baseline
from checks.chaos_roles.runs import ALONE, EVERY, GROUPS, IN_ROLES, STEPS, Record, WatchedRun, command_of
from checks.chaos_roles.state import Mark

# of a process that broke; the loss of another one is told in a sentence
_BROKEN = re.compile(
    r'^(Traceback \(most recent call last\)|Fatal Python error|terminate called|\S*Check fail).*', re.M
)
_ABORTED_BY_JAX = 'JAX distributed service detected fatal errors'  # where learner 0, which coordinates, is lost
_BUG = re.compile(r'^(.* (?:ended with code [12]|was ended by SIG(?:ABRT|SEGV|BUS)) .*)$', re.MULTILINE)
_SHOWN = 3  # lines that are quoted
_CALM_STEPS, _CALM_EVERY = 4, 2  # of runs that nobody disturbs
# sums over processes are taken in another order than those over the devices of one; four steps of Adam move a weight by
# up to 4e-3. Adam divides a gradient by its size, so eps takes out the weights whose gradient is rounding.
_TOLERANCE = 4e-6
_EPS = 1e-4


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Of one run."""

    seconds: float
    exit_code: int | None
    recoveries: Sequence[Recovery]
    violations: Sequence[str]

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            'seconds': round(self.seconds, 1), 'exit_code': self.exit_code, 'violations': list(self.violations),
            'strikes': [recovery.record() for recovery in self.recoveries],
        }  # fmt: skip


def judge_run(record: Record, baseline: Baseline, steps: int = STEPS, deadline_s: float = 0.0) -> Judgement:
    """Everything that did not hold of a run that has ended; `deadline_s`: see Bounds."""
    bounds = Bounds.of(baseline, record.marks, EVERY, deadline_s)
    recoveries = recovery.judge(record.strikes, record.marks, bounds, steps)
    violations = check_end(record, steps)
    violations += [violation for recovered in recoveries for violation in recovered.violations]
    if not any(strike.cell.role == 'engine' for strike in record.strikes):
        violations += check_first_requests(record.marks)
    violations += check_resumes(record.workdir, record.marks)
    return Judgement(record.ending.seconds, record.ending.exit_code, recoveries, violations)


def check_end(record: Record, steps: int) -> list[str]:
    """Of the exit code, the files of the run and the processes that are left."""
    workdir, ending = record.workdir, record.ending
    wrong = [*ending.violations((0,)), *record.orphans]
    wrong += logs.check_finished(workdir, steps, GROUPS, has_events=True)
    wrong += [f'{path.name} was left behind' for path in sorted((workdir / 'publication').glob('.*.partial'))]
    if not holds_export(workdir, steps):
        wrong.append(f'no export of update {steps}')
    wrong += [f'the launcher says: {line}' for line in _BUG.findall(ending.stdout)[:_SHOWN]]
    return wrong + check_role_logs(workdir) + logs.check_with_commands(workdir)


def check_role_logs(workdir: pathlib.Path) -> list[str]:
    """Tracebacks and aborts in the logs of the roles; a peer that is gone is told in one sentence, or by jax."""
    wrong = []
    for path in sorted((workdir / 'logs').glob('*.log')):
        text = path.read_text(errors='replace')
        if (match := _BROKEN.search(text)) and _ABORTED_BY_JAX not in text:
            last = ' / '.join(text[match.start() :].strip().splitlines()[-_SHOWN:])
            wrong.append(f'{path.name}: {match[0]}: {last[-500:]}')
    return wrong


def check_first_requests(marks: Sequence[Mark]) -> list[str]:
    """Where no engine was struck, no controller asks for an answer before all engines hold the first weights."""
    wrong, serving, is_first = [], set[str](), False
    for event in (mark.event for mark in marks if mark.what == 'event'):
        if event['kind'] == 'log':
            serving, is_first = set(), True
        elif event['kind'] == 'engine_state':
            (serving.add if event['state'] == 'serving' else serving.discard)(event['engine'])
        elif event['kind'] == 'route' and is_first:
            is_first = False
            if len(serving) < 2:
                wrong.append(f'event {event["seq"]}: a request while {len(serving)} of 2 engines serve')
    return wrong


def check_resumes(workdir: pathlib.Path, marks: Sequence[Mark]) -> list[str]:
    """Each controller that came as far as to compile went on from the newest checkpoint that there was."""
    wrong = []
    for mark in marks:
        if mark.what == 'start' and mark.process == 'controller-0' and mark.number > 1:
            said = (workdir / 'logs' / f'controller-0.{mark.number}.log').read_text(errors='replace')
            if re.search(r'^compiled \d+', said, re.MULTILINE):
                wrong += [f'start {mark.number}: {text}' for text in logs.check_resumed(said, mark.update)]
    return wrong


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
        fields: dict[str, Any] = {'run__steps': _CALM_STEPS, 'checkpoint__every': _CALM_EVERY, 'staleness__eta': 0}
        fields['optimizer__eps'] = _EPS
        command = functools.partial(command_of, cache=cache, learner=learner, **fields)
        with WatchedRun(command, directory / str(number), until_s) as run:
            records.append(run.carry_out((), _CALM_STEPS))
        if records[-1].is_cut:
            return Calm(None, records[-1].ending.seconds, False, [])
        if violations := check_end(records[-1], _CALM_STEPS):
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
