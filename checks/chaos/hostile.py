"""Hostile configs (tests/config/hostile_configs.py) are refused; hostile scorers (tests/tasks) train."""

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

from checks import logs
from checks.chaos.cases import PROCESS_VERIFIER, Ground, Outcome, conclude, seconds_since
from checks.chaos.scoring import NOTES, SCORERS
from checks.processes import ORPHAN_S, Ending, RunningCommand, is_alive, python

CONFIGS, SCORER = 'config', 'scorer'  # kinds
_MEMORY_BYTES = 8 * 2**30  # a config of enormous sizes that is not refused must not take the machine along
_BATCH = 6  # scorers of a run; they wait for their deadlines one after another
_VARIANT = dataclasses.replace(PROCESS_VERIFIER, steps=4, evaluation=('evaluation.problems=0', 'evaluation.samples=4'))


@dataclasses.dataclass(frozen=True)
class ConfigCase:
    """One start with a hostile config."""

    name: str
    hostile: Any  # a HostileConfig

    def run(self, ground: Ground) -> Iterator[Outcome]:
        began, directory = time.monotonic(), ground.fresh(self.name)
        arguments = [f'--config={self.hostile.config}', f'--workdir={directory / "run"}', *self.hostile.arguments]
        limited = ['prlimit', f'--data={_MEMORY_BYTES}', *python('-m', 'areal_jax.main_train', *arguments)]
        with RunningCommand(limited, directory) as run:
            ending, wrong = run.finish((2,))
        if ending.exit_code == 2 and self.hostile.message not in ending.error:
            wrong.append(f'the sentence does not contain {self.hostile.message!r}: {ending.error}')
        yield conclude(CONFIGS, self.name, directory, began, ending, wrong)


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
            yield Outcome(SCORER, name, round(each_s, 2), ending.exit_code, found, ending.trouble, str(directory))

    def _start(self, ground: Ground, directory: pathlib.Path) -> RunningCommand:
        deadline_s = 2.0 if self.label == 'timeout' else 30.0
        more = ('task.verifier_workers=2', 'task.verifier_attempts=1', f'task.verifier_deadline_s={deadline_s}')
        arguments = _VARIANT.arguments(directory / 'run', *more, cache=ground.cache)
        command = python('-m', 'checks.chaos.scoring', 'checks.chaos.scoring:score', *arguments)
        return RunningCommand(command, directory, {SCORERS: ','.join(self.scorers), NOTES: str(directory)})

    def _check_labels(self, workdir: pathlib.Path) -> list[str]:
        labels = collections.Counter(event['label'] for event in logs.load(workdir) if event['kind'] == 'reward')
        if labels[self.label] < len(self.scorers):
            return [f'{labels[self.label]} answers have the label {self.label!r}, expected {len(self.scorers)} or more']
        return []


def config_cases() -> list[ConfigCase]:
    """All of them; none where the module is absent."""
    return [ConfigCase(name, hostile) for name, hostile in _load('tests.config.hostile_configs', 'HOSTILE_CONFIGS')]


def scorer_cases() -> list[ScorerCase]:
    """Batches of all scorers; none where the module is absent."""
    by_label = collections.defaultdict(list)
    for name, expected in _load('tests.tasks.hostile_scorers', 'HOSTILE_SCORERS'):
        by_label[expected.label].append(name)
    return [
        ScorerCase(label, tuple(names[first : first + _BATCH]))
        for label, names in sorted(by_label.items())
        for first in range(0, len(names), _BATCH)
    ]


def _load(module: str, name: str) -> list[tuple[str, Any]]:
    try:
        found: Mapping[str, Any] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return []
    return list(found.items())


def _without_scorers_output(ending: Ending) -> Ending:
    """Scorers print tracebacks of their own to the same stderr; the program's come with another exit code."""
    if ending.exit_code != 0:
        return ending
    return dataclasses.replace(ending, stderr='')


def _left_behind(path: pathlib.Path) -> list[str]:
    """Violations: processes that scorers started and that are alive after the run, some without our mark."""
    pids = {int(line) for line in _lines(path)}
    end = time.monotonic() + ORPHAN_S
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f'process {pid} of a scorer is alive' for pid in alive]


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
