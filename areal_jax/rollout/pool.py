"""The engines of a run: chooses the engine for each request, and acts on all engines.

The controller and the workflows use it; it knows engines by protocols.RolloutEngine alone. A request
continues elsewhere when its engine leaves.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.errors import UserError
from areal_jax.protocols import Clock, Event, Generation, RolloutEngine
from areal_jax.rollout.spare_engines import SLOW, Entry, Ledger, SpareEngines
from areal_jax.types import (
    NOT_GENERATED,
    EngineCapabilities,
    EngineFinish,
    GenerationRequest,
    KvPolicy,
    LogprobKind,
    PublishedWeights,
    Segment,
)


class EngineError(UserError, ValueError):
    """An engine lacks an ability that the run needs; the message names both and the setting that needs it."""


@dataclasses.dataclass(frozen=True)
class Requirement:
    """One thing that every engine must be able to do."""

    setting: str  # of the config, with its value: 'evaluation.every=8'
    what: str  # the thing, after "cannot": 'keep the weights of a version'
    holds: Callable[[EngineCapabilities], bool]


def needs_logprobs(setting: str, kind: LogprobKind) -> Requirement:
    return Requirement(setting, f'give log-probs of kind {kind!r}', lambda can: kind in can.logprobs)


def needs_update(setting: str, policy: KvPolicy) -> Requirement:
    return Requirement(setting, f'do {policy!r} with unfinished answers at a swap', lambda can: policy in can.update)


def needs_spans(setting: str) -> Requirement:
    return Requirement(setting, 'tell the version of each token after a swap', lambda can: can.spans)


def needs_pause(setting: str) -> Requirement:
    """Requires a pause that keeps the generated tokens."""
    return Requirement(
        setting, 'pause without aborting answers', lambda can: bool({'retract', 'in_place'} & {*can.pause_modes})
    )


def needs_pinned(setting: str) -> Requirement:
    return Requirement(setting, 'keep the weights of an earlier version for an evaluation', lambda can: can.pinned)


def require_capabilities(engines: Iterable[RolloutEngine], requirements: Sequence[Requirement]) -> None:
    """Raises EngineError for the first engine that lacks an ability that the run needs."""
    for engine in engines:
        for requirement in requirements:
            if not requirement.holds(engine.capabilities):
                raise EngineError(
                    f'{engine.name} cannot {requirement.what}, which {requirement.setting} needs: change that setting '
                    'or use other engines'
                )


# A request in the pool: it continues on another engine when its engine leaves. Workflows iterate over it.


class PooledGeneration:
    """Iterates over the segments that its engines deliver in turn, and keeps the ledger; is a protocols.Generation.

    Delivered tokens are no longer outstanding. While the request is between two engines, `generation` and `entry` are
    None, and the iteration waits.

    Args:
      ledger: the ledger of its kind of request (training or pinned).
      on_end: called when the iteration ends.
    """

    def __init__(
        self,
        request: GenerationRequest,
        ledger: Ledger,
        clock: Clock,
        on_end: Callable[[PooledGeneration], None],
    ):
        self.request, self.ledger, self.engine = request, ledger, ''
        self.generation: Generation | None = None  # of the engine that has it
        self.entry: Entry | None = None  # in the ledger
        self._clock, self._on_end = clock, on_end
        self._received: list[Segment] = []  # all delivered segments, the prefix on a next engine
        self._undelivered: collections.deque[Segment] = collections.deque()  # from earlier engines
        self._cancelled = False  # while no engine had it
        self._placed: Event | None = None

    @property
    def finish_reason(self) -> EngineFinish | None:
        if self._cancelled:
            return 'cancelled'
        return None if self.generation is None else self.generation.finish_reason

    @property
    def received_tokens(self) -> int:
        return sum(len(segment.tokens) for segment in (*self.request.prefix, *self._received))

    def first_version(self, newest: int) -> int:
        """Returns the oldest version of the received tokens; `newest` if no token was received."""
        versions = (segment.policy_version for segment in (*self.request.prefix, *self._received))
        return min((version for version in versions if version != NOT_GENERATED), default=newest)

    def rest(self) -> GenerationRequest:
        if not self._received:
            return self.request
        return dataclasses.replace(self.request, prefix=(*self.request.prefix, *self._received))

    def place(self, engine: str, generation: Generation) -> None:
        self.engine, self.generation = engine, generation
        self.entry = self.ledger.open(self.rest(), engine)
        if self._placed is not None:
            self._placed.set()

    async def withdraw(self) -> None:
        """Takes the request from its engine, which has ended it, and receives all delivered segments.

        Does not wait: everything that the engine delivered is available.
        """
        assert self.generation is not None
        async for segment in self.generation:
            self._receive(segment)
            self._undelivered.append(segment)
        self.close()
        self.generation = self.entry = None
        self.wait()

    def wait(self) -> None:
        """Marks the request as waiting for an engine, until `place`."""
        self._placed = self._clock.event(f'an engine for request {self.request.request_id}')

    def cancel_waiting(self) -> None:
        assert self._placed is not None
        self._cancelled = True
        self._placed.set()

    def close(self) -> None:
        """Removes the request from the ledger; a second call does nothing."""
        if self.entry is not None:
            self.ledger.close(self.entry)

    def __aiter__(self) -> PooledGeneration:
        return self

    async def __anext__(self) -> Segment:
        while True:
            if self._undelivered:
                return self._undelivered.popleft()
            if (generation := self.generation) is None:
                if self._cancelled:
                    raise StopAsyncIteration
                assert self._placed is not None
                await self._clock.wait(self._placed)
                continue
            try:
                segment = await generation.__anext__()
            except StopAsyncIteration:
                if self.generation is not generation:  # it has moved meanwhile
                    continue
                self.close()
                self._on_end(self)
                raise
            self._receive(segment)
            return segment

    def _receive(self, segment: Segment) -> None:
        self._received.append(segment)
        if self.entry is not None:
            self.ledger.note_generated(self.entry, len(segment.tokens))


Result = TypeVar('Result')
_Key = tuple[bool, str]  # of a request: whether it is pinned to a version, its id


class Pool:
    """Routes requests: the samples of a group share an engine, and with it a prefill; a new group goes to the engine
    with the fewest outstanding tokens. Requests that are pinned to a version have a separate ledger, so they do not
    change where training requests go. Implements protocols.Pool and protocols.ChangingPool.

    Args:
      requirements: abilities of every engine; raises EngineError, naming the engine, if one lacks any.
      slow_versions: for engines of unequal speed: an answer that spans this many versions moves from a slow engine to a
        faster one when new weights are loaded, because its KV is computed again then anyway; 0 = no answer moves.
      spare_slots: slots of one engine, to leave out a class of engines that adds nothing but age; 0 = leave out none.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        clock: Clock,
        log: EventLog,
        supervisor: Supervisor,
        requirements: Sequence[Requirement] = (),
        *,
        slow_versions: int = 0,
        spare_slots: int = 0,
    ):
        if not engines:
            raise ValueError('the pool has no engine; set cluster.engines')
        require_capabilities(engines, requirements)
        self._engines: dict[str, RolloutEngine] = {}
        self._clock, self._log, self._supervisor, self._requirements = clock, log, supervisor, requirements
        self.ledger, self.pinned_ledger = Ledger(), Ledger()  # for training, and for pinned requests
        self._open: dict[_Key, PooledGeneration] = {}  # in the order of arrival
        self._waiting: dict[_Key, PooledGeneration] = {}  # requests that no engine has
        self._slow_versions = slow_versions
        self._before: dict[str, tuple[float, float]] = {}  # decoded by engines before a resume, see _decoded
        self._target: PublishedWeights | None = None  # last given to engines
        self._pinned: dict[int, PublishedWeights] = {}  # versions that engines keep or are fetching
        hardware = {engine.name: engine.status().hardware for engine in engines}
        self._tells_hardware = len({*hardware.values()}) > 1
        self.sparing: SpareEngines | None = None
        for engine in engines:
            self._admit(engine)
        if spare_slots and self._tells_hardware:
            self.sparing = SpareEngines(hardware, spare_slots, self.ledger, clock, log)

    # Engines that come and go.

    async def join(self, engine: RolloutEngine) -> None:
        """Adds a started engine, once it has the version of the other engines and all pinned versions.

        Raises EngineError if it lacks an ability that the run needs, RuntimeError for a name that is taken.
        """
        require_capabilities([engine], self._requirements)
        if engine.name in self._engines:
            raise RuntimeError(f'{engine.name} joins, and an engine of that name is there')
        held: set[int] = set()
        while True:
            target = self._target
            if target is not None and engine.status().policy_version != target.version:
                await engine.stage(target)
                await engine.swap(target.version)
            elif pins := [published for version, published in self._pinned.items() if version not in held]:
                await engine.pin(pins[0])
                held.add(pins[0].version)
            else:
                break
        self._admit(engine)
        self._place_waiting()

    async def leave(self, name: str, reason: str) -> RolloutEngine:
        """Returns the engine, paused and empty: its requests continue on other engines with all generated tokens.

        From the call on it gets no requests. If there is no other engine, requests wait for one to join.
        """
        engine = self._engines[name]
        for ledger in (self.ledger, self.pinned_ledger):
            ledger.withdraw_engine(name)
        await engine.pause()  # tokens of a running dispatch are kept
        for request in engine.open_requests():
            one = self._open[_key(request)]
            await self._withdraw(engine, one, reason)
            self._waiting[_key(request)] = one
        for one in self._open.values():
            if one.engine == name:  # it has ended, and its workflow has not read that yet
                one.close()
        del self._engines[name]
        for ledger in (self.ledger, self.pinned_ledger):
            ledger.remove_engine(name)
        self._log.write('leave', name, engine=name, reason=reason)
        self._place_waiting()
        return engine

    def _admit(self, engine: RolloutEngine) -> None:
        name, status = engine.name, engine.status()
        self._engines[name] = engine
        for ledger in (self.ledger, self.pinned_ledger):
            ledger.add_engine(name)
        hardware = {'hardware': status.hardware} if self._tells_hardware else {}
        fields = {'version': status.policy_version, 'devices': list(status.devices), **hardware}
        self._log.write('join', name, engine=name, **fields)

    # Requests.

    def generate(self, request: GenerationRequest, prefer: str = '') -> PooledGeneration:
        """Starts the request, on the engine `prefer` if that takes requests; it waits if no engine does."""
        ledger = self.ledger if request.version is None else self.pinned_ledger
        one = PooledGeneration(request, ledger, self._clock, self._forget)
        if not self._place(one, prefer):
            one.wait()
            self._waiting[_key(request)] = one
        self._open[_key(request)] = one
        return one

    def _place(self, one: PooledGeneration, prefer: str = '') -> bool:
        request, ledger = one.rest(), one.ledger
        name = next(filter(ledger.is_routed, (prefer, ledger.engine_of_group(request) or '')), None)
        if (name := name or ledger.least_outstanding()) is None:
            return False
        if request.version is None:
            self._log.write('route', request=request.request_id, draw=request.draw, sample=request.sample, engine=name)
        generation = self._engines[name].generate(request)
        one.place(name, generation)
        return True

    def _place_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for key, one in waiting.items():
            if not self._place(one):
                self._waiting[key] = one

    def _forget(self, one: PooledGeneration) -> None:
        if self._open.get(_key(one.request)) is one:
            del self._open[_key(one.request)]

    def cancel(self, request: GenerationRequest) -> None:
        if (one := self._open.get(_key(request))) is not None:
            self._cancel(one)

    def cancel_all(self, version: int | None = None) -> None:
        for one in list(self._open.values()):
            if version in (None, one.request.version):
                self._cancel(one)
                one.close()  # also if the iteration was abandoned

    def _cancel(self, one: PooledGeneration) -> None:
        if self._waiting.pop(_key(one.request), None) is not None:
            one.cancel_waiting()
        elif one.engine in self._engines:
            self._engines[one.engine].cancel(one.request.request_id)

    # Weights and pauses.

    async def load_weights(self, published: PublishedWeights) -> float:
        """Loads weights on all engines; they fetch at the same time, and each swaps when its weights have arrived."""
        self._target = published
        left_out = self.sparing.pass_publication(published.version) if self.sparing else ()
        fast = self._find_fast() if self._slow_versions else ()

        async def load(engine: RolloutEngine) -> float:
            await engine.stage(published)
            if engine.name in left_out:
                routed = [name for name in self._engines if self.ledger.is_routed(name)]
                await self._send_long(engine, published.version, routed, 0, 'spare')
            elif not fast or engine.name in fast:
                return await engine.swap(published.version)
            else:
                await self._send_long(engine, published.version, fast, self._slow_versions, 'slow')
            pause_s = await engine.swap(published.version)
            engine.resume()
            return pause_s

        return max(await self._on_every_engine(f'load of version {published.version}', load))

    def _find_fast(self) -> list[str]:
        """Finds the engines that are nearly as fast as the fastest; [] if all are, or one is not measured yet."""
        speeds = {name: tokens / seconds if seconds else 0.0 for name, (tokens, seconds) in self._decoded().items()}
        fast = [name for name, speed in speeds.items() if speed >= SLOW * max(speeds.values())]
        return fast if min(speeds.values()) > 0 and len(fast) < len(speeds) else []

    def _decoded(self) -> dict[str, tuple[float, float]]:
        """The decoded tokens of each engine, and their clock seconds, since the start of the run."""
        found = {}
        for name, engine in self._engines.items():
            tokens, seconds = self._before.get(name, (0.0, 0.0))
            status = engine.status()
            found[name] = tokens + status.tokens_per_s * status.decoded_s, seconds + status.decoded_s
        return found

    async def _send_long(
        self, engine: RolloutEngine, version: int, fast: Sequence[str], versions: int, reason: str
    ) -> None:
        """Pauses the engine, and moves answers that span `versions` or more to the least loaded of `fast`."""
        await engine.pause()
        for request in engine.open_requests():
            one = self._open[_key(request)]
            if request.version is None and one.first_version(version) <= version - versions:
                await self._withdraw(engine, one, reason)
                outstanding = self.ledger.outstanding()
                self._place(one, min((name for name in fast if name in outstanding), key=outstanding.__getitem__))

    async def _withdraw(self, engine: RolloutEngine, one: PooledGeneration, reason: str) -> None:
        """Takes a request from a paused engine, with all generated tokens."""
        engine.cancel(one.request.request_id)
        await one.withdraw()
        if one.request.version is None:
            fields = {'request': one.request.request_id, 'tokens': one.received_tokens, 'attempt': 0}
            self._log.write('move', engine.name, from_engine=engine.name, reason=reason, **fields)

    async def pin(self, published: PublishedWeights) -> None:
        self._pinned[published.version] = published
        await self._on_every_engine(f'pin of version {published.version}', lambda engine: engine.pin(published))

    def unpin(self, version: int) -> None:
        self.cancel_all(version)
        for engine in self._engines.values():
            engine.unpin(version)
        del self._pinned[version]

    def pinned_versions(self) -> Sequence[int]:
        return tuple(self._pinned)

    async def pause(self) -> None:
        await self._on_every_engine('pause', lambda engine: engine.pause())

    def resume(self) -> None:
        for engine in self._engines.values():
            engine.resume()

    def open_requests(self) -> int:
        waiting = sum(one.request.version is None for one in self._waiting.values())
        return len(self.ledger) + waiting

    def serving_engines(self) -> int:
        return self.ledger.routed_engines()

    def watch(self, note_room: Callable[[], None]) -> None:
        self.ledger.on_room = note_room

    def order(self) -> list[tuple[str, int, int]]:
        """Lists training requests engine by engine; then those that wait for an engine, under ''."""
        placed = [(name, request) for name, engine in self._engines.items() for request in engine.open_requests()]
        waiting = [('', one.request) for one in self._waiting.values()]
        found = [*placed, *waiting]
        return [(name, request.draw, request.sample) for name, request in found if request.version is None]

    def state(self) -> dict[str, Any]:
        decoded = {name: list(pair) for name, pair in self._decoded().items()} if self._slow_versions else {}
        return {'sparing': self.sparing.state() if self.sparing else None, 'decoded': decoded}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._before = {name: (tokens, seconds) for name, (tokens, seconds) in state.get('decoded', {}).items()}
        if self.sparing and (spared := state.get('sparing')):
            self.sparing.restore(spared)

    async def _on_every_engine(
        self, action: str, act: Callable[[RolloutEngine], Coroutine[object, object, Result]]
    ) -> list[Result]:
        engines, results = list(self._engines.values()), dict[str, Result]()
        done = self._clock.event(f'{action} of every engine')

        async def act_on(engine: RolloutEngine) -> None:
            results[engine.name] = await act(engine)
            if len(results) == len(engines):
                done.set()

        first, *others = engines
        for engine in others:
            self._supervisor.start(f'{engine.name}: {action}', act_on(engine))
        await act_on(first)  # by the caller: with one engine no further coroutine comes in between
        await self._clock.wait(done)
        return [results[engine.name] for engine in engines]


def _key(request: GenerationRequest) -> _Key:
    return request.version is not None, request.request_id
