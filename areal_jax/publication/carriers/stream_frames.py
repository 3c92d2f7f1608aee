"""The frames by which records of weights travel over a socket.

    prefix    magic (4), kind (1), zeros (3), version (8), leaf (4), bytes (4), offset in the leaf (8),
              crc32 of the prefix before it and of the payload (4)
    payload   HELLO, NEXT, ACKNOWLEDGE: a JSON object; HEADER: the header of a record; PART: bytes of a part;
              DONE, NOTED: nothing; REFUSED: a sentence

Numbers are in network order. The crc finds accidents; who may connect is decided before the first frame.
"""

from __future__ import annotations

import enum
import json
import reprlib
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from areal_jax.files import decode_json
from areal_jax.publication.record import Held, Part
from areal_jax.publication.versions import PublicationError

FRAME_BYTES = 1 << 20  # of a part in one frame; the sender computes the crc of one while the reader checks another
_MOST_BYTES = 64 << 20  # of any payload; a header has about 100 bytes a leaf
_LEAVES, _BYTES, _VERSIONS = range(1 << 32), range(1 << 64), range(-(1 << 63), 1 << 63)  # what a prefix can say
_MAGIC = b'ajw1'
_FIELDS = struct.Struct('!4sB3xqIIQ')
_CRC = struct.Struct('!I')
PREFIX_BYTES = _FIELDS.size + _CRC.size


class FrameError(PublicationError):
    """Bytes that are no frame, or not the next one; the connection cannot be used any more."""


class Kind(enum.IntEnum):
    HELLO = 1  # reader: who it is, and what it has acknowledged
    NEXT = 2  # reader: asks for the record after what it knows, on the way to a version
    HEADER = 3  # sender: a record begins, or goes on at leaf and offset
    PART = 4  # sender
    DONE = 5  # sender: nothing is missing
    ACKNOWLEDGE = 6  # reader: holds a version
    NOTED = 7  # sender: has heard that
    REFUSED = 8  # sender: why it gives no record


class Prefix(NamedTuple):
    """Everything of a frame but its payload."""

    kind: Kind
    version: int = 0
    leaf: int = 0
    offset: int = 0
    n_bytes: int = 0
    crc: int = 0


class Piece(NamedTuple):
    """Bytes of a part that go in one frame."""

    leaf: int
    offset: int
    n_bytes: int


def encode_prefix(kind: Kind, payload: Part = b'', version: int = 0, leaf: int = 0, offset: int = 0) -> bytes:
    """What precedes the payload of a frame on the wire."""
    fields = _FIELDS.pack(_MAGIC, kind, version, leaf, len(payload), offset)
    return fields + _CRC.pack(zlib.crc32(payload, zlib.crc32(fields)))


def decode_prefix(content: Part) -> Prefix:
    """Raises FrameError for bytes that no frame begins with; `require_payload` checks the crc."""
    magic, kind, version, leaf, n_bytes, offset = _FIELDS.unpack_from(content)
    if magic != _MAGIC:
        raise FrameError(f'a frame of weights begins with {magic!r}: the other end speaks another protocol')
    try:
        kind = Kind(kind)
    except ValueError:
        raise FrameError(f'a frame of weights has the kind {kind}, which this version does not know') from None
    if n_bytes > _MOST_BYTES:
        raise FrameError(f'a frame of weights has {n_bytes} bytes, and {_MOST_BYTES} is the most')
    return Prefix(kind, version, leaf, offset, n_bytes, _CRC.unpack_from(content, _FIELDS.size)[0])


def require_payload(content: Part, payload: Part) -> None:
    """Raises FrameError where prefix and payload are not as they were sent."""
    if zlib.crc32(payload, zlib.crc32(content[: _FIELDS.size])) != _CRC.unpack_from(content, _FIELDS.size)[0]:
        raise FrameError('a frame of weights was changed on its way (its crc32 differs)')


def cut_pieces(sizes: Sequence[int], leaf: int = 0, offset: int = 0) -> Iterator[Piece]:
    """The frames of a record's parts in order, from a place on."""
    for index in range(leaf, len(sizes)):
        start = offset if index == leaf else 0
        for at in range(start, sizes[index], FRAME_BYTES):
            yield Piece(index, at, min(FRAME_BYTES, sizes[index] - at))


class Hello(NamedTuple):
    """What a reader says of itself."""

    name: str
    held: Held | None


class Request(NamedTuple):
    """What a reader asks for."""

    version: int
    known: Held | None  # that it holds, or has consumed on the way
    partial: Held | None = None  # the record of which it has the bytes before `leaf` and `offset`
    leaf: int = 0
    offset: int = 0


def encode_hello(hello: Hello) -> bytes:
    return json.dumps({'name': hello.name, 'held': hello.held and list(_pair(hello.held))}).encode()


def decode_hello(payload: Part) -> Hello:
    """Raises FrameError for anything else."""
    found = _read_object(payload)
    name = found.get('name')
    if not isinstance(name, str) or not name or not name.isprintable():
        raise FrameError(f'a reader of weights has the name {name!r}')
    return Hello(name, _read_held(found.get('held')))


def encode_request(request: Request) -> bytes:
    pairs = {key: held and list(_pair(held)) for key, held in (('known', request.known), ('partial', request.partial))}
    return json.dumps({'version': request.version, **pairs, 'leaf': request.leaf, 'offset': request.offset}).encode()


def decode_request(payload: Part) -> Request:
    """Raises FrameError for anything else."""
    found = _read_object(payload)
    version, leaf, offset = (_read_number(found, key) for key in ('version', 'leaf', 'offset'))
    if version not in _VERSIONS or leaf not in _LEAVES or offset not in _BYTES:
        raise FrameError(
            f'a reader of weights asks for version {_shorten(version)}, the bytes from leaf {_shorten(leaf)}, offset '
            f'{_shorten(offset)} on'
        )
    return Request(version, _read_held(found.get('known')), _read_held(found.get('partial')), leaf, offset)


def encode_held(held: Held) -> bytes:
    return json.dumps(_pair(held)).encode()


def decode_held(payload: Part) -> Held:
    """Raises FrameError for anything else."""
    try:
        held = _read_held(decode_json(bytes(payload)))
    except ValueError as error:
        raise FrameError(f'a reader of weights sent no JSON ({error})') from error
    if held is None:
        raise FrameError('a reader of weights acknowledged nothing')
    return held


def _pair(held: Held) -> tuple[int, str]:
    return held.version, held.manifest_hash


def _read_object(payload: Part) -> Mapping[str, object]:
    try:
        found = decode_json(bytes(payload))
    except ValueError as error:
        raise FrameError(f'a reader of weights sent no JSON ({error})') from error
    if not isinstance(found, dict):
        raise FrameError(f'a reader of weights sent a {type(found).__name__}')
    return found


def _read_number(found: Mapping[str, object], key: str) -> int:
    value = found.get(key)
    if type(value) is not int:
        raise FrameError(f'a reader of weights asks with {key}={_shorten(value)}')
    return value


def _read_held(found: object) -> Held | None:
    if found is None:
        return None
    if isinstance(found, list) and [type(value) for value in found] == [int, str]:
        version, digest = found
        if version in _VERSIONS and digest.isascii():
            return Held(version, digest)
    raise FrameError(f'a reader of weights names the version {_shorten(found)}')


def _shorten(value: object) -> str:
    """A part of what the other end has sent, however deep or long it is."""
    return reprlib.repr(value)
