"""The file of a delta, `v000007.delta`: it is there whole or not at all, and damage is found before it is used.

prefix   8 bytes 'ARJDELTA', int64 version, int64 version of the base, uint32 bytes of the header, uint32 crc32 of all
         that follows; little-endian
header   the JSON of a RecordHeader
parts    one after the other
"""

from __future__ import annotations

import pathlib
import struct
import zlib

from areal_jax import files
from areal_jax.publication.record import Record, decode_header
from areal_jax.publication.versions import PublicationError

_MAGIC = b'ARJDELTA'
_PREFIX, _FIELDS = struct.Struct('<8sI'), struct.Struct('<qqI')
_START = _PREFIX.size + _FIELDS.size  # of the header
_MOST_BYTES = 1 << 40  # a delta is smaller than its weights
_AGAIN = 'the whole version before it is still valid; publish again, and let nothing else write there'


def write_delta(path: pathlib.Path, record: Record) -> None:
    """Raises PublicationError for lack of space, with both sizes, and for a failed write."""
    header = record.header
    assert header.base is not None
    encoded = header.encode()
    checked = [_FIELDS.pack(header.version, header.base.version, len(encoded)), encoded, *record.parts]
    check = 0
    for piece in checked:
        check = zlib.crc32(piece, check)
    content = b''.join([_PREFIX.pack(_MAGIC, check), *checked])
    if (free := files.free_bytes(path.parent)) < len(content):
        raise PublicationError(
            f'writing {path} failed: {path.parent} has {free} bytes free, and the delta has {len(content)}: make room '
            'or name another publication.directory'
        )
    try:
        files.write_bytes(path, content)
    except OSError as error:
        raise PublicationError(
            f'writing {path} failed ({error}); the disk has {files.free_bytes(path.parent)} bytes free. Make room or '
            'name another publication.directory'
        ) from error


def read_delta(path: pathlib.Path, version: int) -> Record:
    """The record in the file; its parts are views of the content.

    Raises PublicationError for a file that is missing, cut, longer, flipped in any bit, or of another version.
    """
    try:
        content = files.read_regular(path, 'ask for a newer version', _MOST_BYTES)
    except files.FileError as error:
        raise PublicationError(str(error)) from error
    check, found, _, length = _read_prefix(path, content)
    if zlib.crc32(memoryview(content)[_PREFIX.size :]) != check:
        raise PublicationError(f'{path} is cut or changed: its {len(content)} bytes have another checksum; {_AGAIN}')
    header = decode_header(content[_START : _START + length])
    if header.base is None or not header.version == found == version:
        raise PublicationError(f'{path} holds a record of version {header.version}, not version {version}; {_AGAIN}')
    start, parts = _START + length, []
    for size in header.sizes:
        parts.append(memoryview(content)[start : start + size])
        start += size
    if start != len(content):
        raise PublicationError(f'{path} has {len(content)} bytes, and its header says {start}; {_AGAIN}')
    return Record(header, parts)


def read_base(path: pathlib.Path) -> int:
    """The version that the delta in the file is applied to; raises PublicationError for a file of another form."""
    try:
        with path.open('rb') as file:
            return _read_prefix(path, file.read(_START))[2]
    except OSError as error:
        raise PublicationError(f'{path} cannot be read ({error.strerror}); ask for a newer version') from error


def _read_prefix(path: pathlib.Path, content: bytes) -> tuple[int, int, int, int]:
    """(checksum, version, version of the base, bytes of the header)."""
    if len(content) < _START or not content.startswith(_MAGIC):
        raise PublicationError(f'{path} is no delta of weights, or is cut to {len(content)} bytes; {_AGAIN}')
    version, base, length = _FIELDS.unpack_from(content, _PREFIX.size)
    if base >= version:
        raise PublicationError(f'{path} is a delta of version {version} against the later {base}; {_AGAIN}')
    return _PREFIX.unpack_from(content)[1], version, base, length
