"""One call on its way through JetStream: it stands there for its content, its prompt and its prefix."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from areal_jax.errors import UserError
from areal_jax.rollout.http.service import Delivery, Submission
from areal_jax.rollout.http.wire.answer_reader import AnswerText
from areal_jax.rollout.http.wire.exchange import Answer, Call, Finish, FinishWord
from areal_jax.types import EngineFinish, concatenate

_FINISH: dict[EngineFinish, FinishWord] = {'stop': 'stop', 'length': 'length', 'cancelled': 'abort'}
_NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass(eq=False)
class OpenCall:
    """Two are never equal. relay.py changes what stands behind `answer`, under its lock, until the call is over.

    `max_tokens` and `session_cache` are what JetStream's Decode reads of a request.
    """

    call: Call
    answer: Answer
    max_tokens: int
    session_cache: str = ''
    text: AnswerText | None = None  # None: the client sent ids, and gets ids
    submission: Submission | None = None  # None: it is not with the service yet
    error: UserError | None = None  # why the answer is not complete
    slot: int | None = None  # of JetStream
    is_withdrawn: bool = False  # the client is gone
    is_over: bool = False  # nothing follows what was delivered
    has_left: bool = False  # a step of JetStream has said so: the slot is that of other calls
    waiting: np.ndarray = dataclasses.field(default_factory=lambda: _NOTHING)  # int32 [n], for JetStream's next steps
    _passed: int = 0  # tokens whose text was asked for

    @property
    def has_news(self) -> bool:
        return self.is_over or len(self.waiting) > 0

    def put(self, delivery: Delivery) -> None:
        """What the service delivers."""
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
        """The call ends with this error; what was generated before it is delivered."""
        if not self.is_over:
            self.error, self.is_over = error, True

    def take(self, most: int) -> tuple[np.ndarray, bool]:
        """(the next tokens, at most so many, whether the call ends behind them)."""
        taken, self.waiting = self.waiting[:most], self.waiting[most:]
        return taken, self.is_over and not len(self.waiting)

    def extend_text(self, token_ids: Sequence[int]) -> str:
        """The text that JetStream's reply has for the next ids, '' for a client that gets ids alone."""
        if self.text is None:
            return ''
        self._passed += len(token_ids)
        is_last = self.is_over and self._passed == self.answer.n_tokens
        return self.text.extend(np.array(token_ids, np.int32), self.answer.finish if is_last else None)
