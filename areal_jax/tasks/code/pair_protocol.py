"""The messages between the two children of a check: a frame is its length in 4 bytes and JSON.

The child with the tests sends {id, args, keywords}. The child with the answer replies {id} and one of `result`,
`raised` (the name of a builtin exception, its text, a label), `unusable` (why the result cannot be sent) or `failed` (a
label and a reason: no call can work); and `args`, if the call changed its arguments. `encode` writes the values.
"""

from __future__ import annotations

import collections
import decimal
import errno
import fractions
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from areal_jax.errors import name_type
from areal_jax.tasks.scoring.score_call import shorten_reason
from areal_jax.workers.sandbox.fork_hooks import run_hooks

if TYPE_CHECKING:
    from areal_jax.files import JsonObject


MOST_BYTES = 4 * 2**20  # of one text
_DEEPEST = 50
_SMALL = 2**53  # larger ones are hexadecimal, which has no bound on digits


class NotPlainError(ValueError):
    """Raised for a value that cannot be sent; the message describes the value."""


def encode(value: object) -> str:
    """The value as JSON. Raises NotPlainError."""
    text = json.dumps(_to_tree(value, 0))
    if len(text) > MOST_BYTES:
        raise NotPlainError(f'a value of {len(text)} bytes, of at most {MOST_BYTES}')
    return text


def decode(text: str | bytes) -> object:
    """Returns the value given to `encode`. Raises NotPlainError for any other text."""
    if len(text) > MOST_BYTES:
        raise NotPlainError(f'a value of more than {MOST_BYTES} bytes')
    try:
        return _from_tree(json.loads(text), 0)
    except NotPlainError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise NotPlainError(f'no encoded value: {type(error).__name__}') from error


def _to_tree(value: Any, depth: int) -> object:
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and -_SMALL < value < _SMALL):
        return value
    if depth > _DEEPEST:
        raise NotPlainError(f'a value of more than {_DEEPEST} levels')
    if kind is list:
        return [_to_tree(item, depth + 1) for item in value]
    if kind not in _TO_TREE:
        raise NotPlainError(f'a value of type {name_type(kind)}')
    tag, take_apart = _TO_TREE[kind]
    return {tag: take_apart(value, depth + 1)}


def _from_tree(tree: Any, depth: int) -> object:
    if depth > _DEEPEST + 1:
        raise NotPlainError(f'a value of more than {_DEEPEST} levels')
    if type(tree) is list:
        return [_from_tree(item, depth + 1) for item in tree]
    if type(tree) is not dict:
        return tree
    ((tag, content),) = tree.items()
    return _FROM_TREE[tag](content, depth + 1)


def _list_items(value: Any, depth: int) -> list[object]:
    return [_to_tree(item, depth) for item in value]


def _list_pairs(value: Any, depth: int) -> list[object]:
    return [[_to_tree(key, depth), _to_tree(item, depth)] for key, item in value.items()]


def _read_items(content: Any, depth: int) -> list[object]:
    return [_from_tree(item, depth) for item in content]


def _read_pairs(content: Any, depth: int) -> dict[object, object]:
    return {_from_tree(key, depth): _from_tree(item, depth) for key, item in content}


_TO_TREE: dict[type, tuple[str, Callable[[Any, int], object]]] = {
    int: ('int', lambda value, depth: hex(value)),
    tuple: ('tuple', _list_items),
    set: ('set', _list_items),
    frozenset: ('frozenset', _list_items),
    dict: ('dict', _list_pairs),
    collections.defaultdict: ('dict', _list_pairs),
    collections.OrderedDict: ('ordered', _list_pairs),
    collections.Counter: ('counter', _list_pairs),
    collections.deque: ('deque', lambda value, depth: [_list_items(value, depth), value.maxlen]),
    bytes: ('bytes', lambda value, depth: value.hex()),
    bytearray: ('bytearray', lambda value, depth: value.hex()),
    complex: ('complex', lambda value, depth: [value.real, value.imag]),
    range: ('range', lambda value, depth: _list_items((value.start, value.stop, value.step), depth)),
    fractions.Fraction: ('fraction', lambda value, depth: [hex(value.numerator), hex(value.denominator)]),
    decimal.Decimal: ('decimal', lambda value, depth: str(value)),
}
_FROM_TREE: dict[str, Callable[[Any, int], object]] = {
    'int': lambda content, depth: int(content, 16),
    'tuple': lambda content, depth: tuple(_read_items(content, depth)),
    'set': lambda content, depth: set(_read_items(content, depth)),
    'frozenset': lambda content, depth: frozenset(_read_items(content, depth)),
    'dict': _read_pairs,
    'ordered': lambda content, depth: collections.OrderedDict(_read_pairs(content, depth)),
    'counter': lambda content, depth: collections.Counter(_read_pairs(content, depth)),
    'deque': lambda content, depth: collections.deque(_read_items(content[0], depth), content[1]),
    'bytes': lambda content, depth: bytes.fromhex(content),
    'bytearray': lambda content, depth: bytearray.fromhex(content),
    'complex': lambda content, depth: complex(*content),
    'range': lambda content, depth: range(*_read_items(content, depth)),  # type: ignore[call-overload]
    'fraction': lambda content, depth: fractions.Fraction(*(int(part, 16) for part in content)),
    'decimal': lambda content, depth: decimal.Decimal(content),
}


_LENGTH_BYTES = 4
_READ_BYTES = 2**16
_ROOM_BYTES = 2**20  # in addition to a value
_REFUSED = (errno.EPERM, errno.EACCES, errno.EROFS)  # by the sandbox; bubblewrap has files read-only


class LinkEndedError(Exception):
    """Raised if the other child has ended, or closed the link."""


class FrameError(Exception):
    """Raised if the other child sent something that is no frame."""


def read_given(descriptor: int) -> JsonObject:
    """Reads what a child is to run, closes the descriptor, and runs the fork hooks that the code may need."""
    text = b''.join(iter(lambda: os.read(descriptor, _READ_BYTES), b''))
    os.close(descriptor)
    run_hooks(text)
    given: JsonObject = json.loads(text)
    return given


def send_frame(link: int, message: JsonObject) -> None:
    """Sends a frame. Raises LinkEndedError."""
    body = json.dumps(message).encode()
    data = memoryview(len(body).to_bytes(_LENGTH_BYTES, 'big') + body)
    try:
        while data:
            data = data[os.write(link, data) :]
    except OSError as error:
        raise LinkEndedError from error


def receive_frame(link: int) -> JsonObject:
    """Receives a frame. Raises LinkEndedError and FrameError."""
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
    """Reads the reason of a failure from the child with the answer, as one line for a log. Raises FrameError."""
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
    if isinstance(error, MemoryError):
        return 'memory_limit'
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return 'forbidden'
    return 'exception'
