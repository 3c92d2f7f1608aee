"""What must hold of a run that was struck: it ended with its report, trained nothing twice and left no process."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
from collections.abc import Sequence
from typing import Any

from areal_jax.app.export.finished_export import holds_export
from tests.chaos import logs
from tests.chaos.processes import ROOT, python
from tests.chaos_roles import recovery
from tests.chaos_roles.recovery import Baseline, Bounds, Recovery
from tests.chaos_roles.runs import EVERY, GROUPS, STEPS, Record
from tests.chaos_roles.state import Mark

# of a process that broke; the loss of another one is told in a sentence
_BROKEN = re.compile(
    r'^(Traceback \(most recent call last\)|Fatal Python error|terminate called|\S*Check fail).*', re.M
)
_ABORTED_BY_JAX = 'JAX distributed service detected fatal errors'  # where learner 0, which coordinates, is lost
_BUG = re.compile(r'^(.* (?:ended with code [12]|was ended by SIG(?:ABRT|SEGV|BUS)) .*)$', re.MULTILINE)
_SHOWN = 3  # lines that are quoted


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


def judge_run(record: Record, baseline: Baseline, steps: int = STEPS) -> Judgement:
    """Everything that did not hold of a run that has ended."""
    bounds = Bounds.of(baseline, record.marks, EVERY)
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
    return wrong + check_role_logs(workdir) + check_log(workdir)


def check_role_logs(workdir: pathlib.Path) -> list[str]:
    """Tracebacks and aborts in the logs of the roles; a peer that is gone is told in one sentence, or by jax."""
    wrong = []
    for path in sorted((workdir / 'logs').glob('*.log')):
        text = path.read_text(errors='replace')
        if (match := _BROKEN.search(text)) and _ABORTED_BY_JAX not in text:
            last = ' / '.join(text[match.start() :].strip().splitlines()[-_SHOWN:])
            wrong.append(f'{path.name}: {match[0]}: {last[-500:]}')
    return wrong


def check_log(workdir: pathlib.Path) -> list[str]:
    """What main_check_log says of the event log."""
    done = subprocess.run(
        python('-m', 'areal_jax.main_check_log', str(workdir)), cwd=ROOT, capture_output=True, text=True, check=False
    )
    return [] if done.returncode == 0 else [f'main_check_log: {done.stderr.strip()[-500:]}']


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
