"""A field that is wrong is refused in one sentence that names it; a list of many wrong ones is refused at the first."""

from typing import Annotated, Literal

import jsonschema
import pydantic
import pytest
from pydantic import Field, Tag

from areal_jax.rollout.http.wire import bodies
from areal_jax.rollout.http.wire.exchange import RequestError


class Inner(bodies.Body):
    """An object inside of a body."""

    ignored = ('color',)
    type: Literal['inner'] = 'inner'
    size: Annotated[int, bodies.Within(1, 5)] = 1


class Named(bodies.Body):
    """Another one."""

    type: Literal['named']
    name: bodies.Name


class Left(bodies.Skipped):
    """An object that is not read."""

    type: Literal['skipped']


Either = Annotated[
    Annotated[Inner, Tag('(inner)')] | Annotated[Named, Tag('(named)')] | Annotated[Left, Tag('(skipped)')],
    bodies.by('type', ('inner', 'named', 'skipped'), 'inner'),
]


class Whole(bodies.Body):
    """A field of every type."""

    ignored = ('user',)
    unserved = ('image',)
    flag: bool = False
    size: Annotated[int, bodies.Within(1, 5)] = 1
    share: Annotated[float, bodies.Within(0, 2, above=True)] = 1.0
    name: bodies.Text = ''
    text: bodies.LongText = ''
    word: Literal['a', 'b'] = 'a'
    stops: bodies.Stops = ()
    ids: bodies.Ids | None = None
    rows: bodies.IdRows | None = None
    bias: bodies.Bias = ()
    inner: Inner = bodies.OBJECT
    parts: bodies.OneOrList[str, Either] = ''
    schema_: bodies.FreeObject = Field({}, alias='schema')


class Asked(bodies.Body):
    """A body with a required field."""

    name: bodies.Name


def fault_of(values):
    with pytest.raises(RequestError) as error:
        bodies.read(Whole, values)
    assert error.value.status == 400
    return error.value.field, str(error.value)


@pytest.mark.parametrize(
    ('values', 'field', 'message'),
    [
        ([1], 'body', 'body=[1] must be a JSON object'),
        ({'flag': 1}, 'flag', 'flag=1 must be true or false'),
        ({'size': 6}, 'size', 'size=6 must be an integer from 1 to 5'),
        ({'size': True}, 'size', 'size=True must be an integer from 1 to 5'),
        ({'size': 1.0}, 'size', 'size=1.0 must be an integer from 1 to 5'),
        ({'size': 10**400}, 'size', 'size=1000'),
        ({'share': 2.5}, 'share', 'share=2.5 must be a number above 0 to 2'),
        ({'share': 0}, 'share', 'share=0 must be a number above 0 to 2'),
        ({'share': float('nan')}, 'share', 'share=nan must be a number above 0 to 2'),
        ({'share': float('inf')}, 'share', 'share=inf must be a number above 0 to 2'),
        ({'share': 10**400}, 'share', 'share=1000'),
        ({'share': '1'}, 'share', "share='1' must be a number above 0 to 2"),
        ({'share': True}, 'share', 'share=True must be a number above 0 to 2'),
        ({'name': 3}, 'name', 'name=3 must be a valid string'),
        ({'name': 'x' * 4097}, 'name', "name='xxxx"),
        ({'text': '\ud800'}, 'text', "text='\\ud800' has half of a surrogate pair: write the whole character"),
        ({'word': 'c'}, 'word', "word='c' must be 'a' or 'b'"),
        ({'word': ['a']}, 'word', "word=['a'] must be 'a' or 'b'"),
        ({'stops': ['a', '']}, 'stops', "stops='' must have at least 1 character"),
        ({'stops': ['a'] * 65}, 'stops', "stops=('a', 'a', 'a', 'a', 'a', 'a', ...) must have at most 64 items"),
        ({'stops': 'a' * 4097}, 'stops', "stops='aaaa"),
        ({'ids': [1, -1]}, 'ids', 'ids=-1 is no token id: use integers from 0 to 2147483647'),
        ({'ids': [1, True]}, 'ids', 'ids=True is no token id'),
        ({'ids': [2**31]}, 'ids', 'ids=2147483648 is no token id'),
        ({'ids': [10**400]}, 'ids', 'ids=1000'),
        ({'ids': 'abc'}, 'ids', "ids='abc' must be a list of one or more token ids"),
        ({'ids': []}, 'ids', 'ids=[] must be a list of one or more token ids'),
        ({'ids': {str(i): [[[i]]] for i in range(10_000)}}, 'ids', 'ids={'),
        ({'rows': [[1], [1, 'x']]}, 'rows[1]', "rows[1]='x' is no token id"),
        ({'rows': [[1]] * 4097}, 'rows', 'rows=[[1], '),
        ({'bias': [1]}, 'bias', 'bias=[1] must be an object of token ids and numbers'),
        ({'bias': {'a': 1}}, 'bias.a', 'bias.a=1 is not named by a token id: use the id as a string'),
        ({'bias': {'7': 101}}, 'bias.7', 'bias.7=101 must be a number from -100 to 100'),
        ({'bias': {str(i): 1 for i in range(1025)}}, 'bias', 'bias={'),
        ({'inner': []}, 'inner', 'inner=[] must be a JSON object'),
        ({'inner': {'size': 0}}, 'inner.size', 'inner.size=0 must be an integer from 1 to 5'),
        ({'inner': {'more': 0}}, 'inner.more', 'inner.more=0 is an unknown field: leave it out'),
        ({'parts': [{}, 3]}, 'parts[1]', 'parts[1]=3 must be a JSON object'),
        ({'parts': [{'type': 'x'}]}, 'parts[0].type', "parts[0].type='x' must be 'inner' or 'named' or 'skipped'"),
        ({'parts': [{'type': [1]}]}, 'parts[0].type', 'parts[0].type=[1] must be'),
        ({'parts': [{'type': 'named'}]}, 'parts[0].name', 'parts[0].name=None is missing: send it'),
        ({'parts': [{'size': 9}]}, 'parts[0].size', 'parts[0].size=9 must be'),
        ({'parts': [{}] * 4097}, 'parts', 'parts=[{}'),
        ({'parts': 3}, 'parts', 'parts=3 must be a valid string'),
        ({'image': {'a': 1}}, 'image', "image={'a': 1} is not served: leave it out"),
        ({'zz': False}, 'zz', 'zz=False is an unknown field: leave it out'),
        ({'\0': 1}, '\0', '\0=1 is an unknown field'),
        ({'\ud800': 1}, '\ud800', '\ud800=1 is an unknown field'),
        ({'(inner)': 1}, '(inner)', '(inner)=1 is an unknown field'),
        ({'schema_': {}}, 'schema_', 'schema_={} is an unknown field'),
        ({'schema': 1}, 'schema', 'schema=1 must be a JSON object'),
    ],
)
def test_the_field_its_value_and_the_fix_are_named(values, field, message):
    found, sentence = fault_of(values)
    assert found == field
    assert sentence.startswith(message)
    assert len(sentence) < 300


def test_a_misspelt_field_is_named_before_the_missing_one():
    with pytest.raises(RequestError, match=r'^nam=1 is an unknown field'):
        bodies.read(Asked, {'nam': 1})
    with pytest.raises(RequestError, match=r'^name=None is missing: send it'):
        bodies.read(Asked, {'nam': None})


def test_json_for_the_model_is_not_deeper_than_a_template_writes():
    deep = {}
    for _ in range(128):
        deep = {'a': deep}
    assert fault_of({'schema': deep}) == (
        'schema', "schema='...' is nested more than 128 levels deep: make it flatter",
    )  # fmt: skip
    assert bodies.read(Whole, {'schema': deep['a']})[0].schema_ == deep['a']


def test_null_is_an_absent_field():
    nothing = dict.fromkeys(['flag', 'size', 'ids', 'inner', 'parts', 'image', 'user', 'zz'])
    body, ignored = bodies.read(Whole, nothing)
    assert (body.flag, body.size, body.ids, body.inner.size, body.parts) == (False, 1, None, 1, '')
    assert (ignored, body.sent) == (set(), {})


def test_values_are_read_as_they_are_used():
    body, ignored = bodies.read(Whole, {
        'stops': 'END', 'ids': [7, 0], 'rows': [[1], [2, 3]], 'bias': {'7': 1, '003': -2.5}, 'share': 1, 'image': [],
        'user': 'u', 'inner': {'color': 1}, 'parts': [{'color': 1}, {'type': 'skipped', 'any': {'thing': 1}}],
    })  # fmt: skip
    assert (body.stops, body.bias, body.share) == (('END',), ((3, -2.5), (7, 1.0)), 1.0)
    assert (body.ids.tolist(), body.ids.dtype.name, [row.tolist() for row in body.rows]) == (
        [7, 0],
        'int32',
        [[1], [2, 3]],
    )
    assert ignored == {'user', 'inner.color', 'parts.color', 'parts.skipped'}


def test_the_schema_says_what_is_read():
    schema = jsonschema.Draft202012Validator(bodies.describe(Whole))
    for values in (
        {},
        {'size': None, 'zz': None},
        {'parts': [{'type': 'named', 'name': 'x'}]},
        {'user': 3, 'image': 0},
    ):
        assert schema.is_valid(values), values
    for values in (
        {'size': 6},
        {'zz': 1},
        {'image': 1},
        {'parts': [{'type': 'named'}]},
        {'ids': []},
        {'inner': {'a': 1}},
    ):
        assert not schema.is_valid(values), values
    assert '$ref' not in str(schema.schema)


@pytest.mark.parametrize(
    'values',
    [
        {'parts': [3] * 4096}, {'stops': [3] * 50_000}, {'ids': ['x'] * 50_000}, {'rows': [[-1]] * 4096},
        {'bias': {f'x{i}': 1 for i in range(1024)}},
    ],
)  # fmt: skip
def test_many_wrong_entries_are_one_error(values):
    with pytest.raises(pydantic.ValidationError) as error:
        Whole.model_validate(values)
    assert error.value.error_count() == 1
