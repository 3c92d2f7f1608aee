from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.learning.packed_rows import (
    EMPTY,
    CostCoefficients,
    cost_coefficients,
    place_rows,
    row_cost,
    shard_costs,
    visible_pairs,
)


def _place(costs, rows_per_microbatch, data_shards=1, shares=None):
    costs = np.array(costs, float)
    shares = costs if shares is None else np.array(shares, float)
    return place_rows(costs, shares, rows_per_microbatch, data_shards)


def test_pairs_by_hand():
    # 1 + 2 + 3 in a causal segment of 3; beside 2 tokens before it each sees 2 more
    assert visible_pairs(3) == 6
    assert visible_pairs(3, 2) == 12
    # what stands behind a shared prompt is counted as if the prompt stood before it alone, less the prompt's own
    assert visible_pairs(2) + visible_pairs(3, 2) == visible_pairs(5)


def test_cost_by_hand():
    # 2 layers of 10 parameters and a head of 4: 6 * 24 a token; 12 * 2 layers * 3 heads * 5 a pair
    coefficients = cost_coefficients(n_layers=2, n_parameters_per_layer=10, n_heads=3, head_dim=5, n_head_parameters=4)
    assert coefficients == CostCoefficients(144.0, 360.0)
    assert row_cost(2.0, 3.0, coefficients) == 288 + 1080
    np.testing.assert_array_equal(row_cost(np.array([1, 2]), np.array([0, 3]), coefficients), [144, 1368])


def test_pairs_outweigh_tokens_from_the_known_length_on():
    # Qwen2 1.5B: 46.8M parameters a layer, 12 heads of 128: 6 P n = 12 H D n^2 / 2 at n = P / (H D) = 30k tokens
    coefficients = cost_coefficients(n_layers=28, n_parameters_per_layer=46_790_000, n_heads=12, head_dim=128)
    n = 46_790_000 // (12 * 128)
    assert coefficients.per_pair * visible_pairs(n) == pytest.approx(coefficients.per_token * n, rel=1e-3)


def test_longest_first_to_the_shard_with_least():
    # 7 5 | 4 3 would be 12 and 7; 7 to shard 0, 5 to 1, 4 to 1, 3 to 0: 10 and 9
    placement = _place([7, 5, 4, 3], 4, 2)
    np.testing.assert_array_equal(placement, [[0, 3, 1, 2]])
    np.testing.assert_array_equal(shard_costs(np.array([7.0, 5, 4, 3]), placement, 2), [[10, 9]])


def test_a_full_shard_takes_no_more_even_if_it_has_least():
    # 9 to shard 0, then 1, 1 fill shard 1 (2 places): the last 1 must join the 9
    assert _place([9, 1, 1, 1], 4, 2).tolist() == [[0, 3, 1, 2]]


def test_rows_of_like_cost_share_a_microbatch():
    # two shards, one row each: 9 | 8 and 2 | 1 pay 9 + 2; in the order given 9 | 1 and 8 | 2 would pay 9 + 8
    assert _place([9, 1, 8, 2], 2, 2).tolist() == [[0, 2], [3, 1]]


def test_the_least_filled_rows_make_up_the_last_microbatch():
    # five rows in twos: the last micro-batch has one row, that with the smallest share, though another costs less
    assert _place([5, 4, 3, 2, 1], 2, shares=[1, 0.2, 1, 1, 0.9]).tolist() == [[0, 2], [3, 4], [1, EMPTY]]


def test_fewer_rows_than_shards_leave_empty_places():
    placement = _place([3, 2, 1], 8, 8)
    np.testing.assert_array_equal(placement, [[0, 1, 2, *[EMPTY] * 5]])
    np.testing.assert_array_equal(shard_costs(np.array([3.0, 2, 1]), placement, 8), [[3, 2, 1, 0, 0, 0, 0, 0]])
    assert place_rows(np.zeros(0), np.zeros(0), 8, 8).shape == (0, 8)


def test_in_order_is_the_order_given():
    assert place_rows(np.arange(3.0), np.arange(3.0), 2, 2, in_order=True).tolist() == [[0, 1], [2, EMPTY]]


@pytest.mark.parametrize('in_order', [False, True])
def test_rows_that_shards_cannot_share_are_refused(in_order):
    with pytest.raises(ValueError, match=r'rows_per_microbatch=6 must be a multiple of the 4 data shards'):
        place_rows(np.ones(3), np.ones(3), 6, 4, in_order=in_order)


@given(
    costs=st.lists(st.integers(0, 9), max_size=30),
    shards=st.integers(1, 4),
    rows_per_shard=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@settings(max_examples=100, deadline=None)
def test_every_row_once_and_only_the_last_microbatch_has_empty_places(costs, shards, rows_per_shard, seed):
    rows = shards * rows_per_shard
    placement = _place(costs, rows, shards, np.random.default_rng(seed).random(len(costs)))
    assert placement.shape == (-(-len(costs) // rows), rows)
    assert sorted(placement[placement != EMPTY]) == list(range(len(costs)))
    assert not (placement[:-1] == EMPTY).any()
    assert shard_costs(np.array(costs, float), placement, shards).sum() == sum(costs)


def test_balance_is_close_to_the_best_split():
    rng = np.random.default_rng(0)
    for _ in range(20):
        costs = rng.integers(1, 100, 6)
        found = shard_costs(costs, _place(costs, 6, 2), 2).max()
        best = min(
            max(costs[list(c)].sum(), costs.sum() - costs[list(c)].sum()) for c in itertools.combinations(range(6), 3)
        )
        assert found <= 7 / 6 * best  # 4/3 - 1/(3 * 2), Graham's bound
