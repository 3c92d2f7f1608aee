"""The header of a GGUF file without its arrays: `gguf` reads a model's shape from it in milliseconds."""

from __future__ import annotations

import pathlib
import struct
from typing import BinaryIO

# type numbers of the format's key-value section
_SCALARS = {0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?', 10: 'Q', 11: 'q', 12: 'd'}
_TEXT, _ARRAY = 8, 9
_LONGEST = 1 << 32  # of a text or an array: more is a damaged file


def read_gguf_header(path: pathlib.Path) -> tuple[dict[str, object], dict[str, tuple[int, ...]]]:
    """(scalar fields, shapes of the tensors, first axis first) of a GGUF file; arrays are skipped.

    Raises ValueError or EOFError for a file that is not GGUF of version 2 or 3 or is cut short; OSError.
    """
    with path.open('rb') as file:
        if file.read(4) != b'GGUF':
            raise ValueError('it does not begin with GGUF')
        version, n_tensors, n_fields = _unpack(file, '<IQQ')
        if version not in (2, 3):
            raise ValueError(f'version {version} of the format is not known')
        fields = {}
        for _ in range(n_fields):
            name = _read_text(file)
            fields[name] = _read_value(file, _unpack(file, '<I')[0])
        shapes = {}
        for _ in range(n_tensors):
            name = _read_text(file)
            (n_axes,) = _unpack(file, '<I')
            if n_axes > 8:
                raise ValueError(f'tensor {name} has {n_axes} axes')
            shapes[name] = tuple(reversed(_unpack(file, f'<{n_axes}Q')))  # a file lists the last axis first
            _unpack(file, '<IQ')  # type, offset
        return fields, shapes


def _read_value(file: BinaryIO, kind: int) -> object:
    """A scalar or a text; None for an array, which is skipped."""
    if kind in _SCALARS:
        return _unpack(file, f'<{_SCALARS[kind]}')[0]
    if kind == _TEXT:
        return _read_text(file)
    if kind != _ARRAY:
        raise ValueError(f'type {kind} of a field is not known')
    element, length = _unpack(file, '<IQ')
    if length > _LONGEST:
        raise ValueError(f'an array of {length} entries')
    if element in _SCALARS:
        file.seek(length * struct.calcsize(f'<{_SCALARS[element]}'), 1)
    else:
        for _ in range(length):
            _skip_text(file) if element == _TEXT else _read_value(file, element)
    return None


def _read_text(file: BinaryIO) -> str:
    (length,) = _unpack(file, '<Q')
    return _read(file, length).decode(errors='replace')


def _skip_text(file: BinaryIO) -> None:
    _read(file, _unpack(file, '<Q')[0])


def _unpack(file: BinaryIO, form: str) -> tuple[int, ...]:
    return struct.unpack(form, _read(file, struct.calcsize(form)))


def _read(file: BinaryIO, length: int) -> bytes:
    content = file.read(length) if length <= _LONGEST else b''
    if len(content) != length:
        raise EOFError('the file ends inside its header')
    return content
