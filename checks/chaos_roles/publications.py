"""Kills around publications without files: python -m checks.chaos_roles.publications.

--moments=20 --minutes=40 --channel=stream --seed=0 --json=FILE. Runs under launch.local with a controller, two learner
processes, each of which sends its shards of every version, and two engines. In each run four processes get kill -9, one
after the other, each when the run has recovered from the one before it: a sender (a learner process that does not lead,
while a version is sent), a receiver (an engine while it fetches one), a leader (learner process 0, or the controller)
and a follower (learner process 1 during an update or at any time). Every run must end with its report all the same,
nothing may wait for the dead beyond --deadline, and no socket, no file in /dev/shm and no process may be left. Exit
code 0 only if every check held and each of the four was met.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import random
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax import files
from areal_jax.publication.carriers import shm_segment
from areal_jax.publication.carriers.shm_segment import name_run, segment_path
from checks.chaos_roles.judge import check_end, judge_run
from checks.chaos_roles.plan import Cell, Strike
from checks.chaos_roles.recovery import Baseline, measure_baseline
from checks.chaos_roles.runs import STEPS, Record, WatchedRun, command_of
from checks.command import describe_command, leave_directory, make_directory, make_parser, restore_signals

ROLES = ('sender', 'receiver', 'leader', 'follower')
LEADERS = ('controller-0', 'learner-0')  # in turn
CHANNELS = ('stream', 'shm')
DEADLINE_S = 30.0
_LEARNER, _DEVICES = 'hosts=2 x data=2', 2
_READER_S = 5.0
_HANGS_S = 600.0  # with four kills
_SOCKETS = 'areal_jax-weights-*'  # below the directory of temporary files


@dataclasses.dataclass
class Found:
    """What all runs have shown."""

    met: list[Strike] = dataclasses.field(default_factory=list)
    missed: list[str] = dataclasses.field(default_factory=list)  # whose phase did not come
    recoveries: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    violations: list[str] = dataclasses.field(default_factory=list)
    runs: int = 0

    @property
    def counts(self) -> Mapping[str, int]:
        counts = collections.Counter(map(role_of, self.met))
        return {role: counts[role] for role in ROLES}

    @property
    def missing(self) -> list[str]:
        return [role for role, count in self.counts.items() if not count]

    @property
    def passed(self) -> bool:
        return not self.violations and not self.missing


def draw_strikes(rng: random.Random, roles: Sequence[str], leader: str) -> tuple[Strike, ...]:
    """One strike for each role, in a random order; most are at publications.

    An engine is struck last: the run does not wait for its return, and might end before the next strike.

    Args:
      leader: the process that is struck as such.
    """
    order = sorted(rng.sample(roles, len(roles)), key=lambda role: role == 'receiver')
    fractions = sorted(rng.random() for _ in order)
    return tuple(_draw(rng, role, leader, fraction) for role, fraction in zip(order, fractions, strict=True))


def _draw(rng: random.Random, role: str, leader: str, fraction: float) -> Strike:
    if role == 'sender':
        return _kill('learner-1', 'sending', fraction)
    if role == 'receiver':
        return _kill(rng.choice(('engine-0', 'engine-1')), 'staging', fraction)
    if role == 'leader':
        return _kill(leader, rng.choice(('sending', 'sending', 'update')), fraction)
    return _kill('learner-1', rng.choice(('update', 'loop')), fraction)


def _kill(process: str, phase: str, fraction: float) -> Strike:
    role = process.split('-')[0]
    assert role in ('controller', 'learner', 'engine')
    return Strike(Cell(role, signal.SIGKILL, phase), process, fraction)


def role_of(strike: Strike) -> str:
    """The part in a publication of the process that was struck."""
    if strike.cell.role == 'engine':
        return 'receiver'
    if strike.process != 'learner-1':
        return 'leader'
    return 'sender' if strike.cell.phase == 'sending' else 'follower'


def find_leftovers(temporary: pathlib.Path, workdir: pathlib.Path) -> list[str]:
    """Sockets and shared memory that a run has left."""
    segments = shm_segment.DIRECTORY.glob(segment_path(name_run(workdir), '').name.removesuffix('.weights') + '*')
    return [f'{path} was left behind' for path in sorted([*temporary.glob(_SOCKETS), *segments])]


class Pass:
    """One channel, one deadline."""

    def __init__(self, directory: pathlib.Path, channel: str, deadline_s: float, until_s: float):
        self._directory, self._channel, self._until_s = directory, channel, until_s
        self._deadline_s = deadline_s
        self._runs = 0

    def run(self, strikes: Sequence[Strike], baseline: Baseline | None) -> tuple[Record, list[str]]:
        """The run, and what it has left."""
        directory = self._directory / f'run_{self._runs:02d}'
        temporary = directory / 't'
        temporary.mkdir(parents=True)
        self._runs += 1
        command = functools.partial(command_of, cache=self._directory / 'cache', learner=_LEARNER, **self._fields())
        environment = {'TMPDIR': str(temporary)}
        with WatchedRun(
            command,
            directory,
            self._until_s,
            devices=_DEVICES,
            hangs_s=_HANGS_S + self._deadline_s * len(strikes),
            environment=environment,
        ) as watched:
            record = watched.carry_out(strikes, STEPS, baseline, in_order=True)
        return record, [] if record.is_cut else find_leftovers(temporary, record.workdir)

    def _fields(self) -> dict[str, object]:
        return {
            'publication__channel': self._channel, 'publication__dtype': 'bfloat16', 'publication__delta': True,
            'publication__base_every': 3, 'publication__reader_deadline_s': _READER_S,
            'publication__record_deadline_s': self._deadline_s, 'distributed__command_deadline_s': self._deadline_s,
        }  # fmt: skip


def strike_runs(found: Found, runs: Pass, moments: int, deadline_s: float, rng: random.Random, until_s: float) -> None:
    """Fills `found` until each role was struck its part of the moments, or the time is over."""
    for _ in range(2):  # the first compiles, which takes longer than the start of the runs that follow
        record, left = runs.run((), None)
        if record.is_cut:
            return
        found.violations += [f'undisturbed: {text}' for text in [*check_end(record, STEPS), *left]]
        if found.violations:
            return
    baseline = measure_baseline(record.marks)
    print(f'undisturbed: {baseline}', flush=True)
    slowest_s = record.ending.seconds
    while until_s - time.monotonic() > slowest_s:
        roles = [role for role in ROLES if found.counts[role] < moments / len(ROLES)]
        if not roles:
            return
        leader = LEADERS[found.counts['leader'] % len(LEADERS)]
        record, left = runs.run(draw_strikes(rng, roles, leader), baseline)
        if record.is_cut:
            print(f'cut off after {_listed(record.strikes)}', flush=True)
            return
        _note(found, record, left, baseline, deadline_s)
        baseline, slowest_s = baseline.widen(record.marks), max(slowest_s, record.ending.seconds)


def _note(found: Found, record: Record, left: Sequence[str], baseline: Baseline, deadline_s: float) -> None:
    judgement = judge_run(record, baseline, deadline_s=deadline_s)
    found.runs += 1
    wrong = [f'run {found.runs}: {text}' for text in [*judgement.violations, *left]]
    found.met += record.strikes
    found.missed += map(str, record.missed)
    found.recoveries += [recovery.record() for recovery in judgement.recoveries]
    found.violations += wrong
    print(f'{"failed" if wrong else "held":6}  run {found.runs} ({judgement.seconds:.0f} s)', flush=True)
    for line in [*judgement.recoveries, *wrong]:
        print(f'        {line}', flush=True)
    if record.missed:
        print(f'        too late for {_listed(record.missed)}', flush=True)
    if wrong:
        print(f'        {record.workdir}', flush=True)
    else:
        shutil.rmtree(record.workdir.parent, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    parser = make_parser('chaos_roles.publications', __doc__, seed_of='of whom the kills meet, and when')
    parser.add_argument('--minutes', type=float, default=40.0, help='after which it stops by itself')
    parser.add_argument('--moments', type=int, default=20, help='kills, a quarter of them for each part')
    parser.add_argument('--channel', choices=CHANNELS, default=CHANNELS[0], help='publication.channel')
    parser.add_argument(
        '--deadline', type=float, default=DEADLINE_S, help='seconds of the longest command; its start-up too'
    )
    flags = parser.parse_args(arguments)
    restore_signals()
    directory, began_s, found = make_directory('chaos_publications'), time.monotonic(), Found()
    until_s = began_s + 60 * flags.minutes
    runs = Pass(directory, flags.channel, flags.deadline, until_s)
    try:
        strike_runs(found, runs, flags.moments, flags.deadline, random.Random(f'{flags.seed} publications'), until_s)
    except KeyboardInterrupt:
        print('interrupted: what follows is what ran until now', flush=True)
    facts = {
        **describe_command(parser, arguments), 'seed': flags.seed, 'passed': found.passed,
        'minutes': round((time.monotonic() - began_s) / 60, 2), 'channel': flags.channel, 'runs': found.runs,
        'moments': len(found.met), 'counts': found.counts, 'missing': found.missing, 'missed': found.missed,
        'violations': found.violations, 'deadline_s': flags.deadline,
    }  # fmt: skip
    if flags.json:
        files.write_json(flags.json, facts | {'each': found.recoveries})
    for name, value in facts.items():
        print(f'{name}: {value}')
    leave_directory(directory, failed=bool(found.violations))
    return 0 if found.passed else 1


def _listed(strikes: Sequence[Strike]) -> str:
    return ', '.join(map(str, strikes)) or 'no strike'


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
