"""Thousands of checks by one judge, a third of them hostile: their labels, and what they leave behind."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from areal_jax.tasks.code.judge import Judge
from areal_jax.tasks.task import Problem
from benchmarks.code_parts.verdicts import HACK_LIMITS, judge_code, list_problems, open_judge
from tests.tasks.code.hacks import HACKS

CHECKS, SETTLED, MOST_LATE = 10_000, 1_000, 300
MOST_GROWTH = 0.02  # of memory, from after the first checks to the end: the largest of the last samples to the first's
_SAMPLE = 100  # checks between two looks
_FOLDERS = ('/tmp', '/dev/shm')
_TIMED = ('time_limit',)


@dataclasses.dataclass(frozen=True)
class Case:
    """A check, and the labels that are right for it."""

    kind: str
    problem: Problem
    code: str
    labels: tuple[str, ...]


class Draw:
    """Cases at random: a third is hostile, of which some run into the deadline; others are right, wrong or a twin."""

    def __init__(self, problems: Sequence[Problem], seed: int, most_late: int):
        self._problems, self._random, self._late_left = problems, random.Random(seed), most_late
        self._quick = [name for name, hack in HACKS.items() if not set(_TIMED) & set(hack.labels)]
        self._late = sorted(set(HACKS) - set(self._quick))

    def draw(self) -> Case:
        problem = self._random.choice(self._problems)
        entry, solution = problem['entry_point'], problem['prompt'] + problem['answer']
        kind = self._random.choice(('hostile', 'hostile', 'right', 'right', 'wrong', 'twin'))
        if kind == 'hostile':
            name = self._draw_hack()
            return Case(name, problem, HACKS[name].attack(entry), HACKS[name].labels)
        if kind == 'twin':
            name = self._random.choice(sorted(HACKS))
            return Case(f'twin of {name}', problem, HACKS[name].twin(entry, solution), ('ok',))
        if kind == 'right':
            return Case(kind, problem, solution, ('ok',))
        return Case(kind, problem, f'{problem["prompt"]}    return ["wrong"]\n', ('wrong', 'exception'))

    def _draw_hack(self) -> str:
        """Of each kind alike, until so many have run into the deadline."""
        name = self._random.choice(sorted(HACKS))
        if name in self._late:
            if self._late_left == 0:
                return self._random.choice(self._quick)
            self._late_left -= 1
        return name


@dataclasses.dataclass(frozen=True)
class Left:
    """What there is of each at one time, of the judge's process and of the server of children."""

    rss_kb: dict[str, int]
    descriptors: dict[str, int]
    processes: int  # below the judge's
    files: dict[str, frozenset[str]]  # entries by folder


def look(judge: Judge) -> Left:
    pids = {'judge': os.getpid(), 'server': judge.server_pid}
    return Left(
        {name: _read_rss_kb(pid) for name, pid in pids.items()},
        {name: len(os.listdir(f'/proc/{pid}/fd')) for name, pid in pids.items()},
        sum(1 for _ in _list_below(os.getpid())),
        {folder: frozenset(os.listdir(folder)) for folder in _FOLDERS},
    )


def measure_soak(options: Any) -> dict[str, Any]:
    """Flat: memory grows by less than MOST_GROWTH, the others are what they were after the first checks."""
    checks, settled = (60, 20) if options.small else (CHECKS, SETTLED)
    draw = Draw(list_problems(HACK_LIMITS), options.seed, checks * MOST_LATE // CHECKS)
    counts = {'checks': 0, 'hostile': 0, 'late': 0}
    false, samples = list[dict[str, str]](), list[Left]()
    end_s = time.monotonic() + 60 * options.minutes
    with open_judge() as judge:
        while counts['checks'] < checks and time.monotonic() < end_s:
            case = draw.draw()
            found = judge_code(judge, case.problem, case.code)
            counts['checks'] += 1
            counts['hostile'] += case.kind in HACKS
            counts['late'] += found.label in _TIMED
            if found.label not in case.labels:
                false.append({'kind': case.kind, 'problem': case.problem['place'], 'label': found.label})
            if counts['checks'] >= settled and counts['checks'] % min(_SAMPLE, settled) == 0:
                samples.append(look(judge))
    grown, same = compare(samples)
    is_flat = all(share < MOST_GROWTH for share in grown.values()) and all(same.values())
    met = counts['checks'] == checks and counts['late'] <= MOST_LATE and not false and (is_flat or options.small)
    value = {**counts, 'false_labels': len(false), 'rss_growth': grown, 'unchanged': same}
    ends = [_describe(samples[index]) for index in (0, -1)] if samples else []
    kept = list_kept(samples) if samples else {}
    return {'value': value, 'met': met, 'wrong': false[:20], 'kept': kept, 'first_and_last': ends}


def compare(samples: Sequence[Left]) -> tuple[dict[str, float], dict[str, bool]]:
    """Growth of memory from the first sample to the largest of the last tenth; whether the rest is as it was."""
    if not samples:
        return {}, {'samples': False}
    first, last = samples[0], samples[-max(1, len(samples) // 10) :]
    grown = {name: max(one.rss_kb[name] for one in last) / kb - 1 for name, kb in first.rss_kb.items()}
    same = {
        name: all(getattr(one, name) == getattr(first, name) for one in last) for name in ('descriptors', 'processes')
    }
    return grown, same | {folder: not names for folder, names in list_kept(samples).items()}


def list_kept(samples: Sequence[Left]) -> dict[str, list[str]]:
    """By folder what is there in each of the last looks, and was not in the first; any program may have left it."""
    first, last = samples[0], samples[-max(1, len(samples) // 10) :]
    return {
        folder: sorted(frozenset.intersection(*(one.files[folder] for one in last)) - names)
        for folder, names in first.files.items()
    }


def _describe(left: Left) -> dict[str, Any]:
    counts = {folder: len(names) for folder, names in left.files.items()}
    return {**dataclasses.asdict(dataclasses.replace(left, files={})), 'files': counts}


def _read_rss_kb(pid: int) -> int:
    for line in pathlib.Path(f'/proc/{pid}/status').read_text().splitlines():
        if line.startswith('VmRSS:'):
            return int(line.split()[1])
    raise RuntimeError(f'/proc/{pid}/status has no VmRSS')


def _list_below(pid: int) -> Iterator[int]:
    for child in map(int, pathlib.Path(f'/proc/{pid}/task/{pid}/children').read_text().split()):
        yield child
        yield from _list_below(child)
