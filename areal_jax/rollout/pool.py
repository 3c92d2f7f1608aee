"""The engines of a run: which of them generates a request, and what is done to all of them.

The controller and the workflows use it; it knows engines by protocols.RolloutEngine alone.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import Clock, Generation, RolloutEngine
from areal_jax.rollout.load_ledger import Entry, Ledger
from areal_jax.rollout.requirements import Requirement, require_capabilities
from areal_jax.types import EngineFinish, GenerationRequest, PublishedWeights, Segment

Result = TypeVar('Result')


class PooledGeneration:
    """A generation that keeps the ledger: delivered tokens are no longer outstanding. Implements Generation."""

    def __init__(self, generation: Generation, entry: Entry, ledger: Ledger):
        self._generation, self._entry, self._ledger = generation, entry, ledger

    @property
    def finish_reason(self) -> EngineFinish | None:
        return self._generation.finish_reason

    @property
    def engine(self) -> str:
        return self._entry.engine

    def __aiter__(self) -> PooledGeneration:
        return self

    async def __anext__(self) -> Segment:
        try:
            segment = await self._generation.__anext__()
        except StopAsyncIteration:
            self._ledger.close(self._entry)
            raise
        self._ledger.note_generated(self._entry, len(segment.tokens))
        return segment


class Pool:
    """Routes requests: the samples of a group share an engine, and with it a prefill; a new group goes to the engine
    with the fewest outstanding tokens. Requests that are pinned to a version have a ledger of their own, so they do not
    change where training requests go. Implements protocols.Pool.

    Args:
      requirements: what every engine must be able to do; raises EngineError, naming the engine, where one cannot.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        clock: Clock,
        log: EventLog,
        supervisor: Supervisor,
        requirements: Sequence[Requirement] = (),
    ):
        if not engines:
            raise ValueError('the pool has no engine; set cluster.engines')
        require_capabilities(engines, requirements)
        self._engines = {engine.name: engine for engine in engines}
        self._clock, self._log, self._supervisor = clock, log, supervisor
        self.ledger = Ledger(self._engines)  # of training
        self.pinned_ledger = Ledger(self._engines)
        self._pinned: list[int] = []  # versions that engines keep or are fetching
        for name, engine in self._engines.items():
            status = engine.status()
            log.write('join', name, engine=name, version=status.policy_version, devices=list(status.devices))

    def generate(self, request: GenerationRequest, prefer: str = '') -> PooledGeneration:
        """Starts the request on the engine `prefer` if there is one of that name."""
        ledger = self.ledger if request.version is None else self.pinned_ledger
        name = prefer if prefer in self._engines else ledger.engine_of_group(request)
        name = name or ledger.least_outstanding()
        assert name is not None  # the engines of a process stay
        if request.version is None:
            self._log.write('route', request=request.request_id, draw=request.draw, sample=request.sample, engine=name)
        generation = self._engines[name].generate(request)
        return PooledGeneration(generation, ledger.open(request, name), ledger)

    def cancel(self, request: GenerationRequest) -> None:
        ledger = self.ledger if request.version is None else self.pinned_ledger
        if (entry := ledger.find(request.request_id)) is not None:
            self._engines[entry.engine].cancel(entry.request_id)

    def cancel_all(self, version: int | None = None) -> None:
        for ledger in (self.ledger, self.pinned_ledger):
            for entry in ledger.entries():
                if version in (None, entry.version):
                    self._engines[entry.engine].cancel(entry.request_id)
                    ledger.close(entry)  # also if the iteration was abandoned

    async def load_weights(self, published: PublishedWeights) -> float:
        """All engines fetch at the same time; each swaps as soon as its weights are there."""

        async def load(engine: RolloutEngine) -> float:
            await engine.stage(published)
            return await engine.swap(published.version)

        return max(await self._on_every_engine(f'load of version {published.version}', load))

    async def pin(self, published: PublishedWeights) -> None:
        self._pinned.append(published.version)
        await self._on_every_engine(f'pin of version {published.version}', lambda engine: engine.pin(published))

    def unpin(self, version: int) -> None:
        self.cancel_all(version)
        for engine in self._engines.values():
            engine.unpin(version)
        self._pinned.remove(version)

    def pinned_versions(self) -> Sequence[int]:
        return tuple(self._pinned)

    async def pause(self) -> None:
        await self._on_every_engine('pause', lambda engine: engine.pause())

    def resume(self) -> None:
        for engine in self._engines.values():
            engine.resume()

    def open_requests(self) -> int:
        return len(self.ledger)

    def serving_engines(self) -> int:
        return self.ledger.routed_engines()

    def watch(self, note_room: Callable[[], None]) -> None:
        self.ledger.on_room = note_room

    def order(self) -> list[tuple[str, int, int]]:
        return [
            (name, request.draw, request.sample)
            for name, engine in self._engines.items()
            for request in engine.open_requests()
            if request.version is None
        ]

    async def _on_every_engine(
        self, action: str, act: Callable[[RolloutEngine], Coroutine[object, object, Result]]
    ) -> list[Result]:
        """The result of every engine, in their order; they act at the same time, and all have when this returns."""
        results: dict[str, Result] = {}
        done = self._clock.event(f'{action} of every engine')

        async def act_on(engine: RolloutEngine) -> None:
            results[engine.name] = await act(engine)
            if len(results) == len(self._engines):
                done.set()

        first, *others = self._engines.values()
        for engine in others:
            self._supervisor.start(f'{engine.name}: {action}', act_on(engine))
        await act_on(first)  # by the caller: with one engine no further coroutine comes in between
        await self._clock.wait(done)
        return [results[name] for name in self._engines]
