"""A request as the pool has it: it goes on elsewhere when its engine leaves. Workflows iterate over it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from areal_jax.protocols import Clock, Event, Generation
from areal_jax.rollout.spare_engines import Entry, Ledger
from areal_jax.types import NOT_GENERATED, EngineFinish, GenerationRequest, Segment


class PooledGeneration:
    """Iterates over what engines deliver, one after the other, and keeps the ledger. Implements protocols.Generation.

    Delivered tokens are no longer outstanding. Between two engines the request has none: `generation` and `entry` are
    None then, and the iteration waits.

    Args:
      ledger: of the requests of its kind.
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
        self._received: list[Segment] = []  # all that engines delivered, to go on after it
        self._undelivered: collections.deque[Segment] = collections.deque()  # of the engines before
        self._cancelled = False  # while no engine had it
        self._placed: Event | None = None

    @property
    def finish_reason(self) -> EngineFinish | None:
        if self._cancelled:
            return 'cancelled'
        return None if self.generation is None else self.generation.finish_reason

    @property
    def received_tokens(self) -> int:
        """Of the answer, prefix included."""
        return sum(len(segment.tokens) for segment in (*self.request.prefix, *self._received))

    def first_version(self, newest: int) -> int:
        """Of the tokens received; `newest` where there are none."""
        versions = (segment.policy_version for segment in (*self.request.prefix, *self._received))
        return min((version for version in versions if version != NOT_GENERATED), default=newest)

    def rest(self) -> GenerationRequest:
        """The request with everything received as its prefix."""
        if not self._received:
            return self.request
        return dataclasses.replace(self.request, prefix=(*self.request.prefix, *self._received))

    def place(self, engine: str, generation: Generation) -> None:
        """The engine has the request from now on."""
        self.engine, self.generation = engine, generation
        self.entry = self.ledger.open(self.rest(), engine)
        if self._placed is not None:
            self._placed.set()

    async def withdraw(self) -> None:
        """Takes the request from its engine, which has ended it: what was delivered is received, nothing is lost.

        Does not wait: all that the engine delivered is there.
        """
        assert self.generation is not None
        async for segment in self.generation:
            self._receive(segment)
            self._undelivered.append(segment)
        self.close()
        self.generation = self.entry = None
        self.wait()

    def wait(self) -> None:
        """No engine has it until `place`."""
        self._placed = self._clock.event(f'an engine for request {self.request.request_id}')

    def cancel_waiting(self) -> None:
        """Ends a request that no engine has."""
        assert self._placed is not None
        self._cancelled = True
        self._placed.set()

    def close(self) -> None:
        """It is not outstanding any more; nothing the second time."""
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
