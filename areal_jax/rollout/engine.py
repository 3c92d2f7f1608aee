"""An engine in this process: one coroutine that plans a dispatch, runs it on its lane and delivers the outcome.

A dispatch is never preempted. Interruption is what the coroutine does between two of them: deliver what was generated
under the weights before, swap, and have the KV cache of unfinished answers rebuilt ('recompute') or kept ('keep').
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

import numpy as np

from areal_jax.control.events import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.errors import UserError
from areal_jax.events import PUBLISH
from areal_jax.protocols import Clock
from areal_jax.rollout.backend import DecodeBackend, DecodeOutput, SlotInit
from areal_jax.types import EngineStatus, FinishReason, GenerationRequest, PublishedWeights, Segment, Work

KvPolicy = Literal['recompute', 'keep']


class PromptTooLongError(UserError, ValueError):
    """A prompt whose answer does not fit the cache of the engine."""


class LogprobError(UserError, ArithmeticError):
    """An engine whose log-probs are not numbers that a policy can have; names engine, request, version and the fix."""


@dataclasses.dataclass
class _Pending:
    """A segment under way, not delivered yet."""

    version: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    sampling_logprobs: list[float] = dataclasses.field(default_factory=list)  # empty where the request cuts nothing


class RunningRequest:
    """A request inside an engine; iterate for its segments. An iterator object: nothing depends on its collection."""

    def __init__(self, request: GenerationRequest, clock: Clock, engine: str, limit: int):
        self.request, self.engine, self.limit = request, engine, limit
        self.finish_reason: FinishReason | None = None
        self.tokens = [*map(int, request.prompt_tokens), *map(int, request.prefix_tokens)]
        self._clock = clock
        self._pending = _Pending()
        self._segments: collections.deque[Segment] = collections.deque()
        self._news = clock.event(f'segments of request {request.request_id}')

    def extend(
        self, tokens: Sequence[int], logprobs: Sequence[float], version: int, cut: Sequence[float] | None = None
    ) -> None:
        """Tokens decoded under `version`, that of the segment under way; `cut` are log-probs of the cut softmax."""
        pending = self._pending
        if pending.tokens and pending.version != version:
            raise RuntimeError(f'request {self.request.request_id}: flush version {pending.version} before {version}')
        self.tokens.extend(tokens)
        pending.version = version
        pending.tokens.extend(tokens)
        pending.logprobs.extend(logprobs)
        if self.request.sampling.cuts:
            assert cut is not None, 'the backend was built without cuts'
            pending.sampling_logprobs.extend(cut)

    def flush(self) -> None:
        """Deliver the segment under way."""
        pending, self._pending = self._pending, _Pending()
        if pending.tokens:
            cut = np.array(pending.sampling_logprobs, np.float32) if self.request.sampling.cuts else None
            tokens, logprobs = np.array(pending.tokens, np.int32), np.array(pending.logprobs, np.float32)
            self._segments.append(Segment(tokens, logprobs, pending.version, cut))
            self._news.set()

    def finish(self, reason: FinishReason) -> None:
        self.flush()
        self.finish_reason = reason
        self._news.set()

    def __aiter__(self) -> AsyncIterator[Segment]:
        return self

    async def __anext__(self) -> Segment:
        while not self._segments:
            if self.finish_reason is not None:
                raise StopAsyncIteration
            self._news.clear()
            await self._clock.wait(self._news)
        return self._segments.popleft()


@dataclasses.dataclass(frozen=True)
class _Weights:
    version: int
    params: Any


class Engine:
    """Continuous batching over the slots of a backend, under the weights of one version at a time.

    Args:
      name: also the lane.
      receive: fetches published weights (Channel.receive); runs on the lane `publish`.
      version, params: the weights to begin with.
      kv_policy: 'recompute' rebuilds the KV of unfinished answers under new weights (the paper), 'keep' keeps it.
      decode_steps: tokens per slot in one dispatch.
    """

    def __init__(
        self,
        name: str,
        backend: DecodeBackend,
        clock: Clock,
        log: EventLog,
        *,
        receive: Callable[[PublishedWeights], Any],
        version: int,
        params: Any,
        kv_policy: KvPolicy,
        decode_steps: int,
    ):
        self.name = name
        self._backend, self._clock, self._log = backend, clock, log
        self._receive, self._kv_policy, self._decode_steps = receive, kv_policy, decode_steps
        self._weights = _Weights(version, params)
        self._next_weights: _Weights | None = None
        self._state = backend.initial_state()
        self._slots: list[RunningRequest | None] = [None] * backend.slots
        self._stale: list[int] = []  # slots whose KV must be rebuilt before they decode again
        self._waiting: collections.deque[RunningRequest] = collections.deque()
        self._prefixes: dict[tuple[int, bytes], Any] = {}  # (policy version, tokens): a stale hit cannot happen
        self._cancelled: list[str] = []
        self._dead: list[int] = []  # slots that the next dispatch must mark as dead before anything else
        self._dispatches = 0
        self._swapped_s: float | None = None  # when the swap began whose rebuild is under way
        self._pause_s = 0.0
        self._pausing = False
        self._wake = clock.event(f'{name}: a request or weights')
        self._loaded = clock.event(f'{name}: new weights in use')
        self._parked = clock.event(f'{name}: paused')
        self._resumed = clock.event(f'{name}: resumed')

    @property
    def params(self) -> Any:
        """The weights in use."""
        return self._weights.params

    # What the pool calls.

    def start(self, supervisor: Supervisor) -> None:
        supervisor.start(self.name, self._serve())

    def generate(self, request: GenerationRequest) -> RunningRequest:
        """Queue the request.

        Raises PromptTooLongError when prompt and answer do not fit the cache.
        """
        length = len(request.prompt_tokens)
        limit = length + request.sampling.max_new_tokens
        if length < 1 or limit > self._backend.context_tokens:
            raise PromptTooLongError(
                f'draw {request.draw}: a prompt of {length} tokens and {request.sampling.max_new_tokens} new ones '
                f'(rollout.max_new_tokens) do not fit rollout.context_tokens={self._backend.context_tokens}; raise it '
                f'to {limit} or shorten the prompt'
            )
        running = RunningRequest(request, self._clock, self.name, limit)
        self._waiting.append(running)
        self._log.write('arrive', self.name, request=request.request_id)
        self._wake.set()
        return running

    def cancel(self, request_id: str) -> None:
        """Forget the request; what it had delivered stays with the caller."""
        self._cancelled.append(request_id)
        self._wake.set()

    def status(self) -> EngineStatus:
        running = sum(slot is not None for slot in self._slots)
        return EngineStatus(self.name, self._weights.version, running, len(self._waiting), self._backend.slots)

    def open_requests(self) -> list[GenerationRequest]:
        """Requests in slots by slot, then waiting ones in their order."""
        return [r.request for r in [*self._slots, *self._waiting] if r is not None]

    async def load_weights(self, published: PublishedWeights) -> float:
        """Returns when the engine decodes with these weights: the pause of decoding in seconds."""
        await self.receive_weights(published)
        return await self.loaded(published.version)

    async def receive_weights(self, published: PublishedWeights) -> None:
        """Fetch the weights while decoding goes on; they are swapped in between two dispatches."""
        work = Work('load', 1, {'version': published.version})
        params = await self._clock.run(PUBLISH, lambda: self._receive(published), work)
        self._next_weights = _Weights(published.version, params)
        self._wake.set()

    async def loaded(self, version: int) -> float:
        """Returns when the received weights decode: the pause of decoding in seconds."""
        while self._next_weights is not None or self._swapped_s is not None or self._weights.version != version:
            self._loaded.clear()
            await self._clock.wait(self._loaded)
        return self._pause_s

    def request_pause(self) -> None:
        self._pausing = True
        self._wake.set()

    async def paused(self) -> None:
        await self._clock.wait(self._parked)

    def resume(self) -> None:
        self._pausing = False
        self._resumed.set()

    # The engine's coroutine.

    async def _serve(self) -> None:
        while True:
            self._take_cancels()
            if self._next_weights is not None:
                self._swap(self._next_weights)
            if self._pausing:
                await self._park()
            elif inits := self._plan_prefill():
                await self._prefill(inits)
            elif self._running_slots():
                self._note_loaded()
                await self._decode()
            else:
                self._note_loaded()
                self._wake.clear()
                await self._clock.wait(self._wake)

    def _running_slots(self) -> list[int]:
        return [slot for slot, running in enumerate(self._slots) if running is not None]

    def _swap(self, weights: _Weights) -> None:
        """The interruption: between two dispatches, wherever requests stand."""
        interrupted = self._running_slots()
        if interrupted:
            requests = [self._request_id(slot) for slot in interrupted]
            versions = {'from_version': self._weights.version, 'to_version': weights.version}
            self._log.write('interrupt', self.name, engine=self.name, requests=requests, **versions)
            self._flush()
        self._weights, self._next_weights = weights, None
        self._prefixes.clear()
        self._swapped_s = self._clock.now()
        if self._kv_policy == 'recompute':
            self._stale = interrupted

    def _note_loaded(self) -> None:
        """The rebuild after a swap is over: decoding goes on with the new weights."""
        if self._swapped_s is not None:
            self._pause_s, self._swapped_s = self._clock.now() - self._swapped_s, None
            fields = {'version': self._weights.version, 'pause_seconds': self._pause_s}
            self._log.write('load', self.name, engine=self.name, **fields)
            self._loaded.set()

    async def _park(self) -> None:
        """Stand still with everything delivered; requests in slots go back to the head of the queue, in slot order."""
        self._flush()
        self._dead += self._running_slots()
        self._waiting.extendleft(reversed([r for r in self._slots if r is not None]))
        self._slots = [None] * self._backend.slots
        self._stale = []
        self._prefixes.clear()
        self._note_loaded()
        self._resumed.clear()
        self._parked.set()
        await self._clock.wait(self._resumed)
        self._parked.clear()

    def _plan_prefill(self) -> list[SlotInit]:
        """Slots to rebuild and waiting requests for free slots."""
        inits = [self._init(slot, running) for slot in self._stale if (running := self._slots[slot]) is not None]
        self._stale = []
        for slot, occupant in enumerate(self._slots):
            if occupant is None and self._waiting:
                self._slots[slot] = self._waiting.popleft()
                inits.append(self._init(slot, self._slots[slot]))
        return inits

    def _init(self, slot: int, running: RunningRequest | None) -> SlotInit:
        assert running is not None
        return SlotInit(slot, running.request, np.array(running.tokens, np.int32), running.limit)

    async def _prefill(self, inits: list[SlotInit]) -> None:
        by_key: dict[tuple[int, bytes], list[SlotInit]] = {}
        for init in inits:
            by_key.setdefault((self._weights.version, init.tokens[:-1].tobytes()), []).append(init)
        missing = {key: members[0].tokens[:-1] for key, members in by_key.items() if key not in self._prefixes}
        known = {key: self._prefixes[key] for key in by_key if key in self._prefixes}
        backend, weights, state, dead = self._backend, self._weights, self._state, self._take_dead()

        def dispatch() -> tuple[Any, dict[tuple[int, bytes], Any]]:
            prefixes = known | dict(
                zip(missing, backend.prefill(weights.params, list(missing.values())), strict=True) if missing else ()
            )
            new_state = backend.release(state, sorted({*dead, *(init.slot for init in inits)}))
            for key, members in by_key.items():
                new_state = backend.insert(prefixes[key], new_state, members)
            return new_state, prefixes

        tokens = sum(len(sequence) for sequence in missing.values())
        bucket = backend.prefill_bucket(max([0, *map(len, missing.values())]))
        requests = [init.request.request_id for init in inits]
        self._log.write('prefill', self.name, engine=self.name, requests=requests, bucket=bucket, tokens=tokens)
        work = Work('prefill', bucket * len(missing), {'version': weights.version})
        self._state, prefixes = await self._clock.run(self.name, dispatch, work)
        if weights is self._weights:
            self._retain_shared(prefixes)

    def _retain_shared(self, prefixes: dict[tuple[int, bytes], Any]) -> None:
        """Keep the prefixes that a waiting request begins with: the rest of a group too large for the free slots."""
        wanted = {(self._weights.version, np.array(r.tokens[:-1], np.int32).tobytes()) for r in self._waiting}
        self._prefixes = {key: prefix for key, prefix in prefixes.items() if key in wanted}

    async def _decode(self) -> None:
        backend, weights, state, steps = self._backend, self._weights, self._state, self._decode_steps
        dead = self._take_dead()
        slots = [None if running is None else running.request.request_id for running in self._slots]
        occupants = list(self._slots)
        width = backend.width_for(
            max(min(len(running.tokens) + steps, running.limit) for running in self._slots if running is not None)
        )
        self._dispatches += 1

        def dispatch() -> tuple[Any, DecodeOutput]:
            live = backend.release(state, dead) if dead else state
            return backend.generate(weights.params, live, steps, width)

        work = Work('decode', steps, {'version': weights.version})
        self._state, output = await self._clock.run(self.name, dispatch, work)
        self._log.write(
            'decode', self.name, engine=self.name, dispatch=self._dispatches, slots=slots, bucket=width, steps=steps,
            tokens=int(output.valid.sum()), version=weights.version,
        )  # fmt: skip
        self._require_sound(output, occupants, weights.version)
        cut_logprobs = output.sampling_logprobs
        for slot, running in enumerate(occupants):
            if running is not None and self._slots[slot] is running:
                valid = output.valid[:, slot]
                tokens, logprobs = output.tokens[valid, slot].tolist(), output.logprobs[valid, slot].tolist()
                if not tokens:
                    raise RuntimeError(f'{self.name}: slot {slot} is running, but its backend holds it for dead')
                cut = None if cut_logprobs is None else cut_logprobs[valid, slot].tolist()
                running.extend(tokens, logprobs, weights.version, cut)
                self._finish_if_ended(slot, running)

    def _require_sound(self, output: DecodeOutput, occupants: Sequence[RunningRequest | None], version: int) -> None:
        """Refuses a diverged or broken model here, before equal rewards or a filter can hide it."""
        for slot, logprob in output.unsound():
            running = occupants[slot]
            if running is not None and self._slots[slot] is running:
                raise LogprobError(
                    f'{self.name}, request {running.request.request_id}, version {version}: the log-prob of a '
                    f'generated token is {logprob}; lower optimizer.learning_rate if earlier versions gave numbers, '
                    "else mend the weights or use publication.dtype='float32'"
                )

    def _finish_if_ended(self, slot: int, running: RunningRequest) -> None:
        request = running.request
        if len(running.tokens) > len(request.prompt_tokens) and running.tokens[-1] in request.sampling.stop_tokens:
            reason: FinishReason = 'stop'
        elif len(running.tokens) >= running.limit:
            reason = 'length'
        else:
            return
        self._slots[slot] = None
        running.finish(reason)

    def _take_dead(self) -> list[int]:
        dead, self._dead = self._dead, []
        return dead

    def _take_cancels(self) -> None:
        for running in [r for r in [*self._slots, *self._waiting] if r and r.request.request_id in self._cancelled]:
            if running in self._waiting:
                self._waiting.remove(running)
            else:
                slot = self._slots.index(running)
                self._slots[slot] = None
                self._dead.append(slot)
            running.finish('length')
        self._cancelled = []

    def _flush(self) -> None:
        for running in self._slots:
            if running is not None:
                running.flush()

    def _request_id(self, slot: int) -> str:
        running = self._slots[slot]
        assert running is not None
        return running.request.request_id
