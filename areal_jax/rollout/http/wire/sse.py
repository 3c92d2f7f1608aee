"""Server-sent events: how pieces of an answer travel in one response."""

from __future__ import annotations

import json

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import ReplyError
from areal_jax.rollout.http.wire.replies import load_json

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


def parse_event(line: str) -> JsonObject | None:
    """The event in one line of a response; None for [DONE] and for lines that carry none."""
    if not line.startswith(_PREFIX) or line.strip() == _LAST:
        return None
    event = load_json(line.removeprefix(_PREFIX))
    if not isinstance(event, dict):
        raise ReplyError(f'the server sent an event that is no JSON object: {line[:80]!r}')
    return event
