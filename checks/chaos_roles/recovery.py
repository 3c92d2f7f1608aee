"""Who was started again after a strike, and how long it took, against what is allowed; pure."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from checks.chaos_roles.plan import PROCESSES, Strike, engine_of
from checks.chaos_roles.state import Mark
from launch.heartbeats import PATIENCE_S, REGISTER_S

TOGETHER = (*PROCESSES['controller'], *PROCESSES['learner'])  # processes that are started again together
_CONTROLLER = PROCESSES['controller'][0]
_ENGINE_STARTS = 3.0  # of an engine: its recovery takes no longer than so many of its start-ups
_NOTICED_S = 5.0  # a death is noticed within
_HANG_S = PATIENCE_S + 15.0  # a process that is registered and hangs: the launcher looks every five seconds
_UNREGISTERED_S = REGISTER_S + 15.0  # one that is not yet
# part of it after which a strike often comes too late: roles end before all
_LATEST = {'start-up': 0.9, 'end': 0.6, 'update': 0.5, 'loop': 0.9}


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Seconds that the parts of an undisturbed run take on this machine, at most."""

    engine_start_s: float  # from the start of an engine to its address in the registry; the slower of the two
    run_start_s: float  # from the first start of a process to the first request
    update_s: float  # between two publications at most
    end_s: float  # from the last publication to the end of the launcher

    def widen(self, marks: Sequence[Mark]) -> Baseline:
        """With the start-ups of another run before it was struck, if slower: they differ by a tenth and more."""
        own = measure_starts(marks)
        return dataclasses.replace(
            self,
            engine_start_s=max(self.engine_start_s, own.engine_start_s),
            run_start_s=max(self.run_start_s, own.run_start_s),
        )

    def length_s(self, phase: str) -> float:
        """Over which the strikes of a phase are spread."""
        lengths = {
            'start-up': self.run_start_s, 'end': self.end_s, 'update': self.update_s, 'loop': self.update_s,
        }  # fmt: skip
        return _LATEST.get(phase, 0.0) * lengths.get(phase, 0.0)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Longest recoveries, in seconds."""

    engine_s: float
    learners_s: float  # also those of the controller: all start again and make the updates since the checkpoint again
    end_s: float  # the same after the last publication, to the end of the run

    @classmethod
    def of(cls, baseline: Baseline, marks: Sequence[Mark], every: int, deadline_s: float = 0.0) -> Bounds:
        """`marks` are those of the run that was struck: its parts may take longer than those of the others.

        `deadline_s`: so long a process may wait for one that was struck.
        """
        slowest = baseline.widen(marks)
        learners_s = deadline_s + slowest.run_start_s + every * max(baseline.update_s, longest_update_s(marks))
        engine_s = deadline_s + _ENGINE_STARTS * slowest.engine_start_s
        return cls(engine_s, learners_s, learners_s + slowest.end_s)


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What followed a strike."""

    strike: Strike
    moment: str  # what the process had done by then
    noticed_s: float  # from the strike until the process was gone
    noticed_most_s: float
    back_s: float  # from then until the run was where it had been
    back_most_s: float
    violations: Sequence[str]

    def __str__(self) -> str:
        noticed = f'gone after {self.noticed_s:.1f} s of {self.noticed_most_s:.0f}, '
        return f'{self.strike} ({self.moment}): {noticed}back after {self.back_s:.1f} s of {self.back_most_s:.0f}'

    def record(self) -> dict[str, Any]:
        """As JSON."""
        fields = {name: value for name, value in vars(self).items() if name != 'strike'}
        numbers = {name: round(value, 2) if isinstance(value, float) else value for name, value in fields.items()}
        return {'process': self.strike.process, 'cell': ' '.join(self.strike.cell.kinds), **numbers}


def measure_baseline(marks: Sequence[Mark]) -> Baseline:
    """Of a run without strikes that has finished. Raises ValueError where it never came to one of its parts."""
    starts = measure_starts(marks)
    published = [mark.at_s for mark in marks if mark.event.get('kind') == 'publish']
    if not (starts.engine_start_s and starts.run_start_s and published):
        raise ValueError(f'{starts}, {len(published)} publications')
    return Baseline(*starts, longest_update_s(marks), marks[-1].at_s - published[-1])


class Starts(NamedTuple):
    """See Baseline; 0 for what was struck before."""

    engine_start_s: float
    run_start_s: float


def measure_starts(marks: Sequence[Mark]) -> Starts:
    """Of a run until it was struck."""
    undisturbed = list(itertools.takewhile(lambda mark: mark.what != 'struck', marks))
    starts = {mark.process: mark.at_s for mark in undisturbed if mark.what == 'start'}
    built = [mark for mark in undisturbed if mark.what == 'built' and mark.process in PROCESSES['engine']]
    routes = [mark.at_s for mark in undisturbed if mark.event.get('kind') == 'route']
    return Starts(
        max((mark.at_s - starts[mark.process] for mark in built), default=0.0),
        routes[0] - min(starts.values()) if routes else 0.0,
    )


def longest_update_s(marks: Sequence[Mark]) -> float:
    """Between two publications, one right after the other, with nothing struck or started between them."""
    longest, before = 0.0, None
    for mark in marks:
        if mark.what in ('struck', 'gone', 'start'):
            before = None
        elif mark.event.get('kind') == 'publish':
            if before is not None:
                longest = max(longest, mark.at_s - before)
            before = mark.at_s
    return longest


def find_return(strike: Strike, before: Sequence[Mark], since: Sequence[Mark], steps: int) -> float | None:
    """When the run was again where it had been.

    An engine is back when it serves again, or is built where it had not served; controller and learners are when they
    have published the version again that was the last.

    Args:
      before, since: all marks before the strike, and from it on.
    """
    if strike.cell.role == 'engine':
        return _find_engine(strike, since)
    started = _find(since, 0, lambda mark: mark.what == 'start' and mark.process == _CONTROLLER)
    versions = [mark.event['version'] for mark in before if mark.event.get('kind') == 'publish']
    if versions and versions[-1] == steps:
        found = _find(since, 0, lambda mark: mark.what == 'end')
    elif started is None:
        return None
    elif versions:
        is_back = lambda event: event.get('kind') == 'publish' and event['version'] >= versions[-1]
        found = _find(since, started, lambda mark: is_back(mark.event))
    else:
        found = _find(since, started, lambda mark: mark.event.get('kind') == 'route')
    return None if found is None else since[found].at_s


def _find_engine(strike: Strike, since: Sequence[Mark]) -> float | None:
    gone = _find(since, 0, lambda mark: mark.what == 'gone')
    if gone is None:
        return None
    is_own = lambda event, kind: event.get('kind') == kind and event['engine'] == engine_of(strike.process)
    if strike.cell.phase == 'start-up':
        found = _find(since, gone, lambda mark: mark.what == 'built' and mark.process == strike.process)
    elif (registered := _find(since, gone, lambda mark: is_own(mark.event, 'register'))) is None:
        return None
    else:
        serves = lambda event: is_own(event, 'engine_state') and event['state'] == 'serving'
        found = _find(since, registered, lambda mark: serves(mark.event))
    return None if found is None else since[found].at_s


def _find(marks: Sequence[Mark], first: int, holds: Any) -> int | None:
    return next((n for n in range(first, len(marks)) if holds(marks[n])), None)


def judge(strikes: Sequence[Strike], marks: Sequence[Mark], bounds: Bounds, steps: int) -> list[Recovery]:
    """One for each strike of a run that has ended."""
    struck = [n for n, mark in enumerate(marks) if mark.what == 'struck']
    ends = [*struck, len(marks)][1:]
    return [
        _judge(strike, marks[:first], marks[first:end], bounds, steps)
        for strike, first, end in zip(strikes, struck, ends, strict=True)
    ]


def _judge(strike: Strike, before: Sequence[Mark], since: Sequence[Mark], bounds: Bounds, steps: int) -> Recovery:
    """A run that ended before the process was gone, or back, was not held up for longer than until its end."""
    struck_s, last_s = since[0].at_s, since[-1].at_s
    gone_s = next((mark.at_s for mark in since if mark.what == 'gone'), last_s)
    back_s = find_return(strike, before, since, steps)
    hang_s = _HANG_S if _is_registered(strike, before) else _UNREGISTERED_S
    most_s = _NOTICED_S if strike.cell.signal == signal.SIGKILL else hang_s
    back_most_s = bounds.engine_s if strike.cell.role == 'engine' else bounds.learners_s
    if strike.cell.phase == 'end':
        back_most_s = bounds.end_s
    noticed_s, took_s = gone_s - struck_s, (last_s if back_s is None else back_s) - gone_s
    violations = [f'{strike}: {text}' for text in check_restarts(strike, since, steps)]
    if noticed_s > most_s:
        violations.append(f'{strike}: the process was there for {noticed_s:.1f} s more, allowed are {most_s:.1f}')
    if took_s > back_most_s:
        violations.append(f'{strike}: recovery took {took_s:.1f} s, allowed are {back_most_s:.1f}')
    moment = describe_moment(strike, before)
    return Recovery(strike, moment, noticed_s, most_s, took_s, back_most_s, violations)


def check_restarts(strike: Strike, since: Sequence[Mark], steps: int) -> list[str]:
    """Who was started again: an engine alone; controller and learners together, and no engine with them.

    Nobody, where the run has ended before: at its end, and beside an engine that hangs and is not missed.
    """
    again = (mark for mark in since if mark.what == 'start' and mark.number > 1)  # the first may come after the strike
    found = collections.Counter(mark.process for mark in again)
    expected: Mapping[str, int] = dict.fromkeys((strike.process,) if strike.cell.role == 'engine' else TOGETHER, 1)
    unmissed = strike.cell.role == 'engine' and _ended_first(strike, since, steps)
    if found == expected or (not found and (strike.cell.phase == 'end' or unmissed)):
        return []
    return [f'{_listed(found)} started again, expected {_listed(expected)}']


def _ended_first(strike: Strike, since: Sequence[Mark], steps: int) -> bool:
    """Whether the last version was published while the process was still there."""
    there = itertools.takewhile(lambda mark: (mark.what, mark.process) != ('gone', strike.process), since)
    return any(mark.event.get('kind') == 'publish' and mark.event['version'] == steps for mark in there)


def describe_moment(strike: Strike, before: Sequence[Mark]) -> str:
    """What the process had done, and the version that was published last."""
    own = [mark.what for mark in before if mark.process == strike.process]
    versions = [mark.event['version'] for mark in before if mark.event.get('kind') == 'publish']
    done = 'built' if 'built' in own else 'registered' if 'registered' in own else 'not yet registered'
    return f'{done}, version {versions[-1]}' if versions else done


def _is_registered(strike: Strike, before: Sequence[Mark]) -> bool:
    """By its last start."""
    own = [mark.what for mark in before if mark.process == strike.process]
    last = max((n for n, what in enumerate(own) if what == 'start'), default=0)
    return 'registered' in own[last:]


def _listed(starts: Mapping[str, int]) -> str:
    """'engine-1', 'learner-0 twice', 'nobody'."""
    times = {1: '', 2: ' twice'}
    return ', '.join(name + times.get(n, f' {n} times') for name, n in sorted(starts.items()) if n) or 'nobody'
