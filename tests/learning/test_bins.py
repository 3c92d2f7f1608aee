from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.learning.bins import pack_first_fit

_CAPACITY = (20, 7)
_SIZES = st.lists(st.tuples(st.integers(0, _CAPACITY[0]), st.integers(0, _CAPACITY[1])), max_size=60)


def test_largest_first_into_the_first_bin_that_fits():
    # capacity 10, decreasing 8 7 5 3 2: 8 opens bin 0, 7 opens 1, 5 opens 2, 3 fits 1 (7+3), 2 fits 0 (8+2)
    assert pack_first_fit([(2,), (3,), (5,), (7,), (8,)], (10,)) == [[4, 0], [3, 1], [2]]


def test_equal_sizes_go_by_index():
    # 6 6 6 in 13: two in the first bin, in order
    assert pack_first_fit([(6,), (6,), (6,)], (13,)) == [[0, 1], [2]]


def test_second_capacity_opens_a_bin_where_the_first_would_fit():
    # 4+4 of 10 tokens fit, 3+3 of 5 loss tokens do not; the small item (1, 2) still goes to bin 0
    assert pack_first_fit([(4, 3), (4, 3), (1, 2)], (10, 5)) == [[0, 2], [1]]


def test_search_goes_on_where_a_node_promises_what_no_bin_has():
    # bins 0 and 1 have (0, 9) and (9, 0) free, so their parent promises (9, 9); (5, 5) needs bin 2
    sizes = [(10, 1), (1, 10), (5, 5)]
    assert pack_first_fit(sizes, (10, 10)) == [[0], [1], [2]]


def test_nothing_needs_no_bin():
    assert pack_first_fit([], (10,)) == []


def test_item_larger_than_a_bin_is_named():
    with pytest.raises(ValueError, match=r'item 1 of size \(3, 8\) does not fit a bin of capacity \(20, 7\)'):
        pack_first_fit([(1, 1), (3, 8)], _CAPACITY)


@given(_SIZES)
@settings(max_examples=100, deadline=None)
def test_every_item_once_and_no_bin_over_capacity(sizes):
    bins = pack_first_fit(sizes, _CAPACITY)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    for b in bins:
        for axis, capacity in enumerate(_CAPACITY):
            assert sum(sizes[i][axis] for i in b) <= capacity


@given(_SIZES)
@settings(max_examples=50, deadline=None)
def test_equals_first_fit_by_linear_scan(sizes):
    bins: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -max(s / c for s, c in zip(sizes[i], _CAPACITY, strict=True))):
        fits = (b for b in bins if all(sum(sizes[j][a] for j in (*b, i)) <= _CAPACITY[a] for a in (0, 1)))
        found = next(fits, None)
        if found is None:
            bins.append([i])
        else:
            found.append(i)
    assert pack_first_fit(sizes, _CAPACITY) == bins
