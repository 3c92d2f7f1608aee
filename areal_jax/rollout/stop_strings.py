"""Stop strings: which token of an answer completes the first of them. Texts exist on the host only; stream.py asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

DecodeText = Callable[[np.ndarray], str]  # text of consecutive tokens, int32 [n]
_UNFINISHED = '\N{REPLACEMENT CHARACTER}'  # what a part of a character decodes to
_MARGIN = 8  # characters at the start of a text that may change when more tokens precede it


def find_stop(answer: np.ndarray, examined: int, strings: Sequence[str], decode: DecodeText) -> tuple[int, str] | None:
    """(tokens of the answer up to the one that completes a string, the string); None where none is completed.

    A string counts if its last character comes behind the first `examined` tokens. Of several that one token completes,
    it is the one that begins first, then the one named first. The work is in proportion to the new tokens and the
    longest string, not to the answer.

    Args:
      answer: int32 [n], all tokens so far.
      strings: none is empty.
    """
    if examined >= len(answer):
        return None
    longest = max(map(len, strings))
    start = _window_start(answer, examined, longest + _MARGIN, decode)
    passed = len(_text(answer[start:examined], decode))
    if _first_match(_text(answer[start:], decode), passed, strings) is None:
        return None
    for end in range(examined + 1, len(answer) + 1):
        string = _first_match(_text(answer[start:end], decode), passed, strings)
        if string is not None:
            return end, string
    raise AssertionError('the whole text has a match, so a part has one')


def _window_start(answer: np.ndarray, examined: int, characters: int, decode: DecodeText) -> int:
    """First of the last tokens before `examined` whose text has so many characters, or 0."""
    tokens = characters
    while tokens < examined:
        if len(_text(answer[examined - tokens : examined], decode)) >= characters:
            return examined - tokens
        tokens *= 2
    return 0


def _text(tokens: np.ndarray, decode: DecodeText) -> str:
    return decode(tokens).rstrip(_UNFINISHED) if len(tokens) else ''


def _first_match(text: str, passed: int, strings: Sequence[str]) -> str | None:
    """The string that begins first among those that end behind `passed` characters."""
    found = [(at, i) for i, one in enumerate(strings) if (at := text.find(one, max(0, passed - len(one) + 1))) >= 0]
    return strings[min(found)[1]] if found else None
