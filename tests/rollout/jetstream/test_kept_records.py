"""Records wait for their clients, once each, in so many bytes."""

from areal_jax.rollout.jetstream.record import KeptRecords


def test_a_record_is_taken_once():
    records = KeptRecords()
    records.keep('a', b'1')
    records.keep('b', b'2')
    assert [records.take(name) for name in ('a', 'a', 'b', 'c')] == [b'1', b'', b'2', b'']
    assert len(records) == 0


def test_the_oldest_are_forgotten_above_the_bound_and_the_last_is_kept():
    records = KeptRecords(most_bytes=10)
    for name in 'abc':
        records.keep(name, b'1234')
    assert [records.take(name) for name in 'abc'] == [b'', b'1234', b'1234']  # 12 bytes are above 10, 8 are not
    records.keep('d', b'1234')
    records.keep('long', b'x' * 99)
    assert (records.take('d'), len(records.take('long'))) == (b'', 99)


def test_a_name_that_comes_again_replaces_its_record():
    records = KeptRecords(most_bytes=8)
    for content in (b'1234', b'5678', b'9'):
        records.keep('a', content)
    records.keep('b', b'1234567')  # 1 + 7 bytes: what was replaced does not count
    assert (records.take('a'), records.take('b')) == (b'9', b'1234567')
