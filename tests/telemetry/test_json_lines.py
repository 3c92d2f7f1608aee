from __future__ import annotations

import json
import math
import pathlib

import numpy as np
import pytest

from areal_jax.files import FileError
from areal_jax.telemetry.metrics import plain, read_json_lines

BAD_LINES = {
    b'{"b"': 'is no JSON',
    b'[1]': 'holds a list, not an object',
    b'{"b": "\xff"}': 'is no JSON: it is not UTF-8',
    b'[' * 200_000: r'is no JSON that can be read \(RecursionError',
    b'': 'is no JSON',
}


def test_every_cut_of_the_last_line_leaves_the_lines_before(tmp_path: pathlib.Path):
    path = tmp_path / 'x.jsonl'
    whole = '{"a":1}\n{"b":[1,2]}\n'
    for cut in range(9, len(whole) - 1):  # inside the second line: at least its last byte is missing
        path.write_text(whole[:cut])
        assert read_json_lines(path) == [{'a': 1}]
    path.write_text(whole)
    assert read_json_lines(path) == [{'a': 1}, {'b': [1, 2]}]


def test_no_file_and_an_empty_file_are_no_lines(tmp_path: pathlib.Path):
    assert read_json_lines(tmp_path / 'none.jsonl') == []
    (tmp_path / 'empty.jsonl').write_text('')
    assert read_json_lines(tmp_path / 'empty.jsonl') == []


def test_a_bad_line_in_the_middle_is_an_error_that_names_it(tmp_path: pathlib.Path):
    path = tmp_path / 'x.jsonl'
    for line, said in BAD_LINES.items():
        path.write_bytes(b'{"a":1}\n' + line + b'\n{"c":1}\n')
        with pytest.raises(FileError, match=rf'x\.jsonl: line 2 of 3 {said}.*; restore or remove it'):
            read_json_lines(path)


def test_a_last_line_that_no_torn_write_leaves_is_an_error_too(tmp_path: pathlib.Path):
    path = tmp_path / 'x.jsonl'
    for line in (b'[1, 2]', b'3', b'# metrics of my run'):
        path.write_bytes(b'{"a":1}\n' + line)
        with pytest.raises(FileError, match='line 2 of 2 '):
            read_json_lines(path)


def test_plain_values_survive_json():
    value = {
        'n': np.float32(0.5),
        'a': np.array([1, 2]),
        'nan': math.nan,
        'inf': [math.inf, 1.0],
        's': 'x',
        'none': None,
    }
    expected = {'n': 0.5, 'a': [1, 2], 'nan': None, 'inf': [None, 1.0], 's': 'x', 'none': None}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == expected
