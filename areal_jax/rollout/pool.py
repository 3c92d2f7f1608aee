"""The engines of a run: which of them generates a request, and what is done to all of them."""

from __future__ import annotations

from collections.abc import Sequence

from areal_jax.control.events import EventLog
from areal_jax.rollout.engine import Engine, RunningRequest
from areal_jax.types import GenerationRequest, PublishedWeights


class Pool:
    """Prefers one engine per group, whose samples share a prefill; a new group goes where there is least to do."""

    def __init__(self, engines: Sequence[Engine], log: EventLog):
        if not engines:
            raise ValueError('the pool has no engine; set cluster.engines')
        self.engines = {engine.name: engine for engine in engines}
        self._log = log
        for name in self.engines:
            log.write('join', name, engine=name)

    def generate(self, request: GenerationRequest, prefer: str = '') -> RunningRequest:
        """Start the request on the engine `prefer` if it is here, else where its group is, else where least waits."""
        engine = self.engines.get(prefer) or self._engine_of_group(request) or self._least_loaded()
        self._log.write(
            'route', request=request.request_id, draw=request.draw, sample=request.sample, engine=engine.name
        )
        return engine.generate(request)

    async def load_weights(self, published: PublishedWeights) -> float:
        """Swap every engine; returns the longest pause of decoding in seconds."""
        for engine in self.engines.values():
            await engine.receive_weights(published)
        return max([await engine.loaded(published.version) for engine in self.engines.values()])

    async def pause(self) -> None:
        """Returns when every engine stands between two dispatches with all partial output delivered."""
        for engine in self.engines.values():
            engine.request_pause()
        for engine in self.engines.values():
            await engine.paused()

    def cancel_all(self) -> None:
        """Forget every open request."""
        for engine in self.engines.values():
            for request in engine.open_requests():
                engine.cancel(request.request_id)

    def resume(self) -> None:
        for engine in self.engines.values():
            engine.resume()

    def order(self) -> list[tuple[str, int, int]]:
        """(engine, draw, sample) of every open request, in the order in which engines serve them."""
        return [
            (name, request.draw, request.sample)
            for name, engine in self.engines.items()
            for request in engine.open_requests()
        ]

    def _engine_of_group(self, request: GenerationRequest) -> Engine | None:
        for engine in self.engines.values():
            if any(r.draw == request.draw and r.seed == request.seed for r in engine.open_requests()):
                return engine
        return None

    def _least_loaded(self) -> Engine:
        return min(self.engines.values(), key=lambda engine: len(engine.open_requests()))
