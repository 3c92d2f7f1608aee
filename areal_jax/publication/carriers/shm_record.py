"""A record of weights inside a place of shared memory: a prefix, the header, the parts, each at a multiple of 64 bytes.

prefix      magic (8), version (8), bytes of the header (8), bytes to the next record (8), manifest hash (64),
            crc32 of the header (4), crc32 of what is before (4)
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.publication.record import Held, Record, decode_header
from areal_jax.publication.versions import PublicationError

_PREFIX = struct.Struct('<8sqQQ64sI')
_CRC = struct.Struct('<I')
_PREFIX_BYTES = _PREFIX.size + _CRC.size
_MAGIC = b'ajrecord'
_ALIGN = 64  # bytes of a cache line, and a multiple of every element


class Entry(NamedTuple):
    """Where a record is in a place."""

    held: Held
    header: slice
    header_crc: int
    end: int


def count_bytes(header: bytes, sizes: Sequence[int]) -> int:
    """Bytes that a record takes in a place."""
    return _align(_PREFIX_BYTES) + _align(len(header)) + sum(map(_align, sizes))


def write_record(place: memoryview, start: int, record: Record, header: bytes) -> int:
    """Copies a record to `start`; returns where the next one begins. The copy of the parts does not hold the GIL."""
    total = count_bytes(header, record.header.sizes)
    prefix = _PREFIX.pack(
        *(_MAGIC, record.header.version, len(header), total, record.header.manifest_hash.encode()), zlib.crc32(header)
    )
    place[start : start + _PREFIX_BYTES] = prefix + _CRC.pack(zlib.crc32(prefix))
    at = start + _align(_PREFIX_BYTES)
    place[at : at + len(header)] = header
    at += _align(len(header))
    content = np.frombuffer(place, np.uint8)
    for part, size in zip(record.parts, record.header.sizes, strict=True):
        np.copyto(content[at : at + size], np.frombuffer(part, np.uint8) if size else content[:0])
        at += _align(size)
    return start + total


def read_entries(place: memoryview, n_records: int) -> list[Entry]:
    """The records of the chain in a place; raises PublicationError for bytes that are none."""
    entries, start = list[Entry](), 0
    for _ in range(n_records):
        prefix = bytes(place[start : start + _PREFIX.size])
        crc = bytes(place[start + _PREFIX.size : start + _PREFIX_BYTES])
        if len(crc) < _CRC.size or _CRC.pack(zlib.crc32(prefix)) != crc or not prefix.startswith(_MAGIC):
            raise PublicationError(f'record {len(entries)} of a chain of weights in shared memory is damaged')
        _, version, header_bytes, total, digest, header_crc = _PREFIX.unpack(prefix)
        at = start + _align(_PREFIX_BYTES)
        if at + header_bytes > start + total or start + total > len(place):
            raise PublicationError(f'record {len(entries)} of a chain of weights in shared memory has {total} bytes')
        held = Held(version, digest.rstrip(b'\0').decode(errors='replace'))
        entries.append(Entry(held, slice(at, at + header_bytes), header_crc, start + total))
        start += total
    return entries


def read_record(place: memoryview, entry: Entry) -> Record:
    """A record with views of the place as its parts; raises PublicationError for a damaged header."""
    content = bytes(place[entry.header])
    if zlib.crc32(content) != entry.header_crc:
        raise PublicationError(f'the header of version {entry.held.version} in shared memory is damaged')
    header, parts = decode_header(content), list[memoryview]()
    at = entry.header.start + _align(len(content))
    for size in header.sizes:
        parts.append(place[at : at + size])
        at += _align(size)
    if at != entry.end:
        raise PublicationError(
            f'version {entry.held.version} in shared memory is damaged: its parts end at byte {at}, not {entry.end}'
        )
    return Record(header, parts)


def _align(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
