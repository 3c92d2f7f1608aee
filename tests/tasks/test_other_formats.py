"""A file that is not JSON lines is named as what it is, with the command that makes lines of it."""

import bz2
import gzip
import io
import json
import lzma
import zipfile

import pytest

from areal_jax.app.score.answer_files import read_answers
from areal_jax.files import FileError
from areal_jax.tasks import jsonl
from areal_jax.tasks.code import code_task
from areal_jax.tasks.demonstrations import read_demonstrations, read_pairs
from areal_jax.tasks.task import TaskError
from areal_jax.tasks.user_lines import describe_other_format
from areal_jax.text.tokenizer import CharacterTokenizer

ROWS = [{'question': 'q', 'answer': '1'}, {'question': 'r', 'answer': '2'}]
LINES = ''.join(json.dumps(row) + '\n' for row in ROWS).encode()


def zipped(content):
    with zipfile.ZipFile(file := io.BytesIO(), 'w') as archive:
        archive.writestr('a', content)
    return file.getvalue()


FORMATS = {
    'a JSON array': [json.dumps(ROWS).encode(), json.dumps(ROWS, indent=1).encode(), b' \n[\n]', b'\xef\xbb\xbf[{}]'],
    'one JSON value over several lines': [
        json.dumps({'data': ROWS}, indent=1).encode(), b'{"data": [\n{}]}', b'{"a": 1,\n"b": 2}',
    ],
    'a Parquet file': [b'PAR1\x15\x04\x15'],
    'an Arrow file': [b'\xff\xff\xff\xff\x98\x02'],
    'a Feather or Arrow file': [b'ARROW1\x00\x00'],
    'compressed with gzip': [gzip.compress(LINES)],
    'compressed with xz': [lzma.compress(LINES)],
    'compressed with bzip2': [bz2.compress(LINES)],
    'compressed with zstd': [b'\x28\xb5\x2f\xfd\x04'],
    'a ZIP archive': [zipped(LINES)],
    'a SQLite database': [b'SQLite format 3\x00'],
    'text in UTF-16': [LINES.decode().encode('utf-16'), b'\xfe\xff' + LINES.decode().encode('utf-16-be')],
    'text in UTF-32': [LINES.decode().encode('utf-32')],
    'a pointer of Git LFS': [b'version https://git-lfs.github.com/spec/v1\noid sha256:0'],
    'a page of the web': [b'<!DOCTYPE html>\n<html>', b'\n<html>'],
    'a table of CSV': [b'question,answer\nq,1\n'],
}  # fmt: skip


TABLES = ('a JSON array', 'a Parquet file', 'a table of CSV')  # which tasks read: test_user_tables.py


def readers(path, kind):
    """Every reader of lines that a user wrote and that does not read this kind of file, with its error."""
    yield lambda: list(read_answers(path, None)), FileError, f'--answers={path}'
    if kind in TABLES:
        return
    tokenizer = CharacterTokenizer('qr12')
    yield lambda: jsonl.read_problems(path, 'integer'), TaskError, f'task.path={str(path)!r}'
    yield lambda: read_demonstrations(str(path), tokenizer, '', 0.0), TaskError, f'task.path={str(path)!r}'
    yield lambda: read_pairs(str(path), tokenizer, '', 0.0), TaskError, f'task.path={str(path)!r}'
    yield lambda: code_task.read_problems(str(path)), TaskError, f'task.path={str(path)!r}'


@pytest.mark.parametrize('kind', FORMATS)
def test_the_format_is_named_with_the_fix(tmp_path, kind):
    for content in FORMATS[kind]:
        path = tmp_path / ('table.csv' if 'CSV' in kind else 'file.jsonl')
        path.write_bytes(content)
        for read, error, place in readers(path, kind):
            with pytest.raises(error) as refused:
                read()
            said = str(refused.value)
            assert said.startswith(f'{place} is {kind}'), said
            assert 'one JSON object a line is wanted: make it with ' in said


@pytest.mark.parametrize('name', ['a.jsonl', 'a.json', 'a.csv', 'a.parquet'])
@pytest.mark.parametrize('before', [b'', b'\xef\xbb\xbf', b'\n \n'])
def test_lines_are_lines_whatever_the_file_is_called(tmp_path, name, before):
    path = tmp_path / name
    path.write_bytes(before + LINES)
    assert [problem['answer'] for problem in jsonl.read_problems(path, 'integer')] == ['1', '2']


def test_one_line_without_an_end_is_a_line():
    assert describe_other_format(b'{"question": "q", "answer": [1,', 'a.jsonl') == ''
    assert describe_other_format(b'{"a": 1}\n{\n', 'a.jsonl') == ''


def test_a_table_in_tsv_has_its_separator():
    assert "sep='\\t'" in describe_other_format(b'question\tanswer\n', 'a.tsv')
    assert '{' not in describe_other_format(b'question\tanswer\n', 'a.tsv')
