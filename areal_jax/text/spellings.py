"""Keeps spellings of special tokens in messages and tools ordinary text: only a chat template writes special tokens."""

from __future__ import annotations

import functools
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from areal_jax.text.bpe import naming
from areal_jax.text.chat_template import TokenizerError

if TYPE_CHECKING:
    import tokenizers

_Value = TypeVar('_Value')
_SLICE = 1 << 18  # characters that are searched at once
_PRIVATE = range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)  # code points without a meaning


class Spellings:
    """The spellings of a tokenizer's special tokens; thread-safe.

    `mark` puts a mark before each spelling in the texts of a request, before they are rendered. In the rendered text,
    the spellings without a mark are then the template's. `separate` gives these names that no request can guess,
    removes the marks, and returns a tokenizer whose special tokens have only these names. So a prompt is encoded in one
    piece, and a request without a spelling has the ids that `bpe` gives.

    Args:
      bpe: the tokenizer.
      special_ids: ids of the tokens that no text of a request may become.
      source: of the tokenizer, for errors.
    """

    def __init__(self, bpe: tokenizers.Tokenizer, special_ids: frozenset[int], source: str):
        self._bpe, self._source = bpe, source
        added = {token.content: index for index, token in sorted(bpe.get_added_tokens_decoder().items())}
        nonce = secrets.token_hex(16)
        self._names = {text: f'<{nonce}:{index}>' for text, index in added.items() if index in special_ids}
        self._longest = max(map(len, self._names), default=0)
        self._beginnings = {text[:length] for text in self._names for length in range(1, len(text))}
        self._first = re.compile(f'[{re.escape("".join({text[0] for text in self._names}))}]') if self._names else None
        self._start = re.compile(f'(?={_any_of(self._names)})')
        self._token = _any_of(added)

    def mark(self, value: _Value, template: str) -> tuple[_Value, str]:
        """Returns (the JSON value with a mark before each spelling in its texts and names, the mark or '').

        A text that ends within a spelling is marked too: the next one may complete it. The mark occurs neither in the
        texts nor in the source of the template.

        Raises TokenizerError if the texts leave no character for the mark, and for values that are nested too deep.
        """
        texts = list(_list_texts(value))
        if not any(self._find(text) for text in texts):
            return value, ''
        used = set(template).union(*texts)
        mark = next((chr(code) for code in itertools.chain(*_PRIVATE) if chr(code) not in used), None)
        if mark is None:
            raise TokenizerError('the messages spell a special token and use every private character: leave out one')
        try:
            marked = _map_texts(value, lambda text: _insert(mark, text, self._find(text)))
        except RecursionError as error:
            raise TokenizerError('the messages or tools are nested too deep: leave out some levels') from error
        return cast(_Value, marked), mark

    def separate(self, texts: Sequence[str], mark: str) -> tuple[tokenizers.Tokenizer, list[str]]:
        """Returns (the tokenizer for the rendered texts, the texts for it)."""
        pattern = re.compile(f'(?<!{mark}){self._token}')
        renamed = [pattern.sub(lambda found: self._names.get(found[0], found[0]), text) for text in texts]
        return self._renamed, [text.replace(mark, '') for text in renamed]

    @functools.cached_property
    def _renamed(self) -> tokenizers.Tokenizer:
        """The tokenizer with other names for its special tokens, also in its vocabulary: no text becomes one."""
        from tokenizers import Tokenizer

        described = json.loads(self._bpe.to_str())
        described['post_processor'] = None  # it adds special tokens by their names on request
        for token in described['added_tokens']:
            token['content'] = self._names.get(token['content'], token['content'])
        model = described['model']
        if isinstance(model['vocab'], dict):
            model['vocab'] = {self._names.get(text, text): index for text, index in model['vocab'].items()}
        else:  # Unigram: [text, score]
            model['vocab'] = [[self._names.get(text, text), score] for text, score in model['vocab']]
        if model.get('unk_token'):
            model['unk_token'] = self._names.get(model['unk_token'], model['unk_token'])
        with naming(f'{self._source}: the special tokens of this vocabulary cannot be told from text'):
            renamed = Tokenizer.from_str(json.dumps(described))
            for text, name in self._names.items():
                if renamed.token_to_id(name) != self._bpe.token_to_id(text):
                    raise ValueError(f'{text!r} would have another id')
        return renamed

    def _find(self, text: str) -> list[int]:
        """Lists the places where a spelling begins, also one that the end of the text cuts off."""
        if self._first is None:
            return []
        whole: set[int] = set()
        for start in range(0, len(text), _SLICE):  # a search holds the GIL to its end
            end = start + _SLICE
            if self._first.search(text, start, end):
                found = self._start.finditer(text, start, end + self._longest)
                whole.update(place for place in (one.start() for one in found) if place < end)
        tail = range(max(0, len(text) - self._longest + 1), len(text))
        return sorted(whole | {place for place in tail if text[place:] in self._beginnings})


def _any_of(texts: Sequence[str] | dict[str, int] | dict[str, str]) -> str:
    """A pattern for the longest of the texts that begins somewhere, as the library tokenizers finds added tokens."""
    return f'(?:{"|".join(map(re.escape, sorted(texts, key=len, reverse=True)))})'


def _insert(mark: str, text: str, places: Sequence[int]) -> str:
    ends = [*places, len(text)]
    return text[: ends[0]] + ''.join(mark + text[start:end] for start, end in itertools.pairwise(ends))


def _list_texts(value: object) -> Iterator[str]:
    """Yields every text and every name in the JSON value."""
    unread = [value]
    while unread:
        value = unread.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            unread += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            unread += value


def _map_texts(value: object, change: Callable[[str], str]) -> object:
    """A copy of the JSON value in which every text and every name has gone through `change`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_texts(name, change): _map_texts(entry, change) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(entry, change) for entry in value]
    return value
