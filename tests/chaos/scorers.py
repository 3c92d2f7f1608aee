"""Runs whose answers are scored by tests/tasks/hostile_scorers.py, some at a time: they train to their end."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import os
import pathlib
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tests.chaos import logs
from tests.chaos.outcomes import Outcome
from tests.chaos.processes import ORPHAN_S, Ending, RunningCommand, python
from tests.chaos.runs import PROCESS_VERIFIER, Ground, seconds_since

KIND = 'scorer'
_BATCH = 6  # scorers of a run; they wait for their deadlines one after another
_NOTES, _SCORERS = 'AREAL_JAX_CHAOS_NOTES', 'AREAL_JAX_CHAOS_SCORERS'  # of tests/chaos/scoring.py
_VARIANT = dataclasses.replace(PROCESS_VERIFIER, steps=4, evaluation=('evaluation.problems=0', 'evaluation.samples=4'))


@dataclasses.dataclass(frozen=True)
class ScorerCase:
    """One run with a batch of scorers that get the same label."""

    label: str  # what the verifier must say of their answers
    scorers: tuple[str, ...]

    @property
    def name(self) -> str:
        return f'{self.label}: {", ".join(self.scorers)}'

    @property
    def n_outcomes(self) -> int:
        """Outcomes, one a scorer."""
        return len(self.scorers)

    def run(self, ground: Ground) -> Iterator[Outcome]:
        began, directory = time.monotonic(), ground.fresh(self.name)
        with self._start(ground, directory) as run:
            ending = _without_scorers_output(run.wait())
            wrong = ending.violations((0,)) + run.orphans() + _left_behind(directory / 'pids')
        if ending.exit_code == 0:
            wrong += ground.check_finished(_VARIANT, directory / 'run')
            wrong += self._check_labels(directory / 'run')
        calls = collections.Counter(_lines(directory / 'calls'))
        each_s = seconds_since(began) / len(self.scorers)
        for name in self.scorers:
            own = [] if calls[name] else ['it was never called']
            found = '; '.join([*own, *wrong])
            yield Outcome(KIND, name, round(each_s, 2), ending.exit_code, found, ending.trouble, str(directory))

    def _start(self, ground: Ground, directory: pathlib.Path) -> RunningCommand:
        deadline_s = 2.0 if self.label == 'timeout' else 30.0
        more = ('task.verifier_workers=2', 'task.verifier_attempts=1', f'task.verifier_deadline_s={deadline_s}')
        arguments = _VARIANT.arguments(directory / 'run', *more, cache=ground.cache)
        command = python('-m', 'tests.chaos.scored_run', 'tests.chaos.scoring:score', *arguments)
        return RunningCommand(command, directory, {_SCORERS: ','.join(self.scorers), _NOTES: str(directory)})

    def _check_labels(self, workdir: pathlib.Path) -> list[str]:
        labels = collections.Counter(event['label'] for event in logs.load(workdir) if event['kind'] == 'reward')
        if labels[self.label] < len(self.scorers):
            return [f'{labels[self.label]} answers have the label {self.label!r}, expected {len(self.scorers)} or more']
        return []


def scorer_cases() -> list[ScorerCase]:
    """Batches of all scorers; none where the module is absent."""
    by_label = collections.defaultdict(list)
    for name, expected in _hostile_scorers().items():
        by_label[expected.label].append(name)
    return [
        ScorerCase(label, tuple(names[first : first + _BATCH]))
        for label, names in sorted(by_label.items())
        for first in range(0, len(names), _BATCH)
    ]


def _hostile_scorers() -> Mapping[str, Any]:
    try:
        return importlib.import_module('tests.tasks.hostile_scorers').HOSTILE_SCORERS
    except ModuleNotFoundError:
        return {}


def _without_scorers_output(ending: Ending) -> Ending:
    """Scorers print tracebacks of their own to the same stderr; the program's come with another exit code."""
    if ending.exit_code != 0:
        return ending
    return dataclasses.replace(ending, stderr='')


def _left_behind(path: pathlib.Path) -> list[str]:
    """Violations: processes that scorers started and that are alive after the run, some without our mark."""
    pids = {int(line) for line in _lines(path)}
    end = time.monotonic() + ORPHAN_S
    while (alive := [pid for pid in pids if _is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f'process {pid} of a scorer is alive' for pid in alive]


def _is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in ('Z', 'X')
    except OSError:
        return False


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
