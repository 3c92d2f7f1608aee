"""The engine in this process: one coroutine that plans a dispatch, runs it on its lane and delivers the outcome.

app/ builds it around a decode backend (backend.py), pool.py drives it. A dispatch is never preempted. New weights
interrupt decoding between two dispatches: the engine delivers what was generated under the old weights, swaps, and
rebuilds the KV cache of unfinished answers ('recompute') or keeps it ('keep').
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from areal_jax.control.events import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.errors import UserError
from areal_jax.events import engine_lane, publish_lane
from areal_jax.protocols import Clock
from areal_jax.rollout.backend import DecodeBackend, DecodeOutput, Prefix, SlotInit, State
from areal_jax.rollout.running_request import RunningRequest
from areal_jax.rollout.slot_table import SlotTable
from areal_jax.types import (
    EngineCapabilities,
    EngineStatus,
    GenerationRequest,
    KvPolicy,
    PublishedWeights,
    Weights,
    Work,
)

PrefixKey = tuple[int, bytes]  # policy version and RunningRequest.prefix_key: KV of other weights is never found


class PromptTooLongError(UserError, ValueError):
    """A prompt whose answer does not fit the cache of the engine."""


class LogprobError(UserError, ArithmeticError):
    """A log-prob that no policy can have; the message names engine, request, version and the fix."""


@dataclasses.dataclass(frozen=True)
class _Weights:
    version: int
    params: Weights


class LocalEngine:
    """Continuous batching over the slots of a backend, under the weights of one version at a time.

    Implements protocols.RolloutEngine.

    Args:
      index: number of the engine; names it and its two lanes, `engine/K` to decode and `publish/K` to fetch weights.
      receive: fetches published weights (Channel.receive).
      version, params: the weights to begin with.
      kv_policy: 'recompute' rebuilds the KV of unfinished answers under new weights (the paper), 'keep' keeps it.
      decode_steps: tokens per slot in one dispatch.
    """

    def __init__(
        self,
        index: int,
        backend: DecodeBackend,
        clock: Clock,
        log: EventLog,
        *,
        receive: Callable[[PublishedWeights], Weights],
        version: int,
        params: Weights,
        kv_policy: KvPolicy,
        decode_steps: int,
    ):
        self.name, self._publish_lane = engine_lane(index), publish_lane(index)
        self.capabilities = EngineCapabilities(
            logprobs=('behavior', 'sampling'),
            spans=True,
            abort=True,
            pause_modes=('retract',),
            staging=True,
            update=(kv_policy,),
        )
        self._backend, self._clock, self._log = backend, clock, log
        self._receive, self._kv_policy, self._decode_steps = receive, kv_policy, decode_steps
        self._weights = _Weights(version, params)
        self._staged: _Weights | None = None
        self._next_weights: _Weights | None = None  # to be swapped in before the next dispatch
        self._state: State = backend.initial_state()
        self._table = SlotTable(backend.slots)
        self._stale: list[int] = []  # slots whose KV must be rebuilt before they decode again
        self._prefixes: dict[PrefixKey, Prefix] = {}
        self._dispatches = 0
        self._decoded_tokens, self._decoded_s = 0, 0.0
        self._swapped_s: float | None = None  # when the swap began whose rebuild is not finished
        self._pause_s = 0.0
        self._pausing = False
        self._wake = clock.event(f'{self.name}: a request or weights')
        self._loaded = clock.event(f'{self.name}: new weights in use')
        self._parked = clock.event(f'{self.name}: paused')
        self._resumed = clock.event(f'{self.name}: resumed')

    @property
    def params(self) -> Weights:
        """The weights in use."""
        return self._weights.params

    def start(self, supervisor: Supervisor) -> None:
        supervisor.start(self.name, self._serve())

    # What the pool calls; protocols.RolloutEngine has the docstrings.

    def generate(self, request: GenerationRequest) -> RunningRequest:
        """Raises PromptTooLongError when prompt and answer do not fit the cache, RuntimeError for a repeated id."""
        length = len(request.prompt_tokens)
        limit = length + request.sampling.max_new_tokens
        if length < 1 or limit > self._backend.context_tokens:
            raise PromptTooLongError(
                f'draw {request.draw}: a prompt of {length} tokens and {request.sampling.max_new_tokens} new ones '
                f'(rollout.max_new_tokens) do not fit rollout.context_tokens={self._backend.context_tokens}; raise it '
                f'to {limit} or shorten the prompt'
            )
        running = RunningRequest(request, self._clock, self.name, limit)
        if running.request_id in self._table:
            raise RuntimeError(f'{self.name}: request {running.request_id} is open already')
        self._table.add(running)
        self._log.write('arrive', self.name, request=running.request_id)
        self._wake.set()
        return running

    def cancel(self, request_id: str) -> None:
        running = self._table.remove(request_id)
        if running is not None:
            running.finish('cancelled')
            self._wake.set()

    def status(self) -> EngineStatus:
        running, devices = len(self._table.running()), self._backend.devices
        rate = self._decoded_tokens / self._decoded_s if self._decoded_s else 0.0
        return EngineStatus(self.name, self._weights.version, running, self._table.waiting, rate, devices)

    def open_requests(self) -> list[GenerationRequest]:
        """Requests in slots by slot, then waiting ones in their order."""
        return [running.request for running in self._table.open_requests()]

    async def stage(self, published: PublishedWeights) -> None:
        work = Work('load', 1, {'version': published.version})
        params = await self._clock.run(self._publish_lane, lambda: self._receive(published), work)
        self._staged = _Weights(published.version, params)

    async def swap(self, version: int) -> float:
        """Raises RuntimeError where this version is not the one staged last."""
        if self._staged is None or self._staged.version != version:
            held = 'nothing' if self._staged is None else f'version {self._staged.version}'
            raise RuntimeError(f'{self.name}: version {version} is to be swapped in, and {held} is staged')
        self._next_weights, self._staged = self._staged, None
        self._wake.set()
        while self._next_weights is not None or self._swapped_s is not None:
            self._loaded.clear()
            await self._clock.wait(self._loaded)
        return self._pause_s

    async def pause(self) -> None:
        self._pausing = True
        self._wake.set()
        await self._clock.wait(self._parked)

    def resume(self) -> None:
        self._pausing = False
        self._resumed.set()

    # The engine's coroutine.

    async def _serve(self) -> None:
        while True:
            if self._next_weights is not None:
                self._swap(self._next_weights)
            if self._pausing:
                await self._park()
            elif inits := self._plan_prefill():
                await self._prefill(inits)
            elif running := self._table.running():
                self._note_loaded()
                await self._decode(running)
            else:
                self._note_loaded()
                self._wake.clear()
                await self._clock.wait(self._wake)

    def _swap(self, weights: _Weights) -> None:
        """The interruption: between two dispatches, however far the answers are."""
        interrupted = self._table.running()
        if interrupted:
            requests = [running.request_id for _, running in interrupted]
            versions = {'from_version': self._weights.version, 'to_version': weights.version}
            self._log.write('interrupt', self.name, engine=self.name, requests=requests, **versions)
            self._flush()
        self._weights, self._next_weights = weights, None
        self._prefixes.clear()
        self._swapped_s = self._clock.now()
        if self._kv_policy == 'recompute':
            self._stale = [slot for slot, _ in interrupted]

    def _note_loaded(self) -> None:
        """The rebuild after a swap is finished: the next dispatch decodes with the new weights."""
        if self._swapped_s is not None:
            self._pause_s, self._swapped_s = self._clock.now() - self._swapped_s, None
            fields = {'version': self._weights.version, 'pause_seconds': self._pause_s}
            self._log.write('load', self.name, engine=self.name, **fields)
            self._loaded.set()

    async def _park(self) -> None:
        """The pause: everything is delivered, and requests in slots return to the head of the queue in slot order."""
        self._flush()
        self._table.requeue()
        self._stale = []
        self._prefixes.clear()
        self._note_loaded()
        self._resumed.clear()
        self._parked.set()
        await self._clock.wait(self._resumed)
        self._parked.clear()

    def _flush(self) -> None:
        for _, running in self._table.running():
            running.flush()

    # Prefill: waiting requests enter free slots, and interrupted ones get a new KV cache.

    def _plan_prefill(self) -> list[tuple[int, RunningRequest]]:
        """(slot, request): slots to rebuild, then waiting requests for free slots."""
        stale, self._stale = self._stale, []
        rebuilt = [(slot, running) for slot in stale if (running := self._table.slots[slot]) is not None]
        return rebuilt + self._table.fill()

    async def _prefill(self, entries: Sequence[tuple[int, RunningRequest]]) -> None:
        backend, weights, state, dead = self._backend, self._weights, self._state, self._table.take_dead()
        by_key: dict[PrefixKey, list[SlotInit]] = {}
        for slot, running in entries:
            init = SlotInit(slot, running.request, running.tokens, running.limit)
            by_key.setdefault((weights.version, running.prefix_key), []).append(init)
        missing = {key: inits[0].tokens[:-1] for key, inits in by_key.items() if key not in self._prefixes}
        known = {key: self._prefixes[key] for key in by_key if key in self._prefixes}

        def dispatch() -> tuple[State, dict[PrefixKey, Prefix]]:
            prefixes = known | _prefill_missing(backend, weights.params, missing)
            new_state = backend.release(state, sorted({*dead, *(slot for slot, _ in entries)}))
            for key, inits in by_key.items():
                new_state = backend.insert(prefixes[key], new_state, inits)
            return new_state, prefixes

        tokens = sum(len(sequence) for sequence in missing.values())
        bucket = backend.prefill_bucket(max([0, *map(len, missing.values())]))
        requests = [running.request_id for _, running in entries]
        self._log.write('prefill', self.name, engine=self.name, requests=requests, bucket=bucket, tokens=tokens)
        work = Work('prefill', bucket * len(missing), {'version': weights.version})
        self._state, prefixes = await self._clock.run(self.name, dispatch, work)
        if weights is self._weights:  # keep what the rest of a group, too large for the free slots, begins with
            self._prefixes = {key: prefix for key, prefix in prefixes.items() if self._table.is_awaited(key[1])}

    # Decode.

    async def _decode(self, entries: Sequence[tuple[int, RunningRequest]]) -> None:
        backend, weights, state, steps = self._backend, self._weights, self._state, self._decode_steps
        dead = self._table.take_dead()
        slots = [None if running is None else running.request_id for running in self._table.slots]
        width = backend.width_for(max(min(len(running) + steps, running.limit) for _, running in entries))
        self._dispatches += 1

        def dispatch() -> tuple[State, DecodeOutput]:
            live = backend.release(state, dead) if dead else state
            return backend.generate(weights.params, live, steps, width)

        began_s, work = self._clock.now(), Work('decode', steps, {'version': weights.version})
        self._state, output = await self._clock.run(self.name, dispatch, work)
        counts = output.counts()
        tokens = int(counts.sum())
        self._log.write(
            'decode', self.name, engine=self.name, dispatch=self._dispatches, slots=slots, bucket=width, steps=steps,
            tokens=tokens, version=weights.version,
        )  # fmt: skip
        self._decoded_tokens += tokens
        self._decoded_s += self._clock.now() - began_s
        current = {slot: running for slot, running in entries if self._table.slots[slot] is running}
        self._require_sound(output, current, weights.version)
        self._deliver(output.by_slot(), counts.tolist(), current, weights.version)

    def _require_sound(self, output: DecodeOutput, current: Mapping[int, RunningRequest], version: int) -> None:
        """Refuses a diverged or broken model here, before equal rewards or a filter can hide it."""
        for slot, logprob in output.unsound():
            if slot in current:
                raise LogprobError(
                    f'{self.name}, request {current[slot].request_id}, version {version}: the log-prob of a '
                    f'generated token is {logprob}; lower optimizer.learning_rate if earlier versions gave numbers, '
                    "else mend the weights or use publication.dtype='float32'"
                )

    def _deliver(
        self, output: DecodeOutput, counts: Sequence[int], current: Mapping[int, RunningRequest], version: int
    ) -> None:
        """Adds the tokens of each slot to its request; `output` is by slot."""
        for slot, running in current.items():
            count = counts[slot]
            if not count:
                raise RuntimeError(f'{self.name}: slot {slot} is running, but its backend has stopped decoding it')
            cut = None if output.sampling_logprobs is None else output.sampling_logprobs[slot, :count]
            running.extend(output.tokens[slot, :count], output.logprobs[slot, :count], version, cut)
            if output.tokens[slot, count - 1] in running.request.sampling.stop_tokens:
                self._table.free(running)
                running.finish('stop')
            elif len(running) >= running.limit:
                self._table.free(running)
                running.finish('length')


def _prefill_missing(
    backend: DecodeBackend, params: Weights, missing: Mapping[PrefixKey, np.ndarray]
) -> dict[PrefixKey, Prefix]:
    return dict(zip(missing, backend.prefill(params, list(missing.values())), strict=True)) if missing else {}
