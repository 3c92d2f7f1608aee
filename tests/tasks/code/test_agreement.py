"""What a test expects against what was printed or returned: a tolerance for decimals, and JSON's types."""

from __future__ import annotations

import decimal
import fractions
import json
import math
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from areal_jax.tasks.code.checks_program import TOLERANCE, outputs_agree, values_agree

NAN, INF = math.nan, math.inf
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ('printed', 'expected'),
    [
        (repr(1 / 3), '0.3333333333'), ('0.30000000000000004', '0.3'), ('0.333333', '0.3333333333'),
        ('3.3333333e-1', '0.33333333'), ('.5', '0.5'), ('2', '2.0'), ('2.', '2.000'), ('-0.0', '0.0'), ('0', '0.000'),
        ('+1.5', '1.5'), ('1e3', '1000.0'), ('1000.0005', '1000.0'), ('1.60218e-19', '1.602e-19'), ('1.0E-9', '1e-09'),
        ('0.000012345', '0.000012'), ('1e400', '1e400'), ('nan inf', 'nan inf'), ('x =  0.25 ', 'x = 0.25000'),
        ('1 0.1\n2 0.2000000001\n\n', '1 0.1\n2 0.2'), ('3', '3'), ('', ''), ('a  b ', 'a  b\n'),
    ],
)  # fmt: skip
def test_outputs_that_agree(printed, expected):
    assert outputs_agree(printed, expected)


@pytest.mark.parametrize(
    ('printed', 'expected'),
    [
        ('0.3334', '0.3333333333'), ('0.33', '0.3333333333'), ('0.333335', '0.3333333333'), ('3.0', '3'),
        ('3.0000001', '3'),
        ('10000001', '10000000'), ('9.11e-31', '1.6e-19'), ('0', '1.6e-19'), ('0.0', '0.000002'), ('-0.3', '0.3'),
        ('0x1p-2', '0.25'), ('1_0.5', '10.5'), ('٣.5', '3.5'), ('nan', '0.5'), ('inf', '1e400'), ('1e400', '1e300'),
        ('1e400', '0.5'), ('0.5', '1e400'), ('NaN', 'nan'), ('0,5', '0.5'), ('0.5.', '0.5'), ('1/2', '0.5'),
        ('True', '1.0'),
        ('0.1 0.2', '0.1'), ('0.1', '0.1 0.2'), ('0.1\n0.2', '0.1 0.2'), ('0.1 0.2', '0.1\n0.2'),
        ('0.1\n\n0.2', '0.1\n0.2'),
        ('x=0.25', 'x=0.250'), ('a b', 'a  b'), (' a', 'a'), ('0' * 500 + '.5', '0.5'), ('', '0.0'), ('0.0', ''),
    ],
)  # fmt: skip
def test_outputs_that_do_not(printed, expected):
    assert not outputs_agree(printed, expected)


@pytest.mark.parametrize(
    ('found', 'expected'),
    [
        (0.1 * 3, 0.3), (1 / 3, 0.3333333333), (1, 1.0), (1, 0.9999999999), ((1, 2), [1, 2]), ([(1, 'a')], [[1, 'a']]),
        ((), []), ({'a': (0.1 * 3, None)}, {'a': [0.3, None]}), ({2: 'x'}, {'2': 'x'}),
        ({None: 1, 1.5: 2}, {'null': 1, '1.5': 2}), (NAN, NAN), ([NAN, INF], [NAN, INF]), (True, 1), (1, True),
        (2.0, 2),
        (-0.0, 0.0), (1.60218e-19, 1.602e-19), (10**18, 10**18), (2**53 + 1, 2**53 + 1), (10**23, 1e23),
    ],
)  # fmt: skip
def test_values_that_agree(found, expected):
    assert values_agree(found, expected)
    assert values_agree([found], [expected])
    assert values_agree({'k': (found, 0)}, {'k': [expected, 0]})


@pytest.mark.parametrize(
    ('found', 'expected'),
    [
        (0.3001, 0.3), (0.3 + 3 * TOLERANCE, 0.3), (9.11e-31, 1.6e-19), (0.0, 1.6e-19), (3.0000001, 3), (4, 3),
        (True, 0.9999999),
        (2**53 + 1, 2**53), (10**400, 1e300), (10**400, INF), (INF, 1e300), (INF, -INF), (1e300, INF), (NAN, 1.0),
        (1.0, NAN),
        (None, NAN), ('0.3', 0.3), (0.3, '0.3'), (fractions.Fraction(1, 3), 0.3333333333),
        (decimal.Decimal('0.3'), 0.3),
        (complex(0.3), 0.3000000001), ((1, 2), [2, 1]), ((1,), [1, 2]), ([1, 2], [1]), ({1, 2}, [1, 2]),
        ('ab', ['a', 'b']),
        (range(2), [0, 1]), (b'ab', 'ab'), ({0: 'a'}, ['a']), (['a'], {'0': 'a'}), ({}, []), ([], {}), ((), {}),
        (None, []),
        ({'a': 1, 'b': 2}, {'a': 1}), ({'a': 1}, {'a': 1, 'b': 2}), ({1: 'a', '1': 'a'}, {'1': 'a'}),
        ({True: 'a'}, {'1': 'a'}),
        ({(1, 2): 'a'}, {'[1, 2]': 'a'}), ({'1': 'a'}, {'2': 'a'}), (0, None), (False, None), ('', None),
    ],
)  # fmt: skip
def test_values_that_do_not(found, expected):
    assert not values_agree(found, expected)
    assert not values_agree((found,), [expected])
    assert not values_agree({'k': found}, {'k': expected})


def as_python(value):
    """What JSON may have been written from: tuples for lists."""
    if isinstance(value, list):
        return tuple(map(as_python, value))
    return {key: as_python(item) for key, item in value.items()} if isinstance(value, dict) else value


@hypothesis.given(_JSON)
def test_every_value_of_json_agrees_with_itself_and_with_its_tuples(value):
    read = json.loads(json.dumps(value))
    assert values_agree(value, read)
    assert values_agree(as_python(value), read)
    assert not values_agree([value], read)


@hypothesis.given(st.floats(-1e300, 1e300), st.floats(-1, 1))
def test_the_tolerance_is_the_one_that_is_stated(expected, part):
    """Within it, to either side, and no longer at three times as much; as printed too."""
    room = TOLERANCE * abs(expected)
    near = expected + 0.99 * part * room
    assert values_agree(near, expected)
    assert outputs_agree(repr(near), repr(expected))
    far = expected + math.copysign(3 * max(room, TOLERANCE), part)
    assert not values_agree(far, expected)
    assert not outputs_agree(repr(far), repr(expected))


def test_long_outputs_take_no_time():
    began = time.process_time()
    assert not outputs_agree('9' * 10**5 + '.0', '9' * 10**5 + '.5')
    assert not outputs_agree('1.' * 40_000, '1.' * 39_999)
    assert outputs_agree('0.1 ' * 20_000, '0.10 ' * 20_000)
    assert time.process_time() - began < 1
