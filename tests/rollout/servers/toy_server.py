"""The toy engine as a server in another process: it can hang, die, return, refuse, and say what is not so."""

from __future__ import annotations

import numpy as np

from areal_jax.rollout.servers.member import (
    FencedError,
    HeldWeights,
    OutcomeUnknownError,
    RefusedError,
    RequestFailedError,
)
from areal_jax.types import Segment, Work
from tests.rollout.toy_engine import ToyEngine, ToyGeneration


class RemoteGeneration(ToyGeneration):
    error: Exception | None = None

    async def __anext__(self):
        while not self._ready:
            if self.error:
                raise self.error
            if self.finish_reason:
                raise StopAsyncIteration
            self._news.clear()
            await self._clock.wait(self._news)
        return self._ready.pop(0)


class ToyServer(ToyEngine):
    """Weights are (version, w). `trouble` names what is wrong with it: see `do`."""

    def __init__(self, index, clock, *, step_s=0.01):
        super().__init__(index, clock, version=0)
        self.step_s, self.trouble, self.digest, self.calls = step_s, set(), 'none', []
        self._healed, self._alive = clock.event('healed'), True
        self.fenced, self.closed, self.ask_s = 0, False, 0.001

    @property
    def is_paused(self):
        return self._paused

    def heal(self):
        self.trouble = set()
        self._healed.set()
        self._wake.set()

    def die(self):
        """As by kill -9: open requests are cut, nothing answers."""
        self.trouble = {'dead'}
        self.cut()

    def cut(self):
        """The connections of open requests."""
        for generation in self.generations.values():
            generation.error = RequestFailedError(f'{self.name}: the connection was cut')
            generation.deliver()
        self.generations.clear()

    def restart(self):
        """A new process: it holds version 0 and knows no request."""
        self.generations.clear()
        self.version, self.w, self.digest, self._staged = 0, 0, 'none', None
        self.heal()

    async def _reach(self, action):
        """What every call to the server goes through."""
        self.calls.append(action)
        await self._clock.run('time', lambda: None, Work('time', self.ask_s if action == 'ask' else 0.001))
        if 'dead' in self.trouble:
            raise OutcomeUnknownError(f'{self.name}: {action}: connection refused')
        while self.trouble & {'hangs', f'{action} hangs'}:
            self._healed.clear()
            await self._clock.wait(self._healed)
        if 'obeys another' in self.trouble and action not in ('ask', 'fence'):
            raise FencedError(f'{self.name}: {action}: its lease has lapsed')
        if f'{action} refused' in self.trouble:
            raise RefusedError(f'{self.name}: {action} was refused')

    def generate(self, request):
        assert request.request_id not in self.generations, 'sent again to a server that still has it'
        generation = self.generations[request.request_id] = RemoteGeneration(request, self._clock, self.name)
        if 'dead' in self.trouble:
            generation.error = RequestFailedError(f'{self.name}: connection refused')
        self._wake.set()
        return generation

    async def stage(self, published):
        await self._reach('stage')
        if 'torn' in self.trouble:
            raise RefusedError(f'{self.name}: the digest of a leaf is wrong')
        self._staged = await self._clock.run(self.name.replace('engine', 'publish'), lambda: published, Work('load'))

    async def swap(self, version):
        if 'swap lost' in self.trouble:  # it is not done, and the reply is lost
            raise OutcomeUnknownError(f'{self.name}: swap: the connection was cut')
        if 'acts, then hangs' in self.trouble:
            self.trouble = {'hangs'}
            self.version, self.w, self.digest = version, self._staged.handle, self._staged.manifest_hash
        await self._reach('swap')
        assert version == self._staged.version
        self.version, self.w, self.digest = version, self._staged.handle, self._staged.manifest_hash
        return 0.01

    async def ask(self):
        await self._reach('ask')
        if 'obeys another' in self.trouble:
            return HeldWeights(-1, self.digest, is_fenced=True)
        if 'paused by a stranger' in self.trouble:
            return HeldWeights(self.version, self.digest, paused='for 3 s by a stranger')
        digest = 'stale' if 'stale digest' in self.trouble else self.digest
        return HeldWeights(self.version - ('stale version' in self.trouble), digest)

    async def fence(self):
        await self._reach('fence')
        self.fenced += 1
        self.trouble.discard('obeys another')
        self.generations.clear()
        self.resume()

    async def pause(self):
        await self._reach('pause')
        await super().pause()

    async def close(self):
        try:
            await self._reach('close')
        except OutcomeUnknownError:
            return
        self.closed = True
        self.resume()

    async def _serve(self):
        while True:
            if self.trouble & {'hangs', 'dead'}:
                self._healed.clear()
                await self._clock.wait(self._healed)
                continue
            if self._paused:
                self._still.set()
            if self._paused or not self.generations:
                self._wake.clear()
                await self._clock.wait(self._wake)
                continue
            generation, version, w = next(iter(self.generations.values())), self.version, self.w
            await self._clock.run(self.name, lambda: None, Work('time', self.step_s))
            if self.generations.get(generation.request.request_id) is generation and not self.trouble & {
                'hangs',
                'dead',
            }:
                self.emit(generation, version, w)

    def emit(self, generation, version, w):
        if 'fails requests' in self.trouble:
            generation.error = RequestFailedError(f'{self.name}: status 500')
            self.generations.pop(generation.request.request_id)
            generation.deliver()
        elif 'garbage' in self.trouble:
            generation.deliver(Segment(np.array([1], np.int32), np.array([np.nan], np.float32), version))
        elif 'other version' in self.trouble:
            generation.deliver(Segment(np.array([1], np.int32), np.array([-1], np.float32), version + 5))
        else:
            super().emit(generation, version, w)
