"""The shape of a model from the header of its GGUF file, without the library that reads the rest."""

from __future__ import annotations

import contextlib
import struct
import sys

import pytest

from areal_jax.formats.gguf import GgufError, load_gguf, read_gguf_header, read_gguf_shape
from tests.formats.test_gguf import file_tensors, write


@pytest.mark.parametrize('tied', [False, True])
def test_the_shape_is_that_of_the_whole_file(tmp_path, monkeypatch, tied):
    tensors = file_tensors()[0]
    if tied:
        del tensors['output.weight']
    write(tmp_path / 'm.gguf', tensors)
    whole, _, _ = load_gguf(tmp_path / 'm.gguf')
    monkeypatch.setitem(sys.modules, 'gguf', None)
    assert read_gguf_shape(tmp_path / 'm.gguf') == whole


def test_every_cut_of_the_header_is_named(tmp_path):
    path = tmp_path / 'm.gguf'
    write(path, file_tensors()[0])
    content = path.read_bytes()
    shapes = read_gguf_header(path).tensors
    assert shapes.keys() == file_tensors()[0].keys()
    for length in (0, 3, 4, 20, 100, 400):
        path.write_bytes(content[:length])
        with pytest.raises(GgufError, match=f'{path} is no GGUF file, or only a part of one'):
            read_gguf_shape(path)


def test_lengths_and_counts_that_lie_are_refused(tmp_path):
    """Each place of the header in turn has the largest numbers of 4 and of 8 bytes, or none."""
    path = tmp_path / 'm.gguf'
    write(path, file_tensors()[0])
    content = path.read_bytes()
    for place in range(4, 600, 3):
        for lie in (b'\xff' * 8, b'\xff' * 4, bytes(8), b'\xff' * 7 + b'\x7f'):
            path.write_bytes(content[:place] + lie + content[place + len(lie) :])
            with contextlib.suppress(ValueError, EOFError):
                read_gguf_header(path)


def test_nonsense_is_refused_and_not_read_for_ever(tmp_path):
    path = tmp_path / 'm.gguf'
    for version, n_fields, rest, said in (
        (1, 0, b'', 'version 1'),
        (3, 1, struct.pack('<Q', 2**60), 'ends inside its header'),
        (3, 1, struct.pack('<QII', 0, 77, 0), 'type 77'),
        (3, 1, struct.pack('<QIIQ', 0, 9, 8, 2**40), 'an array of'),
    ):
        path.write_bytes(b'GGUF' + struct.pack('<IQQ', version, 0, n_fields) + rest)
        with pytest.raises(GgufError, match=said):
            read_gguf_shape(path)
    with pytest.raises(GgufError, match='there is no file'):
        read_gguf_shape(tmp_path / 'none.gguf')
