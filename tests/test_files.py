"""Files are whole or absent."""

import errno
import json
import os

import pytest

from areal_jax import files


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / 'a.json'
    files.write_json(path, {'a': 1})
    files.write_json(path, {'a': 2})
    assert json.loads(path.read_text()) == {'a': 2}
    assert os.listdir(tmp_path) == ['a.json']


def test_a_write_that_fails_leaves_the_old_file_and_names_it(tmp_path, monkeypatch):
    path = tmp_path / 'a.txt'
    files.write_text(path, 'old')

    def fail(_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', fail)
    with pytest.raises(OSError, match='No space left') as caught:
        files.write_text(path, 'new')
    assert caught.value.filename == str(path)
    assert path.read_text() == 'old'
    assert os.listdir(tmp_path) == ['a.txt']


def test_infinity_is_written_only_where_it_is_allowed(tmp_path):
    with pytest.raises(ValueError, match='JSON compliant'):
        files.write_json(tmp_path / 'a.json', float('inf'))
    files.write_json(tmp_path / 'a.json', float('inf'), allow_nan=True)
    assert json.loads((tmp_path / 'a.json').read_text()) == float('inf')
