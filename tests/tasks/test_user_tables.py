"""Parquet, CSV, TSV and JSON arrays give the rows that lines of JSON give; columns have the names of the file."""

import datetime
import decimal
import json

import pyarrow
import pytest
from pyarrow import parquet

from areal_jax.tasks import jsonl
from areal_jax.tasks.code import code_task
from areal_jax.tasks.demonstrations import read_demonstrations, read_pairs
from areal_jax.tasks.task import TaskError
from areal_jax.tasks.user_lines import read_objects
from areal_jax.text.tokenizer import CharacterTokenizer

ROWS = [{'question': 'a, "b"\nc?', 'answer': '7'}, {'question': 'd?', 'answer': '-8'}]


def write(path, rows):
    """The rows as the suffix of the path says."""
    if path.suffix == '.parquet':
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == '.json':
        path.write_text(json.dumps(rows))
    elif path.suffix == '.jsonl':
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    else:
        separator = {'.csv': ',', '.tsv': '\t'}[path.suffix]
        quoted = [[f'"{str(value).replace(chr(34), 2 * chr(34))}"' for value in row.values()] for row in rows]
        path.write_text('\n'.join(separator.join(row) for row in [list(rows[0]), *quoted]) + '\n')
    return path


@pytest.mark.parametrize('suffix', ['parquet', 'json', 'csv', 'tsv', 'jsonl'])
def test_every_format_has_the_same_rows(tmp_path, suffix):
    path = write(tmp_path / f'a.{suffix}', ROWS)
    assert [row for _, row in read_objects(path)] == ROWS
    assert jsonl.read_problems(path, 'integer') == ROWS


@pytest.mark.parametrize(
    ('suffix', 'places'),
    [
        ('parquet', ['a.parquet, row 1', 'a.parquet, row 2']),
        ('json', ['a.json, element 1', 'a.json, element 2']),
        ('csv', ['a.csv:3', 'a.csv:4']),  # the first row has two lines
        ('jsonl', ['a.jsonl:1', 'a.jsonl:2']),
    ],
)
def test_a_row_has_a_place(tmp_path, monkeypatch, suffix, places):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / f'a.{suffix}', ROWS)
    assert [place for place, _ in read_objects(f'a.{suffix}')] == places


def test_values_of_parquet_are_those_of_json(tmp_path):
    row = {
        'day': datetime.date(2026, 11, 30), 'price': decimal.Decimal('1.50'), 'none': None, 'many': [1, 2], 'x': 0.5,
        'turns': [{'role': 'user', 'content': 'é'}], 'raw': b'\x00\xff',
    }  # fmt: skip
    path = tmp_path / 'a.parquet'
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    [(_, read)] = read_objects(path)
    assert read == row | {'day': '2026-11-30', 'price': '1.50', 'raw': 'AP8='}


def test_a_number_of_parquet_is_a_gold_like_one_of_json(tmp_path):
    rows = [{'question': 'a', 'answer': 2.5}, {'question': 'b', 'answer': 1e20}]
    found = [jsonl.read_problems(write(tmp_path / f'a.{kind}', rows), 'number') for kind in ('parquet', 'jsonl')]
    assert found[0] == found[1] == [{'question': 'a', 'answer': '5/2'}, {'question': 'b', 'answer': str(10**20)}]


def test_columns_have_the_names_of_the_file(tmp_path):
    rows = [
        {'problem': 'a?', 'worked': 'so #### 3', 'answer': 'no gold', 'meta': {'gold': '4'}, 'prompt': [{'text': 'b?'}]}
    ]
    path = write(tmp_path / 'a.parquet', rows)

    def read(**columns):
        return jsonl.read_problems(path, 'integer', columns)

    assert read(question='problem', answer='meta.gold') == [{'question': 'a?', 'answer': '4'}]
    assert read(question='prompt.0.text', answer='meta.gold') == [{'question': 'b?', 'answer': '4'}]
    lines = write(tmp_path / 'a.jsonl', [{'question': 'a?', 'answer': 'so #### 3'}])  # a column under another name
    assert jsonl.read_problems(lines, 'integer', {'solution': 'answer'}) == [{'question': 'a?', 'answer': '3'}]


def test_every_reader_takes_columns(tmp_path):
    tokenizer = CharacterTokenizer('abc')
    path = write(tmp_path / 'a.jsonl', [{'x': 'a', 'y': 'b', 'z': 'c'}])
    [shown] = read_demonstrations(str(path), tokenizer, '', 0.0, {'question': 'x', 'answer': 'y'}).train
    [pair] = read_pairs(str(path), tokenizer, '', 0.0, {'prompt': 'x', 'chosen': 'y', 'rejected': 'z'}).train
    assert tokenizer.decode(shown.prompt_tokens) == tokenizer.decode(pair.prompt_tokens)
    code = {'ask': 'f?', 'name': 'f', 'checks': [[[1], 2]]}
    columns = {'question': 'ask', 'entry_point': 'name', 'tests': 'checks'}
    [problem] = code_task.read_problems(str(write(tmp_path / 'b.jsonl', [code])), columns)
    assert problem['entry_point'] == 'f'


@pytest.mark.parametrize('column', ['gone', 'meta.gone', 'many.2', 'many.x'])
def test_a_column_that_is_not_there_is_named(tmp_path, column):
    path = write(tmp_path / 'a.jsonl', [{'meta': {'gold': '4'}, 'many': [1, 2]}])
    with pytest.raises(TaskError) as refused:
        list(read_objects(path, columns={'answer': column}))
    assert str(refused.value).endswith(f':1: task.columns.answer={column!r} is not there; the columns are many, meta')


@pytest.mark.parametrize(
    ('name', 'content', 'said'),
    [
        ('a.csv', b'question,answer\na,1,2\n', 'a.csv:2: the row has 3 values, and the header 2 names: quote values'),
        ('a.csv', b'question,answer\na\n', 'a.csv:2: the row has 1 values, and the header 2 names: quote values'),
        ('a.csv', b'answer,answer\na,b\n', "a.csv:1: the column 'answer' stands twice: rename one of the two"),
        ('a.csv', b'question,answer\n"a,1\n', 'cannot be read as a table of CSV (unexpected end of data): save it as'),
        ('a.csv', 'question,answer\né,1\n'.encode('latin-1'), 'cannot be read as a table of CSV ('),
        ('a.csv', b'question,answer\n', 'has no line: give one JSON object a line'),
        ('a.json', b'[{"question": "a"},\n 3]', 'a.json, element 2: expected a JSON object, got 3'),
        ('a.json', b'[\n{"question": "a"', 'is not JSON ('),
        ('a.json', b'[]', 'has no line: give one JSON object a line'),
        ('a.parquet', b'PAR1\x15\x04\x15', 'cannot be read as Parquet ('),
    ],
)
def test_a_table_that_is_wrong_is_named(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TaskError) as refused:
        list(read_objects(path))
    assert said in str(refused.value)


def test_parquet_without_its_package_is_one_sentence(tmp_path, monkeypatch):
    path = write(tmp_path / 'a.parquet', ROWS)
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    with pytest.raises(TaskError, match=r'a\.parquet. is a Parquet file and needs pyarrow: .*pip install'):
        list(read_objects(path))
