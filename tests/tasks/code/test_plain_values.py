"""Values that cross as JSON: plain ones come back equal and of their type, others do not cross."""

from __future__ import annotations

import collections
import contextlib
import decimal
import fractions
import json
import math

import hypothesis
import hypothesis.strategies as st
import pytest

from areal_jax.tasks.code.pair_protocol import MOST_BYTES, NotPlainError, decode, encode

_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()) | st.binary()
    | st.complex_numbers(allow_nan=False) | st.fractions()
)  # fmt: skip
_keys = st.integers() | st.text() | st.tuples(st.integers(), st.booleans())
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(_keys, inner) | st.frozensets(_keys),
    max_leaves=12,
)


def kinds(value):
    """The types in a value, level by level."""
    if isinstance(value, dict):
        return type(value), [(kinds(key), kinds(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [kinds(item) for item in value]
    return type(value)


@hypothesis.given(_values)
def test_plain_values_come_back_as_they_were(value):
    found = decode(encode(value))
    assert found == value
    assert kinds(found) == kinds(value)


@pytest.mark.parametrize(
    'value',
    [
        -(2**60), {1, 2}, bytearray(b'\0\xff'), range(0, 10, 3), collections.Counter('aab'),
        collections.OrderedDict(b=1, a=2), collections.deque([1, 2], maxlen=3), decimal.Decimal('0.10'),
        fractions.Fraction(1, 3), float('inf'), '\ud800', '\0', {(1, 2): [None]},
    ],
)  # fmt: skip
def test_each_kind_of_value_comes_back(value):
    found = decode(encode(value))
    assert (type(found), found) == (type(value), value)


def test_an_int_of_any_length_comes_back():
    assert decode(encode(1 << 20_000)) == 1 << 20_000


def test_nan_and_a_default_dict():
    assert math.isnan(decode(encode(float('nan'))))
    assert decode(encode(collections.defaultdict(int, a=1))) == {'a': 1}


class Always:
    __eq__ = lambda self, other: True
    __hash__ = None


@pytest.mark.parametrize(
    ('value', 'said'),
    [
        (Always(), 'type Always'),
        ([Always()], 'type Always'),
        (type('Whole', (int,), {})(1), 'type Whole'),
        (type('Text', (str,), {})('a'), 'type Text'),
        ((i for i in ()), 'type generator'),
        (len, 'type builtin_function_or_method'),
        ('x' * MOST_BYTES, f'of at most {MOST_BYTES}'),
    ],
)
def test_other_values_do_not_cross(value, said):
    with pytest.raises(NotPlainError, match=said):
        encode(value)


def test_levels_have_a_bound_on_both_sides():
    value: list[object] = []
    for _ in range(60):
        value = [value]
    with pytest.raises(NotPlainError, match='50 levels'):
        encode(value)
    with pytest.raises(NotPlainError, match='50 levels'):
        decode('[' * 60 + ']' * 60)
    with pytest.raises(NotPlainError, match='RecursionError'):
        decode('[' * 100_000)


@pytest.mark.parametrize(
    'text',
    ['', '{', '{}', '{"object": 1}', '{"int": 1}', '{"int": "0x1", "set": []}', '{"set": [[]]}', '{"dict": [1]}',
     '{"fraction": ["0x1", "0x0"]}', '{"range": [0, 1, 0]}', '{"decimal": "x"}', '{"deque": [[1], "2"]}'],
)  # fmt: skip
def test_texts_that_no_encoder_wrote_are_refused(text):
    with pytest.raises(NotPlainError):
        decode(text)


_TAGS = st.sampled_from(['int', 'set', 'dict', 'tuple', 'range', 'bytes', 'deque', 'decimal', 'counter'])
_trees = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(_TAGS, inner, max_size=1)
)


@hypothesis.given(st.text() | _trees.map(json.dumps))
def test_any_text_is_a_value_or_refused(text):
    with contextlib.suppress(NotPlainError):
        decode(text)
