"""The row of a reader in the control of a segment: its name, and the version that it has acknowledged last.

bytes of the name (4), name (116), holds it has taken (8), when it acknowledged (8, ns), version (8),
manifest hash (64), crc32 of these (4)
"""

from __future__ import annotations

import dataclasses
import struct
import zlib

from areal_jax.publication.record import Held
from areal_jax.publication.versions import PublicationError

_ROW = struct.Struct('<I116sQqq64s')
_CRC = struct.Struct('<I')
MOST_NAME_BYTES = 116
_NOTHING = -1  # version of a reader that has acknowledged none


@dataclasses.dataclass(frozen=True)
class ReaderRow:
    """What a reader says of itself."""

    name: str
    holds: int = 0  # how often it has begun to read: tells a new hold from one that was ignored
    acknowledged_ns: int = 0  # of the clock that all processes of a host share
    held: Held | None = None

    def __post_init__(self) -> None:
        if len(self.name.encode()) > MOST_NAME_BYTES:
            raise PublicationError(
                f'the name of a reader of weights has {len(self.name.encode())} bytes, {self.name[:20]!r}...: use at '
                f'most {MOST_NAME_BYTES}'
            )

    def write(self, row: memoryview) -> None:
        name, held = self.name.encode(), self.held or Held(_NOTHING, '')
        fields = (len(name), name, self.holds, self.acknowledged_ns, held.version, held.manifest_hash.encode())
        content = _ROW.pack(*fields)
        row[: _ROW.size + _CRC.size] = content + _CRC.pack(zlib.crc32(content))


def read_row(row: memoryview) -> ReaderRow | None:
    """None where nobody has written one, or its writer died or is stopped in the middle."""
    content, crc = bytes(row[: _ROW.size]), bytes(row[_ROW.size : _ROW.size + _CRC.size])
    if _CRC.pack(zlib.crc32(content)) != crc:
        return None
    size, name, holds, when_ns, version, digest = _ROW.unpack(content)
    held = None if version == _NOTHING else Held(version, digest.rstrip(b'\0').decode(errors='replace'))
    return ReaderRow(name[:size].decode(errors='ignore'), holds, when_ns, held) if size else None
