"""Chaos: python -m checks.chaos --minutes=60 --seed=0 --json=FILE [--jobs=N] [--kinds=kill,signal] [--only=TEXT].

Real processes of main_train, one for each core at a time, are killed, stopped, starved of disk and fed damaged files,
hostile scorers and hostile configs. A complete run takes about half an hour on two cores with nothing else to do; fewer
minutes take a sample of every kind, drawn by the seed. Exit code 0 only if every check held and at least one case of
each kind ran.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import copy
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from areal_jax import files
from checks.chaos import disks, entry, hostile, kills, signals
from checks.chaos import files as damaged_files
from checks.chaos.cases import VIRTUAL, Case, Coverage, Ground, Outcome, all_held, record, seconds_since, table
from checks.command import describe_command, leave_directory, make_directory, make_parser, restore_signals

# kind: its share of the minutes and its cases
KINDS: dict[str, tuple[float, Callable[[], Sequence[Case]]]] = {
    kills.KIND: (16.0, kills.kill_chains),
    signals.KIND: (10.0, signals.signal_cases),
    disks.KIND: (6.0, disks.disk_cases),
    damaged_files.KIND: (11.0, damaged_files.file_cases),
    hostile.SCORER: (9.0, hostile.scorer_cases),
    hostile.CONFIGS: (5.0, hostile.config_cases),
    entry.KIND: (3.0, entry.entry_cases),
}


class Schedule:
    """Which case is next: of the kinds that have not reached their minimum, the one with least of its share of time.

    Several threads may draw cases at once.
    """

    def __init__(self, kinds: Sequence[str], seed: int, minutes: float, only: str = '', jobs: int = 1):
        self._seconds, self._jobs = minutes * 60, jobs
        self._shares = {kind: KINDS[kind][0] for kind in kinds}
        self._left: dict[str, Iterator[Case]] = {}
        self.minimum: dict[str, int] = {}
        for kind, (_, list_cases) in KINDS.items():
            cases = list(list_cases())
            random.Random(f'{seed} {kind}').shuffle(cases)
            self.minimum[kind] = (
                kills.MINIMUM if kind == kills.KIND else sum(getattr(case, 'n_outcomes', 1) for case in cases)
            )
            if kind in kinds:
                self._left[kind] = iter([case for case in cases if only in case.name])
        self._used = dict.fromkeys(kinds, 0.0)
        self._ran = dict.fromkeys(kinds, 0)  # outcomes
        self._begun: set[str] = set()
        self._lock = threading.Lock()

    def next(self, elapsed_s: float) -> tuple[str, Case, float] | None:
        """(kind, case, seconds left of the kind's share); after the minutes only kinds of which nothing ran."""
        with self._lock:
            while self._left:
                kind = min(self._left, key=self._urgency)
                if elapsed_s > self._seconds and kind in self._begun:
                    return None
                case = next(self._left[kind], None)
                if case is not None:
                    self._begun.add(kind)
                    return kind, case, self._share_s(kind) - self._used[kind]
                del self._left[kind]
            return None

    def note(self, kind: str, seconds: float, outcomes: int) -> None:
        """A case has taken `seconds` and had so many outcomes."""
        with self._lock:
            self._used[kind] += seconds
            self._ran[kind] += outcomes

    def _urgency(self, kind: str) -> tuple[bool, bool, float]:
        return kind in self._begun, self._ran[kind] >= self.minimum[kind], self._used[kind] / self._shares[kind]

    def _share_s(self, kind: str) -> float:
        return self._jobs * self._seconds * self._shares[kind] / sum(self._shares.values())


def main(arguments: Sequence[str]) -> int:
    parser = _make_parser()
    flags = parser.parse_args(arguments)
    restore_signals()
    schedule = Schedule(flags.kinds or list(KINDS), flags.seed, flags.minutes, flags.only, flags.jobs)
    began = time.monotonic()
    directory = make_directory('chaos')
    ground = Ground(directory, flags.seed)
    outcomes = run_schedule(schedule, ground, lambda: time.monotonic() - began, flags.jobs)
    coverage = _coverage(schedule, outcomes)
    facts = describe_command(parser, arguments) | {
        'seed': flags.seed,
        'minutes_asked': flags.minutes,
        'jobs': flags.jobs,
        'minutes_taken': round((time.monotonic() - began) / 60, 2),
        'mounts_disks': disks.can_mount(),  # without this, no real disk was filled
    }
    if flags.json:
        files.write_json(flags.json, record(outcomes, coverage, facts))
    _print_summary(outcomes, coverage, facts)
    leave_directory(directory, failed=any(outcome.verdict == 'failed' for outcome in outcomes))
    return 0 if all_held(outcomes, coverage) else 1


def run_schedule(schedule: Schedule, ground: Ground, elapsed: Callable[[], float], jobs: int) -> list[Outcome]:
    """Runs cases on `jobs` threads until the schedule has no more; an interruption ends them after their case."""
    outcomes: list[Outcome] = []
    stop = threading.Event()

    def work() -> None:
        own = copy.copy(ground)  # `until` and `lifetime_s` are those of the case under way
        while not stop.is_set() and (drawn := schedule.next(elapsed())):
            kind, case, left_s = drawn
            began = time.monotonic()
            own.until = began + left_s
            found = list(_outcomes(kind, case, own))
            schedule.note(kind, time.monotonic() - began, len(found))
            outcomes.extend(found)
            if all(outcome.verdict == 'held' for outcome in found):
                for directory in {outcome.directory for outcome in found if outcome.directory}:
                    shutil.rmtree(directory, ignore_errors=True)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            measure_lifetime(ground)
            working = [pool.submit(work) for _ in range(jobs)]
            for future in working:
                future.result()
        except KeyboardInterrupt:
            stop.set()
            print('interrupted: what follows is what ran until now', flush=True)
    return outcomes


def _outcomes(kind: str, case: Case, ground: Ground) -> Iterator[Outcome]:
    """Those of a case, each printed; an exception of the case itself is a failure and ends nothing else."""
    began = time.monotonic()
    try:
        for outcome in case.run(ground):
            _print_outcome(outcome)
            yield outcome
    except Exception as error:
        detail = f'{type(error).__name__} in the case itself: {error}'
        failure = Outcome(kind, case.name, seconds_since(began), None, detail)
        _print_outcome(failure)
        yield failure


def _print_outcome(outcome: Outcome) -> None:
    line = f'{outcome.verdict:6}  {outcome.kind}: {outcome.case}  ({outcome.seconds:.0f} s)'
    if outcome.verdict == 'failed':
        line += f'\n        {outcome.trouble or "wrong"}, exit code {outcome.exit_code}: {outcome.detail}'
        line += f'\n        {outcome.directory}'
    print(line, flush=True)


def measure_lifetime(ground: Ground) -> None:
    """A run fills the cache of compiled programs; the next takes as long as those that will be killed."""
    for _ in range(2):
        with ground.start(VIRTUAL, ground.fresh('lifetime')) as run:
            ground.lifetime_s = run.wait().seconds


def _coverage(schedule: Schedule, outcomes: Sequence[Outcome]) -> dict[str, Coverage]:
    ran = {kind: sum(outcome.kind == kind for outcome in outcomes) for kind in schedule.minimum}
    chains = sum(outcome.kind == kills.CHAINS for outcome in outcomes)
    coverage = {kind: Coverage(ran[kind], minimum) for kind, minimum in schedule.minimum.items()}
    return coverage | {kills.CHAINS: Coverage(chains, kills.MINIMUM_CHAINS)}


def _print_summary(outcomes: Sequence[Outcome], coverage: dict[str, Coverage], facts: dict[str, Any]) -> None:
    print(f'\n{table(outcomes, coverage)}\n')
    complete = all(covered.complete for covered in coverage.values())
    failed = sum(outcome.verdict == 'failed' for outcome in outcomes)
    print(
        f'{facts["minutes_taken"]} minutes, seed {facts["seed"]}, commit {facts["commit"]}: '
        f'{"complete" if complete else "a sample"}, {len(outcomes) - failed} held, {failed} failed'
    )
    if missing := [kind for kind, covered in coverage.items() if covered.ran == 0]:
        print(f'not run at all: {", ".join(missing)}')


def _make_parser() -> argparse.ArgumentParser:
    parser = make_parser('chaos', __doc__, seed_of='of the order of the cases and of every moment')
    parser.add_argument('--minutes', type=float, default=60.0, help='wall time, divided over the kinds')
    parser.add_argument('--jobs', type=int, default=max(1, (os.cpu_count() or 1)), help='cases at once')
    parser.add_argument('--kinds', type=_kinds, help=f'only these, for a look: {",".join(KINDS)}')
    parser.add_argument('--only', default='', help='only the cases whose name contains this text, for a look')
    return parser


def _kinds(text: str) -> list[str]:
    names = text.split(',')
    if unknown := sorted(set(names) - set(KINDS)):
        raise argparse.ArgumentTypeError(f'unknown: {", ".join(unknown)}; known: {", ".join(KINDS)}')
    return names


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
