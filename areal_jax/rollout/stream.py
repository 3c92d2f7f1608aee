"""One set of decoding slots: the requests in and before them, their KV cache, and the dispatches that serve them.

LocalEngine has a stream for training, and another for pinned requests, as for evaluation. A stream runs one dispatch at
a time: scheduler.py plans it, and the owner of the stream chooses its weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from areal_jax.columns import ColumnArrays, cut
from areal_jax.control.event_writer import EventLog
from areal_jax.errors import UserError
from areal_jax.protocols import Clock
from areal_jax.rollout.backend import DecodeBackend, DecodeOutput, DecodeRow, SamplingError, Span, State
from areal_jax.rollout.running_request import RunningRequest, StopSearch
from areal_jax.rollout.scheduler import Copies, DecodeStep, PrefillStep, Scheduler
from areal_jax.text.decoding import TokenBytes
from areal_jax.types import GenerationRequest, Weights, Work


class PromptTooLongError(UserError, ValueError):
    """A prompt whose answer does not fit the cache of the engine."""


class LogprobError(UserError, ArithmeticError):
    """A log-prob that no policy can have; the message names engine, request, version and the fix."""


class DispatchError(UserError, RuntimeError):
    """A dispatch has failed; the requests that were in slots are lost."""


@dataclasses.dataclass(frozen=True)
class LogprobFailure:
    """An engine's reaction to a log-prob that no policy can have."""

    ends_run: bool  # else only the request fails
    fix: str  # the advice in the error


IN_TRAINING = LogprobFailure(
    True,
    'lower optimizer.learning_rate if earlier versions gave numbers, else mend the weights or use '
    "publication.dtype='float32'",
)
WITHOUT_TRAINING = LogprobFailure(
    True, "get the files of the weights again, name other weights, or use --config.publication.dtype='float32'"
)
IN_A_SERVER = dataclasses.replace(WITHOUT_TRAINING, ends_run=False)


@dataclasses.dataclass(frozen=True)
class EngineWeights:
    """Weights in the form that an engine's backend takes."""

    version: int
    params: Weights


@dataclasses.dataclass(frozen=True)
class Kinds:
    """The names of a stream's dispatches, as work of the lane and in the event log."""

    prefill: str
    decode: str
    in_background: bool  # Work.in_background


TRAINING = Kinds('prefill', 'decode', in_background=False)
EVALUATION = Kinds('evaluation_prefill', 'evaluation_decode', in_background=True)


@dataclasses.dataclass
class StreamTotals:
    """Totals of all dispatches since the start; seconds of the clock from request to completion."""

    decoded_tokens: int = 0
    decoded_s: float = 0.0
    prefilled_tokens: int = 0  # of answers without tokens
    prefilled_s: float = 0.0
    rebuilt_tokens: int = 0  # of interrupted or preempted answers and their prompts, computed again
    rebuilt_s: float = 0.0
    positions: int = 0  # visible to rows, over rows and steps
    positions_read: int = 0  # read by attention, the masked ones included


class DecodeStream:
    """Continuous batching over the slots of a backend, on the lane `engine`.

    Args:
      engine: name of the engine, and of its lane.
      version: policy version of the requests that are not pinned to one.
      decode_steps: tokens per slot in one dispatch.
      token_bytes: for stop strings; None = a request may have none.
      failure: the reaction to a log-prob that is NaN, infinite or above 0.

    Raises CacheBudgetError if the backend's cache can not hold one sequence.
    """

    def __init__(
        self,
        engine: str,
        backend: DecodeBackend,
        clock: Clock,
        log: EventLog,
        *,
        kinds: Kinds,
        version: int,
        decode_steps: int,
        token_bytes: TokenBytes | None = None,
        failure: LogprobFailure = IN_TRAINING,
    ):
        self._engine, self.backend, self._clock, self._log = engine, backend, clock, log
        self._failure = failure
        self._kinds, self._decode_steps, self._token_bytes = kinds, decode_steps, token_bytes
        self._scheduler = Scheduler(
            backend, version=version, decode_steps=decode_steps, on_preempt=self._note_preempted
        )
        self.table, self.cache = self._scheduler.table, self._scheduler.cache
        self.totals = StreamTotals()
        self._state: State = backend.initial_state()
        self._dispatches = 0  # of decoding

    def add(self, request: GenerationRequest) -> RunningRequest:
        """Puts the request at the end of the queue.

        Raises PromptTooLongError when prompt and answer do not fit the cache, SamplingError for sampling parameters
        that it cannot decode with, RuntimeError for a repeated id.
        """
        self.backend.sampling.check(request)
        if request.sampling.stop_strings and self._token_bytes is None:
            strings = request.sampling.stop_strings
            raise SamplingError(
                f'request {request.request_id}: stop_strings={strings}, but {self._engine} has no tokenizer to find '
                'them with; use stop tokens, or build the engine with token_bytes'
            )
        length = len(request.prompt_tokens)
        limit = length + request.sampling.max_new_tokens
        if length < 1 or limit > self.backend.context_tokens:
            raise PromptTooLongError(
                f'draw {request.draw}: a prompt of {length} tokens and {request.sampling.max_new_tokens} new ones '
                f'(rollout.max_new_tokens) do not fit rollout.context_tokens={self.backend.context_tokens}; raise it '
                f'to {limit} or shorten the prompt'
            )
        running = RunningRequest(request, self._clock, self._engine, limit)
        if running.request_id in self.table:
            raise RuntimeError(f'{self._engine}: request {running.request_id} is open already')
        self._scheduler.add(running)
        return running

    def cancel(self, request_id: str) -> bool:
        """Ends the request with the reason 'cancelled'; returns False if the stream does not have it."""
        running = self._scheduler.remove(request_id)
        if running is not None:
            running.finish('cancelled')
        return running is not None

    def change_version(self, version: int, *, keep: bool) -> None:
        """Delivers all generated tokens; later tokens are of this version.

        `keep` keeps the KV of requests that are ready to decode; all other KV is computed again.
        """
        self.deliver()
        self._scheduler.change_version(version, keep=keep)

    def deliver(self) -> None:
        for running in self.table.open_requests():
            running.flush()

    def requeue(self) -> None:
        """Delivers all generated tokens; returns the requests in slots to the head of the queue, without their KV."""
        self.deliver()
        self._scheduler.requeue()

    def recover(self, error: Exception) -> None:
        """Recovers from a dispatch that raised: ends the requests in slots with DispatchError and empties the cache.

        Waiting requests stay. The cache state is allocated again, because the dispatch may have consumed (donated) it.
        """
        for _, running in self.table.running():
            self._scheduler.remove(running.request_id)
            running.fail(
                DispatchError(
                    f'{self._engine}, request {running.request_id}: a dispatch failed ({type(error).__name__}: '
                    f'{error}); send the request again'
                )
            )
        self._scheduler.requeue()
        self._state = None  # frees its memory first
        self._state = self.backend.initial_state()

    def release(self) -> None:
        """Drops the cache; nothing can be decoded after this."""
        self._state = None

    def next_step(self, *, only_begun: bool = False) -> PrefillStep | DecodeStep | None:
        """Returns the next dispatch, for `run`; None if there is no request. See Scheduler.next_step."""
        return self._scheduler.next_step(only_begun=only_begun)

    async def run(self, step: PrefillStep | DecodeStep, weights: EngineWeights) -> None:
        if isinstance(step, PrefillStep):
            await self._prefill(step, weights)
        else:
            await self._decode(step, weights)

    def _note_preempted(self, running: RunningRequest) -> None:
        fields = {'request': running.request_id, 'tokens': len(running)}
        self._log.write('preempt', self._engine, engine=self._engine, **fields)

    async def _prefill(self, step: PrefillStep, weights: EngineWeights) -> None:
        backend, state = self.backend, self._state
        pieces = [planned.piece for planned in step.pieces]
        before, after = self._attach_copies(step.attached_before), self._attach_copies(step.attached_after)

        def dispatch() -> State:
            new_state = _copy(backend, state, step.copies, step.part_copies, step.state_copies)
            new_state = _copy(backend, new_state, *before)
            new_state = backend.prefill(weights.params, new_state, pieces) if pieces else new_state
            return _copy(backend, new_state, *after)

        tokens = sum(len(piece.tokens) for piece in pieces)
        rebuilt = sum(len(planned.piece.tokens) for planned in step.pieces if planned.is_rebuilt)
        kept = {'kept': list(step.found)} if any(step.found) else {}
        self._log.write(
            self._kinds.prefill, self._engine, engine=self._engine, requests=list(step.requests),
            bucket=step.bucket.tokens, prior=step.bucket.prior, tokens=tokens, rebuilt=rebuilt,
            prompt_tokens=sum(len(planned.piece.tokens) for planned in step.pieces if planned.is_of_prompt), **kept,
        )  # fmt: skip
        size = {'tokens': tokens, 'positions': sum(_seen_positions(piece.span) for piece in pieces)}
        began_s, work = self._clock.now(), self._work(self._kinds.prefill, step.bucket.tokens, weights, size)
        self._state = await self._clock.run(self._engine, dispatch, work)
        self._scheduler.note_prefilled(step)
        if tokens:
            seconds, totals = self._clock.now() - began_s, self.totals
            totals.prefilled_tokens += tokens - rebuilt
            totals.prefilled_s += seconds * (tokens - rebuilt) / tokens
            totals.rebuilt_tokens += rebuilt
            totals.rebuilt_s += seconds * rebuilt / tokens

    async def _decode(self, step: DecodeStep, weights: EngineWeights) -> None:
        backend, state, steps = self.backend, self._state, self._decode_steps
        slots: list[str | None] = [None] * backend.slots
        for slot, running in step.entries:
            slots[slot] = running.request_id
        self._dispatches += 1
        entries = enumerate(step.entries if backend.records_context else ())
        first_rows = [index for index, (_, running) in entries if not running.has_begun]

        def dispatch() -> tuple[State, DecodeOutput, Mapping[int, ColumnArrays]]:
            copied = _copy(backend, state, step.copies, step.part_copies, step.state_copies)
            after, output = backend.generate(weights.params, copied, step.rows, steps)
            return after, output, {index: _read_context(backend, after, step.rows[index]) for index in first_rows}

        first = np.array([row.position for row in step.rows]) + 1  # positions that a row's first step sees
        size = {'rows': len(step.rows), 'positions': int(first.sum()), 'quiet': step.quiet}
        began_s, work = self._clock.now(), self._work(self._kinds.decode, steps, weights, size)
        self._state, output, contexts = await self._clock.run(self._engine, dispatch, work)
        counts = output.counts()
        tokens = int(counts.sum())
        current = [running if self.table.slots[slot] is running else None for slot, running in step.entries]
        lost = sum(count for count, running in zip(counts.tolist(), current, strict=True) if running is None)
        positions = int((counts * first + counts * (counts - 1) // 2).sum())
        self._log.write(
            self._kinds.decode, self._engine, engine=self._engine, dispatch=self._dispatches, slots=slots,
            bucket=backend.batch_bucket(step.rows), steps=len(output.tokens), tokens=tokens, version=weights.version,
            positions=positions, positions_read=output.positions_read, **({'discarded': lost} if lost else {}),
        )  # fmt: skip
        totals = self.totals
        totals.decoded_tokens += tokens
        totals.decoded_s += self._clock.now() - began_s
        totals.positions += positions
        totals.positions_read += output.positions_read
        sound = self._require_sound(output, current, weights.version)
        for row, context in contexts.items():
            if (request := sound[row]) is not None:
                request.give_context(context)
        self._deliver(output.by_row(), counts.tolist(), sound, weights.version)

    def _attach_copies(self, requests: Sequence[RunningRequest]) -> tuple[Copies, Copies, Copies]:
        """Returns the copies of blocks, parts and states that requests continue in after the end of their prefixes."""
        cached = [running.cached for running in requests if running.cached is not None]
        tails = tuple(pair for one in cached if (pair := one.tail_copy))
        return tails, tuple(self.cache.windows.pair(tails)), tuple(pair for one in cached if (pair := one.state_copy))

    def _work(self, kind: str, amount: float, weights: EngineWeights, size: Mapping[str, float]) -> Work:
        return Work(kind, amount, {'version': weights.version}, self._kinds.in_background, size)

    def _require_sound(
        self, output: DecodeOutput, current: Sequence[RunningRequest | None], version: int
    ) -> Sequence[RunningRequest | None]:
        """Returns the requests with sound log-probs, by row; None in other rows.

        Refuses a diverged or broken model here, before equal rewards or a filter can hide it.
        """
        sound = list(current)
        for row, logprob in output.unsound():
            running = sound[row]
            if running is None:
                continue
            error = LogprobError(
                f'{self._engine}, request {running.request_id}, version {version}: the log-prob of a '
                f'generated token is {logprob}; {self._failure.fix}'
            )
            if self._failure.ends_run:
                raise error
            self._scheduler.remove(running.request_id)  # none of its KV is kept
            running.fail(error)
            sound[row] = None
        return sound

    def _deliver(
        self, output: DecodeOutput, counts: Sequence[int], current: Sequence[RunningRequest | None], version: int
    ) -> None:
        for row, running in enumerate(current):
            if running is None:
                continue
            count = counts[row]
            if not count:
                raise RuntimeError(f'{self._engine}: the backend has decoded nothing for {running.request_id}')
            matched, count = self._find_stop(running, output.tokens[row, :count])
            past_end = count < counts[row]
            place = row, slice(count)
            tokens = output.tokens[place]
            if output.ended is not None and output.ended[row]:
                matched = int(tokens[-1])
            running.extend(tokens, output.logprobs[place], version, cut(output.columns, place))
            if matched is not None:
                running.matched = matched
                self._scheduler.end(running, past_end=past_end)
                running.finish('stop')
            elif len(running) >= running.limit:
                self._scheduler.end(running)
                running.finish('length')
            else:
                self._scheduler.note_decoded(running)
                if running.streams:
                    running.flush()

    def _find_stop(self, running: RunningRequest, tokens: np.ndarray) -> tuple[int | str | None, int]:
        """Returns (stop token or string that ends the answer, how many of the new tokens belong to the answer).

        Decoding ends at a stop token, but continues after a stop string. So a string found comes first, and wins.
        """
        params = running.request.sampling
        if params.stop_strings and self._token_bytes is not None:
            before = running.tokens[len(running.request.prompt_tokens) :]
            if running.stop_search is None:
                running.stop_search = StopSearch(params.stop_strings, self._token_bytes)
                running.stop_search.pass_over(before.tolist())
            early, late = np.split(tokens, [max(0, params.min_new_tokens - len(before))])
            running.stop_search.pass_over(early.tolist())
            if (found := running.stop_search.find(late.tolist())) is not None:
                return found[1], len(early) + found[0]
        last = int(tokens[-1])
        return (last if last in params.stop_tokens else None), len(tokens)


def _seen_positions(span: Span) -> int:
    """The number of positions seen, summed over the span: each token sees itself and all tokens before it."""
    return (span.stop - span.start) * (span.start + 1 + span.stop) // 2


def _read_context(backend: DecodeBackend, state: State, row: DecodeRow) -> ColumnArrays:
    return backend.read_context(state, row.blocks, len(row.request.prompt_tokens))


def _copy(backend: DecodeBackend, state: State, copies: Copies, part_copies: Copies, state_copies: Copies) -> State:
    if copies or part_copies or state_copies:
        return backend.copy(state, copies, part_copies, state_copies)
    return state
