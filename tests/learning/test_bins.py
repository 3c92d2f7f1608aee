from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.learning.packing import fit_capacities, pack_fewest_first, pack_first_fit, spread_remainder

_CAPACITY = (20, 7)
_SIZES = st.lists(st.tuples(st.integers(0, _CAPACITY[0]), st.integers(0, _CAPACITY[1])), max_size=60)
_LENGTHS = st.lists(st.integers(0, 20), max_size=60)
_PACKERS = pytest.mark.parametrize('pack', [pack_first_fit, pack_fewest_first])


def _largest_first(sizes, capacity):
    return sorted(range(len(sizes)), key=lambda i: -max(s / c for s, c in zip(sizes[i], capacity, strict=True)))


@pytest.mark.parametrize(
    ('sizes', 'capacity', 'bins'),
    [
        # largest first: decreasing 8 7 5 3 2: 8 opens bin 0, 7 opens 1, 5 opens 2, 3 fits 1 (7+3), 2 fits 0 (8+2)
        ([(2,), (3,), (5,), (7,), (8,)], (10,), [[4, 0], [3, 1], [2]]),
        # equal sizes go by index: two in the first bin, in order
        ([(6,), (6,), (6,)], (13,), [[0, 1], [2]]),
        # 4+4 of 10 tokens fit, 3+3 of 5 loss tokens do not; the small item (1, 2) goes to the lower of two equal bins
        ([(4, 3), (4, 3), (1, 2)], (10, 5), [[0, 2], [1]]),
        # bins 0 and 1 have (0, 9) and (9, 0) free: together enough for (5, 5), neither of them is
        ([(10, 1), (1, 10), (5, 5)], (10, 10), [[0], [1], [2]]),
        # the first capacity is the scarcer (28 of 20 against 15 of 20). (9, 1), (8, 5), (6, 6) in bins of their own
        # have 1, 2 and 4 free of it; (1, 3) would fit all: it goes where 1 is left; then (2, 0) to bins 1 and 2
        ([(9, 1), (8, 5), (6, 6), (1, 3), (2, 0), (2, 0)], (10, 10), [[0, 3], [1, 4], [2, 5]]),
        # the first capacity is the scarcer (21 / 20 to 6 / 7); (0, 6) leaves all of it: (17, 0) joins, (4, 0) cannot
        ([(0, 6), (4, 0), (17, 0)], _CAPACITY, [[0, 2], [1]]),
    ],
    ids=['decreasing', 'equal', 'second capacity', 'both capacities', 'scarcer capacity', 'a bin in use first'],
)
def test_first_fit_by_hand(sizes, capacity, bins):
    assert pack_first_fit(sizes, capacity) == bins


def test_fewest_sequences_by_hand():
    # Algorithm 1. [6, 6, 5, 1] in 13: 6 6 together, 5 opens, 1 to the one with fewer (first fit: 6 6 1 | 5)
    assert pack_fewest_first([(6,), (6,), (5,), (1,)], (13,)) == [[0, 1], [2, 3]]
    assert pack_first_fit([(6,), (6,), (5,), (1,)], (13,)) == [[0, 1, 3], [2]]
    # [9, 6, 2, 1, 1] in 10: 2 fits only beside 6, 1 to the 9 (fewer sequences, though fuller), 1 to what has room
    assert pack_fewest_first([(9,), (6,), (2,), (1,), (1,)], (10,)) == [[0, 3], [1, 2, 4]]


@_PACKERS
def test_nothing_needs_no_bin(pack):
    assert pack([], (10,)) == []
    assert pack(np.zeros((0, 2), int), (10, 3)) == []


@_PACKERS
def test_items_of_no_size_fit_a_bin_of_no_capacity(pack):
    assert pack([(0, 3), (0, 3), (0, 3)], (0, 6)) == [[0, 1], [2]]


@_PACKERS
def test_item_larger_than_a_bin_is_named(pack):
    with pytest.raises(ValueError, match=r'item 1 of size \(3, 8\) does not fit a bin of capacity \(20, 7\)'):
        pack([(1, 1), (3, 8)], _CAPACITY)


@_PACKERS
@given(sizes=_SIZES)
@settings(max_examples=100, deadline=None)
def test_every_item_once_and_no_bin_over_capacity(pack, sizes):
    bins = pack(sizes, _CAPACITY)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    for b in bins:
        assert b  # none is empty
        for axis, capacity in enumerate(_CAPACITY):
            assert sum(sizes[i][axis] for i in b) <= capacity


def _scan(sizes, capacity, choose):
    """By the words of the definition: `choose` takes (bins, those that fit) to a bin."""
    bins: list[list[int]] = []
    for i in _largest_first(sizes, capacity):
        fits = [b for b in bins if all(sum(sizes[j][a] for j in (*b, i)) <= c for a, c in enumerate(capacity))]
        if fits:
            choose(fits).append(i)
        else:
            bins.append([i])
    return bins


@given(_LENGTHS)
@settings(max_examples=100, deadline=None)
def test_one_capacity_equals_first_fit_by_linear_scan(lengths):
    sizes = [(n,) for n in lengths]
    expected = _scan(sizes, (20,), lambda fits: fits[0])
    assert pack_first_fit(sizes, (20,)) == expected
    # a second capacity that takes no larger share of anything changes nothing
    assert pack_first_fit([(n, n // 2) for n in lengths], (20, 10)) == expected
    assert pack_first_fit([(n // 2, n) for n in lengths], (10, 20)) == expected


@given(_SIZES)
@settings(max_examples=100, deadline=None)
def test_two_capacities_equal_best_fit_by_linear_scan(sizes):
    scarcer = 0 if sum(s[0] * _CAPACITY[1] - s[1] * _CAPACITY[0] for s in sizes) >= 0 else 1
    differences = [s[0] * _CAPACITY[1] - s[1] * _CAPACITY[0] for s in sizes]
    if min(differences, default=0) >= 0 or max(differences) <= 0:
        return  # one capacity decides

    def best(fits):
        free = [tuple(c - sum(sizes[i][a] for i in b) for a, c in enumerate(_CAPACITY)) for b in fits]
        return min(zip(free, fits, strict=True), key=lambda pair: (pair[0][scarcer], -pair[0][1 - scarcer]))[1]

    whole = all(sum(s[a] for s in sizes) <= _CAPACITY[a] for a in (0, 1))
    expected = [_largest_first(sizes, _CAPACITY)] if whole else _scan(sizes, _CAPACITY, best)
    assert pack_first_fit(sizes, _CAPACITY) == expected


@given(_SIZES)
@settings(max_examples=50, deadline=None)
def test_fewest_first_equals_the_definition(sizes):
    assert pack_fewest_first(sizes, _CAPACITY) == _scan(sizes, _CAPACITY, lambda fits: min(fits, key=len))


def test_a_remainder_is_spread_over_smaller_bins_by_hand():
    # bins of 12 in batches of three: 12 | 7 5 | 4 4 3 | 6 6, so one is beyond: that with the smallest items, the third.
    # No bin of 3 holds a 4; three bins of 6 hold 4, 4 and 3, two of 7 hold 4 3 and 4
    sizes = [(12,), (7,), (5,), (4,), (4,), (3,), (6,), (6,)]
    bins = [[0], [1, 2], [3, 4, 5], [6, 7]]
    assert spread_remainder(bins, sizes, 3, [(3,), (6,), (12,)]) == [[0], [1, 2], [6, 7], [3], [4], [5]]
    assert spread_remainder(bins, sizes, 3, [(7,), (12,)]) == [[0], [1, 2], [6, 7], [3, 5], [4]]
    # two to a batch: none is beyond; three bins of 6 would not be one batch of two; nothing smaller is offered
    assert spread_remainder(bins, sizes, 2, [(6,), (12,)]) == bins
    assert spread_remainder(bins[:3], sizes, 2, [(6,), (12,)]) == bins[:3]
    assert spread_remainder(bins, sizes, 3, [(12,)]) == bins
    assert spread_remainder([], [], 3, [(6,), (12,)]) == []


@given(sizes=_SIZES, bins_per_batch=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_spreading_keeps_every_item_once_and_the_number_of_batches(sizes, bins_per_batch):
    packed = pack_first_fit(sizes, _CAPACITY)
    spread = spread_remainder(packed, sizes, bins_per_batch, [(5, 2), (10, 4), _CAPACITY])
    assert sorted(i for b in spread for i in b) == list(range(len(sizes)))
    assert -(-len(spread) // bins_per_batch) == -(-len(packed) // bins_per_batch)
    full = len(packed) // bins_per_batch * bins_per_batch
    for place, b in enumerate(spread):
        limit = (10, 4) if len(spread) != len(packed) and place >= full else _CAPACITY
        assert all(sum(sizes[i][a] for i in b) <= limit[a] for a in (0, 1))


def test_bins_take_the_capacities_that_sum_to_least_by_hand():
    # 4 4 3 3 in bins of 10: 4 4 | 3 3 take 10 and 6. Two of 7 hold 4 3 and 4 3, one more would hold nothing
    sizes = [(4,), (4,), (3,), (3,)]
    bins = pack_first_fit(sizes, (10,))
    assert bins == [[0, 1], [2, 3]]
    assert fit_capacities(bins, sizes, [(6,), (7,), (10,)]) == [[0, 2], [1, 3]]
    # with bins of 6, 10 and 6 hold 14 for the least; with bins of 5, 10 and 5: 4 | 4 3 3
    assert fit_capacities(bins, sizes, [(6,), (10,)]) == bins
    assert fit_capacities(bins, sizes, [(5,), (10,)]) == [[0], [1, 2, 3]]
    # 8 5 | 3 take 14 and 5, and 5 | 8 3 take 5 and 11
    assert fit_capacities([[0, 1], [2]], [(8,), (5,), (3,)], [(5,), (11,), (14,)]) == [[1], [0, 2]]
    # the second capacity counts: one bin of (2, 3) has room for one item only
    assert fit_capacities([[0, 1]], [(1, 2)] * 2, [(2, 3), (9, 9)]) == [[0], [1]]
    # five bins of two items: the four with the fewest tokens are repacked, and the fullest stays
    sizes = [(6,), (4,), *[(4,), (3,)] * 4]
    bins = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert fit_capacities(bins, sizes, [(7,), (10,)]) == bins
    assert fit_capacities(bins, sizes, [(4,), (6,), (10,)])[0] == [0, 1]
    assert fit_capacities([], [], [(5,), (10,)]) == []


@given(sizes=_SIZES)
@settings(max_examples=100, deadline=None)
def test_fitting_keeps_every_item_once_and_never_costs_more(sizes):
    capacities = [(5, 2), (12, 5), _CAPACITY]

    def cost(bins):
        used = [tuple(sum(sizes[i][a] for i in b) for a in (0, 1)) for b in bins]
        return sum(min(c[0] for c in capacities if c[0] >= u[0] and c[1] >= u[1]) for u in used)

    packed = pack_first_fit(sizes, _CAPACITY)
    fitted = fit_capacities(packed, sizes, capacities)
    assert sorted(i for b in fitted for i in b) == list(range(len(sizes)))
    assert all(fitted)  # none is empty
    assert cost(fitted) <= cost(packed)
    assert fit_capacities(packed, sizes, [_CAPACITY]) == packed or cost(fitted) < cost(packed)


@pytest.mark.parametrize(('n', 'share'), [(128, 0.93), (512, 0.97), (10_000, 0.997)])
def test_lognormal_lengths_come_close_to_the_bound(n, share):
    for seed in range(5 if n < 10_000 else 1):
        drawn = np.random.default_rng(seed).lognormal(np.log(6000), 0.9, n)
        lengths = np.clip(drawn, 64, 28_672).astype(int)
        bins = pack_first_fit(lengths[:, None], (32_768,))
        assert -(-lengths.sum() // 32_768) / len(bins) >= share
        # answers of these lengths behind prompts of 300, in rows for half as many loss tokens
        both = pack_first_fit(np.stack([lengths + 300, lengths], 1), (32_768, 28_672))
        assert lengths.sum() / 28_672 / len(both) >= share - 0.01
