import pytest

from areal_jax.rollout.decode.decode_rows import derive_batches, share_batches, smallest_that_holds


@pytest.mark.parametrize(
    ('slots', 'expected'),
    [
        (1, (1,)),
        (2, (1, 2)),
        (5, (1, 2, 4, 5)),
        (8, (1, 2, 4, 8)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
        (64, (1, 2, 4, 8, 16, 24, 32, 48, 64)),
        # 1 2 4 8 16 24 32 48 64 96 128 192 256 without 24, 48 and 96: each has neighbours of ratio 2
        (256, (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)),
    ],
)
def test_batches_are_powers_of_two_and_half_way_between_large_ones(slots, expected):
    assert derive_batches(slots) == expected


@pytest.mark.parametrize(('slots', 'expected'), [(4, (4,)), (8, (8,)), (9, (8, 9)), (32, (8, 16, 24, 32))])
def test_batches_begin_with_the_least_or_hold_all_slots(slots, expected):
    assert derive_batches(slots, least=8) == expected


@pytest.mark.parametrize('most', range(1, 11))
def test_no_more_than_asked_for_and_all_slots_fit(most):
    for slots in range(1, 600, 7):
        batches = derive_batches(slots, most)
        assert len(batches) <= most
        assert batches[-1] == slots
        assert list(batches) == sorted(set(batches))


@pytest.mark.parametrize('most', range(2, 14))
def test_two_kinds_share_the_programs_and_both_hold_all_slots(most):
    plain, others = share_batches(32, most)
    assert len(plain) + len(others) <= most
    assert plain[-1] == others[-1] == 32
    assert len(plain) >= len(others)


def test_the_smallest_that_holds():
    assert [smallest_that_holds((1, 4, 6), n) for n in (1, 2, 4, 5, 6)] == [1, 4, 4, 6, 6]
    with pytest.raises(ValueError, match=r'7 rows do not fit batch_buckets=\(1, 4, 6\)'):
        smallest_that_holds((1, 4, 6), 7)
