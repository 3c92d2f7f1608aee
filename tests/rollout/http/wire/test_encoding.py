"""JSON and server-sent events on the wire."""

import json

import pytest

from areal_jax.rollout.http.wire.encoding import DONE, frame, parse_event, parse_json, read_integer, write_slowly
from areal_jax.rollout.http.wire.exchange import ReplyError, RequestError


def test_an_event_is_read_as_it_was_written():
    event = {'text': 'é\u2028\n', 'logprob': -0.5}
    line, end = frame(event).decode().split('\n\n')
    assert (parse_event(line), end, '\n' in line) == (event, '', False)


def test_the_end_and_lines_between_events_are_none():
    assert [parse_event(line) for line in (DONE.decode().strip(), '', ': ping', 'event: x')] == [None] * 4


@pytest.mark.parametrize('line', ['data: {"a', 'data: [1]'])
def test_a_broken_event_is_refused(line):
    with pytest.raises(ReplyError, match=r'the server sent .*no JSON'):
        parse_event(line)


def test_a_number_that_json_has_not_is_not_written():
    with pytest.raises(ValueError, match='not JSON compliant'):
        frame({'logprob': float('nan')})


@pytest.mark.parametrize(
    'value',
    [
        7, None, 'é"', {}, [], [[]], {'a': {}}, [1, [2, {'b': [3.5, None, True]}], 'x'], {'a': [1] * 5000, 'é': 'c'},
        [[i, {'x': i}] for i in range(3000)], [0] * 1024, [0] * 1025, [0] * 1024 + [[1]],
    ],
)  # fmt: skip
def test_pieces_of_a_value_are_what_the_library_writes(value):
    pieces = list(write_slowly(value))
    assert ''.join(pieces) == json.dumps(value)
    assert max(map(len, pieces)) < 20_000


@pytest.mark.parametrize('content', [b'{"a": ', b'\xff', b'', b'[' * 100_000, b'{"a": ' + b'9' * 5000 + b'}'])
def test_a_body_that_is_no_json_is_refused(content):
    with pytest.raises(RequestError, match=r'^body must be JSON: ') as error:
        parse_json(content)
    assert error.value.field == 'body'


def test_json_is_read():
    assert parse_json('{"a": "é"}'.encode()) == {'a': 'é'}


@pytest.mark.parametrize(('text', 'number'), [
    ('0', 0), ('7', 7), ('0' * 5000 + '7', 7), ('900', 900), ('901', None), ('9' * 5000, None), ('', None),
    ('-1', None), ('+1', None), ('1_0', None), (' 1', None), ('1.0', None), ('\u0661', None), ('\xb2', None),
])  # fmt: skip
def test_text_over_http_is_an_integer_or_none(text, number):
    assert read_integer(text, 900) == number
