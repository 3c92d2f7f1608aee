"""Values as bytes and back: a JSON header, then the raw bytes of the arrays. Nothing but the listed types travels.

    body        length of the header (4 bytes), the header, the arrays; each part begins at a multiple of 8 bytes
    header      {'value': ..., 'arrays': [[dtype, shape, first byte], ...]}

In `value`, null, numbers and strings are themselves and a JSON array is a list. An object has one key, the kind:
dict, tuple, array, scalar, groups (messages.py) or the name of a record. Reading runs no code of the sender and
makes no object of a type that is not listed here. Decoded arrays are views of the body.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from areal_jax.checkpoint.shards import ArrayShape, Piece, StoredArray
from areal_jax.distributed.messages import join_groups, split_groups
from areal_jax.types import TrajectoryGroup

_LENGTH = struct.Struct('!I')
_ALIGNMENT = 8
_UNREADABLE = (
    *(ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError),
    *(SyntaxError, struct.error, MemoryError),  # the first one from numpy, for the text of a dtype
)
_KINDS = 'biuf'  # of numpy dtypes: bool, integers, floats
_SCALARS = (bool, int, float, str)
Body: TypeAlias = bytes | bytearray | mmap.mmap
_Pack = Callable[[Any], tuple[Any, ...]]
_Unpack = Callable[..., Any]


class CodecError(ValueError):
    """A value that cannot be encoded, or bytes that cannot be decoded."""


def _pack_stored(leaf: StoredArray) -> tuple[Any, ...]:
    return (
        leaf.directory,
        leaf.name,
        leaf.shape,
        leaf.dtype.str,
        [tuple(piece) for piece in leaf.pieces],
        leaf.if_damaged,
    )


def _unpack_stored(directory: str, name: str, shape: Any, dtype: str, pieces: Any, if_damaged: str) -> StoredArray:
    return StoredArray(directory, name, tuple(shape), np.dtype(dtype), tuple(Piece(*p) for p in pieces), if_damaged)


# the records that travel: type -> (name, its fields as values, from its fields)
_RECORDS: Mapping[type, tuple[str, _Pack, _Unpack]] = {
    Piece: ('Piece', tuple, Piece),
    ArrayShape: ('ArrayShape', lambda leaf: (leaf.shape, leaf.dtype), ArrayShape),
    StoredArray: ('StoredArray', _pack_stored, _unpack_stored),
}
_UNPACK = {name: unpack for name, _, unpack in _RECORDS.values()}


def encode(value: object) -> bytes:
    """Raises CodecError for a value of a type that does not travel."""
    return b''.join(encode_parts(value))


def encode_parts(value: object) -> list[bytes | memoryview]:
    """The parts of `encode`, of which arrays are not copied."""
    arrays: list[np.ndarray] = []
    described = _describe(value, arrays)
    table, offset = [], 0
    for array in arrays:
        table.append([array.dtype.str, array.shape, offset])
        offset += _padded(array.nbytes)
    header = json.dumps({'value': described, 'arrays': table}, separators=(',', ':')).encode()
    padding = b' ' * (_padded(_LENGTH.size + len(header)) - _LENGTH.size - len(header))
    parts: list[bytes | memoryview] = [_LENGTH.pack(len(header) + len(padding)), header, padding]
    for array in arrays:
        parts += [array.reshape(-1).view(np.uint8).data, bytes(_padded(array.nbytes) - array.nbytes)]
    return parts


def decode(body: Body) -> Any:
    """The value; raises CodecError for anything that `encode` has not made."""
    try:
        (length,) = _LENGTH.unpack_from(body)
        first = _LENGTH.size + length
        header = json.loads(bytes(memoryview(body)[_LENGTH.size : first]))
        arrays = [_read_array(body, first, *described) for described in header['arrays']]
        return _rebuild(header['value'], arrays)
    except _UNREADABLE as error:
        raise CodecError(f'a message cannot be read ({type(error).__name__}: {error})') from error


def _describe(value: Any, arrays: list[np.ndarray]) -> Any:
    if value is None or (isinstance(value, _SCALARS) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return {'array' if isinstance(value, np.ndarray) else 'scalar': _add(np.asarray(value), arrays)}
    if (record := _RECORDS.get(type(value))) is not None:
        name, pack, _ = record
        return {name: [_describe(field, arrays) for field in pack(value)]}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise CodecError(f'a dict with other keys than strings does not travel: {list(value)[:4]}')
        return {'dict': {str(key): _describe(item, arrays) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        is_tuple = isinstance(value, tuple)
        if value and all(isinstance(item, TrajectoryGroup) for item in value):
            return {'groups': [is_tuple, _describe(join_groups(value), arrays)]}
        items = [_describe(item, arrays) for item in value]
        return {'tuple': items} if is_tuple else items
    raise CodecError(f'a {type(value).__name__} does not travel between processes')


def _add(array: np.ndarray, arrays: list[np.ndarray]) -> int:
    if array.dtype.kind not in _KINDS:
        raise CodecError(f'an array of dtype {array.dtype} does not travel between processes')
    arrays.append(np.ascontiguousarray(array).reshape(array.shape))
    return len(arrays) - 1


def _read_array(body: Body, first: int, name: str, shape: Sequence[int], offset: int) -> np.ndarray:
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS:
        raise CodecError(f'an array of dtype {dtype} does not travel between processes')
    if not all(type(size) is int and size >= 0 for size in (*shape, offset)):
        raise CodecError(f'an array of shape {shape} at byte {offset}')
    count = 1
    for size in shape:
        count *= size
    return np.frombuffer(body, dtype, count, first + offset).reshape(shape)


def _rebuild(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_rebuild(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == 'dict':
        return {key: _rebuild(item, arrays) for key, item in content.items()}
    if kind == 'tuple':
        return tuple(_rebuild(item, arrays) for item in content)
    if kind == 'array':
        return arrays[content]
    if kind == 'scalar':
        return arrays[content][()]
    if kind == 'groups':
        groups = split_groups(_rebuild(content[1], arrays))
        return tuple(groups) if content[0] else groups
    return _UNPACK[kind](*(_rebuild(field, arrays) for field in content))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def describe_arrays(tree: Any) -> Any:
    """Nested dicts of arrays with an ArrayShape for each array: what another process knows of them."""
    if isinstance(tree, Mapping):
        return {key: describe_arrays(item) for key, item in tree.items()}
    return ArrayShape(tuple(int(size) for size in tree.shape), str(tree.dtype))
