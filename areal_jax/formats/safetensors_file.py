"""The safetensors format: files of named tensors, read by rows and written tensor by tensor.

`hf_directory` reads and `hf_export` writes them. A file is the length of the header (8 bytes, little endian), a JSON
header {name: {dtype, shape, data_offsets}}, and the tensors one after the other. The safetensors package is not used:
its errors do not name the tensor of a wrong size, rows that it maps end the process (SIGBUS) if the file becomes
shorter, its other way of reading takes the whole tensor for each slice, and its writer needs all tensors in memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.errors import UserError

DTYPES = {'F32': np.dtype(np.float32), 'BF16': np.dtype(jnp.bfloat16), 'F16': np.dtype(np.float16)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BITS = {  # of one element, for every dtype of the format: offsets are checked even if a dtype cannot be read
    'F4': 4, 'F6_E2M3': 6, 'F6_E3M2': 6, 'F8_E4M3': 8, 'F8_E5M2': 8, 'F8_E8M0': 8, 'F8_E4M3FNUZ': 8, 'F8_E5M2FNUZ': 8,
    'BOOL': 8, 'U8': 8, 'I8': 8, 'U16': 16, 'I16': 16, 'F16': 16, 'BF16': 16, 'U32': 32, 'I32': 32, 'F32': 32,
    'U64': 64, 'I64': 64, 'F64': 64, 'C64': 64,
}  # fmt: skip
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100 << 20  # the format's own bound
_ALIGNMENT = 8  # bytes: where the first tensor may start
_MOST_BYTES = 1 << 63  # no size of a file, an axis or an offset is as large


class SafetensorsError(UserError, ValueError):
    """A file that is not a safetensors file, is damaged, or is only a part of one; the message names it."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file; its values are not in memory."""

    path: pathlib.Path
    name: str
    stored_as: str  # the format's name of the dtype, which need not be one of DTYPES
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BITS.get(self.stored_as, 0) // 8

    def read_rows(self, first: int, end: int) -> np.ndarray:
        """[end - first, ...] along the first axis; raises SafetensorsError for a dtype that is not one of DTYPES."""
        dtype, row = self._dtype(), math.prod(self.shape[1:])
        size = (end - first) * row * dtype.itemsize
        content = np.fromfile(self.path, np.uint8, size, offset=self.offset + first * row * dtype.itemsize)
        if len(content) < size:
            raise SafetensorsError(f'{self.path} became shorter while {self.name} was read')
        return content.view(dtype).reshape(end - first, *self.shape[1:])

    def map(self) -> np.ndarray:
        """The tensor as an array over the file, read when it is used; raises SafetensorsError as `read_rows`."""
        return np.memmap(self.path, self._dtype(), 'r', self.offset, self.shape)

    def _dtype(self) -> np.dtype:
        if self.stored_as not in DTYPES:
            raise SafetensorsError(
                f'{self.path}: {self.name} has dtype {self.stored_as}; only {", ".join(DTYPES)} are supported'
            )
        return DTYPES[self.stored_as]


def list_tensors(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Every tensor of the file by name.

    Raises SafetensorsError for a file that is cut short and for a header that cannot be read. Also if the header's
    offsets leave a gap or an overlap, end before or after the file does, or contradict a dtype and shape.
    """
    if not path.is_file():
        raise SafetensorsError(f'{path} is no regular file')
    size = path.stat().st_size
    with path.open('rb') as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), 'little')
        start = _LENGTH_BYTES + length
        if start > size:
            raise SafetensorsError(
                f'{path} is no safetensors file, or cut short: {size} bytes, its header needs {start}'
            )
        if length > _MOST_HEADER_BYTES:
            raise SafetensorsError(f'{path} is no safetensors file: its header would have {length} bytes')
        content = file.read(length)
    try:
        header: dict[str, dict[str, object]] = json.loads(content)
        header.pop('__metadata__', None)
        entries = {name: (entry['dtype'], entry['shape'], entry['data_offsets']) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SafetensorsError(f'{path} is no safetensors file: its header cannot be read ({error!r})') from error
    found = {name: _checked(path, name, *entry) for name, entry in entries.items()}
    end = start + _require_tiling(path, {name: offsets for name, (_, _, offsets) in found.items()})
    if end > size:
        raise SafetensorsError(f'{path} is cut short: it has {size} bytes, its tensors end at {end}')
    if end < size:
        raise SafetensorsError(f'{path} is damaged: it has {size} bytes, but its tensors end at {end}')
    return {
        name: StoredTensor(path, name, dtype, tuple(shape), start + offsets[0])
        for name, (dtype, shape, offsets) in found.items()
    }


def _checked(
    path: pathlib.Path, name: str, dtype: object, shape: object, offsets: object
) -> tuple[str, list[int], list[int]]:
    """A header's entry, after a check that its offsets fit its dtype and shape."""
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise SafetensorsError(f'{path}: {name} has dtype {reprlib.repr(dtype)}, which is none of the format')
    if not _are_sizes(shape):
        raise SafetensorsError(
            f'{path} is damaged: {name} has shape {reprlib.repr(shape)}; it must list integers of at least 0'
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise SafetensorsError(
            f'{path} is damaged: {name} has data_offsets {reprlib.repr(offsets)}; they must be two integers of at '
            'least 0, the first not above the second'
        )
    bits, extent = math.prod(shape) * _BITS[dtype], offsets[1] - offsets[0]
    if bits >= 8 * _MOST_BYTES:
        raise SafetensorsError(f'{path} is damaged: {name} has shape {reprlib.repr(shape)}, more than a file can have')
    if bits != 8 * extent:
        raise SafetensorsError(
            f'{path} is damaged: {name} lies in {extent} bytes (data_offsets {offsets}), but {dtype} of shape {shape} '
            f'takes {bits / 8 if bits % 8 else bits // 8}'
        )
    return dtype, shape, offsets


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _MOST_BYTES for value in values)


def _require_tiling(path: pathlib.Path, offsets: Mapping[str, Sequence[int]]) -> int:
    """Checks that the tensors follow each other from byte 0 without gap or overlap; returns the end of the last."""
    end, place = 0, 'where the data begins'
    for name, (first, own_end) in sorted(offsets.items(), key=lambda item: tuple(item[1])):
        if first != end:
            raise SafetensorsError(
                f'{path} is damaged: {name} begins at byte {first} of the data, not at byte {end}, {place}'
            )
        end, place = own_end, f'where {name} ends'
    return end


def write_tensors(
    path: pathlib.Path, tensors: Mapping[str, jax.ShapeDtypeStruct], read: Callable[[str], np.ndarray]
) -> None:
    """Writes the tensors in their order; `read(name)` is called just before each, so one at a time is in memory.

    Raises OSError, and SafetensorsError for a dtype that is not one of DTYPES.
    """
    header: dict[str, dict[str, object]] = {'__metadata__': {'format': 'pt'}}  # transformers requires it
    offset = 0
    for name, tensor in tensors.items():
        dtype = np.dtype(tensor.dtype)
        if dtype not in _NAMES:
            raise SafetensorsError(f'{name} has dtype {dtype}; only {", ".join(map(str, _NAMES))} can be written')
        end = offset + math.prod(tensor.shape) * dtype.itemsize
        header[name] = {'dtype': _NAMES[dtype], 'shape': list(tensor.shape), 'data_offsets': [offset, end]}
        offset = end
    content = json.dumps(header).encode()
    content += b' ' * (-len(content) % _ALIGNMENT)
    with path.open('wb') as file:
        file.write(len(content).to_bytes(_LENGTH_BYTES, 'little') + content)
        for name in tensors:
            file.write(np.ascontiguousarray(read(name)).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


# The file of a value head, next to the weights that it reads or in their directory `critic`.


FILE = 'value_head.safetensors'
DIRECTORY = 'critic'  # of an export: serving programs read every *.safetensors file next to config.json

ValueHead = dict[str, np.ndarray]  # {'weight': float32 [d], 'bias': float32 []}


class ValueHeadError(SafetensorsError):
    """A file without a value head of this width; the message names it and the fix."""


def write_value_head(directory: pathlib.Path, head: ValueHead) -> None:
    """Writes the file into a directory, which is created if missing; raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / f'{FILE}.part'
    shapes = {name: jax.ShapeDtypeStruct(values.shape, np.float32) for name, values in head.items()}
    write_tensors(unfinished, shapes, lambda name: np.asarray(head[name], np.float32))
    os.replace(unfinished, directory / FILE)


def read_value_head(directory: pathlib.Path, width: int) -> ValueHead | None:
    """The head of a model in `directory`, or of its `critic`; None if there is no such file.

    Raises ValueHeadError for a head of another width, or with NaN or infinity, and SafetensorsError for a damaged file.
    """
    path = next((p for p in (directory / FILE, directory / DIRECTORY / FILE) if p.is_file()), None)
    if path is None:
        return None
    found = list_tensors(path)
    shapes = {name: tensor.shape for name, tensor in found.items()}
    if shapes != (wanted := {'weight': (width,), 'bias': ()}):
        raise ValueHeadError(f'{path} holds {shapes}, and the value head of this model is {wanted}: remove the file')
    head = {name: tensor.map().astype(np.float32).reshape(wanted[name]) for name, tensor in found.items()}
    if not all(np.isfinite(values).all() for values in head.values()):
        raise ValueHeadError(f'{path} holds NaN or infinity: remove the file, and the head begins at 0')
    return head
