"""Packed attention against loops, against each segment alone, and against values that are not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.models.attention.backends import AttentionError, packed_attention, packed_rows_attention
from areal_jax.models.attention.flash import RowIds, stream_ids, visible_tiles, visits
from tests.models.attention.rows import (
    INTERPRETED,
    OUR_OWN,
    PACKED,
    PLACES,
    POSITIONS,
    SCALE,
    SHARED,
    D,
    K,
    N,
    T,
    attend,
    both_packings,
    by_loops,
    cotangent,
    pull_back,
    runs_anything,
    runs_here,
    seen_by,
    tensors,
)


@runs_here
@both_packings
def test_output_and_gradients_equal_loops(segment, parent, impl):
    if impl == 'splash' and segment is SHARED[0]:
        pytest.skip('cannot share prompts')
    inputs = tensors()
    expected = by_loops(*inputs, seen_by(segment, parent), cotangent())
    for ours, loops in zip(pull_back(*inputs, cotangent(), segment, parent, impl), expected, strict=True):
        np.testing.assert_allclose(ours, loops, atol=5e-6)


@runs_here
@both_packings
def test_a_window_equals_brute_force(segment, parent, impl):
    # counted in positions: token 70, the first of answer 3, stands at 50 and sees 38 to 49 of the prompt
    if impl == 'splash' and segment is SHARED[0]:
        pytest.skip('cannot share prompts')
    inputs, positions = tensors(), POSITIONS if segment is SHARED[0] else PLACES
    seen = seen_by(segment, parent, positions, 13)
    expected = by_loops(*inputs, seen, cotangent())
    ours = pull_back(*inputs, cotangent(), segment, parent, impl, positions, 13)
    for found, loops in zip(ours, expected, strict=True):
        np.testing.assert_allclose(found, loops, atol=5e-6)
    if segment is SHARED[0]:
        assert np.flatnonzero(seen[70]).tolist() == [*range(38, 50), 70]


@runs_here
@pytest.mark.parametrize('window', [None, 13])
def test_sinks_are_one_more_score_of_each_head(impl, window):
    # 9 is above most scores: the sums of head 3 are nearly its sink alone
    inputs, sinks = tensors(), np.array([-3.0, 0.0, 2.0, 9.0], np.float32)
    row, positions = (PACKED, PLACES) if impl == 'splash' else (SHARED, POSITIONS)
    expected = by_loops(*inputs, seen_by(*row, positions, window), cotangent(), sinks)
    ours = pull_back(*inputs, cotangent(), *row, impl, positions, window, sinks=sinks)
    for found, loops in zip(ours, expected, strict=True):
        np.testing.assert_allclose(found, loops, atol=1e-6 * np.abs(loops).max())


@runs_anything
def test_slices_of_the_queries_make_up_the_whole(impl):
    # three devices with 50 queries each, every one with all keys; gradients of keys add up over devices
    q, k, v = tensors()
    whole = pull_back(q, k, v, cotangent(), *SHARED, impl, POSITIONS, 13)
    parts = [
        pull_back(q[i : i + 50], k, v, cotangent()[i : i + 50], *SHARED, impl, POSITIONS, 13, np.int32(i))
        for i in (0, 50, 100)
    ]
    out, d_q, d_k, d_v = zip(*parts, strict=True)
    for found, expected in zip((np.concatenate(out), np.concatenate(d_q), sum(d_k), sum(d_v)), whole, strict=True):
        np.testing.assert_allclose(found, expected, atol=5e-6)


@pytest.mark.parametrize(
    ('impl', 'sliced'), [('blocked', False), ('splash', False), *((impl, True) for impl in OUR_OWN)]
)
def test_rows_together_equal_row_by_row(impl, sliced):
    second = PACKED if impl == 'splash' else SHARED
    n_queries, first = (50, 60) if sliced else (T, 0)
    rows = [np.stack(x) for x in zip(tensors(0), tensors(7), strict=True)]
    rows[0] = rows[0][:, first : first + n_queries]
    row_ids = [np.stack(x) for x in zip(PACKED, second, strict=True)]
    d_out = np.stack([cotangent((n_queries, N, D))] * 2)

    @jax.jit
    def together(q, k, v, *row_ids):
        attention = lambda *x: packed_rows_attention(
            *x, *row_ids, scale=SCALE, impl=impl, first=first, interpret=impl in INTERPRETED
        )
        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(d_out)

    found = together(*rows, *row_ids)
    for index in range(2):
        one = pull_back(*(x[index] for x in rows), d_out[index], *(x[index] for x in row_ids), impl, first=first)
        for ours, alone in zip(found, one, strict=True):
            np.testing.assert_allclose(ours[index], alone, atol=5e-6)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 6), st.integers(0, 40)), min_size=T, max_size=T),
    st.integers(0, 99),
)
def test_blocked_equals_dense_for_any_ids(pairs, seed):
    # ids in any order, interleaved segments, parents that come later or do not exist, positions that jump
    segment, parent, positions = np.array(pairs, np.int32).T
    q, k, v = tensors(seed)
    dense, blocked = (attend(q, k, v, segment, parent, impl, positions, 13) for impl in ('dense', 'blocked'))
    np.testing.assert_allclose(blocked, dense, atol=2e-6)


def tiles_of(segment, parent, positions=None, window=None, first=0, n_queries=None):
    """Blocks of 64 keys that each block of queries visits, in the order of the visits."""
    ids = RowIds(*(None if x is None else jnp.array(x)[None] for x in (segment, parent, positions)), first)
    visited = jax.jit(lambda ids: visits(visible_tiles(*stream_ids(ids, n_queries or len(segment)), window, 64)))
    order, count = visited(ids)
    return [row[:n].tolist() for row, n in zip(np.asarray(order), count, strict=True)]


def test_only_tiles_with_a_visible_pair_are_visited():
    # 5 blocks of 64: prompt, answer, answer (seeing the prompt), an ordinary segment of two blocks whose last 10
    # tokens are padding.  Blocks seen: 0 | 0, 1 | 0, 2 | 3 | 3, 4: not the other answer, not the other group.
    segment = np.repeat([1, 2, 3, 4, 4], 64).astype(np.int32)
    parent = np.repeat([1, 1, 1, 4, 4], 64).astype(np.int32)
    segment[-10:] = parent[-10:] = 0
    assert tiles_of(segment, parent) == [[0], [0, 1], [0, 2], [3], [3, 4]]
    # queries 160 to 223 are of segments 3 and 4 with parents 1 and 4: the range of parents holds 2, visited in vain
    assert tiles_of(segment, parent, first=160, n_queries=128) == [[0, 1, 2, 3], [3, 4]]
    # the answers start at position 64: a window of 2 reaches the last token of the prompt, one of 1 does not
    positions = np.r_[0:64, 64:128, 64:128, 0:128].astype(np.int32)
    assert tiles_of(segment, parent, positions, 2) == [[0], [0, 1], [0, 2], [3], [3, 4]]
    assert tiles_of(segment, parent, positions, 1) == [[0], [1], [2], [3], [4]]


def test_rows_in_one_stream_share_no_tile():
    # two rows of two blocks: [1 1 | 2 0] and [1 1 | 1 0], in each row padding and segment 2 in the second block
    segment = np.array([[1] * 64 + [2] * 50 + [0] * 14, [1] * 114 + [0] * 14], np.int32)
    ids = RowIds(jnp.array(segment), jnp.array(segment), None, 0)
    tiles = jax.jit(lambda ids: visible_tiles(*stream_ids(ids, 128), None, 64))(ids)
    assert np.asarray(tiles, int).tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


@runs_here
def test_large_scores_do_not_overflow(impl):
    # scores of about 1e5 * .4: the softmax is an argmax
    q, k, v = tensors()
    inputs = q * 1e3, k * 1e2, v
    out, *gradients = pull_back(*inputs, cotangent(), *PACKED, impl)
    np.testing.assert_allclose(out, by_loops(*inputs, seen_by(*PACKED)), atol=1e-4)
    assert all(np.isfinite(g).all() for g in gradients)


@runs_anything
@pytest.mark.parametrize('poison', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('where', ['q', 'k', 'v', 'all'])
def test_poison_stays_in_its_segment(impl, poison, where):
    # answer 2 (tokens 50 to 69) goes bad at its token 55: 55 to 69 are lost, forward and backward. Its gradient
    # reaches the prompt (0 to 49); answer 3 (70 to 99) and the second group stand in the same blocks, untouched.
    clean = tensors()
    clean[1][..., 3] = np.abs(clean[1][..., 3])  # a query of -inf there has scores of -inf only
    bad = [x.copy() for x in clean]
    for x, name in zip(bad, 'qkv', strict=True):
        if where in (name, 'all'):
            x[55, :, 3] = poison
    out, *gradients = pull_back(*bad, cotangent(), *SHARED, impl)
    expected, *clean_gradients = pull_back(*clean, cotangent(), *SHARED, impl)
    others = np.r_[0:50, 70:T]
    lost = slice(55, 70) if where != 'q' else slice(55, 56)
    np.testing.assert_array_equal(out[others], expected[others])
    assert not np.isfinite(out[lost]).any()
    neighbours = np.r_[70:T]
    for got, plain in zip(gradients, clean_gradients, strict=True):
        np.testing.assert_array_equal(got[neighbours], plain[neighbours])
        assert not np.isfinite(got[55:56]).any()
    assert not np.isfinite(gradients[1][:50]).any()


@runs_anything
def test_a_bad_cotangent_stays_in_its_segment(impl):
    # the gradient that comes back for token 60 is NaN: it reaches what 60 sees (0 to 60, without answer 3), no more
    bad = cotangent()
    bad[60, 1] = np.nan
    gradients, expected = (pull_back(*tensors(), x, *SHARED, impl)[1:] for x in (bad, cotangent()))
    for index, (got, plain) in enumerate(zip(gradients, expected, strict=True)):
        untouched = np.r_[0:60, 61:T] if index == 0 else np.r_[61:T]
        np.testing.assert_array_equal(got[untouched], plain[untouched])
        reached = got[60, 1] if index == 0 else got[:61, 0]
        assert not np.isfinite(reached).any()


@pytest.mark.parametrize(('impl', 'dtype'), [*((impl, jnp.bfloat16) for impl in OUR_OWN), ('blocked', jnp.float16)])
def test_half_precision_stays_so_and_near(impl, dtype):
    inputs = [jnp.asarray(x, dtype) for x in tensors()]
    d_out = np.asarray(jnp.asarray(cotangent(), dtype), np.float64)
    expected = by_loops(*inputs, seen_by(*SHARED), d_out)
    for found, loops in zip(pull_back(*inputs, d_out, *SHARED, impl), expected, strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), loops, atol=0.02 * np.abs(loops).max())


def products(jaxpr):
    """Matrix products in a program, of those that something depends on."""
    used, count = {id(v) for v in jaxpr.outvars}, 0
    for equation in reversed(jaxpr.eqns):
        if not equation.effects and not any(id(v) in used for v in equation.outvars):
            continue
        used |= {id(v) for v in equation.invars}
        count += equation.primitive.name == 'dot_general'
        holds_program = lambda p: hasattr(p, 'eqns') or hasattr(p, 'jaxpr')
        for parameter in jax.tree.leaves(equation.params, is_leaf=holds_program):
            inner = getattr(parameter, 'jaxpr', parameter)
            count += products(inner) if hasattr(inner, 'eqns') else 0
    return count


@runs_here
def test_rematerialisation_never_runs_the_forward_pass_again(impl):
    # q k' and p v forward; backward works out q k', d_out v' and one product for each of d_q, d_k and d_v. Kernels that
    # do d_q apart from d_k and d_v work out the first two twice, and splash sums d_out * out by a product
    def loss(x):
        x = jnp.sin(x)
        return jnp.sum(jnp.sin(attend(x, x[:, :K], x[:, K:], *PACKED, impl)))

    def count(policy):
        return products(jax.make_jaxpr(jax.value_and_grad(jax.checkpoint(loss, policy=policy)))(tensors()[0]).jaxpr)

    policies = jax.checkpoint_policies
    backward = {'dense': 5, 'blocked': 5, 'pallas': 7, 'splash': 8}[impl]
    assert count(policies.save_only_these_names('attention_output', 'attention_lse')) == 2 + backward
    assert count(policies.nothing_saveable) == 2 + 2 + backward


def test_wrong_arguments_are_named():
    q, k, v = tensors()
    with pytest.raises(AttentionError, match="impl='flash' is unknown; use one of auto, dense, blocked"):
        attend(q, k, v, *PACKED, 'flash')
    with pytest.raises(AttentionError, match='3 query heads are not a multiple of 2 key heads'):
        attend(q[:, :3], k, v, *PACKED, 'dense')
    with pytest.raises(AttentionError, match=r'window=3 with positions=None: give .* positions'):
        attend(q, k, v, *PACKED, 'dense', None, 3)
    with pytest.raises(AttentionError, match='queries 149 to 151 do not lie in a row of 150 tokens'):
        packed_attention(q[:2], k, v, *PACKED, scale=1.0, first=149)


def test_blocked_equals_dense_in_rows_long_enough_for_large_tiles():
    # more than 2048 tokens: tiles of 64; segments of 700 tokens, two of them answers to the first, and 35 of padding
    tokens = 2135
    segment = np.r_[np.repeat([1, 2, 3], 700), np.zeros(35)].astype(np.int32)
    parent = np.where(segment == 0, 0, 1).astype(np.int32)
    q, k, v = (x[:, :2] for x in tensors(tokens=tokens))
    d_out = cotangent((tokens, 2, D))
    dense, blocked = (pull_back(q, k, v, d_out, segment, parent, impl) for impl in ('dense', 'blocked'))
    for ours, expected in zip(blocked, dense, strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)
