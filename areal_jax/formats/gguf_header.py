"""The header of a GGUF file: its fields, and where its tensors are. `gguf` reads models with it.

The reader of the package `gguf` makes several numpy arrays for every token of the vocabulary, which takes seconds.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import pathlib
import struct
from collections.abc import Mapping

_SCALARS = {0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?', 10: 'Q', 11: 'q', 12: 'd'}
_TEXT, _ARRAY = 8, 9  # type numbers of the format's key-value section, as in _SCALARS
_LENGTH = struct.Struct('<Q')
_LONGEST = 1 << 32  # of an array: more is a damaged file
_ALIGNMENT = 32  # bytes; the default of the format


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file, before it is read."""

    shape: tuple[int, ...]  # first axis first
    kind: int  # number of the type that its values are stored in
    start: int  # byte of the file

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Scalars, texts and lists of them by name; tensors by name, in the order of the file."""

    fields: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]


def read_gguf_header(path: pathlib.Path) -> GgufHeader:
    """The header of a GGUF file; reads no tensor.

    Raises ValueError or EOFError for a file that is not GGUF of version 2 or 3 or is cut short; OSError.
    """
    with path.open('rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:4] != b'GGUF':
            raise ValueError('it does not begin with GGUF')
        try:
            return _Reader(content).header()
        except struct.error as error:
            raise EOFError('the file ends inside its header') from error
        except RecursionError as error:
            raise ValueError('its arrays are nested without end') from error


class _Reader:
    """Reads one value after the other; struct.error where the content ends."""

    def __init__(self, content: mmap.mmap):
        self._content, self._place = content, 4  # after the magic

    def header(self) -> GgufHeader:
        version, n_tensors, n_fields = self._numbers('<IQQ')
        if version not in (2, 3):
            raise ValueError(f'version {version} of the format is not known')
        fields: dict[str, object] = {}
        for _ in range(n_fields):
            name = self._text()
            _require_new(name, fields)
            fields[name] = self._value(*self._numbers('<I'))
        relative: dict[str, StoredTensor] = {}
        for _ in range(n_tensors):
            name = self._text()
            _require_new(name, relative)
            (n_axes,) = self._numbers('<I')
            if n_axes > 8:
                raise ValueError(f'tensor {name} has {n_axes} axes')
            shape = self._numbers(f'<{n_axes}Q')[::-1]  # a file lists the last axis first
            relative[name] = StoredTensor(shape, *self._numbers('<IQ'))
        alignment = fields.get('general.alignment', _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f'general.alignment={alignment!r} must be an integer of at least 1')
        data = -(-self._place // alignment) * alignment
        return GgufHeader(fields, {n: dataclasses.replace(t, start=data + t.start) for n, t in relative.items()})

    def _value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self._numbers(f'<{_SCALARS[kind]}')[0]
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f'type {kind} of a field is not known')
        element, length = self._numbers('<IQ')
        if length > _LONGEST:
            raise ValueError(f'an array of {length} entries')
        if element in _SCALARS:
            return list(self._numbers(f'<{length}{_SCALARS[element]}'))
        return [self._text() if element == _TEXT else self._value(element) for _ in range(length)]

    def _text(self) -> str:
        start = self._place + _LENGTH.size
        self._place = start + _LENGTH.unpack_from(self._content, self._place)[0]
        if self._place > len(self._content):
            raise EOFError('the file ends inside its header')
        return self._content[start : self._place].decode()

    def _numbers(self, form: str) -> tuple:
        found = struct.unpack_from(form, self._content, self._place)
        self._place += struct.calcsize(form)
        return found


def _require_new(name: str, found: Mapping[str, object]) -> None:
    if name in found:
        raise ValueError(f'it has {name} twice')
