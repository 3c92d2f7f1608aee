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


BROKEN = {
    b'{"a": 1,\n "b"': r'is no JSON: line 2: Expecting',
    b'': r'is no JSON: Expecting value',
    b'{"a": "\xff"}': r'is no JSON: it is not UTF-8',
    b'{\n\n"a": "\xff"}': r'is no JSON: line 3: it is not UTF-8',
    b'[1]': r'holds a list, not an object',
    b'null': r'holds a NoneType, not an object',
    b'{"a": ' + b'[' * 200_000: r'is no JSON that can be read \(RecursionError',
    b'{"a": ' + b'1' * 5000 + b'}': r'is no JSON that can be read \(ValueError: Exceeds the limit',
}


@pytest.mark.parametrize('content', BROKEN, ids=list(range(len(BROKEN))))
def test_json_that_cannot_be_used_is_named_with_its_line_and_the_fix(tmp_path, content):
    path = tmp_path / 'a.json'
    path.write_bytes(content)
    with pytest.raises(files.FileError, match=rf'^{path} {BROKEN[content]}.*; make it new$') as refused:
        files.read_json(path, 'make it new')
    assert '\n' not in str(refused.value)


def test_a_json_file_that_is_missing_or_a_directory_is_named(tmp_path):
    for path in (tmp_path / 'none.json', tmp_path):
        with pytest.raises(files.FileError, match=rf'^{path} cannot be read \(.*; restore it or remove it$'):
            files.read_json(path)
    (tmp_path / 'a.json').write_text('{"a": 1}')
    assert files.read_json(tmp_path / 'a.json') == {'a': 1}
