"""What the two children of a check say to each other: a frame is its length in 4 bytes and JSON.

The child with the tests sends {id, args, keywords}. The child with the answer replies {id} and one of `result`,
`raised` (the name of a builtin exception, its text, a label), `unusable` (why the result cannot cross) or `failed` (a
label and a reason: no call of it can work); and `args`, where the call changed its arguments. Values are those of
plain_values.
"""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING

from areal_jax.tasks.code.pair_protocol import MOST_BYTES
from areal_jax.tasks.scoring.score_call import shorten_reason
from areal_jax.workers.sandbox.fork_hooks import run_hooks

if TYPE_CHECKING:
    from areal_jax.files import JsonObject

_LENGTH_BYTES = 4
_READ_BYTES = 2**16
_ROOM_BYTES = 2**20  # beside a value
_REFUSED = (errno.EPERM, errno.EACCES, errno.EROFS)  # by the sandbox; bubblewrap has files read-only


class LinkEndedError(Exception):
    """The other child has ended, or closed the link."""


class FrameError(Exception):
    """The other child sent something that is no frame."""


def read_given(descriptor: int) -> JsonObject:
    """What a child is to run, from where it was handed over, to which it is the last reader."""
    text = b''.join(iter(lambda: os.read(descriptor, _READ_BYTES), b''))
    os.close(descriptor)
    run_hooks(text)
    given: JsonObject = json.loads(text)
    return given


def send_frame(link: int, message: JsonObject) -> None:
    """Raises LinkEndedError."""
    body = json.dumps(message).encode()
    data = memoryview(len(body).to_bytes(_LENGTH_BYTES, 'big') + body)
    try:
        while data:
            data = data[os.write(link, data) :]
    except OSError as error:
        raise LinkEndedError from error


def receive_frame(link: int) -> JsonObject:
    """Raises LinkEndedError and FrameError."""
    length = int.from_bytes(_read(link, _LENGTH_BYTES), 'big')
    if length > MOST_BYTES + _ROOM_BYTES:
        raise FrameError(f'an answer of {length} bytes, of at most {MOST_BYTES}')
    try:
        found = json.loads(_read(link, length))
    except (ValueError, RecursionError) as error:
        raise FrameError(f'a reply that is not JSON: {type(error).__name__}') from error
    if type(found) is not dict:
        raise FrameError('a reply that is no object')
    return found


def read_reason(said: object) -> str:
    """What the child with the answer says of a failure, as a line that a log can hold. Raises FrameError."""
    if type(said) is not str:
        raise FrameError('a reason that is no text')
    return shorten_reason(said)


def _read(link: int, length: int) -> bytes:
    parts = []
    while length:
        try:
            part = os.read(link, min(length, _READ_BYTES))
        except OSError as error:
            raise LinkEndedError from error
        if not part:
            raise LinkEndedError
        parts.append(part)
        length -= len(part)
    return b''.join(parts)


def label_error(error: BaseException) -> str:
    """What an exception of the tested code comes to."""
    if isinstance(error, MemoryError):
        return 'memory_limit'
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return 'forbidden'
    return 'exception'
