"""A TypedDict as a check at run time."""

from typing import Annotated, Literal, NotRequired, TypedDict

import pytest

from areal_jax.events.records import describe_record


class Base(TypedDict):
    """What both have."""

    number: Annotated[int, 'a count']


class Entry(Base):
    """One entry.

    More about it.
    """

    kind: Literal['entry']
    share: Annotated[float | None, 'a share']
    names: NotRequired[Annotated[list[str | None], 'names']]


GOOD = {'number': 1, 'kind': 'entry', 'share': 0.5}


def test_fields_come_in_order_with_type_and_comment():
    record = describe_record(Entry)
    assert record.comment == 'One entry.'
    assert [(f.name, f.type_name, f.comment, f.optional) for f in record.fields] == [
        ('number', 'int', 'a count', False),
        ('kind', "'entry'", '', False),
        ('share', 'float or null', 'a share', False),
        ('names', 'list of (str or null)', 'names', True),
    ]
    assert (record.required, record.allowed - record.required) == ({'number', 'kind', 'share'}, {'names'})


@pytest.mark.parametrize(
    ('changes', 'fault'),
    [
        ({}, ''),
        ({'share': None}, ''),
        ({'share': 2}, ''),  # JSON writes whole numbers without a point
        ({'names': []}, ''),
        ({'names': ['a', None]}, ''),
        ({'number': 1.0}, 'has number=1.0, which is not of type int'),
        ({'number': False}, 'has number=False, which is not of type int'),
        ({'share': True}, 'has share=True, which is not of type float or null'),
        ({'kind': 'other'}, "has kind='other', which is not of type 'entry'"),
        ({'names': ['a', 1]}, "has names=['a', 1], which is not of type list of (str or null)"),
        ({'names': None}, 'has names=None, which is not of type list of (str or null)'),
        ({'more': 1}, 'has the unknown field more=1'),
    ],
)
def test_the_first_fault_is_named(changes, fault):
    assert describe_record(Entry).find_fault(GOOD | changes) == fault


@pytest.mark.parametrize('name', GOOD)
def test_a_field_left_out_is_named(name):
    values = {key: value for key, value in GOOD.items() if key != name}
    assert describe_record(Entry).find_fault(values) == f'has no {name!r}'


def test_a_declaration_that_cannot_be_checked_is_refused():
    with pytest.raises(TypeError, match="field 'x' is declared as <class 'int'>; use Annotated"):
        describe_record(TypedDict('Bare', {'x': int}))
