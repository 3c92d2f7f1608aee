"""Text of answers, token by token: whole characters, without what may become a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.rollout.http.wire.exchange import CallSampling, Message
from areal_jax.tasks.tokenizer import Tokenizer

_INCOMPLETE = '\ufffd'  # what a tokenizer writes for a part of a character


class Texts:
    """The tokenizer of the served model, as routes need it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_ids = (tokenizer.eos_id,)
        self._hidden = tokenizer.special_token_ids()

    def encode(self, text: str) -> np.ndarray:
        """int32 [n]."""
        return self._tokenizer.encode(text)

    def apply_template(self, messages: Sequence[Message]) -> np.ndarray:
        """int32 [P]; takes about 0.1 s, since templates run in a process of their own."""
        return self._tokenizer.encode_chats([[{'role': m.role, 'content': m.content} for m in messages]])[0]

    def decode(self, tokens: Sequence[int], skip_special: bool) -> str:
        kept = [token for token in tokens if not skip_special or token not in self._hidden]
        return self._tokenizer.decode(np.asarray(kept, np.int32)) if kept else ''

    def token_text(self, token: int) -> str:
        return self._tokenizer.decode(np.asarray([token], np.int32))


class AnswerText:
    """Text of one answer: `add` gives what the tokens complete, `finish` the rest."""

    def __init__(self, texts: Texts, sampling: CallSampling):
        self._texts, self._sampling = texts, sampling
        self._tokens: list[int] = []
        self._start = self._read = (
            0  # tokens [start, read) are in the text; decoded again, since their neighbours count
        )
        self._held = ''  # decoded; may be the begin of a stop string

    def add(self, tokens: np.ndarray) -> str:
        self._tokens += tokens.tolist()
        self._held += self._decode_new(partial=False)
        keep = max((_overlap(self._held, stop) for stop in self._sampling.stop_strings), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def finish(self, tokens: np.ndarray, matched: int | str | None) -> str:
        """`matched` is the stop that ended the answer: a string ends the text."""
        self._tokens += tokens.tolist()
        text = self._held + self._decode_new(partial=True)
        if isinstance(matched, str) and matched in text:
            end = text.index(matched)
            text = text[: end + len(matched)] if self._sampling.keep_stop else text[:end]
        return text

    def _decode_new(self, partial: bool) -> str:
        before = self._decode(self._tokens[self._start : self._read])
        after = self._decode(self._tokens[self._start :])
        if not partial and (after.endswith(_INCOMPLETE) or len(after) <= len(before)):
            return ''
        self._start, self._read = self._read, len(self._tokens)
        return after[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._texts.decode(tokens, self._sampling.skip_special_tokens)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
