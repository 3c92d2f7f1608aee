"""Leaves out a class of engines that adds nothing but age, and takes it back: rollout.slow_engines='spare'.

A class is made of engines of equal hardware. pool.py asks at every publication. All numbers come from the ledger and
the clock, so that a run that goes on from a checkpoint, and a replay, decide as the run did.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from areal_jax.control.event_writer import EventLog
from areal_jax.protocols import Clock
from areal_jax.types import GenerationRequest


@dataclasses.dataclass(eq=False)
class Entry:
    """One open request."""

    request_id: str
    group: tuple[int, int]  # (seed, draw)
    engine: str
    outstanding: int  # tokens that it may still generate
    version: int | None  # GenerationRequest.version


@dataclasses.dataclass(eq=False)
class _Group:
    engine: str  # of the request that came last
    requests: int = 0  # open ones


@dataclasses.dataclass(eq=False)
class _Load:
    """Of one engine."""

    number: int  # in the order of joining: of equally loaded engines the first is chosen
    outstanding: int = 0  # tokens
    is_routed: bool = True  # whether new requests may go there

    @property
    def rank(self) -> tuple[int, int]:
        return self.outstanding, self.number


class Ledger:
    """Which request is open on which engine, and how many tokens each engine may still have to generate."""

    def __init__(self, engines: Iterable[str] = ()):
        self.on_room: Callable[[], None] = lambda: None  # called when a request ends, an engine comes or goes
        # called with the engine, the change of its open requests, and tokens that one of them got
        self.on_change: Callable[[str, int, int], None] = lambda engine, requests, tokens: None
        self._numbers = itertools.count()
        self._loads: dict[str, _Load] = {}
        self._ranking: list[tuple[int, int, str]] = []  # (outstanding tokens, number, engine), ascending
        self._entries: dict[str, Entry] = {}  # by request id, in the order of arrival
        self._groups: dict[tuple[int, int], _Group] = {}
        for name in engines:
            self.add_engine(name)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, request_id: str) -> Entry | None:
        """None where no such request is open."""
        return self._entries.get(request_id)

    def add_engine(self, name: str) -> None:
        """From now on new requests may go there; an engine that was withdrawn keeps its entries."""
        load = self._loads.setdefault(name, _Load(next(self._numbers)))
        self._unrank(name, load)
        load.is_routed = True
        self._rank(name, load)
        self.on_room()

    def withdraw_engine(self, name: str) -> None:
        """No new request goes there; what is open there stays."""
        load = self._loads[name]
        self._unrank(name, load)
        load.is_routed = False
        self.on_room()

    def remove_engine(self, name: str) -> None:
        """Forgets the engine; raises RuntimeError where it has outstanding tokens."""
        self.withdraw_engine(name)
        if self._loads[name].outstanding:
            raise RuntimeError(f'{name} is removed with {self._loads[name].outstanding} outstanding tokens')
        del self._loads[name]

    def entries(self) -> list[Entry]:
        """The open requests, first come first."""
        return list(self._entries.values())

    def outstanding(self) -> dict[str, int]:
        """Outstanding tokens by engine."""
        return {name: load.outstanding for name, load in self._loads.items()}

    def routed_engines(self) -> int:
        """How many engines take new requests."""
        return len(self._ranking)

    def is_routed(self, name: str) -> bool:
        return name in self._loads and self._loads[name].is_routed

    def engine_of_group(self, request: GenerationRequest) -> str | None:
        """Where an open request of the same group is."""
        group = self._groups.get((request.seed, request.draw))
        return None if group is None else group.engine

    def least_outstanding(self, avoid: str = '') -> str | None:
        """The engine with the fewest outstanding tokens, not `avoid`; None where there is no other."""
        return next((name for _, _, name in self._ranking if name != avoid), None)

    def open(self, request: GenerationRequest, engine: str) -> Entry:
        """Notes that the engine has the request. Raises RuntimeError for a request that is open already."""
        request_id = request.request_id
        if request_id in self._entries:
            raise RuntimeError(f'request {request_id} is open already, on {self._entries[request_id].engine}')
        generated = sum(len(segment.tokens) for segment in request.prefix)
        tokens = request.sampling.max_new_tokens - generated
        entry = self._entries[request_id] = Entry(
            request_id, (request.seed, request.draw), engine, tokens, request.version
        )
        group = self._groups.setdefault(entry.group, _Group(engine))
        group.engine = engine
        group.requests += 1
        self._add(engine, tokens)
        self.on_change(engine, 1, 0)
        return entry

    def note_generated(self, entry: Entry, tokens: int) -> None:
        """Notes that so many of its tokens were delivered; a closed entry stays as it is."""
        if self._entries.get(entry.request_id) is entry:
            entry.outstanding -= tokens
            self._add(entry.engine, -tokens)
            self.on_change(entry.engine, 0, tokens)

    def close(self, entry: Entry) -> None:
        """Notes that the request has ended; nothing the second time."""
        if self._entries.get(entry.request_id) is not entry:
            return
        del self._entries[entry.request_id]
        group = self._groups[entry.group]
        group.requests -= 1
        if not group.requests:
            del self._groups[entry.group]
        self._add(entry.engine, -entry.outstanding)
        self.on_change(entry.engine, -1, 0)
        self.on_room()

    def _add(self, engine: str, tokens: int) -> None:
        """Changes the outstanding tokens of an engine and its place in the ranking."""
        load = self._loads[engine]
        self._unrank(engine, load)
        load.outstanding += tokens
        self._rank(engine, load)

    def _unrank(self, name: str, load: _Load) -> None:
        place = bisect.bisect_left(self._ranking, (*load.rank, name))
        if place < len(self._ranking) and self._ranking[place][2] == name:
            del self._ranking[place]

    def _rank(self, name: str, load: _Load) -> None:
        if load.is_routed:
            bisect.insort(self._ranking, (*load.rank, name))


SLOW = 0.7  # of the speed of the fastest engines: those with less are slow
PUBLICATIONS = 3  # in a row after which a class is left out
FITS = 0.8  # of the slots of the other classes, that open answers fill: more may not fit when many come at once
SLOWER = 1.1  # times the seconds of an update before: the class is taken back, as it did add tokens


class Change(NamedTuple):
    """A class that gets no new requests from now on ('start'), or gets them again ('done')."""

    mode: Literal['start', 'done']
    hardware: str
    reason: Literal['fits', 'full', 'slower']
    open: float  # answers of the whole pool, mean since the publication before
    slots: int  # of the engines that get requests without the class
    speed: float  # of an answer on the class, as a share of the fastest class
    update_s: float  # mean of the last intervals between publications


@dataclasses.dataclass
class Interval:
    """Between two publications."""

    seconds: float
    answer_s: dict[str, float]  # seconds times open answers, by class
    tokens: dict[str, int]  # that answers got, by class


class SpareRule:
    """Which classes are left out. Decides once an interval, in constant time in the number of open answers.

    A slow class is left out where the slots of the others had room for every open answer, on average and with a
    reserve, in PUBLICATIONS intervals in a row. It is taken back where these slots are full, and where the next
    PUBLICATIONS updates take longer than before; the latter doubles the number in a row that is asked for.

    Args:
      slots: by class, of all its engines.
    """

    def __init__(self, slots: Mapping[str, int]):
        self._slots = dict(slots)
        self.spared: list[str] = []  # classes, in the order in which they were left out
        self._open: collections.Counter[str] = collections.Counter()  # answers by class
        self._at_s: float | None = None  # up to when `_since` is measured; None before the first publication
        self._since = Interval(0.0, {}, {})  # the interval under way
        self._last: list[Interval] = []
        self._needed = PUBLICATIONS  # in a row
        self._held: dict[str, int] = {}  # intervals in a row in which the answers fitted without the class
        self._trial: tuple[int, float] | None = None  # intervals since a class was left out, seconds of one before
        self._speeds: dict[str, float] = {}  # of classes when they were left out

    def note(self, hardware: str, answers: int, tokens: int, now_s: float) -> None:
        """The class has so many more open answers, and got so many tokens."""
        self._measure(now_s)
        self._open[hardware] += answers
        if tokens and self._at_s is not None:
            self._since.tokens[hardware] = self._since.tokens.get(hardware, 0) + tokens

    def judge(self, now_s: float) -> Change | None:
        """Ends an interval: a version is published. At most one class changes."""
        self._measure(now_s)
        ended, self._since = self._since, Interval(0.0, {}, {})
        if self._at_s is None:
            self._at_s = now_s
            return None
        if not ended.seconds:
            return None
        self._last = [*self._last, ended][-PUBLICATIONS:]
        change = self._take_back(ended) or self._leave_out(ended)
        if change is not None:
            self._held, self._last = {}, []
        return change

    def state(self, now_s: float) -> dict[str, Any]:
        """JSON-able. Ends the term under way here, so that a resumed run adds the same ones in the same order."""
        self._measure(now_s)
        return {
            'spared': list(self.spared), 'at_s': self._at_s, 'since': dataclasses.asdict(self._since),
            'last': [dataclasses.asdict(one) for one in self._last], 'needed': self._needed, 'held': dict(self._held),
            'trial': None if self._trial is None else list(self._trial), 'speeds': dict(self._speeds),
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Open answers are noted again as their requests are opened."""
        self.spared, self._at_s, self._since = list(state['spared']), state['at_s'], Interval(**state['since'])
        self._last, self._needed = [Interval(**one) for one in state['last']], state['needed']
        self._held, self._speeds = dict(state['held']), dict(state['speeds'])
        self._trial = None if state['trial'] is None else (state['trial'][0], state['trial'][1])

    def _measure(self, now_s: float) -> None:
        """Adds the time until now; nothing before the first publication, or without time."""
        if self._at_s is None or now_s == self._at_s:
            return
        seconds, since = now_s - self._at_s, self._since
        since.seconds += seconds
        for hardware in self._slots:  # in one order, so that a resumed run adds up in it too
            if answers := self._open[hardware]:
                since.answer_s[hardware] = since.answer_s.get(hardware, 0.0) + answers * seconds
        self._at_s = now_s

    def _leave_out(self, ended: Interval) -> Change | None:
        speeds = self._measure_speeds()
        fastest = max(speeds.values(), default=0.0)
        slow = [hardware for hardware in sorted(speeds, key=speeds.__getitem__) if speeds[hardware] < SLOW * fastest]
        held = {
            hardware: self._held.get(hardware, 0) + 1
            for hardware in slow
            if _mean_open(ended) <= FITS * self._serving_slots(without=hardware)
        }
        self._held = held
        due = next((hardware for hardware in slow if held.get(hardware, 0) >= self._needed), None)
        if due is None:
            return None
        self.spared.append(due)
        self._speeds[due] = speeds[due] / fastest
        self._trial = 0, self._mean_update_s()
        return self._describe('start', due, 'fits', ended)

    def _take_back(self, ended: Interval) -> Change | None:
        if not self.spared:
            return None
        hardware = self.spared[-1]
        reason: Literal['full', 'slower'] | None = None
        if _mean_open(ended) > self._serving_slots():
            reason = 'full'
        elif self._trial is not None:
            intervals, before_s = self._trial[0] + 1, self._trial[1]
            self._trial = (intervals, before_s) if intervals < PUBLICATIONS else None
            if self._trial is None and self._mean_update_s() > SLOWER * before_s:
                reason, self._needed = 'slower', 2 * self._needed
        if reason is None:
            return None
        change = self._describe('done', hardware, reason, ended)
        self.spared.pop()
        self._trial = None
        return change

    def _describe(
        self, mode: Literal['start', 'done'], hardware: str, reason: Literal['fits', 'full', 'slower'], ended: Interval
    ) -> Change:
        slots, update_s = self._serving_slots(without=hardware), self._mean_update_s()
        return Change(mode, hardware, reason, _mean_open(ended), slots, self._speeds[hardware], update_s)

    def _measure_speeds(self) -> dict[str, float]:
        """Tokens a second of an answer, over the last intervals, of the classes that had any."""
        found: dict[str, float] = {}
        for hardware in self._slots:
            answer_s = sum(one.answer_s.get(hardware, 0.0) for one in self._last)
            if answer_s and hardware not in self.spared:
                found[hardware] = sum(one.tokens.get(hardware, 0) for one in self._last) / answer_s
        return found

    def _mean_update_s(self) -> float:
        return sum(one.seconds for one in self._last) / len(self._last)

    def _serving_slots(self, without: str = '') -> int:
        return sum(slots for one, slots in self._slots.items() if one not in self.spared and one != without)


def _mean_open(interval: Interval) -> float:
    return sum(interval.answer_s.values()) / interval.seconds


class SpareEngines:
    """Applies the rule to the ledger of a pool.

    Args:
      hardware: by engine; two classes or more.
      slots: of one engine.
    """

    def __init__(self, hardware: Mapping[str, str], slots: int, ledger: Ledger, clock: Clock, log: EventLog):
        self._engines: dict[str, list[str]] = {}  # by class
        for engine, one in hardware.items():
            self._engines.setdefault(one, []).append(engine)
        self._hardware, self._ledger, self._clock, self._log = dict(hardware), ledger, clock, log
        self._rule = SpareRule({one: slots * len(engines) for one, engines in self._engines.items()})
        ledger.on_change = self._note

    def pass_publication(self, version: int) -> Sequence[str]:
        """The engines that are left out from now on; what they have open goes on elsewhere."""
        change = self._rule.judge(self._clock.now())
        if change is None:
            return ()
        engines = self._engines[change.hardware]
        self._log.write(
            'spare', mode=change.mode, hardware=change.hardware, engines=engines, version=version, open=change.open,
            slots=change.slots, speed=change.speed, update_seconds=change.update_s, reason=change.reason,
        )  # fmt: skip
        for engine in engines:
            if change.mode == 'start':
                self._ledger.withdraw_engine(engine)
            else:
                self._ledger.add_engine(engine)
        return engines if change.mode == 'start' else ()

    def state(self) -> dict[str, Any]:
        return self._rule.state(self._clock.now())

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rule.restore(state)
        for hardware in self._rule.spared:
            for engine in self._engines[hardware]:
                self._ledger.withdraw_engine(engine)

    def _note(self, engine: str, answers: int, tokens: int) -> None:
        self._rule.note(self._hardware[engine], answers, tokens, self._clock.now())
