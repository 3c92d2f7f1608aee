"""Engines of this process that fail and drift like servers in others."""

from __future__ import annotations

import dataclasses

import numpy as np

from areal_jax.rollout.servers.member import HeldWeights, OutcomeUnknownError, RequestFailedError


class CutGeneration:
    """Fails after its first segment."""

    def __init__(self, generation):
        self._generation, self.engine, self.finish_reason = generation, generation.engine, None

    def __aiter__(self):
        return self

    async def __anext__(self):
        raise RequestFailedError('status 500')


class BiasedGeneration:
    def __init__(self, generation, server):
        self._generation, self._server, self.engine = generation, server, generation.engine

    @property
    def finish_reason(self):
        return self._generation.finish_reason

    def __aiter__(self):
        return self

    async def __anext__(self):
        segment = await self._generation.__anext__()
        return dataclasses.replace(segment, behavior_logprobs=segment.behavior_logprobs + np.float32(self._server.bias))


class LocalServer:
    """The engine of this process behind calls that may fail: `bad_draws` always do.

    `bias` is added to the log-probs of what it generates from then on.
    """

    def __init__(self, engine, bad_draws=()):
        self._engine, self.name, self.capabilities = engine, engine.name, engine.capabilities
        self._bad_draws, self.bias = bad_draws, 0.0
        self.cancel, self.resume, self.open_requests = engine.cancel, engine.resume, engine.open_requests
        self.status, self.is_dead = engine.status, False

    def _reach(self):
        if self.is_dead:
            raise OutcomeUnknownError(f'{self.name}: connection refused')

    def generate(self, request):
        generation = self._engine.generate(request)
        return CutGeneration(generation) if request.draw in self._bad_draws else BiasedGeneration(generation, self)

    async def stage(self, published):
        self._reach()
        await self._engine.stage(published)

    async def swap(self, version):
        self._reach()
        return await self._engine.swap(version)

    async def pause(self):
        self._reach()
        await self._engine.pause()

    async def ask(self):
        self._reach()
        return HeldWeights(self._engine.status().policy_version)

    async def fence(self):
        self._reach()
        for request in self._engine.open_requests():
            self._engine.cancel(request.request_id)
        self._engine.resume()

    async def close(self): ...
