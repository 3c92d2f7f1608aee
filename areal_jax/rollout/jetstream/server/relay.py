"""Connects three kinds of threads: the host's, where answers grow, JetStream's, which take steps, and gRPC's loop.

A step of JetStream contains the deliveries since the last one. The host's loop announces deliveries when it has made
all of a dispatch, so that a dispatch is one step, and JetStream's work per step is done once per dispatch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence

import numpy as np

from areal_jax.errors import UserError
from areal_jax.protocols import Inbox
from areal_jax.rollout.http.service import Action, Delivery, Submission
from areal_jax.rollout.http.wire.answer_reader import AnswerText
from areal_jax.rollout.http.wire.exchange import Answer, Call, Finish, FinishWord
from areal_jax.types import EngineFinish, concatenate

FILLER = -1  # no token has this id


def count_columns(steps: int) -> int:
    """The number of token columns for dispatches of `steps` steps."""
    return steps + 1


def make_data(slots: int, steps: int) -> np.ndarray:
    """Returns int32 [slots, 2 (k + 1) + 1]: tokens, their validity, and a length, for slots without news."""
    columns = count_columns(steps)
    data = np.zeros((slots, 2 * columns + 1), np.int32)
    data[:, :columns], data[:, columns : 2 * columns] = FILLER, 1
    return data


def write_row(data: np.ndarray, slot: int, tokens: np.ndarray, *, ends: bool) -> None:
    """Writes the news of one slot: int32 [n] tokens, n at most the steps, and whether the call ends after them."""
    columns = (data.shape[1] - 1) // 2
    if len(tokens) >= columns:
        raise ValueError(f'slot {slot}: {len(tokens)} tokens in {columns} columns, one of which is spare')
    data[slot, : len(tokens)] = tokens
    if ends:
        data[slot, columns + len(tokens)] = 0


def drop_fillers(token_ids: Sequence[int]) -> list[int]:
    return [token for token in token_ids if token != FILLER]


_FINISH: dict[EngineFinish, FinishWord] = {'stop': 'stop', 'length': 'length', 'cancelled': 'abort'}
_NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass(eq=False)
class OpenCall:
    """A call in JetStream's threads, compared by identity. Until it is over, relay.py changes `answer` under its lock.

    JetStream's Decode reads only `max_tokens` and `session_cache` of a request.
    """

    call: Call
    answer: Answer
    max_tokens: int
    session_cache: str = ''
    text: AnswerText | None = None  # None: the client sent ids, and gets ids
    submission: Submission | None = None  # None: not made yet
    error: UserError | None = None  # why the answer is not complete
    slot: int | None = None  # of JetStream
    is_withdrawn: bool = False  # the client is gone
    is_over: bool = False  # no further tokens follow
    has_left: bool = False  # a step has told JetStream of the end: the slot belongs to other calls
    waiting: np.ndarray = dataclasses.field(default_factory=lambda: _NOTHING)  # int32 [n], for JetStream's next steps
    _passed: int = 0  # tokens whose text was requested

    @property
    def has_news(self) -> bool:
        return self.is_over or len(self.waiting) > 0

    def put(self, delivery: Delivery) -> None:
        answer = self.answer
        if self.is_over:
            return
        if delivery.error is not None:
            self.fail(delivery.error)
            return
        answer.cached_tokens, answer.retractions, answer.began = (
            delivery.cached_tokens,
            delivery.retractions,
            delivery.began,
        )
        for piece in delivery.pieces:
            answer.add(piece)
        self.waiting = concatenate([self.waiting, *(piece.tokens for piece in delivery.pieces)], np.int32)
        if delivery.finish is not None:
            answer.finish = Finish(_FINISH[delivery.finish], delivery.matched)
            answer.version, self.is_over = delivery.version, True

    def fail(self, error: UserError) -> None:
        """Ends the call with this error; earlier tokens are still delivered."""
        if not self.is_over:
            self.error, self.is_over = error, True

    def take(self, most: int) -> tuple[np.ndarray, bool]:
        """Returns (up to `most` next tokens, whether the call ends after them)."""
        taken, self.waiting = self.waiting[:most], self.waiting[most:]
        return taken, self.is_over and not len(self.waiting)

    def extend_text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the next ids for JetStream's reply; '' for a client that gets ids alone."""
        if self.text is None:
            return ''
        self._passed += len(token_ids)
        is_last = self.is_over and self._passed == self.answer.n_tokens
        return self.text.extend(np.array(token_ids, np.int32), self.answer.finish if is_last else None)


class Relay:
    """The open calls by JetStream slot.

    Args:
      inbox: of the service.
      slots: of JetStream: calls that may be under way at once; not the slots of our engine.
      steps: tokens of a slot in one step; further tokens of a dispatch come with the next step.
    """

    def __init__(self, inbox: Inbox, slots: int, steps: int):
        self.slots, self.steps = slots, steps
        self._inbox = inbox
        self._changed = threading.Condition()
        self._by_slot: list[OpenCall | None] = [None] * slots
        self._fresh: dict[OpenCall, None] = {}  # with news, in the order in which they got them
        self._unannounced: list[tuple[OpenCall, Delivery]] = []  # of the host's thread
        self._is_closed = False
        self.steps_taken = 0

    # JetStream's threads.

    def submit(self, call: OpenCall) -> None:
        """Gives the call to the service; ends a call whose client is gone."""
        with self._changed:
            if call.submission is not None and not call.is_withdrawn and not call.is_over:
                self._inbox.put(call.submission)  # under the lock, so that a withdrawal comes after it
            else:
                call.put(Delivery(finish='cancelled'))
                self._note(call)

    def insert(self, call: OpenCall, slot: int) -> None:
        """Makes the call a row of the steps from now on."""
        with self._changed:
            call.slot, self._by_slot[slot] = slot, call
            if call.has_news:
                self._note(call)

    def take_step(self) -> np.ndarray:
        """Waits until there is news; returns the data of the next step (`make_data`)."""
        with self._changed:
            self._changed.wait_for(self._is_due)
            data = make_data(self.slots, self.steps)
            left: dict[OpenCall, None] = {}
            for call in self._fresh:
                if call.slot is None:
                    left[call] = None
                    continue
                tokens, ends = call.take(self.steps)
                write_row(data, call.slot, tokens, ends=ends)
                if ends:
                    self._by_slot[call.slot], call.has_left = None, True
                elif call.has_news:
                    left[call] = None
            self._fresh = left
            self.steps_taken += 1
        return data

    def fail_slots(self, error: UserError) -> np.ndarray:
        """Ends all calls in slots with this error; returns the step's data. The service withdraws the calls."""
        with self._changed:
            data = make_data(self.slots, self.steps)
            failed = [call for call in self._by_slot if call is not None]
            for slot, call in enumerate(self._by_slot):
                if call is not None:
                    call.fail(error)
                    write_row(data, slot, call.waiting[:0], ends=True)
                    call.has_left = True
            self._by_slot = [None] * self.slots
            self._fresh = {call: None for call in self._fresh if call not in failed}
        self._withdraw_from_service(failed)
        return data

    def fail(self, call: OpenCall, error: UserError) -> None:
        with self._changed:
            call.fail(error)
            self._note(call)

    def count_free(self) -> int:
        """The number of slots without a call, according to the steps so far."""
        with self._changed:
            return sum(call is None for call in self._by_slot)

    def end(self, call: OpenCall, error: UserError) -> None:
        """Ends the call with this error, even while its last tokens are being sent; the service withdraws it."""
        with self._changed:
            is_open = not call.is_over
            call.error = call.error or error  # before the service can report that it was cancelled
            call.is_over = True
            self._note(call)
        if is_open:
            self._withdraw_from_service([call])

    # The host's thread.

    def deliver(self, call: OpenCall, delivery: Delivery) -> None:
        """Implements Submission.deliver: the rows of a dispatch come one by one, and are announced together."""
        if not self._unannounced:
            asyncio.get_running_loop().call_soon(self._announce)
        self._unannounced.append((call, delivery))

    def _announce(self) -> None:
        delivered, self._unannounced = self._unannounced, []
        with self._changed:
            for call, delivery in delivered:
                call.put(delivery)
                self._note(call)

    # The loop of gRPC.

    def withdraw(self, call: OpenCall) -> None:
        """Ends the call, wherever it is, because the client is gone."""
        with self._changed:
            call.is_withdrawn = True
            is_open = not call.is_over
        if is_open:
            self._withdraw_from_service([call])

    def close(self) -> None:
        """Wakes waiting steps; from now on no step waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # Under the lock.

    def _note(self, call: OpenCall) -> None:
        if not call.has_left:
            self._fresh[call] = None
            self._changed.notify_all()

    def _is_due(self) -> bool:
        """Whether a step is due: a call without a slot counts only if JetStream has a free one for it."""
        has_room = any(call is None for call in self._by_slot)
        return self._is_closed or any(call.slot is not None or has_room for call in self._fresh)

    def _withdraw_from_service(self, calls: Sequence[OpenCall]) -> None:
        """Withdraws calls from any thread; the service ignores unknown ones."""
        submissions = [call.submission for call in calls if call.submission is not None]
        self._inbox.put(Action('withdraw', lambda service: service.withdraw(submissions), lambda result, error: None))
