"""The text of an answer while it grows: whole characters only, and without the stop that ended it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from areal_jax.rollout.http.wire.exchange import Finish
from areal_jax.types import concatenate

_UNFINISHED = '\N{REPLACEMENT CHARACTER}'  # what a part of a character decodes to
_PARTS = 3  # bytes of a character at most, while one is missing
_CONTEXT = 8  # tokens that are decoded again with new ones: some tokens look otherwise at the start of a text
_WINDOW = 64  # tokens, above which the oldest are not decoded again


class AnswerText:
    """Turns the tokens of one answer into the text that they add.

    Text that may be the beginning of a stop string is held back until it is clear that it is not one. The work is in
    proportion to the new tokens, not to the answer.

    Args:
      decode: text of consecutive tokens, int32 [n].
      keep_stop: the stop string, or the text of the stop token, stays.
    """

    def __init__(self, decode: Callable[[np.ndarray], str], stop_strings: Sequence[str] = (), keep_stop: bool = False):
        self._decode, self._stops, self._keep_stop = decode, stop_strings, keep_stop
        self._window = np.zeros(0, np.int32)  # the last tokens of the answer
        self._passed = 0  # characters of the window's text that are given or held back
        self._held = ''  # text that may be the beginning of a stop string

    def extend(self, tokens: np.ndarray, finish: Finish | None = None) -> str:
        """The text that the tokens add; those that end the answer come with its end."""
        if finish is None:
            self._held += self._decode_new(tokens, final=False)
            clear = len(self._held) - self._suspicious()
            given, self._held = self._held[:clear], self._held[clear:]
            return given
        if isinstance(finish.matched, int) and not self._keep_stop:
            tokens = tokens[:-1]
        before = self._held + self._decode_new(tokens[:-1], final=False)
        given = before + self._decode_new(tokens[-1:], final=True)
        if isinstance(finish.matched, str):
            begin = given.find(finish.matched, max(0, len(before) - len(finish.matched) + 1))
            kept = len(finish.matched) if self._keep_stop else 0
            given = given if begin < 0 else given[: begin + kept]
        self._held = ''
        return given

    def _decode_new(self, tokens: np.ndarray, final: bool) -> str:
        if not len(tokens) and not final:
            return ''
        window = np.concatenate([self._window, tokens])
        text = self._text(window)
        end = len(text) if final else _whole(text)
        new = text[self._passed : end]
        self._passed = end
        if len(window) > _WINDOW:
            text_end = len(text) - end
            window = window[-_CONTEXT:]
            self._passed = len(self._text(window)) - text_end
        self._window = window
        return new

    def _text(self, tokens: np.ndarray) -> str:
        return self._decode(tokens) if len(tokens) else ''

    def _suspicious(self) -> int:
        """Characters at the end of the held text that a stop string may begin with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


def cut_stop(
    tokens: np.ndarray,
    finish: Finish,
    keep_stop: bool,
    decode: Callable[[np.ndarray], str],
    encode: Callable[[str], np.ndarray],
) -> np.ndarray:
    """The ids of a whole answer without the stop that ended it, and without what its last token has behind a string.

    Where a stop string begins inside of a token, the text before it in this token is encoded again.

    Args:
      keep_stop: the stop stays.
    """
    if isinstance(finish.matched, int) and not keep_stop:
        return tokens[:-1]
    if not isinstance(finish.matched, str):
        return tokens
    for start in range(len(tokens) - 1, -1, -1):
        text = decode(tokens[start:])
        begin = text.find(finish.matched)
        if begin >= 0 and not text.startswith(_UNFINISHED):
            kept = text[: begin + (len(finish.matched) if keep_stop else 0)]
            return concatenate([tokens[:start], *([encode(kept)] if kept else [])], np.int32)
    return tokens


def _whole(text: str) -> int:
    """Characters of the text, without an end that more tokens may complete."""
    end = len(text)
    while end > len(text) - _PARTS and text[:end].endswith(_UNFINISHED):
        end -= 1
    return end
