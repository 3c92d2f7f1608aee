"""One set of decoding slots: the requests in and before them, their KV cache, and the dispatches that serve them.

LocalEngine has a stream for training, and pinned.py one for evaluation beside it. A stream runs one dispatch at a time;
which comes next, and with which weights, is said by its owner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from areal_jax.control.events import EventLog
from areal_jax.errors import UserError
from areal_jax.protocols import Clock
from areal_jax.rollout.backend import DecodeBackend, DecodeOutput, Prefix, SlotInit, State
from areal_jax.rollout.running_request import RunningRequest
from areal_jax.rollout.slot_table import SlotTable
from areal_jax.types import GenerationRequest, Weights, Work

PrefixKey = tuple[int, bytes]  # policy version and RunningRequest.prefix_key: KV of other weights is never found
Entries = Sequence[tuple[int, RunningRequest]]  # (slot, request)


class PromptTooLongError(UserError, ValueError):
    """A prompt whose answer does not fit the cache of the engine."""


class LogprobError(UserError, ArithmeticError):
    """A log-prob that no policy can have; the message names engine, request, version and the fix."""


@dataclasses.dataclass(frozen=True)
class EngineWeights:
    """Weights as an engine's backend takes them."""

    version: int
    params: Weights


@dataclasses.dataclass(frozen=True)
class Kinds:
    """How the dispatches of a stream are called, as work of the lane and in the event log."""

    prefill: str
    decode: str
    in_background: bool  # Work.in_background


TRAINING = Kinds('prefill', 'decode', in_background=False)
EVALUATION = Kinds('evaluation_prefill', 'evaluation_decode', in_background=True)


class DecodeStream:
    """Continuous batching over the slots of a backend, on the lane `engine`.

    Args:
      engine: name of the engine, and of its lane.
      decode_steps: tokens per slot in one dispatch.
    """

    def __init__(
        self, engine: str, backend: DecodeBackend, clock: Clock, log: EventLog, *, kinds: Kinds, decode_steps: int
    ):
        self._engine, self._backend, self._clock, self._log = engine, backend, clock, log
        self._kinds, self._decode_steps = kinds, decode_steps
        self.table = SlotTable(backend.slots)
        self.decoded_tokens, self.decoded_s = 0, 0.0
        self._state: State = backend.initial_state()
        self._stale: list[int] = []  # slots whose KV must be rebuilt before they decode again
        self._prefixes: dict[PrefixKey, Prefix] = {}
        self._dispatches = 0

    def add(self, request: GenerationRequest) -> RunningRequest:
        """Puts the request at the end of the queue.

        Raises PromptTooLongError when prompt and answer do not fit the cache, RuntimeError for a repeated id.
        """
        length = len(request.prompt_tokens)
        limit = length + request.sampling.max_new_tokens
        if length < 1 or limit > self._backend.context_tokens:
            raise PromptTooLongError(
                f'draw {request.draw}: a prompt of {length} tokens and {request.sampling.max_new_tokens} new ones '
                f'(rollout.max_new_tokens) do not fit rollout.context_tokens={self._backend.context_tokens}; raise it '
                f'to {limit} or shorten the prompt'
            )
        running = RunningRequest(request, self._clock, self._engine, limit)
        if running.request_id in self.table:
            raise RuntimeError(f'{self._engine}: request {running.request_id} is open already')
        self.table.add(running)
        return running

    def cancel(self, request_id: str) -> bool:
        """Ends the request with the reason 'cancelled'; False where it is not here."""
        running = self.table.remove(request_id)
        if running is not None:
            running.finish('cancelled')
        return running is not None

    def flush(self) -> None:
        """Delivers what was generated."""
        for _, running in self.table.running():
            running.flush()

    def drop_cache(self, rebuild: Entries) -> None:
        """Forgets every prefix; the slots of `rebuild` get a new KV cache before they decode again."""
        self._prefixes.clear()
        self._stale = [slot for slot, _ in rebuild]

    def requeue(self) -> None:
        """Delivers everything, and returns the requests in slots to the head of the queue, without their KV cache."""
        self.flush()
        self.table.requeue()
        self.drop_cache(())

    # Prefill: waiting requests enter free slots, and interrupted ones get a new KV cache.

    def plan_prefill(self) -> Entries:
        """Slots to rebuild, then waiting requests for free slots."""
        stale, self._stale = self._stale, []
        rebuilt = [(slot, running) for slot in stale if (running := self.table.slots[slot]) is not None]
        return rebuilt + self.table.fill()

    async def prefill(self, entries: Entries, weights: EngineWeights) -> None:
        backend, state, dead = self._backend, self._state, self.table.take_dead()
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
        self._log.write(
            self._kinds.prefill, self._engine, engine=self._engine, requests=requests, bucket=bucket, tokens=tokens
        )
        work = self._work(self._kinds.prefill, bucket * len(missing), weights)
        self._state, prefixes = await self._clock.run(self._engine, dispatch, work)
        # what the rest of a group, too large for the free slots, begins with
        self._prefixes = {key: prefix for key, prefix in prefixes.items() if self.table.is_awaited(key[1])}

    # Decode.

    async def decode(self, weights: EngineWeights) -> None:
        """One dispatch for the requests in slots, of which there is at least one."""
        backend, state, steps = self._backend, self._state, self._decode_steps
        entries, dead = self.table.running(), self.table.take_dead()
        slots = [None if running is None else running.request_id for running in self.table.slots]
        width = backend.width_for(max(min(len(running) + steps, running.limit) for _, running in entries))
        self._dispatches += 1

        def dispatch() -> tuple[State, DecodeOutput]:
            live = backend.release(state, dead) if dead else state
            return backend.generate(weights.params, live, steps, width)

        began_s, work = self._clock.now(), self._work(self._kinds.decode, steps, weights)
        self._state, output = await self._clock.run(self._engine, dispatch, work)
        counts = output.counts()
        tokens = int(counts.sum())
        self._log.write(
            self._kinds.decode, self._engine, engine=self._engine, dispatch=self._dispatches, slots=slots,
            bucket=width, steps=steps, tokens=tokens, version=weights.version,
        )  # fmt: skip
        self.decoded_tokens += tokens
        self.decoded_s += self._clock.now() - began_s
        current = {slot: running for slot, running in entries if self.table.slots[slot] is running}
        self._require_sound(output, current, weights.version)
        self._deliver(output.by_slot(), counts.tolist(), current, weights.version)

    def _work(self, kind: str, amount: float, weights: EngineWeights) -> Work:
        return Work(kind, amount, {'version': weights.version}, self._kinds.in_background)

    def _require_sound(self, output: DecodeOutput, current: Mapping[int, RunningRequest], version: int) -> None:
        """Refuses a diverged or broken model here, before equal rewards or a filter can hide it."""
        for slot, logprob in output.unsound():
            if slot in current:
                raise LogprobError(
                    f'{self._engine}, request {current[slot].request_id}, version {version}: the log-prob of a '
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
                raise RuntimeError(f'{self._engine}: slot {slot} is running, but its backend has stopped decoding it')
            cut = None if output.sampling_logprobs is None else output.sampling_logprobs[slot, :count]
            running.extend(output.tokens[slot, :count], output.logprobs[slot, :count], version, cut)
            if output.tokens[slot, count - 1] in running.request.sampling.stop_tokens:
                self.table.free(running)
                running.finish('stop')
            elif len(running) >= running.limit:
                self.table.free(running)
                running.finish('length')


def _prefill_missing(
    backend: DecodeBackend, params: Weights, missing: Mapping[PrefixKey, np.ndarray]
) -> dict[PrefixKey, Prefix]:
    return dict(zip(missing, backend.prefill(params, list(missing.values())), strict=True)) if missing else {}
