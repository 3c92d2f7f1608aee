"""Engines, learner, channel, stream and verifier that cost next to nothing: what is left is the host's own work.

side_host.py says what they stand for. A request is answered by one segment of fixed length; an engine finishes a few
requests in each dispatch, oldest first.
"""

from __future__ import annotations

import collections
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

import numpy as np

from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import REWARD, engine_lane, publish_lane
from areal_jax.protocols import Clock
from areal_jax.rollout.backend import DecodeOutput, DecodeRow, PrefillBucket, PrefillPiece, SamplingSupport, Span
from areal_jax.rollout.servers.member import HeldWeights
from areal_jax.types import (
    EngineCapabilities,
    EngineFinish,
    EngineStatus,
    FinishReason,
    GenerationRequest,
    Prompt,
    PublishedWeights,
    Segment,
    TrajectoryGroup,
    Verdict,
    Work,
)

FINISHED_A_DISPATCH = 8
DIGEST = 'toy'  # of the weights of every version


class ToyGeneration:
    """One segment, once the engine has finished the request."""

    def __init__(self, request: GenerationRequest, engine: str, clock: Clock):
        self.request, self.engine = request, engine
        self.finish_reason: EngineFinish | None = None
        self._clock, self._done = clock, clock.event(f'answer to {request.request_id}')
        self._segment: Segment | None = None

    def finish(self, segment: Segment, reason: EngineFinish = 'stop') -> None:
        self._segment, self.finish_reason = segment, reason
        self._done.set()

    def __aiter__(self) -> AsyncIterator[Segment]:
        return self

    async def __anext__(self) -> Segment:
        await self._clock.wait(self._done)
        segment, self._segment = self._segment, None
        if segment is None:
            raise StopAsyncIteration
        return segment


class ToyEngine:
    """Implements protocols.RolloutEngine."""

    capabilities = EngineCapabilities(
        logprobs=('behavior',), spans=False, abort=True, pause_modes=('retract',), staging=True, update=('recompute',),
        pinned=False,
    )  # fmt: skip

    def __init__(self, index: int, clock: Clock, answer_tokens: int):
        self.name, self._index, self._clock = engine_lane(index), index, clock
        self._tokens = np.arange(answer_tokens, dtype=np.int32)
        self._logprobs = np.full(answer_tokens, -1.0, np.float32)
        self._open: collections.OrderedDict[str, ToyGeneration] = collections.OrderedDict()
        self._version, self._pausing = 0, False
        self._wake = clock.event(f'{self.name}: a request')
        self._resumed = clock.event(f'{self.name}: resumed')
        self._parked = clock.event(f'{self.name}: paused')

    def start(self, supervisor: Supervisor) -> None:
        supervisor.start(self.name, self._serve())

    def generate(self, request: GenerationRequest) -> ToyGeneration:
        generation = self._open[request.request_id] = ToyGeneration(request, self.name, self._clock)
        self._wake.set()
        return generation

    def cancel(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def status(self) -> EngineStatus:
        return EngineStatus(self.name, self._version, len(self._open), 0, 0.0, ('none',))

    def open_requests(self) -> list[GenerationRequest]:
        return [generation.request for generation in self._open.values()]

    async def stage(self, published: PublishedWeights) -> None:
        work = Work('load', 1, {'version': published.version})
        await self._clock.run(publish_lane(self._index), lambda: None, work)

    async def swap(self, version: int) -> float:
        self._version = version
        return 0.0

    async def pin(self, published: PublishedWeights) -> None:
        raise NotImplementedError

    def unpin(self, version: int) -> None:
        raise NotImplementedError

    async def pause(self) -> None:
        self._pausing = True
        self._wake.set()
        await self._clock.wait(self._parked)

    def resume(self) -> None:
        self._pausing = False
        self._resumed.set()

    async def _serve(self) -> None:
        while True:
            if self._pausing:
                self._resumed.clear()
                self._parked.set()
                await self._clock.wait(self._resumed)
                self._parked.clear()
            elif self._open:
                await self._dispatch()
            else:
                self._wake.clear()
                await self._clock.wait(self._wake)

    async def _dispatch(self) -> None:
        version = self._version
        await self._clock.run(self.name, lambda: None, Work('decode', 1, {'version': version}))
        finished = [self._open.popitem(last=False)[1] for _ in range(min(FINISHED_A_DISPATCH, len(self._open)))]
        for generation in finished:
            generation.finish(Segment(self._tokens, self._logprobs, version))


class ToyServer(ToyEngine):
    """Implements rollout.servers.remote_engine.RemoteEngine: a server that answers every question at once."""

    async def ask(self) -> HeldWeights:
        return HeldWeights(self._version, DIGEST)

    async def fence(self) -> None:
        self._open.clear()

    async def close(self) -> None: ...


class FastBackend:
    """Decodes nothing: fixed tokens, no stop token before the limit."""

    block_tokens = 64
    devices: tuple[str, ...] = ('none',)
    state_bytes, records_context, windows, states = 0, False, None, None
    sampling = SamplingSupport(vocab_size=2, cuts=False, adjusts=False, stop_tokens=4, biased_tokens=0)

    def __init__(
        self, slots: int, context_tokens: int = 2048, *, largest_piece: int = 2048, cache_tokens: int | None = None
    ):
        self.slots, self.context_tokens, self.largest_piece = slots, context_tokens, largest_piece
        self.cache_blocks = (cache_tokens or slots * context_tokens) // self.block_tokens

    def prepare(self, weights: int) -> int:
        return weights

    def initial_state(self) -> int:
        return 0

    def read_context(self, state: int, blocks: Sequence[int], tokens: int) -> dict[str, np.ndarray]:
        return {}

    def prefill_bucket(self, spans: Sequence[Span]) -> PrefillBucket | None:
        tokens = sum(stop - start for start, stop in spans)
        return PrefillBucket(self.largest_piece, 0) if tokens <= self.largest_piece else None

    def prefill(self, weights: int, state: int, pieces: Sequence[PrefillPiece]) -> int:
        return state

    def batch_bucket(self, rows: Sequence[DecodeRow]) -> int:
        return self.slots

    def generate(self, weights: int, state: int, rows: Sequence[DecodeRow], steps: int) -> tuple[int, DecodeOutput]:
        left = np.array([row.limit - row.position - 1 for row in rows])
        shape = steps, len(rows)
        valid = np.arange(steps)[:, None] < left
        return state, DecodeOutput(np.ones(shape, np.int32), np.full(shape, -1, np.float32), valid)

    def copy(
        self,
        state: int,
        copies: Sequence[tuple[int, int]],
        parts: Sequence[tuple[int, int]] = (),
        states: Sequence[tuple[int, int]] = (),
    ) -> int:
        return state


class ToyLearner:
    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, float]:
        return {}

    def publish(self, version: int) -> int:
        return version

    def save(self) -> int:
        return 0

    def restore(self, saved: int) -> None: ...


class ToyChannel:
    def transfer(self, version: int, copy: int) -> PublishedWeights:
        return PublishedWeights(version, DIGEST, copy)

    def receive(self, published: PublishedWeights) -> int:
        return published.version

    def release(self, version: int, pinned: Collection[int] = ()) -> None: ...


class ToyStream:
    def __init__(self, prompt_tokens: int) -> None:
        self._tokens, self._next = np.arange(prompt_tokens, dtype=np.int32), 0

    def draw(self) -> Prompt:
        self._next += 1
        return Prompt(self._next - 1, self._tokens, 'toy', {})

    def state(self) -> Mapping[str, int]:
        return {'next': self._next}

    def restore(self, state: Mapping[str, int]) -> None:
        self._next = state['next']


class ToyVerifier:
    """Answers at once, through the clock as the real one does."""

    def __init__(self, clock: Clock):
        self._clock = clock

    async def verify(
        self, prompt: Prompt, answer_tokens: np.ndarray, finish_reason: FinishReason, describe_episode: object = None
    ) -> Verdict:
        return await self._clock.call(REWARD, _answer, Work('reward', 1, {'draw': prompt.draw}), 60.0)


async def _answer() -> Verdict:
    return Verdict(1.0)
