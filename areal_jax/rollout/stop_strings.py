"""Stop strings: which token of an answer completes the first of them. Texts exist on the host only; stream.py asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from areal_jax.text.decoding import TextStart, TokenBytes


class StopSearch:
    """Looks for the first of some strings in the text of an answer that grows.

    Of several strings that one token completes, it is the one that begins first, then the one named first. The work is
    in proportion to the new tokens and the longest string, not to the answer. Bytes are compared: those of a string
    are found in the bytes of the tokens exactly where the text has the string, because no character of UTF-8 begins
    inside of another one.

    Args:
      strings: none is empty. U+FFFD in one is that character, not a broken one; half of a surrogate pair is in no text.
    """

    def __init__(self, strings: Sequence[str], token_bytes: TokenBytes):
        self._strings = [(string.encode(), string) for string in strings if _has_bytes(string)]
        self._longest = max((len(content) for content, _ in self._strings), default=1)
        self._start = TextStart(token_bytes)
        self._tail = b''  # of the text so far: what a string may begin with

    def pass_over(self, tokens: Iterable[int]) -> None:
        """The next tokens of the answer, in which no string ends it."""
        self._keep(self._tail + b''.join(self._start.spell(tokens)))

    def find(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """(how many of the next tokens belong to the answer, the string that the last one of these completes)."""
        for count, added in enumerate(self._start.spell(tokens), start=1):
            passed = len(self._tail)
            content = self._tail + added
            string = self._first_match(content, passed)
            if string is not None:
                return count, string
            self._keep(content)
        return None

    def _keep(self, content: bytes) -> None:
        self._tail = content[max(0, len(content) - self._longest + 1) :]

    def _first_match(self, content: bytes, passed: int) -> str | None:
        """The string that begins first among those that end behind `passed` bytes."""
        found = [
            (at, index)
            for index, (one, _) in enumerate(self._strings)
            if (at := content.find(one, max(0, passed - len(one) + 1))) >= 0
        ]
        return self._strings[min(found)[1]][1] if found else None


def _has_bytes(string: str) -> bool:
    return not any('\ud800' <= character <= '\udfff' for character in string)
