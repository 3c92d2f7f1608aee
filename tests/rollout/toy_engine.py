"""The smallest engine that keeps the contract: one coroutine, no slots, one token a request at a time.

Weights are one integer w. The token at position p is 1 + (7 w + p) % 9; an answer has max_new_tokens tokens. Nothing of
rollout/ is imported: the pool and the contract work with any engine.
"""

from __future__ import annotations

import numpy as np

from areal_jax.types import EngineCapabilities, EngineStatus, Segment, Work


class ToyGeneration:
    def __init__(self, request, clock, engine):
        self.request, self.engine, self.finish_reason = request, engine, None
        self.tokens, self._ready = sum(len(s.tokens) for s in request.prefix), []
        self._clock, self._news = clock, clock.event('segments')

    def deliver(self, segment=None, reason=None):
        self._ready += [segment] if segment else []
        self.finish_reason = reason
        self._news.set()

    def __aiter__(self):
        return self

    async def __anext__(self):
        while not self._ready:
            if self.finish_reason:
                raise StopAsyncIteration
            self._news.clear()
            await self._clock.wait(self._news)
        return self._ready.pop(0)


class ToyEngine:
    """Serves the oldest request first and delivers every token at once."""

    capabilities = EngineCapabilities(
        logprobs=('behavior',), spans=True, abort=True, pause_modes=('in_place',), staging=True, update=('keep',),
        pinned=True,
    )  # fmt: skip

    def __init__(self, index, clock, version=0):
        self.name, self._clock, self.version, self.w, self._staged = f'engine/{index}', clock, version, 0, None
        self.generations, self._wake, self._still = {}, clock.event('work'), clock.event('still')
        self._paused, self._pinned = False, {}

    def generate(self, request):
        generation = self.generations[request.request_id] = ToyGeneration(request, self._clock, self.name)
        self._wake.set()
        return generation

    def cancel(self, request_id):
        if request_id in self.generations:
            self.generations.pop(request_id).deliver(reason='cancelled')

    async def stage(self, published):
        lane = self.name.replace('engine', 'publish')
        self._staged = await self._clock.run(lane, lambda: published, Work('load'))

    async def swap(self, version):
        assert version == self._staged.version
        self.version, self.w = version, self._staged.handle
        return 0.0

    async def pin(self, published):
        lane = self.name.replace('engine', 'publish')
        self._pinned[published.version] = await self._clock.run(lane, lambda: published.handle, Work('load'))

    def unpin(self, version):
        del self._pinned[version]

    async def pause(self):
        self._paused = True
        self._wake.set()
        await self._clock.wait(self._still)

    def resume(self):
        self._paused = False
        self._still.clear()
        self._wake.set()

    def open_requests(self):
        return [generation.request for generation in self.generations.values()]

    def status(self):
        return EngineStatus(
            self.name, self.version, min(1, len(self.generations)), max(0, len(self.generations) - 1), 0.0, ('toy',)
        )

    def start(self, supervisor):
        supervisor.start(self.name, self._serve())

    async def _serve(self):
        while True:
            if self._paused:
                self._still.set()
            if self._paused or not self.generations:
                self._wake.clear()
                await self._clock.wait(self._wake)
                continue
            generation, version, w = next(iter(self.generations.values())), self.version, self.w
            if generation.request.version is not None:
                version = generation.request.version
                w = self._pinned[version]
            await self._clock.run(self.name, lambda: None, Work('decode'))
            if self.generations.get(generation.request.request_id) is generation:
                self.emit(generation, version, w)

    def emit(self, generation, version, w):
        position = len(generation.request.prompt_tokens) + generation.tokens
        generation.tokens += 1
        ended = generation.tokens == generation.request.sampling.max_new_tokens
        if ended:
            del self.generations[generation.request.request_id]
        segment = Segment(np.array([1 + (7 * w + position) % 9], np.int32), -np.ones(1, np.float32), version)
        generation.deliver(segment, 'length' if ended else None)
