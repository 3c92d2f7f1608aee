"""The text of an answer while it grows: whole characters only, and without the stop that ended it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from areal_jax.rollout.http.wire.exchange import Finish
from areal_jax.text.decoding import TextDecoder, TokenBytes
from areal_jax.types import concatenate


class AnswerText:
    """Turns the tokens of one answer into the text that they add.

    Text that may be the beginning of a stop string, or is one, is held back until it is clear that the answer goes on
    behind it. The work is in proportion to the new tokens, not to the answer.

    Args:
      decoder: of this answer, from its beginning.
      keep_stop: the stop string, or the text of the stop token, stays.
    """

    def __init__(self, decoder: TextDecoder, stop_strings: Sequence[str] = (), keep_stop: bool = False):
        self._decoder, self._stops, self._keep_stop = decoder, stop_strings, keep_stop
        self._held = ''  # text that may be the beginning of a stop string

    def extend(self, tokens: np.ndarray, finish: Finish | None = None) -> str:
        """The text that the tokens add; those that end the answer come with its end."""
        if finish is None:
            self._held += self._decoder.extend(tokens)
            clear = len(self._held) - self._suspicious()
            given, self._held = self._held[:clear], self._held[clear:]
            return given
        if isinstance(finish.matched, int) and not self._keep_stop:
            tokens = tokens[:-1]
        before = self._held + self._decoder.extend(tokens[:-1])
        given = before + self._decoder.extend(tokens[-1:], is_last=True)
        if isinstance(finish.matched, str):
            # it ends behind what came before, or with it where the end comes alone
            begin = given.find(finish.matched, max(0, len(before) - len(finish.matched) + min(1, len(tokens))))
            kept = len(finish.matched) if self._keep_stop else 0
            given = given if begin < 0 else given[: begin + kept]
        self._held = ''
        return given

    def _suspicious(self) -> int:
        """Characters at the end of the held text that a stop string may begin with, or is."""
        longest = max(map(len, self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


def cut_stop(
    tokens: np.ndarray,
    finish: Finish,
    keep_stop: bool,
    token_bytes: TokenBytes,
    encode: Callable[[str], np.ndarray],
) -> np.ndarray:
    """The ids of a whole answer without the stop that ended it, and without what its last token has behind a string.

    Where a stop string begins inside of a token, the text before it in this token is encoded again.

    Args:
      keep_stop: the stop stays.
    """
    if isinstance(finish.matched, int) and not keep_stop:
        return tokens[:-1]
    if not isinstance(finish.matched, str) or not len(tokens):
        return tokens
    parts, stop = token_bytes.spell_all(tokens.tolist()), finish.matched.encode()
    content = b''.join(parts)
    begin = content.find(stop, max(0, len(content) - len(parts[-1]) - len(stop) + 1))
    if begin < 0:
        return tokens
    end = begin + (len(stop) if keep_stop else 0)
    bounds = np.cumsum([0, *map(len, parts)])
    whole = max(i for i, at in enumerate(bounds.tolist()) if at == end or (at < end and _begins(content, at)))
    kept = token_bytes.read(content[bounds[whole] : end])
    return concatenate([tokens[:whole], *([encode(kept)] if kept else [])], np.int32)


def _begins(content: bytes, place: int) -> bool:
    """Whether no character is cut in two there."""
    return content[place] & 0xC0 != 0x80
