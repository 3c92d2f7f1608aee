"""A field that is wrong is refused in one sentence that names it."""

import pytest

from areal_jax.rollout.http.wire.exchange import RequestError
from areal_jax.rollout.http.wire.request_fields import Fields, parse_json, read_integer, read_token_ids


@pytest.mark.parametrize(
    ('take', 'value', 'message'),
    [
        (lambda f: f.take_flag('x'), 1, 'p.x=1 must be true or false'),
        (lambda f: f.take_integer('x', 0, 1, 5), 6, 'p.x=6 must be an integer from 1 to 5'),
        (lambda f: f.take_integer('x', 0, 1, 5), True, 'p.x=True must be an integer from 1 to 5'),
        (lambda f: f.take_integer('x', 0, 1, 5), 1.0, 'p.x=1.0 must be an integer from 1 to 5'),
        (lambda f: f.take_optional_integer('x', 1, 5), 0, 'p.x=0 must be an integer from 1 to 5'),
        (lambda f: f.take_number('x', 0, 0, 2), 2.5, 'p.x=2.5 must be a number from 0 to 2'),
        (lambda f: f.take_number('x', 0, 0, 2), float('nan'), 'p.x=nan must be a number from 0 to 2'),
        (lambda f: f.take_number('x', 0, 0, 2), float('inf'), 'p.x=inf must be a number from 0 to 2'),
        (lambda f: f.take_number('x', 1, 0, 1, above=True), 0, 'p.x=0 must be a number above 0 to 1'),
        (lambda f: f.take_number('x', 1, 0, 1), '1', "p.x='1' must be a number from 0 to 1"),
        (lambda f: f.take_text('x'), 3, 'p.x=3 must be a string'),
        (lambda f: f.take_text('x'), '\ud800', "p.x='\\ud800' has half of a surrogate pair: write the whole character"),
        (lambda f: f.take_choice('x', ('a', 'b')), 'c', "p.x='c' must be 'a' or 'b'"),
        (lambda f: f.take_texts('x'), ['a', ''], "p.x=['a', ''] must be a string or a list of strings, none of them"),
        (lambda f: f.take_token_ids('x'), [1, -1], 'p.x=-1 is no token id: use integers from 0 to 2147483647'),
        (lambda f: f.take_token_ids('x'), 'abc', "p.x='abc' must be a list of token ids"),
        (lambda f: f.take_bias('x'), [1], 'p.x=[1] must be an object of token ids and numbers'),
        (lambda f: f.take_bias('x'), {'a': 1}, 'p.x.a=1 is not named by a token id: use the id as a string'),
        (lambda f: f.take_bias('x'), {'7': 101}, 'p.x.7=101 must be a number from -100 to 100'),
        (lambda f: f.take_fields('x'), [], 'p.x=[] must be a JSON object'),
        (lambda f: f.take_unserved('x'), {'a': 1}, "p.x={'a': 1} is not served: leave it out"),
        (lambda f: f.finish(), False, 'p.x=False is an unknown field: leave it out'),
    ],
)
def test_the_field_its_value_and_the_fix_are_named(take, value, message):
    with pytest.raises(RequestError) as error:
        take(Fields({'x': value}, 'p'))
    assert str(error.value).startswith(message)
    assert (error.value.field.startswith('p.x'), error.value.status) == (True, 400)


def test_null_is_an_absent_field():
    fields = Fields({'x': None})
    assert not fields.has('x')
    assert (fields.take_flag('x', True), fields.take_integer('x', 3, 1), fields.take_text('x', 'd')) == (True, 3, 'd')
    Fields({'x': None}).finish()


def test_what_was_taken_is_known():
    fields = Fields({'a': 1, 'b': [], 'c': 'ignored', 'd': {'7': 1, '3': -2.5}, 'e': [1, 2], 'f': 's'})
    assert (fields.take_integer('a', 0, 0), fields.take_bias('d'), fields.take_token_ids('e')) == (
        1, ((3, -2.5), (7, 1.0)), (1, 2),
    )  # fmt: skip
    assert fields.take_texts('f') == ('s',)
    fields.take_unserved('b')
    fields.take_ignored('c')
    fields.finish()


def test_a_long_value_is_not_repeated_whole():
    with pytest.raises(RequestError) as error:
        Fields({'x': 'y' * 10_000}).take_flag('x')
    assert len(str(error.value)) < 120
    with pytest.raises(RequestError, match='must be a list of one or more token ids'):
        read_token_ids('x', {str(i): [[[i]]] for i in range(10_000)})


@pytest.mark.parametrize('content', [b'{"a": ', b'\xff', b'', b'[' * 100_000, b'{"a": ' + b'9' * 5000 + b'}'])
def test_a_body_that_is_no_json_is_refused(content):
    with pytest.raises(RequestError, match=r'^body must be JSON: ') as error:
        parse_json(content)
    assert error.value.field == 'body'


def test_json_is_read():
    assert parse_json('{"a": "é"}'.encode()) == {'a': 'é'}
    with pytest.raises(RequestError, match=r'^body=\[1\] must be a JSON object'):
        Fields([1])


@pytest.mark.parametrize(('text', 'number'), [
    ('0', 0), ('7', 7), ('0' * 5000 + '7', 7), ('900', 900), ('901', None), ('9' * 5000, None), ('', None),
    ('-1', None), ('+1', None), ('1_0', None), (' 1', None), ('1.0', None), ('\u0661', None), ('\xb2', None),
])  # fmt: skip
def test_text_over_http_is_an_integer_or_none(text, number):
    assert read_integer(text, 900) == number
