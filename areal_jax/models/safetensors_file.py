"""Before the loop and under arrow 8: files of named tensors (the safetensors format), read and written in parts.

A file is 8 bytes, the little-endian length of a JSON header {name: {dtype, shape, data_offsets}}, the header, and the
tensors one after the other. The library of that name gives numpy whole tensors only, and none of bfloat16.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = {'F32': np.dtype(np.float32), 'BF16': np.dtype(jnp.bfloat16), 'F16': np.dtype(np.float16)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_ALIGNMENT = 8  # bytes: where the first tensor may start


class SafetensorsError(ValueError):
    """A file that is no safetensors file or only a part of one; the message names it."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies; nothing of it is in memory."""

    path: pathlib.Path
    name: str
    stored_as: str  # the format's name of the dtype, which need not be one of DTYPES
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    def read_rows(self, first: int, end: int) -> np.ndarray:
        """[end - first, ...] along the first axis; raises SafetensorsError for a dtype that is not one of DTYPES."""
        if self.stored_as not in DTYPES:
            raise SafetensorsError(
                f'{self.path}: {self.name} has dtype {self.stored_as}; only {", ".join(DTYPES)} are supported'
            )
        dtype, row = DTYPES[self.stored_as], math.prod(self.shape[1:])
        size = (end - first) * row * dtype.itemsize
        content = np.fromfile(self.path, np.uint8, size, offset=self.offset + first * row * dtype.itemsize)
        if len(content) < size:
            raise SafetensorsError(f'{self.path} became shorter while {self.name} was read')
        return content.view(dtype).reshape(end - first, *self.shape[1:])


def list_tensors(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Every tensor of the file by name; raises SafetensorsError."""
    size = path.stat().st_size
    with path.open('rb') as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), 'little')
        start = _LENGTH_BYTES + length
        if start > size:
            raise SafetensorsError(
                f'{path} is no safetensors file, or cut short: {size} bytes, its header needs {start}'
            )
        content = file.read(length)
    try:
        header: dict[str, Any] = json.loads(content)
        header.pop('__metadata__', None)
        tensors = {
            name: StoredTensor(path, name, entry['dtype'], tuple(entry['shape']), start + entry['data_offsets'][0])
            for name, entry in header.items()
        }
        end = start + max((entry['data_offsets'][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise SafetensorsError(f'{path} is no safetensors file: its header cannot be read ({error!r})') from error
    if end > size:
        raise SafetensorsError(f'{path} is cut short: it has {size} bytes, its tensors end at {end}')
    return tensors


def write_tensors(
    path: pathlib.Path, tensors: Mapping[str, jax.ShapeDtypeStruct], read: Callable[[str], np.ndarray]
) -> None:
    """Writes the tensors in their order, `read(name)` when its turn comes: one at a time is in memory.

    Raises OSError, and SafetensorsError for a dtype that is not one of DTYPES.
    """
    header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}  # transformers refuses files without
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
