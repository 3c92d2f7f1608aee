"""An answer that comes from another process: what has come of it, and the iterator that delivers it."""

from __future__ import annotations

import collections

import numpy as np

from areal_jax.protocols import Clock
from areal_jax.types import EngineFinish, GenerationRequest, Segment, concatenate


class GrowingAnswer:
    """Iterate for its segments; the base of what implements protocols.Generation for engines elsewhere."""

    def __init__(self, request: GenerationRequest, clock: Clock):
        self.request, self.request_id = request, request.request_id
        self.finish_reason: EngineFinish | None = None
        self.received_tokens = sum(len(segment.tokens) for segment in request.prefix)
        self._received = list(request.prefix)
        self._undelivered: collections.deque[Segment] = collections.deque()
        self._error: Exception | None = None
        self._clock, self._news = clock, clock.event(f'segments of request {self.request_id}')

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
        self._undelivered.append(segment)
        self._news.set()

    def end(self, reason: EngineFinish) -> None:
        self.finish_reason = reason
        self._news.set()

    def fail(self, error: Exception) -> None:
        """The iteration raises the error, after what was received."""
        self._error = error
        self._news.set()

    async def __anext__(self) -> Segment:
        while not self._undelivered:
            if self._error is not None:
                raise self._error
            if self.finish_reason is not None:
                raise StopAsyncIteration
            self._news.clear()
            await self._clock.wait(self._news)
        return self._undelivered.popleft()
