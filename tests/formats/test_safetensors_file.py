"""Files of named tensors: what is written comes back, and a header that places tensors wrongly is refused by name."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load

from areal_jax.formats.safetensors_file import SafetensorsError, list_tensors, write_tensors
from tests.lying_headers import list_lies

ENTRY = dict[str, Any]
# 'a': six float32 in bytes 0 to 24, 'b': four float16 in 24 to 32, 'empty': none, 'c': three int8 in 32 to 35
HEADER: dict[str, ENTRY] = {
    'a': {'dtype': 'F32', 'shape': [2, 3], 'data_offsets': [0, 24]},
    'b': {'dtype': 'F16', 'shape': [4], 'data_offsets': [24, 32]},
    'empty': {'dtype': 'F32', 'shape': [0, 7], 'data_offsets': [32, 32]},
    'c': {'dtype': 'I8', 'shape': [3], 'data_offsets': [32, 35]},
}
DATA = np.arange(6, dtype=np.float32).tobytes() + np.arange(4, dtype=np.float16).tobytes() + bytes(3)


def write(path: pathlib.Path, header: Any, data: bytes = DATA) -> pathlib.Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, 'little') + text + data)
    return path


def changed(name: str, **fields: Any) -> dict[str, ENTRY]:
    return HEADER | {name: HEADER[name] | fields}


def test_what_is_written_comes_back(tmp_path: pathlib.Path):
    values = {'w': np.arange(6, dtype=np.float32).reshape(2, 3), 'b': np.arange(3).astype(jnp.bfloat16)}
    shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in values.items()}
    write_tensors(tmp_path / 'x', shapes, values.__getitem__)
    stored = list_tensors(tmp_path / 'x')
    assert stored.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(stored[name].read_rows(0, len(value)), value)


def test_the_order_of_the_header_is_free(tmp_path: pathlib.Path):
    path = write(tmp_path / 'x', {'__metadata__': {'a': 'b'}, **dict(reversed(HEADER.items()))})
    stored = list_tensors(path)
    np.testing.assert_array_equal(stored['a'].read_rows(1, 2), [[3, 4, 5]])
    np.testing.assert_array_equal(stored['b'].read_rows(0, 4), [0, 1, 2, 3])
    assert stored['empty'].read_rows(0, 0).shape == (0, 7)
    assert load(path.read_bytes()).keys() == stored.keys()


A, B, C = '(data_offsets [0, 24])', '(data_offsets [24, 32])', '(data_offsets [32, 35])'
PAIR, SHAPE = 'they must be two integers of at least 0, the first not above', 'it must list integers of at least 0'
DAMAGED = {
    'shape larger': (changed('a', shape=[3, 3]), f'a lies in 24 bytes {A}, but F32 of shape [3, 3] takes 36'),
    'shape smaller': (changed('b', shape=[3]), f'b lies in 8 bytes {B}, but F16 of shape [3] takes 6'),
    'scalar': (changed('a', shape=[]), f'a lies in 24 bytes {A}, but F32 of shape [] takes 4'),
    'dtype': (changed('a', dtype='BF16'), f'a lies in 24 bytes {A}, but BF16 of shape [2, 3] takes 12'),
    'dtype not read': (changed('c', dtype='I64'), f'c lies in 3 bytes {C}, but I64 of shape [3] takes 24'),
    'half bytes': (changed('c', dtype='F4', shape=[7]), f'c lies in 3 bytes {C}, but F4 of shape [7] takes 3.5'),
    'unknown dtype': (changed('c', dtype='F5'), "c has dtype 'F5', which is none of the format"),
    'dtype no name': (changed('c', dtype=['I8']), "c has dtype ['I8'], which is none of the format"),
    'overlap': (
        changed('b', data_offsets=[16, 24]),
        'b begins at byte 16 of the data, not at byte 24, where a ends',
    ),
    'gap': (
        changed('c', data_offsets=[33, 36]),
        'c begins at byte 33 of the data, not at byte 32, where empty ends',
    ),
    'gap at the start': (
        {'a': HEADER['a'] | {'data_offsets': [11, 35]}},
        'a begins at byte 11 of the data, not at byte 0, where the data begins',
    ),
    'tensor twice': (HEADER | {'a2': HEADER['a']}, 'a2 begins at byte 0 of the data, not at byte 24, where a ends'),
    'negative': (changed('a', data_offsets=[-24, 0]), f'a has data_offsets [-24, 0]; {PAIR}'),
    'backwards': (changed('a', data_offsets=[24, 0]), f'a has data_offsets [24, 0]; {PAIR}'),
    'float offsets': (changed('a', data_offsets=[0.0, 24.0]), f'a has data_offsets [0.0, 24.0]; {PAIR}'),
    'one offset': (changed('a', data_offsets=[0]), f'a has data_offsets [0]; {PAIR}'),
    'three offsets': (changed('a', data_offsets=[0, 24, 32]), f'a has data_offsets [0, 24, 32]; {PAIR}'),
    'negative shape': (changed('a', shape=[-2, -3]), f'a has shape [-2, -3]; {SHAPE}'),
    'float shape': (changed('a', shape=[2.0, 3]), f'a has shape [2.0, 3]; {SHAPE}'),
    'shape no list': (changed('a', shape=6), f'a has shape 6; {SHAPE}'),
    'no offsets': (HEADER | {'a': {'dtype': 'F32', 'shape': [6]}}, 'its header cannot be read'),
    'tensor missing': ({name: HEADER[name] for name in ('a', 'b', 'empty')}, 'bytes, but its tensors end at'),
}


@pytest.mark.parametrize('case', DAMAGED)
def test_a_damaged_header_is_refused_by_name(tmp_path: pathlib.Path, case: str):
    header, message = DAMAGED[case]
    path = write(tmp_path / 'x', header)
    with pytest.raises(SafetensorsError, match=f'^{re.escape(str(path))}.*{re.escape(message)}'):
        list_tensors(path)
    with pytest.raises(SafetensorError):  # as the library of the format does
        load(path.read_bytes())


def test_data_too_short_or_too_long_is_refused_with_both_sizes(tmp_path: pathlib.Path):
    path = write(tmp_path / 'x', HEADER)
    size = path.stat().st_size
    write(path, HEADER, DATA + bytes(5))
    with pytest.raises(
        SafetensorsError, match=f'{path} is damaged: it has {size + 5} bytes, but its tensors end at {size}'
    ):
        list_tensors(path)
    write(path, HEADER, DATA[:-1])
    with pytest.raises(
        SafetensorsError, match=f'{path} is cut short: it has {size - 1} bytes, its tensors end at {size}'
    ):
        list_tensors(path)


def test_a_header_nested_too_deep_is_refused(tmp_path: pathlib.Path):
    text = b'[' * 100_000
    (tmp_path / 'x').write_bytes(len(text).to_bytes(8, 'little') + text)
    with pytest.raises(SafetensorsError, match='its header cannot be read'):
        list_tensors(tmp_path / 'x')


def test_a_header_that_lies_is_refused_by_its_reader(tmp_path: pathlib.Path):
    refused, path = 0, tmp_path / 'x'
    huge = json.dumps({'a': {'dtype': 'F4', 'shape': [10**4000, 10**4000 + 1], 'data_offsets': [0, 35]}}).encode()
    for text in (*list_lies(HEADER), huge):
        path.write_bytes(len(text).to_bytes(8, 'little') + text + DATA)
        try:
            list_tensors(path)
        except SafetensorsError:
            refused += 1
    assert refused > 200
