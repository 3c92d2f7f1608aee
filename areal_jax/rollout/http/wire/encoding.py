"""JSON and server-sent events as text: bounded where it comes from others, in quick pieces where it is ours."""

from __future__ import annotations

import json
from collections.abc import Iterator

from areal_jax.errors import show
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import ReplyError, RequestError

LARGEST_VERSION = 2**63 - 1  # of weights, in a text
MOST_PROMPTS = 4096  # of one request, and entries of other lists
MOST_LEVELS = 128  # of JSON that goes to the model or comes from it
_LONGEST_NAME = 80  # characters of a field's name that a sentence repeats: clients choose the names of unknown fields
_ENTRIES, _FEW = 256, 2048  # list entries in one piece, and values in a small one
_PREFIX = 'data: '
_LAST = f'{_PREFIX}[DONE]'
DONE = f'{_LAST}\n\n'.encode()  # ends every stream


def refuse(field: str, value: object, fix: str) -> RequestError:
    """Returns the error for a value that is not served, to be raised."""
    if len(field) > _LONGEST_NAME:
        field = f'{field[:_LONGEST_NAME]}...'
    return RequestError(field, f'{field}={show(value)} {fix}')


def parse_json(content: bytes) -> object:
    """Decodes the JSON body of a request; raises RequestError if it is no JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8, and very deep nesting
        reason = str(error).splitlines()[0] if isinstance(error, ValueError) else 'it is nested too deep'
        raise RequestError('body', f'body must be JSON: {reason}') from error


def load_json(content: str | bytes) -> object:
    """Decodes a server's JSON; raises ReplyError for anything else."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and nesting without end
        raise ReplyError(f'the server sent no JSON but {show(content[:100])}: send the request again') from error


def count_levels(value: object) -> int:
    """Counts the nested levels of objects and lists."""
    levels, layer = 0, [value]
    while layer := [one for one in layer if isinstance(one, dict | list)]:
        levels += 1
        layer = [part for one in layer for part in (one.values() if isinstance(one, dict) else one)]
    return levels


def read_integer(text: str, most: int) -> int | None:
    """Reads a text of ASCII digits as a number; None for any other text, and for a number above `most`.

    Use it for all numbers in text from HTTP: int() raises ValueError for thousands of digits.
    """
    digits = text.lstrip('0')
    if not (text.isascii() and text.isdigit()) or len(digits) > len(str(most)):
        return None
    number = int(digits or '0')
    return number if number <= most else None


def frame(event: JsonObject) -> bytes:
    """Renders one event as bytes."""
    return frame_text(write_json(event))


def frame_named(event: JsonObject) -> bytes:
    """Renders one event with its type as the event's name."""
    return f'event: {event["type"]}\n'.encode() + frame(event)


def frame_text(event: str) -> bytes:
    """Renders one event that is JSON already."""
    return f'{_PREFIX}{event}\n\n'.encode()


def write_json(value: object) -> str:
    return json.dumps(value, separators=(',', ':'), allow_nan=False)


def write_slowly(value: object) -> Iterator[str]:
    """Yields `json.dumps(value)` in quick pieces, because the library holds the interpreter for a whole value."""
    if _is_small(value):
        yield json.dumps(value)
    elif isinstance(value, dict):
        for index, (name, inner) in enumerate(value.items()):
            yield f'{", " if index else "{"}{json.dumps(name)}: '
            yield from write_slowly(inner)
        yield '}'
    else:
        assert isinstance(value, list)
        for start in range(0, len(value), _ENTRIES):
            part = value[start : start + _ENTRIES]
            if _is_small(part):
                yield f'{", " if start else "["}{json.dumps(part)[1:-1]}'
                continue
            for index, inner in enumerate(part, start):
                yield ', ' if index else '['
                yield from write_slowly(inner)
        yield ']'


def _is_small(value: object) -> bool:
    """Whether the value has at most _FEW values inside, at any depth."""
    layer, found = [value], 0
    while layer := [one for one in layer if isinstance(one, list | dict)]:
        found += sum(map(len, layer))
        if found > _FEW:
            return False
        layer = [part for one in layer for part in (one.values() if isinstance(one, dict) else one)]
    return True


def parse_event(line: str) -> JsonObject | None:
    """Parses the event in one line of a response; None for [DONE] and for lines without an event."""
    if not line.startswith(_PREFIX) or line.strip() == _LAST:
        return None
    event = load_json(line.removeprefix(_PREFIX))
    if not isinstance(event, dict):
        raise ReplyError(f'the server sent an event that is no JSON object: {line[:80]!r}')
    return event
