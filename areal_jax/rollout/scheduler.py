"""Plans an engine's next dispatch: which requests enter slots, and which leave them because blocks run out.

Pure bookkeeping between two dispatches; stream.py runs the plans. Prefill runs in pieces between decode dispatches, so
that long prompts do not stop the other answers: at most MOST_PREFILLED times the tokens of the longest piece, then one
decode dispatch for the requests that are ready. A decode dispatch costs nearly as much with few rows as with many.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Callable, Sequence

from areal_jax.rollout.backend import DecodeBackend, DecodeRow, PrefillBucket, PrefillPiece, Span
from areal_jax.rollout.blocks import CachedSequence, Prefix
from areal_jax.rollout.cache_table import CacheTable
from areal_jax.rollout.running_request import RunningRequest


class SlotTable:
    """Slots and the queue before them, in constant time per request."""

    def __init__(self, slots: int):
        self.slots: list[RunningRequest | None] = [None] * slots
        self._slot_of: dict[str, int] = {}  # by request id, in the order of admission
        self._free = list(range(slots))  # a heap
        self._waiting: collections.OrderedDict[str, RunningRequest] = collections.OrderedDict()  # by request id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slot_of or request_id in self._waiting

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def taken(self) -> int:
        return len(self._slot_of)

    @property
    def is_full(self) -> bool:
        return not self._free

    def has_slot(self, running: RunningRequest) -> bool:
        return running.request_id in self._slot_of

    def running(self) -> list[tuple[int, RunningRequest]]:
        """Lists (slot, request) by slot."""
        return [(slot, running) for slot, running in enumerate(self.slots) if running is not None]

    def admitted(self) -> list[RunningRequest]:
        """Lists the requests in slots, in the order in which they entered."""
        return [running for slot in self._slot_of.values() if (running := self.slots[slot]) is not None]

    def youngest(self) -> RunningRequest:
        """The request that entered a slot last."""
        return self._at(next(reversed(self._slot_of.values())))

    def open_requests(self) -> list[RunningRequest]:
        """Requests in slots by slot, then waiting ones in their order."""
        return [*(running for _, running in self.running()), *self._waiting.values()]

    @property
    def is_empty(self) -> bool:
        return not self._slot_of and not self._waiting

    def version(self) -> int | None:
        """Returns the version that the requests in slots ask for; if all slots are free, the first waiting one's."""
        first = next(iter(self._slot_of.values()), None)
        running = next(iter(self._waiting.values())) if first is None else self._at(first)
        return running.request.version

    def add(self, running: RunningRequest) -> None:
        """Puts the request at the end of the queue."""
        self._waiting[running.request_id] = running

    def next_waiting(self, *, only_begun: bool = False) -> RunningRequest | None:
        """Returns the first waiting request if it may enter a slot; `only_begun`: the first that has tokens.

        All requests in slots ask for the same version: a request of another one waits until all slots are free.
        """
        if not self._waiting or not self._free:
            return None
        running = next((one for one in self._waiting.values() if one.has_begun or not only_begun), None)
        return running if running is not None and running.request.version == self.version() else None

    def enter(self, running: RunningRequest) -> None:
        """Moves a waiting request into the lowest free slot."""
        del self._waiting[running.request_id]
        slot = heapq.heappop(self._free)
        self.slots[slot] = running
        self._slot_of[running.request_id] = slot

    def leave(self, running: RunningRequest) -> None:
        slot = self._slot_of.pop(running.request_id)
        self.slots[slot] = None
        heapq.heappush(self._free, slot)

    def remove(self, request_id: str) -> RunningRequest | None:
        """Removes the request from queue or slot; returns None if it is in neither."""
        if request_id in self._waiting:
            return self._waiting.pop(request_id)
        if request_id not in self._slot_of:
            return None
        running = self._at(self._slot_of[request_id])
        self.leave(running)
        return running

    def return_to_queue(self, running: RunningRequest) -> None:
        """Moves a request from its slot to the head of the queue."""
        self.leave(running)
        self.add(running)
        self._waiting.move_to_end(running.request_id, last=False)

    def requeue(self) -> None:
        """Returns the requests in slots to the head of the queue, in slot order."""
        for _, running in reversed(self.running()):
            self.return_to_queue(running)

    def _at(self, slot: int) -> RunningRequest:
        running = self.slots[slot]
        assert running is not None
        return running


Copies = tuple[tuple[int, int], ...]  # (source, target)

NO_PREFILL = PrefillBucket(0, 0)
MOST_PREFILLED = 4  # longest pieces, in tokens, between two dispatches of decoding
_FULL = 0.75  # share of a bucket that is worth its padding: pieces that fill less are split over two dispatches


@dataclasses.dataclass(frozen=True)
class PlannedPiece:
    """A prefill piece with the prefix or sequence that it fills."""

    target: Prefix | CachedSequence
    piece: PrefillPiece
    is_rebuilt: bool  # it belongs to an answer with tokens

    @property
    def is_of_prompt(self) -> bool:
        """Whether the piece is of a prefix, which other answers to the prompt share."""
        return isinstance(self.target, Prefix)


@dataclasses.dataclass(frozen=True)
class PrefillStep:
    """One dispatch of prefill: copies, pieces, copies."""

    copies: Copies  # of blocks, before all else
    part_copies: Copies  # of places in the pool of layers with a window
    state_copies: Copies  # of places of recurrent states
    requests: tuple[str, ...]  # new in their slots, or with tokens in this prefill
    bucket: PrefillBucket
    pieces: tuple[PlannedPiece, ...]
    found: tuple[int, int]  # prompt positions that the cache had, for answers without and with tokens
    attached_before: tuple[RunningRequest, ...]  # requests whose prefix is in the cache
    attached_after: tuple[RunningRequest, ...]  # requests whose prefix the pieces complete


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """One decode dispatch, for the requests whose tokens except the last are in the cache."""

    copies: Copies  # as in PrefillStep
    part_copies: Copies
    state_copies: Copies
    entries: tuple[tuple[int, RunningRequest], ...]  # (slot, request) by slot
    rows: tuple[DecodeRow, ...]  # of the entries, in their order
    quiet: int  # equal dispatches, this one included, until the next decision, unless a request ends or comes


class Scheduler:
    """Slots, queue and blocks of one stream.

    Args:
      version: policy version of the requests that are not pinned to one.
      decode_steps: tokens per row in one dispatch.
      on_preempt: called with each request that loses its blocks to another one.
    """

    def __init__(
        self, backend: DecodeBackend, *, version: int, decode_steps: int, on_preempt: Callable[[RunningRequest], None]
    ):
        self._backend, self._on_preempt = backend, on_preempt
        self.table = SlotTable(backend.slots)
        self.cache = CacheTable(
            backend.cache_blocks, backend.block_tokens,
            context_tokens=backend.context_tokens, steps=decode_steps, version=version, windows=backend.windows,
            states=backend.states,
        )  # fmt: skip
        self._prefilled = 0  # tokens since the last dispatch of decoding, padding included
        # requests in slots that are not ready to decode, in the order of admission; some may have become ready or left
        # since the last plan. None: unknown, and any request may lack blocks
        self._unready: list[RunningRequest] | None = None

    # Requests.

    def add(self, running: RunningRequest) -> None:
        """Puts the request at the end of the queue."""
        self.table.add(running)
        self.cache.open(running)

    def remove(self, request_id: str) -> RunningRequest | None:
        """Removes the request from queue or slot, and its blocks; returns None if it is in neither."""
        self._unready = None
        running = self.table.remove(request_id)
        if running is not None:
            self.cache.close(running)
        return running

    def end(self, running: RunningRequest, *, past_end: bool = False) -> None:
        """Removes a request whose answer has ended; a later prompt that continues it finds it in the cache.

        `past_end`: the last dispatch has decoded more tokens than belong to the answer.
        """
        self.note_decoded(running)
        self.table.leave(running)
        self.cache.close(running, keep=True, past_end=past_end)

    def change_version(self, version: int, *, keep: bool) -> None:
        """Forgets kept blocks and the KV of the requests in slots; `keep` spares requests that are ready to decode."""
        self._unready = None
        for running in self.table.admitted():
            if not (keep and _is_ready(running)):
                self.cache.retract(running)
        self.cache.clear(version, self.table.open_requests())

    def requeue(self) -> None:
        """Returns the requests in slots to the head of the queue, and forgets the cache."""
        self.change_version(self.cache.version, keep=False)
        self.table.requeue()
        self._prefilled = 0

    # The next dispatch.

    def next_step(self, *, only_begun: bool = False) -> PrefillStep | DecodeStep | None:
        """Plans the next dispatch; None if no request can run.

        Args:
          only_begun: no new answer starts; waiting requests that already have tokens get slots.
        """
        if self._unready is None:
            self._give_blocks()
        unready = self._unready = [*self._find_unready(), *self._admit(only_begun)]
        has_ready = len(unready) < self.table.taken
        if unready and not (has_ready and self._prefilled >= MOST_PREFILLED * self._backend.largest_piece):
            step = self._plan_prefill(unready)
            self._prefilled += step.bucket.tokens
            return step
        self._prefilled = 0
        if not has_ready:
            return None
        entries = tuple(entry for entry in self.table.running() if _is_ready(entry[1]))
        for _, running in entries:
            self.cache.hold_steps(running)
        rows = tuple(self._decode_row(running) for _, running in entries)
        quiet = 1 if unready else self.cache.count_quiet(len(rows))
        return DecodeStep(*self._take_copies(), entries, rows, quiet)

    def note_prefilled(self, step: PrefillStep) -> None:
        """Notes a finished prefill. A request that was cancelled meanwhile has no part of the cache any more."""
        for running in (*step.attached_before, *step.attached_after):
            if running.cached is not None:
                self.cache.attach(running)
        for planned in step.pieces:
            planned.target.filled = planned.piece.span.stop
            self.cache.settle(planned.target)
            if isinstance(planned.target, Prefix):
                self.cache.prefixes.note_filled(planned.target)

    def note_decoded(self, running: RunningRequest) -> None:
        """Notes that a request got tokens, of which all but the last are in the cache."""
        self._unready = None
        cached = _cached(running)
        cached.filled = len(running) - 1
        self.cache.cover(running)

    def _give_blocks(self) -> None:
        """Gives requests in slots blocks for the next dispatch, in admission order; preempts the youngest if short."""
        for running in self.table.admitted():
            while self.table.has_slot(running) and not self._has_blocks(running):
                youngest = self.table.youngest()
                _require(self.table.taken > 1, youngest)
                self.cache.retract(youngest)
                self.table.return_to_queue(youngest)
                self._on_preempt(youngest)

    def _has_blocks(self, running: RunningRequest) -> bool:
        if running.cached is None:
            return self.cache.place(running, at_any_cost=True)
        return not _is_ready(running) or self.cache.grow(running)

    def _find_unready(self) -> list[RunningRequest]:
        """Lists unready requests that were in slots before; a ready request stays ready until it decodes."""
        if self._unready is None:
            return [running for running in self.table.admitted() if not _is_ready(running)]
        return [running for running in self._unready if self.table.has_slot(running) and not _is_ready(running)]

    def _admit(self, only_begun: bool) -> list[RunningRequest]:
        admitted: list[RunningRequest] = []
        while (running := self.table.next_waiting(only_begun=only_begun)) is not None:
            if not self.cache.place(running, at_any_cost=not self.table.taken):
                _require(self.table.taken > 0, running)
                break
            self.table.enter(running)
            admitted.append(running)
        return admitted

    def _plan_prefill(self, unready: Sequence[RunningRequest]) -> PrefillStep:
        """Plans a prefill for unready requests. Ready ones have nothing to compute, and their prefill was logged."""
        planned: dict[Prefix | CachedSequence, tuple[RunningRequest, PlannedPiece]] = {}  # by target
        spans: list[Span] = []
        is_full, before = False, []  # `is_full`: no bucket holds the planned pieces, so plan no more
        for running in unready:
            cached = _cached(running)
            if not cached.is_attached and (cached.prefix is None or cached.prefix.is_complete):
                before.append(running)
            target = None if is_full else _prefill_target(running)
            if target is not None and target not in planned:
                planned[target] = running, self._next_piece(running, target)
                spans.append(planned[target][1].piece.span)
                is_full = self._backend.prefill_bucket(spans) is None
        chosen, bucket = self._fill_bucket(list(planned.values()))
        drivers = {running.request_id for running, _ in chosen}
        for _, one in chosen:
            self.cache.hold(one.target, *one.piece.span)
        pieces = tuple(piece for _, piece in chosen)
        completed = [
            one.target
            for one in pieces
            if isinstance(one.target, Prefix) and one.piece.span.stop == len(one.target.tokens)
        ]
        after = [one for one in unready if not _cached(one).is_attached and _cached(one).prefix in completed]
        targets = [one.target for one in pieces]
        for running in (*before, *after):
            if (cached := _cached(running)) not in targets:
                prompt = len(running.request.prompt_tokens) - 1
                self.cache.hold(cached, prompt, prompt)
        named = tuple(
            running.request_id for running in unready if running.request_id in drivers or not _cached(running).is_logged
        )
        for running in unready:
            _cached(running).is_logged = True
        pieces, found = tuple(map(self._find_places, pieces)), _take_found(unready)
        return PrefillStep(*self._take_copies(), named, bucket, pieces, found, tuple(before), tuple(after))

    def _take_copies(self) -> tuple[Copies, Copies, Copies]:
        """Returns the copies of blocks, of parts and of states with which a step begins."""
        cache = self.cache
        return tuple(cache.take_copies()), tuple(cache.windows.take_copies()), tuple(cache.states.take_copies())

    def _find_places(self, planned: PlannedPiece) -> PlannedPiece:
        piece, target = planned.piece, planned.target
        parts = self.cache.windows.table(target.need, len(piece.blocks))
        return dataclasses.replace(planned, piece=dataclasses.replace(piece, parts=parts, state=target.state or 0))

    def _decode_row(self, running: RunningRequest) -> DecodeRow:
        request, cached, blocks = running.request, _cached(running), _cached(running).blocks
        tokens = running.tokens if request.sampling.penalizes else ()
        parts = self.cache.windows.table(cached.need, len(blocks))
        return DecodeRow(
            request, running.last_token, len(running) - 1, running.limit, blocks, tokens, parts, cached.state or 0
        )

    def _next_piece(self, running: RunningRequest, target: Prefix | CachedSequence) -> PlannedPiece:
        if isinstance(target, Prefix):
            tokens, start = target.tokens, target.filled
            blocks = [*target.whole, *(() if target.tail is None else (target.tail,))]
        else:
            start = target.filled if target.is_attached else len(running.request.prompt_tokens) - 1
            tokens, blocks = running.tokens[:-1], target.blocks
        piece = PrefillPiece(tokens[start : start + self._backend.largest_piece], start, blocks)
        return PlannedPiece(target, piece, running.has_begun)

    def _fill_bucket(
        self, planned: Sequence[tuple[RunningRequest, PlannedPiece]]
    ) -> tuple[Sequence[tuple[RunningRequest, PlannedPiece]], PrefillBucket]:
        """Returns the first pieces, as many as fill a bucket well, and the bucket."""
        if not planned:
            return (), NO_PREFILL
        spans: list[Span] = [one.piece.span for _, one in planned]
        best: tuple[float, int, PrefillBucket] | None = None
        for count in range(self._count_held(spans), 0, -1):
            bucket = self._backend.prefill_bucket(spans[:count])
            if bucket is None:
                raise RuntimeError(f'no prefill bucket holds {spans[0]}')
            share = sum(span.stop - span.start for span in spans[:count]) / bucket.tokens
            if best is None or share > best[0]:
                best = share, count, bucket
            if share >= _FULL:
                break
        assert best is not None
        return planned[: best[1]], best[2]

    def _count_held(self, spans: Sequence[Span]) -> int:
        """Returns how many of the first spans one bucket holds, at least 1."""
        low, high = 1, len(spans)
        while low < high:
            middle = -(-(low + high) // 2)
            if self._backend.prefill_bucket(spans[:middle]) is None:
                high = middle - 1
            else:
                low = middle
        return low


def _require(has_company: bool, running: RunningRequest) -> None:
    """Raises RuntimeError if the request is alone: by the size of the cache, a single one always fits."""
    if not has_company:
        raise RuntimeError(f'request {running.request_id} does not fit the KV cache, and nothing else is in it')


def _cached(running: RunningRequest) -> CachedSequence:
    assert running.cached is not None
    return running.cached


def _is_ready(running: RunningRequest) -> bool:
    cached = running.cached
    return cached is not None and cached.is_attached and cached.filled == len(running) - 1


def _take_found(unready: Sequence[RunningRequest]) -> tuple[int, int]:
    """Returns PrefillStep.found for prefixes not reported yet, and marks them as reported.

    A prefix counts for the first request with it, by whether that has tokens.
    """
    found = [0, 0]
    for running in unready:
        if (prefix := _cached(running).prefix) is not None:
            found[running.has_begun] += prefix.found
            prefix.found = 0
    return found[0], found[1]


def _prefill_target(running: RunningRequest) -> Prefix | CachedSequence | None:
    """Returns the prefix or sequence to compute next for the request; None = nothing, or nothing yet."""
    cached = _cached(running)
    if cached.prefix is not None and not cached.prefix.is_complete:
        return cached.prefix
    filled = cached.filled if cached.is_attached else len(running.request.prompt_tokens) - 1
    return cached if filled < len(running) - 1 else None
