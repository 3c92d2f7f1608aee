"""A request on a server: what has come of its answer, and the iterator that delivers it."""

from __future__ import annotations

import collections

import numpy as np

from areal_jax.protocols import Clock
from areal_jax.rollout.remote_engine import RequestFailedError
from areal_jax.types import EngineFinish, GenerationRequest, Segment, concatenate


class ServerRequest:
    """One request from its arrival to its end; iterate for its segments. Implements protocols.Generation.

    The iteration raises RequestFailedError after the segments that came, where the rest of the answer is lost.
    """

    def __init__(self, request: GenerationRequest, clock: Clock, engine: str):
        self.request, self.engine, self._clock = request, engine, clock
        self.request_id = request.request_id
        self.finish_reason: EngineFinish | None = None
        self.wire_id = ''  # of the call under way
        self.vain_calls = 0  # in a row that were aborted by somebody else before their first token
        self._generated = [segment.tokens for segment in request.prefix]
        self._ready: collections.deque[Segment] = collections.deque()
        self._error: RequestFailedError | None = None
        self._news = clock.event(f'segments of request {self.request_id}')

    @property
    def generated(self) -> np.ndarray:
        """int32 [n]: the answer so far, prefix included."""
        return concatenate(self._generated, np.int32)

    @property
    def remaining(self) -> int:
        """Tokens that the answer may still have."""
        return self.request.sampling.max_new_tokens - sum(len(tokens) for tokens in self._generated)

    def deliver(self, segment: Segment) -> None:
        self._generated.append(segment.tokens)
        self._ready.append(segment)
        self._news.set()

    def finish(self, reason: EngineFinish) -> None:
        self.finish_reason = reason
        self._news.set()

    def fail(self, error: RequestFailedError) -> None:
        self._error = error
        self._news.set()

    def __aiter__(self) -> ServerRequest:
        return self

    async def __anext__(self) -> Segment:
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self.finish_reason is not None:
                raise StopAsyncIteration
            self._news.clear()
            await self._clock.wait(self._news)
        return self._ready.popleft()
