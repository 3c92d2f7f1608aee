"""The one iterator of segments: what a workflow reads while an engine here, a server or the pool fills it."""

from __future__ import annotations

import collections
from typing import Self

import numpy as np

from areal_jax.protocols import Clock
from areal_jax.types import EngineFinish, GenerationRequest, Segment, concatenate


class SegmentIterator:
    """Iterate for the segments of a request; implements protocols.Generation.

    `engine` is the one that generates, '' where none does yet. The iteration ends with `finish_reason`, or raises
    `error`, after everything that was delivered.
    """

    def __init__(self, request: GenerationRequest, clock: Clock, engine: str = ''):
        self.request, self.request_id, self.engine = request, request.request_id, engine
        self.finish_reason: EngineFinish | None = None
        self.error: Exception | None = None  # why it ended without a reason
        self._undelivered: collections.deque[Segment] = collections.deque()
        self._clock, self._news = clock, clock.event(f'segments of request {self.request_id}')

    def deliver(self, segment: Segment) -> None:
        self._undelivered.append(segment)
        self._news.set()

    def end(self, reason: EngineFinish) -> None:
        self.finish_reason = reason
        self._news.set()

    def fail(self, error: Exception) -> None:
        """The iteration raises the error, after what was delivered."""
        self.error = error
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Segment:
        while not self._undelivered:
            if self.error is not None:
                raise self.error
            if self.finish_reason is not None:
                raise StopAsyncIteration
            self._news.clear()
            await self._clock.wait(self._news)
        return self._undelivered.popleft()


class GrowingAnswer(SegmentIterator):
    """An answer that comes from another process: it also keeps what has come, to go on after it elsewhere."""

    def __init__(self, request: GenerationRequest, clock: Clock, engine: str = ''):
        super().__init__(request, clock, engine)
        self.received_tokens = sum(len(segment.tokens) for segment in request.prefix)
        self._received = list(request.prefix)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n]: the answer so far, prefix included."""
        return concatenate([segment.tokens for segment in self._received], np.int32)

    @property
    def room_tokens(self) -> int:
        """How many more tokens the answer may have."""
        return self.request.sampling.max_new_tokens - self.received_tokens

    def take(self, segment: Segment) -> None:
        self.received_tokens += len(segment.tokens)
        self._received.append(segment)
        self.deliver(segment)
