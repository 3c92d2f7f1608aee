"""Moves devices between generation and training during a run, always between two updates.

The controller calls `pass_boundary` before every update. split_choice.py chooses the split of an update, `site` owns
the devices, and engines leave and join the pool. A move loses and repeats nothing: requests continue on other engines
with all their generated tokens, the learner's state stays bit-equal, and a checkpoint holds the split.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import NamedTuple, Protocol, TypedDict

from areal_jax import lanes
from areal_jax.config.cluster import DeviceSplit
from areal_jax.control.event_writer import EventLog
from areal_jax.control.split_choice import (
    Choice,
    DecodeSums,
    LaneSeconds,
    fit_step,
    full_rows,
    full_seconds,
    mean_seconds,
    needed_seconds,
    open_rows,
    waits,
)
from areal_jax.control.supervisor import Supervisor
from areal_jax.events.schema import Event, RunDoneEvent
from areal_jax.protocols import ChangingPool, Clock, RolloutEngine
from areal_jax.types import PublishedWeights, Work


class DeviceSite(Protocol):
    """The owner of the devices that control/reallocation.py moves between learner and engines.

    Blocking methods do not touch data that another lane reads.
    """

    def engines_of(self, split: DeviceSplit) -> Mapping[str, Sequence[str]]:
        """The devices' names by engine, in the engines' order. An engine with equal devices in two splits stays."""
        ...

    def prepare(self, split: DeviceSplit) -> None:
        """Compiles the programs of the split once; blocking, on the lane `prepare`, while the run continues."""
        ...

    def move_learner(self, split: DeviceSplit) -> None:
        """Moves the learner to the devices of the split; blocking, on its lane, between two updates."""
        ...

    def build_engine(self, name: str, split: DeviceSplit, published: PublishedWeights) -> RolloutEngine:
        """Builds an engine of the split with these weights, not started; blocking, on its lane for fetching weights."""
        ...

    def start_engine(self, engine: RolloutEngine) -> None:
        """Starts an engine from `build_engine`."""
        ...

    def stop_engine(self, engine: RolloutEngine) -> None:
        """Ends an engine that has left the pool, and releases its weights and its cache."""
        ...


_MEASURED = ('train', 'snapshot')  # kinds of work of the learner that belong to an update
_MOST_KEPT = 1024  # updates whose seconds are kept


class ReallocationState(TypedDict):
    """The part of a Reallocation that a checkpoint keeps."""

    learner: str  # of the split
    engines: str
    ahead: list[str] | None  # learner and engines of a split that was chosen but not taken yet
    prepared: list[list[str]]  # likewise, for the splits whose programs were compiled
    choice: dict[str, int]
    measured: list[list[float]]
    busy: dict[str, float]  # since the last boundary
    decoded: list[float]  # likewise, DecodeSums
    open_rows: float
    taken: list[int]  # likewise, Answered
    ended: list[int]  # likewise
    finished: dict[str, list[int]]  # answers that no update has taken: Answered by draw
    begun_s: float | None


class Answered(NamedTuple):
    """A number of answers, and their tokens in total."""

    answers: int = 0
    tokens: int = 0

    @property
    def mean(self) -> float:
        """Mean tokens per answer; 0 without answers."""
        return self.tokens / self.answers if self.answers else 0.0

    def plus(self, other: Answered) -> Answered:
        return Answered(self.answers + other.answers, self.tokens + other.tokens)


class Reallocation:
    """The split of the devices, and the moves from one split to the next.

    Args:
      split: the first split.
      published: the weights that the engines have.
      slots, cache_tokens: slots and cache size of one engine.
      on_moved: called with the new split after every move.
    """

    def __init__(
        self,
        clock: Clock,
        log: EventLog,
        supervisor: Supervisor,
        *,
        pool: ChangingPool,
        site: DeviceSite,
        choice: Choice,
        split: DeviceSplit,
        published: PublishedWeights,
        slots: int,
        cache_tokens: int,
        on_moved: Callable[[DeviceSplit], None] = lambda split: None,
    ):
        self._clock, self._log, self._supervisor = clock, log, supervisor
        self._pool, self._site, self._choice, self._on_moved = pool, site, choice, on_moved
        self.split, self.published = split, published
        self._slots, self._cache_tokens = slots, cache_tokens
        self._ahead: DeviceSplit | None = None  # chosen but not taken yet
        self._preparing: set[DeviceSplit] = set()
        self.prepared: dict[DeviceSplit, None] = {}  # splits whose programs are compiled, in order
        self._measured: list[LaneSeconds] = []  # updates with this split
        self._busy = {'learner': 0.0, 'engines': 0.0}  # since the last boundary
        self._decoded = DecodeSums()  # likewise
        self._open_rows = 0.0  # split_choice.open_rows
        self._ended = self._taken = Answered()  # likewise: answers that ended, and answers that were trained or dropped
        self._finished: dict[int, Answered] = {}  # ended answers that are neither trained nor dropped, by draw
        self._dispatch_s: dict[str, float] = {}  # by engine: seconds of the dispatch whose event comes next
        self._begun_s: float | None = None  # time of the last boundary; None: before the first, or after a move
        self._moved = 0  # requests that moved to another engine in this move
        log.listeners.append(self._on_event)

    async def pass_boundary(self, update: int, await_published: Callable[[], Awaitable[None]]) -> None:
        """Called before `update`, while nothing trains: moves the devices if the split changes.

        Args:
          await_published: returns when every engine has the newest weights.
        """
        self._measure()
        if self._ahead is None:
            wanted = self._choice.choose(update, self.split, self._measured)
            self._ahead = wanted if wanted != self.split else None
        if self._ahead is not None and (self._choice.is_punctual or self._ahead in self.prepared):
            target, self._ahead = self._ahead, None
            await self._move(update, target, await_published)
        if (later := self._ahead or self._choice.ahead(update, self.split)) is not None:
            self._prepare(later)

    def state(self) -> ReallocationState:
        ahead = self._ahead
        return {
            'learner': self.split.learner,
            'engines': self.split.engines,
            'ahead': None if ahead is None else [ahead.learner, ahead.engines],
            'prepared': [[split.learner, split.engines] for split in self.prepared],
            'choice': self._choice.state(),
            'measured': [list(seconds) for seconds in self._measured],
            'busy': dict(self._busy),
            'decoded': list(self._decoded),
            'open_rows': self._open_rows,
            'taken': list(self._taken),
            'ended': list(self._ended),
            'finished': {str(draw): list(answered) for draw, answered in self._finished.items()},
            'begun_s': self._begun_s,
        }

    def restore(self, state: ReallocationState) -> None:
        """Continues from a checkpoint, with whose split the site was built; the caller compiles `prepared`."""
        self._ahead = None if state['ahead'] is None else DeviceSplit(*state['ahead'])
        self.prepared = {DeviceSplit(*split): None for split in state['prepared']}
        self._choice.restore(state['choice'])
        self._measured = [LaneSeconds(*seconds) for seconds in state['measured']]
        self._busy, self._decoded = dict(state['busy']), DecodeSums(*state['decoded'])
        self._open_rows = state['open_rows']
        self._taken, self._ended, self._begun_s = Answered(*state['taken']), Answered(*state['ended']), state['begun_s']
        self._finished = {int(draw): Answered(*answered) for draw, answered in state['finished'].items()}

    # Measurement of busy lanes.

    def _on_event(self, event: Event) -> None:
        self._moved += event['kind'] == 'move'
        if event['kind'] == 'decode':
            rows = sum(slot is not None for slot in event['slots'])
            seconds = self._dispatch_s.pop(event['engine'])  # run_done comes before it
            self._decoded = self._decoded.add(event['steps'], rows, seconds, event['positions'])
        elif event['kind'] == 'finish':
            answer, draw = Answered(1, event['tokens']), event['draw']
            self._finished[draw] = self._finished.get(draw, Answered()).plus(answer)
            self._ended = self._ended.plus(answer)
        elif event['kind'] == 'consume':
            self._take(*event['draws'])
        elif event['kind'] == 'evaluate':  # an evaluation before or after training
            self._finished.clear()
        elif event['kind'] == 'drop':
            self._take(event['draw'])
        elif event['kind'] == 'run_done' and event['lane'] is not None:
            self._note_work(event)

    def _take(self, *draws: int) -> None:
        for draw in draws:
            self._taken = self._taken.plus(self._finished.pop(draw, Answered()))

    def _note_work(self, event: RunDoneEvent) -> None:
        assert event['lane'] is not None
        if event['lane'] == lanes.LEARNER and event['work'] in _MEASURED:
            self._busy['learner'] += event['seconds']
        elif lanes.is_engine_lane(event['lane']):
            self._busy['engines'] += event['seconds']
            if event['work'] == 'decode':
                self._dispatch_s[event['lane']] = event['seconds']

    def _measure(self) -> None:
        """Ends the measurement of an update, and begins the next one."""
        now, engines = self._clock.now(), self._pool.serving_engines()
        if self._begun_s is not None:
            learner, busy, decoded = self._busy['learner'], self._busy['engines'], self._decoded
            full, cost = full_rows(decoded, self._slots, self._cache_tokens), fit_step(decoded)
            period, taken, ended = now - self._begun_s, self._taken, self._ended
            if decoded.steps and waits(period, learner):
                self._open_rows = open_rows(self._open_rows, decoded.rows / decoded.steps, full, engines)
            reached = min(full, self._open_rows / max(engines, 1)) if self._open_rows else full
            needs = busy - decoded.seconds + full_seconds(decoded, cost, reached)
            needed = needed_seconds(period, learner, needs / max(engines, 1), taken=taken.answers, ended=ended.answers)
            seconds = LaneSeconds(
                period, learner, busy / max(engines, 1), needed, *cost,
                full_share=1 / full if full else 0.0, open_share=1 / self._open_rows if self._open_rows else 0.0,
                growth=ended.mean / taken.mean if taken.mean and ended.mean else 1.0,
            )  # fmt: skip
            self._measured = [*self._measured[-_MOST_KEPT:], seconds]
        self._begun_s, self._busy = now, {'learner': 0.0, 'engines': 0.0}
        self._decoded, self._taken, self._ended = DecodeSums(), Answered(), Answered()

    # The move.

    def _prepare(self, split: DeviceSplit) -> None:
        """Compiles a later split while the run continues."""
        if split in self.prepared or split in self._preparing:
            return
        self._preparing.add(split)

        async def prepare() -> None:
            await self._compile(split)
            self._preparing.remove(split)
            self.prepared[split] = None

        self._supervisor.start(f'preparation of {split}', prepare())

    async def _compile(self, split: DeviceSplit) -> None:
        await self._clock.run(lanes.PREPARE, lambda: self._site.prepare(split), Work('compile'))

    async def _move(self, update: int, target: DeviceSplit, await_published: Callable[[], Awaitable[None]]) -> None:
        before, began_s, busy = self.split, self._clock.now(), mean_seconds(self._measured)
        await await_published()
        await self._compile(target)  # does nothing if it is prepared; waits for a preparation under way
        leaving, joining = self._find_change(before, target)
        self._moved, prepared_s = 0, self._clock.now()
        await self._at_once('leave', leaving, functools.partial(self._end_engine, target))
        left_s = self._clock.now()
        work = Work('reshard', 1, {'update': update})
        await self._clock.run(lanes.LEARNER, lambda: self._site.move_learner(target), work)
        learner_s = self._clock.now()
        await self._at_once('join', joining, functools.partial(self._begin_engine, target))
        self.split = target
        self._choice.note_move(before, target)
        now = self._clock.now()
        self._log.write(
            'reallocate', update=update,
            from_learner=before.learner, from_engines=before.engines, learner=target.learner, engines=target.engines,
            left=leaving, joined=joining, moved=self._moved,
            busy_learner=busy.learner, busy_engines=busy.engines, needed_engines=busy.needed, period=busy.period,
            wait_seconds=prepared_s - began_s, leave_seconds=left_s - prepared_s, learner_seconds=learner_s - left_s,
            join_seconds=now - learner_s, seconds=now - began_s,
        )  # fmt: skip
        self._measured, self._begun_s = [], None  # the next update refills the engines: not measured
        self._on_moved(target)

    def _find_change(self, before: DeviceSplit, after: DeviceSplit) -> tuple[list[str], list[str]]:
        """(engines that leave, engines that join). With equal devices an engine stays, else a new one replaces it."""
        ours, theirs = self._site.engines_of(before), self._site.engines_of(after)
        stay = {name for name in ours.keys() & theirs.keys() if ours[name] == theirs[name]}
        return [name for name in ours if name not in stay], [name for name in theirs if name not in stay]

    async def _at_once(
        self, action: str, names: Sequence[str], act: Callable[[str], Coroutine[object, object, None]]
    ) -> None:
        """Runs `act` for all these engines at the same time; returns when all are done."""
        left, done = list(names), self._clock.event(f'{action} of engines')

        async def act_on(name: str) -> None:
            await act(name)
            left.remove(name)
            if not left:
                done.set()

        for name in names:
            self._supervisor.start(f'{name}: {action}', act_on(name))
        if names:
            await self._clock.wait(done)

    async def _end_engine(self, target: DeviceSplit, name: str) -> None:
        engine = await self._pool.leave(name, f'its devices go to {target}')
        self._site.stop_engine(engine)

    async def _begin_engine(self, target: DeviceSplit, name: str) -> None:
        published = self.published
        lane = lanes.publish_lane(int(lanes.short_name(name)))
        work = Work('load', 1, {'version': published.version})
        engine = await self._clock.run(lane, lambda: self._site.build_engine(name, target, published), work)
        self._site.start_engine(engine)
        await self._pool.join(engine)
