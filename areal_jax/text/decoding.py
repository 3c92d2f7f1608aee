"""Converts tokens to text, at once or as they arrive: the bytes of each token, and the characters of complete bytes."""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from areal_jax.files import JsonObject

if TYPE_CHECKING:
    import tokenizers

Spell = Callable[[int], bytes | None]  # the bytes of a token; None for an id that is no token

_ANCHOR = 'a'  # an ordinary token, after or before which another one is decoded
_BYTE = re.compile('<0x([0-9A-Fa-f]{2})>')  # how a byte-fallback vocabulary names a byte
_REPLACEMENT = '\N{REPLACEMENT CHARACTER}'
_ESCAPES = dict.fromkeys(range(0xDC80, 0xDD00), _REPLACEMENT)  # the characters that surrogateescape makes of bytes


class TokenBytes:
    """The bytes that each token of a vocabulary adds to a text; the bytes of a character may be in several tokens.

    Args:
      spell: the bytes of a token that follows others.
      spell_first: the bytes of the first token of a text; None = as `spell`.
      stripped: prefixes that are removed from a text, in this order, as far as it has them: (b' ',) for Llama 2.
      each_byte: whether each byte that is no character becomes a U+FFFD; else each longest part of a character does, as
        Unicode recommends and byte-level vocabularies do.
    """

    def __init__(
        self, spell: Spell, spell_first: Spell | None = None, stripped: Sequence[bytes] = (), each_byte: bool = False
    ):
        self.behind = functools.cache(spell)
        self.first = self.behind if spell_first is None else functools.cache(spell_first)
        self.stripped, self.each_byte = tuple(stripped), each_byte

    def spell_all(self, tokens: Iterable[int]) -> list[bytes]:
        """The bytes of consecutive tokens, of which the first one begins a text."""
        return TextStart(self).spell(tokens)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of consecutive tokens, of which the first one begins it."""
        return self.read(b''.join(self.spell_all(tokens)))

    def split(self, tokens: Iterable[int]) -> list[str]:
        """The characters that each of consecutive tokens completes; joined they are the text that `decode` gives.

        A character whose bytes are in several tokens is in the entry of the last one. What the text lacks to complete a
        character is in the entry of the last token.
        """
        spelled = self.spell_all(tokens)
        reader = codecs.getincrementaldecoder('utf-8')('surrogateescape' if self.each_byte else 'replace')
        last = len(spelled) - 1
        parts = [reader.decode(content, index == last) for index, content in enumerate(spelled)]
        return [part.translate(_ESCAPES) for part in parts] if self.each_byte else parts

    def text_of(self, token: int) -> str:
        """The text of a token that follows others, for lists of tokens."""
        return self.read(self.behind(token) or b'')

    def name(self, tokens: Iterable[int]) -> dict[str, str]:
        """The texts of tokens by their ids, without tokens that have no text: JSON-able."""
        return {str(token): text for token in tokens if (text := self.text_of(token))}

    def read(self, content: bytes) -> str:
        """The characters in these bytes."""
        if not self.each_byte:
            return content.decode('utf-8', 'replace')
        return content.decode('utf-8', 'surrogateescape').translate(_ESCAPES)


class TextStart:
    """Spells the tokens of one text in their order: at its start, some are written differently."""

    def __init__(self, token_bytes: TokenBytes):
        self._bytes = token_bytes
        self._stripped = list(token_bytes.stripped)
        self._is_past = False  # later tokens no longer depend on the start
        self._has_first = False

    def spell(self, tokens: Iterable[int]) -> list[bytes]:
        """Returns the bytes of the next tokens; b'' for an id that is no token."""
        unread, found = iter(tokens), []
        while not self._is_past and (token := next(unread, None)) is not None:
            found.append(self._spell_early(token))
        behind = self._bytes.behind
        return [*found, *(behind(token) or b'' for token in unread)]

    def pass_over(self) -> None:
        """Marks the start of the text as passed."""
        self._is_past = True

    def _spell_early(self, token: int) -> bytes:
        content = (self._bytes.behind if self._has_first else self._bytes.first)(token)
        if content is None:
            return b''
        self._has_first = True
        while content and self._stripped:
            if not content.startswith(self._stripped[0]):
                self._stripped.clear()
                break
            content = content[len(self._stripped.pop(0)) :]
        self._is_past = not self._stripped
        return content


class TextDecoder:
    """Turns the tokens of one text, from its beginning, into the characters that they complete.

    However the tokens are cut into pieces, the pieces of text add up to the whole. The work is in proportion to the
    new tokens.

    Args:
      hidden: tokens that are skipped, as if they were not there.
      ends: tokens that are left out if one of them is the last of the text.
      marks: characters that replace some tokens, whatever `hidden` says.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        hidden: Collection[int] = frozenset(),
        ends: Collection[int] = (),
        marks: Mapping[int, str] | None = None,
    ):
        self._hidden, self._ends, self._marks = hidden, ends, marks or {}
        self._start, self._each_byte = TextStart(token_bytes), token_bytes.each_byte
        make = codecs.getincrementaldecoder('utf-8')
        self._characters = make('surrogateescape' if self._each_byte else 'replace')
        self._held: list[int] = []  # an end token, left out if it is the last token

    def extend(self, tokens: Iterable[int] | np.ndarray, *, is_last: bool = False) -> str:
        """The characters that the tokens complete; a character that is never completed comes with the last ones."""
        ids = [*self._held, *(tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)]
        self._held = []
        if ids and ids[-1] in self._ends:
            self._held = [ids.pop()]
        parts = []
        for is_mark, run in itertools.groupby(ids, self._marks.__contains__):
            write = self._write_marks if is_mark else self._write
            parts.append(write(run))
        if is_last:
            parts.append(self._read(b'', True))
        return ''.join(parts)

    def _write(self, tokens: Iterable[int]) -> str:
        hidden = self._hidden
        return self._read(b''.join(self._start.spell([token for token in tokens if token not in hidden])), False)

    def _write_marks(self, tokens: Iterable[int]) -> str:
        self._start.pass_over()
        return self._read(b'', True) + ''.join([self._marks[token] for token in tokens])

    def _read(self, content: bytes, is_last: bool) -> str:
        text = self._characters.decode(content, is_last)
        return text.translate(_ESCAPES) if self._each_byte else text


def read_token_bytes(tokenizer: tokenizers.Tokenizer) -> TokenBytes:
    """Returns the TokenBytes of a library tokenizer; tokens that encode a text have the text of its decoder.

    Byte-level vocabularies have the library's text for any ids. If a vocabulary has tokens for single bytes, the
    library writes U+FFFD for a whole run of them if one byte is wrong; here the complete characters of a run stay text.
    A decoder that looks at more than a token and the start of the text (CTC; the last token of BPEDecoder) is asked for
    each token alone.
    """
    steps = _list_steps(tokenizer)
    kinds = [step['type'] for step in steps]
    fused = kinds.index('Fuse') if 'Fuse' in kinds else len(kinds)
    at_start = [step for step in steps[fused:] if step['type'] == 'Strip']
    stripped = [step['content'].encode() for step in at_start for _ in range(step['start'])]
    write = _Writer(tokenizer, [step for index, step in enumerate(steps) if _is_local(step, index > fused)])

    def spell(token: int, is_first: bool = False) -> bytes | None:
        text = tokenizer.id_to_token(token) if token >= 0 else None
        if text is None:
            return None
        if 'ByteFallback' in kinds and (byte := _BYTE.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        text = write(text, is_first)
        return _find_level_bytes(text) if 'ByteLevel' in kinds else text.encode()

    return TokenBytes(spell, functools.partial(spell, is_first=True), stripped, each_byte='ByteFallback' in kinds)


class _Writer:
    """Writes one token, after others or at the start of a text, by the steps of a decoder that treat tokens alone.

    Args:
      steps: as the library describes them; [] = no such step. Without any decoder, tokens are joined with blanks.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, steps: Sequence[JsonObject]):
        from tokenizers import decoders

        self._joins, self._decoder = tokenizer.decoder is None, None
        if steps:
            self._decoder = decoders.Fuse()
            self._decoder.__setstate__(json.dumps({'type': 'Sequence', 'decoders': list(steps)}).encode())
            both, one = (self._decoder.decode([_ANCHOR] * count) for count in (2, 1))
            self._before, self._after = len(one), len(both) - len(one)

    def __call__(self, token: str, is_first: bool) -> str:
        if self._joins:
            return token if is_first else f' {token}'
        if self._decoder is None:
            return token
        around = ([] if is_first else [_ANCHOR], [_ANCHOR])
        text = self._decoder.decode([*around[0], token, *around[1]])
        return text[0 if is_first else self._before : len(text) - self._after]


def _list_steps(tokenizer: tokenizers.Tokenizer) -> list[JsonObject]:
    """Lists the steps of its decoder, as JSON describes them; [] without a decoder."""
    if tokenizer.decoder is None:
        return []
    unread, found = [json.loads(tokenizer.decoder.__getstate__())], []
    while unread:
        step = unread.pop(0)
        if step['type'] == 'Sequence':
            unread[:0] = step['decoders']
        else:
            found.append(step)
    return found


def _is_local(step: JsonObject, is_fused: bool) -> bool:
    """Whether a step changes each token independently."""
    kind = step['type']
    return kind not in ('ByteLevel', 'ByteFallback', 'Fuse') and not (kind == 'Strip' and is_fused)


def _find_level_bytes(text: str) -> bytes:
    """The bytes of a byte-level token; a token with a character that stands for no byte is text."""
    alphabet = _byte_alphabet()
    return bytes(map(alphabet.__getitem__, text)) if alphabet.keys() >= set(text) else text.encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary (GPT-2): printable Latin-1 as it is, others from U+0100."""
    shown = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}
