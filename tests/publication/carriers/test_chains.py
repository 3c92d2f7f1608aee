"""Which records of a chain a reader needs, by the rules of record.RecordReceiver."""

import pytest

from areal_jax.publication.carriers.stream_sender import describe, find_missing, is_needed, require_next, require_parts
from areal_jax.publication.record import Held, Record
from areal_jax.publication.versions import PublicationError
from tests.publication.carriers.record_samples import held, make_chain, make_record

CHAIN = [Held(4, 'a'), Held(5, 'b'), Held(6, 'c')]


@pytest.mark.parametrize(
    ('version', 'known', 'missing'),
    [
        (6, None, [0, 1, 2]),
        (6, Held(4, 'a'), [1, 2]),
        (6, Held(5, 'b'), [2]),
        (6, Held(6, 'c'), []),
        (6, Held(5, 'x'), [0, 1, 2]),  # other bits than the chain has
        (6, Held(3, 'z'), [0, 1, 2]),  # of an earlier chain
        (5, Held(6, 'c'), [0, 1]),  # deltas do not lead back
        (4, None, [0]),
    ],
)
def test_a_reader_gets_the_deltas_after_what_it_holds_else_all(version, known, missing):
    assert list(find_missing(CHAIN, version, known)) == missing


def test_a_version_that_a_chain_lacks():
    assert find_missing(CHAIN, 7, None) is None
    assert find_missing([], 4, None) is None


def test_a_delta_continues_the_last_record():
    whole, first, second = make_chain(4)
    require_next([], whole.header)
    require_next([held(whole)], first.header)
    with pytest.raises(
        PublicationError, match=r'delta of version 6 is based on version 5 .*ends with version 4 .*send version 6 whole'
    ):
        require_next([held(whole)], second.header)
    with pytest.raises(PublicationError, match='the chain ends with no record'):
        require_next([], first.header)


def test_parts_are_as_long_as_the_header_says():
    record = make_record(1, (2, 3))
    require_parts(record)
    with pytest.raises(ValueError, match=r'version 1 has parts of \[2, 1\] bytes, not \[2, 3\]'):
        require_parts(Record(record.header, [b'ab', b'c']))


def test_a_chain_is_needed_for_what_is_not_released_or_pinned():
    assert is_needed(CHAIN, 6, ())
    assert not is_needed(CHAIN, 7, ())
    assert is_needed(CHAIN, 7, [5])
    assert not is_needed([], 0, [5])


def test_versions_are_named():
    assert describe([]) == 'no version'
    assert describe([CHAIN[2:]]) == 'version 6'
    assert describe([CHAIN[2:], CHAIN[:1]]) == 'versions 4 and 6'
    assert describe([CHAIN]) == 'versions 4, 5 and 6'
