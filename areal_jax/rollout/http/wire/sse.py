"""Server-sent events: how pieces of an answer travel in one response."""

from __future__ import annotations

import json
from collections.abc import Iterator

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import ReplyError, load_json

_ENTRIES, _FEW = 256, 2048  # of a list in one piece, and values in it
_PREFIX = 'data: '
_LAST = f'{_PREFIX}[DONE]'
DONE = f'{_LAST}\n\n'.encode()  # ends every stream


def frame(event: JsonObject) -> bytes:
    """One event on the wire."""
    return frame_text(write_json(event))


def frame_named(event: JsonObject) -> bytes:
    """The same with its type as the name of the event."""
    return f'event: {event["type"]}\n'.encode() + frame(event)


def frame_text(event: str) -> bytes:
    """The same for an event that is JSON already."""
    return f'{_PREFIX}{event}\n\n'.encode()


def write_json(value: object) -> str:
    return json.dumps(value, separators=(',', ':'), allow_nan=False)


def write_slowly(value: object) -> Iterator[str]:
    """`json.dumps(value)` in pieces, none of which takes long: the library holds the interpreter for a whole value."""
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
    """Whether it has few values inside, at any depth."""
    layer, found = [value], 0
    while layer := [one for one in layer if isinstance(one, list | dict)]:
        found += sum(map(len, layer))
        if found > _FEW:
            return False
        layer = [part for one in layer for part in (one.values() if isinstance(one, dict) else one)]
    return True


def parse_event(line: str) -> JsonObject | None:
    """The event in one line of a response; None for [DONE] and for lines that carry none."""
    if not line.startswith(_PREFIX) or line.strip() == _LAST:
        return None
    event = load_json(line.removeprefix(_PREFIX))
    if not isinstance(event, dict):
        raise ReplyError(f'the server sent an event that is no JSON object: {line[:80]!r}')
    return event
