"""Leaves out a class of engines that adds nothing but age, and takes it back: rollout.slow_engines='spare'.

A class is made of engines of equal hardware. pool.py asks at every publication. All numbers come from the ledger and
the clock, so that a resumed run and a replay decide as the original run did.
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
    engine: str  # of the last request
    requests: int = 0  # open ones


@dataclasses.dataclass(eq=False)
class _Load:
    number: int  # in the order of joining: among equally loaded engines the first is chosen
    outstanding: int = 0  # tokens
    is_routed: bool = True  # whether new requests may go there

    @property
    def rank(self) -> tuple[int, int]:
        return self.outstanding, self.number


class Ledger:
    """The open requests of each engine, and the number of tokens that each engine may still have to generate."""

    def __init__(self, engines: Iterable[str] = ()):
        self.on_room: Callable[[], None] = lambda: None  # called when a request ends, or an engine comes or goes
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
        """Returns the entry of a request; None if it is not open."""
        return self._entries.get(request_id)

    def add_engine(self, name: str) -> None:
        """Lets new requests go to the engine; an engine that was withdrawn keeps its entries."""
        load = self._loads.setdefault(name, _Load(next(self._numbers)))
        self._unrank(name, load)
        load.is_routed = True
        self._rank(name, load)
        self.on_room()

    def withdraw_engine(self, name: str) -> None:
        """Stops new requests from going to the engine; its open requests stay."""
        load = self._loads[name]
        self._unrank(name, load)
        load.is_routed = False
        self.on_room()

    def remove_engine(self, name: str) -> None:
        """Forgets the engine; raises RuntimeError if it has outstanding tokens."""
        self.withdraw_engine(name)
        if self._loads[name].outstanding:
            raise RuntimeError(f'{name} is removed with {self._loads[name].outstanding} outstanding tokens')
        del self._loads[name]

    def entries(self) -> list[Entry]:
        """Lists the open requests in the order of arrival."""
        return list(self._entries.values())

    def outstanding(self) -> dict[str, int]:
        return {name: load.outstanding for name, load in self._loads.items()}

    def routed_engines(self) -> int:
        return len(self._ranking)

    def is_routed(self, name: str) -> bool:
        return name in self._loads and self._loads[name].is_routed

    def engine_of_group(self, request: GenerationRequest) -> str | None:
        group = self._groups.get((request.seed, request.draw))
        return None if group is None else group.engine

    def least_outstanding(self, avoid: str = '') -> str | None:
        """Returns the engine with the fewest outstanding tokens, except `avoid`; None if there is no other."""
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
        """Notes that `tokens` of its tokens were delivered; a closed entry stays as it is."""
        if self._entries.get(entry.request_id) is entry:
            entry.outstanding -= tokens
            self._add(entry.engine, -tokens)
            self.on_change(entry.engine, 0, tokens)

    def close(self, entry: Entry) -> None:
        """Notes that the request has ended; a second call does nothing."""
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


SLOW = 0.7  # times the speed of the fastest engines: slower ones are slow
PUBLICATIONS = 3  # in a row after which a class is left out
FITS = 0.8  # largest share of the other classes' slots that answers may fill: a reserve for when many come at once
SLOWER = 1.1  # times the seconds of an update before: the class is taken back, because it did add tokens


class Change(NamedTuple):
    """A class that gets no new requests from now on ('start'), or gets them again ('done')."""

    mode: Literal['start', 'done']
    hardware: str
    reason: Literal['fits', 'full', 'slower']
    open: float  # mean open answers of the whole pool since the previous publication
    slots: int  # of the engines that get requests, without the class
    speed: float  # of an answer on the class, as a share of the fastest class
    update_s: float  # mean of the last intervals between publications


@dataclasses.dataclass
class Interval:
    """Measurements between two publications."""

    seconds: float
    answer_s: dict[str, float]  # seconds times open answers, by class
    tokens: dict[str, int]  # generated, by class


class SpareRule:
    """Decides once an interval which classes are left out; the time does not depend on the number of open answers.

    A slow class is left out if the slots of the others had room for every open answer, on average and with a
    reserve, in PUBLICATIONS intervals in a row. It is taken back if these slots are full, or if the next PUBLICATIONS
    updates take longer than before; the latter doubles the number of intervals in a row required from then on.

    Args:
      slots: by class, the sum over its engines.
    """

    def __init__(self, slots: Mapping[str, int]):
        self._slots = dict(slots)
        self.spared: list[str] = []  # classes, in the order in which they were left out
        self._open: collections.Counter[str] = collections.Counter()  # answers by class
        self._at_s: float | None = None  # time up to which `_since` is measured; None before the first publication
        self._since = Interval(0.0, {}, {})  # the interval under way
        self._last: list[Interval] = []
        self._needed = PUBLICATIONS  # in a row
        self._held: dict[str, int] = {}  # intervals in a row in which the answers fitted without the class
        self._trial: tuple[int, float] | None = None  # intervals since a class was left out, seconds of one before
        self._speeds: dict[str, float] = {}  # of classes when they were left out

    def note(self, hardware: str, answers: int, tokens: int, now_s: float) -> None:
        """Adds `answers` to the open answers of the class, and `tokens` to the tokens that it generated."""
        self._measure(now_s)
        self._open[hardware] += answers
        if tokens and self._at_s is not None:
            self._since.tokens[hardware] = self._since.tokens.get(hardware, 0) + tokens

    def judge(self, now_s: float) -> Change | None:
        """Ends an interval at a publication and returns the change of at most one class."""
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
        """Returns the state as JSON values.

        Ends the current term of the sums here, so that a resumed run adds the same terms in the same order.
        """
        self._measure(now_s)
        return {
            'spared': list(self.spared), 'at_s': self._at_s, 'since': dataclasses.asdict(self._since),
            'last': [dataclasses.asdict(one) for one in self._last], 'needed': self._needed, 'held': dict(self._held),
            'trial': None if self._trial is None else list(self._trial), 'speeds': dict(self._speeds),
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state; open answers are noted again as their requests are opened."""
        self.spared, self._at_s, self._since = list(state['spared']), state['at_s'], Interval(**state['since'])
        self._last, self._needed = [Interval(**one) for one in state['last']], state['needed']
        self._held, self._speeds = dict(state['held']), dict(state['speeds'])
        self._trial = None if state['trial'] is None else (state['trial'][0], state['trial'][1])

    def _measure(self, now_s: float) -> None:
        """Adds the time until now; does nothing before the first publication, or if no time has passed."""
        if self._at_s is None or now_s == self._at_s:
            return
        seconds, since = now_s - self._at_s, self._since
        since.seconds += seconds
        for hardware in self._slots:  # in a fixed order, so that a resumed run adds in the same order
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
        """Returns tokens per second and answer over the last intervals, by class that had answers and is not spared."""
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
      hardware: by engine; at least two classes.
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
        """Ends an interval; returns the engines that are left out from now on, whose open requests must move."""
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
