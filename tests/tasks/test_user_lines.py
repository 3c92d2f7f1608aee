"""Files of JSON lines as users leave them: read, or refused in one sentence that names file and line."""

from __future__ import annotations

import pytest

from areal_jax.tasks import jsonl
from areal_jax.tasks.demonstrations import read_demonstrations
from areal_jax.tasks.task import TaskError
from areal_jax.tasks.user_lines import read_objects
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.tasks.declared import task_values

GOOD = b'{"question": "q", "answer": "1"}'


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'rows.jsonl'


@pytest.mark.parametrize(
    'content',
    [
        GOOD,
        GOOD + b'\n',
        b'\n \n' + GOOD + b'\r\n\r\n',
        b'\xef\xbb\xbf' + GOOD,  # a byte order mark
        b'\t' + GOOD + b'  \n\t',
    ],
)
def test_marks_blanks_and_line_ends_say_nothing(path, content):
    path.write_bytes(content)
    assert [row for _, row in read_objects(path)] == [{'question': 'q', 'answer': '1'}]


def test_lines_are_counted_from_1_and_end_at_line_feeds_alone(path):
    path.write_text('{"a": "x\u2028y"}\n\n{"a": 2}\n', encoding='utf-8', newline='')
    assert list(read_objects(path)) == [(f'{path}:1', {'a': 'x\u2028y'}), (f'{path}:3', {'a': 2})]


FAULTS = {
    'Latin-1': (b'{"question": "\xe4"}', ':2: not UTF-8: byte 14 of the line is 0xe4'),
    'UTF-16': (GOOD.decode().encode('utf-16'), ':2: not UTF-8: byte 0 of the line is 0xff'),
    'torn': (GOOD[:20], ':2: not JSON ('),
    'NUL bytes': (bytes(50), ':2: not JSON ('),
    'deep': (b'[' * 100_000, ":2: the JSON is nested too deep, got '[[["),
    'deep in an object': (b'{"question": ' + b'[' * 100_000, ':2: the JSON is nested too deep'),
    'long': (b' ' * (17 * 2**20), ':2: the line has more than 16 MiB; give one JSON object a line'),
    'long number': (b'{"question": "q", "answer": ' + b'9' * 5000 + b'}', ':2: not JSON (Exceeds the limit'),
    'list': (b'[1]', ":2: expected a JSON object, got '[1]'"),
    'null': (b'null', ":2: expected a JSON object, got 'null'"),
    'number': (b'7', ":2: expected a JSON object, got '7'"),
    'two objects': (GOOD + GOOD, ':2: not JSON (Extra data'),
}


@pytest.mark.parametrize('case', FAULTS)
def test_a_bad_line_is_named_with_its_value(path, case):
    content, message = FAULTS[case]
    path.write_bytes(GOOD + b'\n' + content + b'\n')
    demonstrations = lambda: read_demonstrations(
        str(path), CharacterTokenizer('q1'), **task_values('system_prompt', 'held_out_fraction')
    )
    for read in (lambda: jsonl.read_problems(path, 'integer'), demonstrations):
        with pytest.raises(TaskError) as error:
            read()
        assert str(error.value).startswith(f'{path}{message}')
        assert len(str(error.value)) < 400


@pytest.mark.parametrize('content', [b'', b'\n', b' \n\r\n\t', b'\xef\xbb\xbf'])
def test_a_file_without_a_line_is_named(path, content):
    path.write_bytes(content)
    with pytest.raises(TaskError, match=rf"^task\.path='{path}' has no line: give one JSON object a line"):
        list(read_objects(path))


def test_a_path_that_cannot_be_read_is_named(tmp_path):
    cases = {
        str(tmp_path / 'absent'): 'No such file or directory',
        str(tmp_path): 'Is a directory',
        'a\0b': 'embedded null byte',
        'x' * 5000: 'File name too long',
    }
    for path, reason in cases.items():
        with pytest.raises(TaskError, match=rf'^task\.path=.* cannot be read \({reason}\): give a file of JSON lines'):
            list(read_objects(path))
