"""Bounds on the values and the text in a request's body: the cost of parsing and of later work grows with both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from areal_jax.rollout.http.wire.encoding import MOST_PROMPTS, parse_json
from areal_jax.rollout.http.wire.exchange import RequestError

MOST_VALUES = 1 << 16  # in a body, without token ids: schemas, messages, tool calls; more than fit any context
_BEGINNINGS = b'[', b'{', b','  # every JSON value follows one of these bytes, which texts contain too
_SLICE = 1 << 20  # bytes that are searched at once
_IDS = ('input_ids', 'token_ids', 'prompt', 'tokens')  # fields with token ids, or lists of them
_TOO_LARGE = 413
_LEAST_TEXT = 1 << 20  # characters
_SLACK = 4  # texts may be longer than their tokens' text: normalizers and templates drop some
Result = TypeVar('Result')


@dataclasses.dataclass(frozen=True)
class BodyBound:
    """Upper bounds on the bodies of legal requests, by the context of the model and by its vocabulary.

    Args:
      context_tokens: the most tokens of a prompt.
      in_token: the most characters `[`, `{` and `,` in one token of the vocabulary, because texts contain them too.
      longest_token: in characters.
    """

    context_tokens: int
    in_token: int
    longest_token: int

    @classmethod
    def of(cls, context_tokens: int, vocabulary: Collection[str]) -> BodyBound:
        """Returns the bound of a model with these tokens."""
        in_token = max((sum(map(text.count, '[{,')) for text in vocabulary), default=1)
        return cls(context_tokens, max(1, in_token), max(map(len, vocabulary), default=1))

    def most_values(self, prompts: int) -> int:
        """The most value beginnings in the bytes of a body, for a route that takes `prompts` prompts."""
        return MOST_VALUES + prompts * self.context_tokens * self.in_token

    def most_text(self, prompts: int) -> int:
        """The most characters in all texts of a body; a route without prompts has no such bound."""
        return max(_LEAST_TEXT, _SLACK * prompts * self.context_tokens * self.longest_token) if prompts else 2**63

    def count(self, content: bytes | bytearray, prompts: int) -> Iterator[None]:
        """Counts beginnings of values before anything parses the bytes, and yields between slices.

        A body shorter than its bound is not searched. Raises RequestError.
        """
        most, found = self.most_values(prompts), 0
        if len(content) <= most:
            return
        for start in range(0, len(content), _SLICE):
            found += sum(content.count(one, start, start + _SLICE) for one in _BEGINNINGS)
            yield
        if found > most:
            raise _too_much(f'{found} values ("[", "{{" and ",")', most, self.context_tokens)

    def require_text(self, prompt: str, field: str) -> None:
        """Raises RequestError for a prompt that is too long for the context, before it is encoded."""
        if len(prompt) > (most := self.most_text(1)):
            raise RequestError(
                field,
                f'{field} of {len(prompt)} characters does not fit the context of {self.context_tokens} tokens, '
                f'for which {most} are the most: shorten it',
            )


def parse_large(
    function: Callable[[object], Result], bound: BodyBound, most_text: int, content: bytes | bytearray
) -> Result:
    """Returns `function` of the parsed JSON of a body.

    Raises RequestError for too many values without token ids (the larger of MOST_VALUES and the context), or for more
    text than `most_text`.
    """
    value = parse_json(bytes(content))
    found = count_values(value)
    if found > (most := max(MOST_VALUES, bound.context_tokens)):
        raise _too_much(f'{found} values besides token ids', most, bound.context_tokens)
    if (length := count_characters(value)) > most_text:
        raise _too_much(f'{length} characters of text', most_text, bound.context_tokens)
    return function(value)


def count_characters(value: object) -> int:
    """Counts the characters of all texts and names in JSON, except in lists of token ids."""
    found, layer = 0, [value]
    while layer:
        found += sum(len(one) for one in layer if isinstance(one, str))
        inside: list[object] = []
        for one in layer:
            if isinstance(one, dict):
                inside += [*one, *one.values()]
            elif isinstance(one, list) and not _are_ids(one):
                inside += one
        layer = inside
    return found


def count_values(value: object) -> int:
    """Counts the values inside objects and lists of JSON; a prompt of token ids counts as one."""
    found, layer = 0, [value]
    if isinstance(value, dict):
        found, layer = len(value), []
        for name, inner in value.items():
            layer += _skip_ids(inner) if name in _IDS else [inner]
    while layer := [one for one in layer if isinstance(one, dict | list)]:
        found += sum(map(len, layer))
        layer = [part for one in layer for part in (one.values() if isinstance(one, dict) else one)]
    return found


def _skip_ids(value: object) -> list[object]:
    """Returns the parts of an id field's value that still count: lists of ids are left out, arrays are made of them."""
    if not isinstance(value, list) or _are_ids(value):
        return []
    return [one for one in value if not _are_ids(one)] if len(value) <= MOST_PROMPTS else [value]


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _too_much(found: str, most: int, context_tokens: int) -> RequestError:
    return RequestError(
        'body', f'the body has {found}, and a request of this route for a context of {context_tokens} tokens has '
        f'{most} at most: send less at once, or flatter schemas', _TOO_LARGE,
    )  # fmt: skip
