"""How many values and how much text the body of a request may have: parsing it costs by both, and so does the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from areal_jax.rollout.http.wire.exchange import RequestError
from areal_jax.rollout.http.wire.request_fields import MOST_PROMPTS, parse_json

MOST_VALUES = 1 << 16  # of a body besides token ids: schemas, messages, calls of tools; more than any context shows
_BEGINNINGS = b'[', b'{', b','  # of a value: in the bytes of JSON there are no others, but in texts
_SLICE = 1 << 20  # bytes that are searched at once
_IDS = ('input_ids', 'token_ids', 'prompt', 'tokens')  # fields with token ids, or lists of them
_TOO_LARGE = 413
_LEAST_TEXT = 1 << 20  # characters
_SLACK = 4  # texts may have more than their tokens spell: normalizers and templates leave out some
Result = TypeVar('Result')


@dataclasses.dataclass(frozen=True)
class BodyBound:
    """What the bodies of legal requests stay below, by the context of the model and by its vocabulary.

    Args:
      context_tokens: a prompt has at most so many.
      in_token: of `[`, `{` and `,`, the most that one token of the vocabulary spells: texts have them too.
      longest_token: in characters.
    """

    context_tokens: int
    in_token: int
    longest_token: int

    @classmethod
    def of(cls, context_tokens: int, vocabulary: Collection[str]) -> BodyBound:
        """Of a model with these tokens."""
        in_token = max((sum(map(text.count, '[{,')) for text in vocabulary), default=1)
        return cls(context_tokens, max(1, in_token), max(map(len, vocabulary), default=1))

    def most_values(self, prompts: int) -> int:
        """Beginnings of values in the bytes of a body of a route that takes so many prompts."""
        return MOST_VALUES + prompts * self.context_tokens * self.in_token

    def most_text(self, prompts: int) -> int:
        """Characters in all texts of a body; a route that takes no prompt has no such bound."""
        return max(_LEAST_TEXT, _SLACK * prompts * self.context_tokens * self.longest_token) if prompts else 2**63

    def count(self, content: bytes | bytearray, prompts: int) -> Iterator[None]:
        """Counts beginnings of values before anything parses the bytes, and yields between slices.

        A bound that the bytes can not reach costs nothing. Raises RequestError.
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
        """Raises RequestError for a prompt that no context has room for, before it is encoded."""
        if len(prompt) > (most := self.most_text(1)):
            raise RequestError(
                field, f'{field} of {len(prompt)} characters does not fit the context of {self.context_tokens} tokens, '
                f'for which {most} are the most: shorten it',
            )  # fmt: skip


def parse_large(
    function: Callable[[object], Result], bound: BodyBound, most_text: int, content: bytes | bytearray
) -> Result:
    """What the function makes of the JSON of a body.

    Raises RequestError for one of more than MOST_VALUES values besides token ids, or of more text than `most_text`.
    """
    value = parse_json(bytes(content))
    found = count_values(value)
    if found > (most := max(MOST_VALUES, bound.context_tokens)):
        raise _too_much(f'{found} values besides token ids', most, bound.context_tokens)
    if (length := count_characters(value)) > most_text:
        raise _too_much(f'{length} characters of text', most_text, bound.context_tokens)
    return function(value)


def count_characters(value: object) -> int:
    """Of all texts and names in JSON, but for lists of token ids."""
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
    """Of JSON, those inside objects and lists; a prompt of token ids counts as one."""
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
    """A value of a field of ids, without the ids, of which arrays are made."""
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
