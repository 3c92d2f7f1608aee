"""Reads which steps an offline file of wandb holds: a killed run loses what wandb has not written yet.

The format is LevelDB's log, after a header of 7 bytes: blocks of 32 KiB with records, in parts.
"""

from __future__ import annotations

import importlib
import pathlib
import struct
from collections.abc import Iterable, Iterator

_HEADER, _BLOCK = 7, 32768
_PART = struct.Struct('<IHB')  # checksum, length, kind
_WHOLE, _FIRST, _LAST = 1, 2, 4  # kinds; 3 is a part between


def last_step_in(paths: Iterable[pathlib.Path]) -> int | None:
    """The highest step in these files, -1 for none; None where this version of wandb does not say."""
    try:
        record = importlib.import_module('wandb.proto.wandb_internal_pb2').Record
        steps = [-1]
        for path in paths:
            for content in read_records(path.read_bytes()):
                found = record.FromString(content)
                if found.WhichOneof('record_type') == 'history':
                    steps.append(found.history.step.num)
        return max(steps)
    except Exception:  # an inner module of wandb, which may change
        return None


def read_records(content: bytes) -> Iterator[bytes]:
    """The whole records of a file; one that was being written is left out."""
    position, parts = _HEADER, b''
    while position + _PART.size <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _PART.size:  # too few for a part: zeros
            position += left
            continue
        _, length, kind = _PART.unpack_from(content, position)
        begin = position + _PART.size
        if not kind or begin + length > len(content):
            return
        parts = (b'' if kind in (_WHOLE, _FIRST) else parts) + content[begin : begin + length]
        position = begin + length
        if kind in (_WHOLE, _LAST):
            yield parts
