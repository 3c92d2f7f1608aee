"""Packed attention against loops, against each segment alone, and against values that are not finite."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.models import attention
from areal_jax.models.attention import packed_attention

T, N, K, D = 150, 4, 2, 8  # three blocks of 64 tokens, the last not full
SCALE = 0.4
IMPLS = ('dense', 'blocked')


def tensors(seed=0, tokens=T):
    shapes = (tokens, N, D), (tokens, K, D), (tokens, K, D)
    return [np.random.default_rng(seed + i).normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)]


def ids(*lengths, parents=None):
    """Segments 1, 2, ... of the lengths, each its own parent or the one of `parents`; the rest of T is padding."""
    parents = parents or range(1, len(lengths) + 1)
    segment, parent = np.zeros((2, T), np.int32)
    start = 0
    for index, (length, above) in enumerate(zip(lengths, parents, strict=True)):
        segment[start : start + length], parent[start : start + length] = index + 1, above
        start += length
    return segment, parent


PACKED = ids(70, 1, 40, 30)
SHARED = ids(50, 20, 30, 25, 10, parents=(1, 1, 1, 4, 4))  # two groups: prompts 1 and 4, answers 2, 3 and 5


def by_loops(q, k, v, segment, parent):
    out = np.zeros(q.shape)
    for t in range(len(q)):
        seen = [s for s in range(t + 1) if segment[s] in (segment[t], parent[t])]
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = k[seen, group].astype(np.float64) @ q[t, head] * SCALE
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ v[seen, group] / weights.sum()
    return out


@functools.partial(jax.jit, static_argnames='impl')  # one program for all tests of an implementation
def attend(q, k, v, segment, parent, impl):
    return packed_attention(q, k, v, segment, parent, scale=SCALE, impl=impl)


@functools.partial(jax.jit, static_argnames='impl')
def gradients(q, k, v, segment, parent, impl):
    """Of a function in which every output has its own weight, so that none cancels."""
    cotangent = np.random.default_rng(9).normal(size=q.shape)
    loss = lambda q, k, v: jnp.sum(cotangent * jnp.tanh(attend(q, k, v, segment, parent, impl)))
    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


@pytest.mark.parametrize('impl', IMPLS)
@pytest.mark.parametrize(('segment', 'parent'), [PACKED, SHARED], ids=['packed', 'shared'])
def test_forward_equals_loops(segment, parent, impl):
    q, k, v = tensors()
    np.testing.assert_allclose(attend(q, k, v, segment, parent, impl), by_loops(q, k, v, segment, parent), atol=2e-6)


@pytest.mark.parametrize('impl', IMPLS)
def test_a_segment_in_company_equals_the_segment_alone(impl):
    q, k, v = tensors()
    together, start = attend(q, k, v, *PACKED, impl), 0
    for length in (70, 1, 40, 30, 9):  # the last is padding, a segment like any other
        own = slice(start, start + length)
        ones = np.ones(length, np.int32)
        alone = by_loops(q[own], k[own], v[own], ones, ones)
        np.testing.assert_allclose(together[own], alone, atol=1e-5)
        start += length


@pytest.mark.parametrize('impl', IMPLS)
def test_an_answer_under_a_shared_prompt_equals_prompt_and_answer_in_one(impl):
    q, k, v = tensors()
    together = attend(q, k, v, *SHARED, impl)
    for prompt, answer in ((range(50), range(50, 70)), (range(50), range(70, 100)), (range(100, 125), range(125, 135))):
        rows = [*prompt, *answer]
        ones = np.ones(len(rows), np.int32)
        alone = by_loops(q[rows], k[rows], v[rows], ones, ones)
        np.testing.assert_allclose(together[np.array(rows)], alone, atol=1e-5)


@pytest.mark.parametrize('impl', IMPLS)
@pytest.mark.parametrize(('segment', 'parent'), [PACKED, SHARED], ids=['packed', 'shared'])
def test_gradients_equal_those_of_a_plain_softmax(segment, parent, impl):
    q, k, v = tensors()
    cotangent = np.random.default_rng(9).normal(size=q.shape)
    places = np.arange(T)
    seen = (places[:, None] >= places) & ((segment[:, None] == segment) | (parent[:, None] == segment))

    def loss(q, k, v):
        k, v = jnp.repeat(k, N // K, axis=1), jnp.repeat(v, N // K, axis=1)
        scores = jnp.where(seen, jnp.einsum('tnd,snd->nts', q, k) * SCALE, -jnp.inf)
        return jnp.sum(cotangent * jnp.tanh(jnp.einsum('nts,snd->tnd', jax.nn.softmax(scores), v)))

    expected = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for ours, plain in zip(gradients(q, k, v, segment, parent, impl), expected, strict=True):
        np.testing.assert_allclose(ours, plain, atol=2e-5)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 6)), min_size=T, max_size=T), st.integers(0, 99))
def test_blocked_equals_dense_for_any_ids(pairs, seed):
    # ids in any order, interleaved segments, parents that come later or do not exist
    segment, parent = np.array(pairs, np.int32).T
    q, k, v = tensors(seed)
    dense, blocked = (attend(q, k, v, segment, parent, impl) for impl in IMPLS)
    np.testing.assert_allclose(blocked, dense, atol=2e-6)


def test_blocked_visits_only_tiles_with_a_visible_pair():
    # 5 blocks of 64: prompt, answer, answer (seeing the prompt), an ordinary segment of two blocks whose last 10
    # tokens are padding.  Blocks seen: 0 | 1, 0 | 2, 0 | 3 | 4, 3: not the other answer, not the other group.
    segment = np.repeat([1, 2, 3, 4, 4], 64).astype(np.int32)
    parent = np.repeat([1, 1, 1, 4, 4], 64).astype(np.int32)
    segment[-10:] = parent[-10:] = 0
    rows = attention._Rows(None, np.arange(320), jnp.array(segment), jnp.array(parent))
    keys = attention._Keys(None, None, np.arange(320), jnp.array(segment))
    order, count = attention._visible_tiles(rows, keys)
    seen = [sorted(row[:n].tolist()) for row, n in zip(np.asarray(order), count, strict=True)]
    assert seen == [[0], [0, 1], [0, 2], [3], [3, 4]]


def test_auto_takes_blocks_for_long_rows():
    def loops(tokens):
        one = np.ones(tokens, np.int32)
        return 'while' in str(jax.make_jaxpr(lambda q, k, v: attend(q, k, v, one, one, 'auto'))(*tensors(0, tokens)))

    assert not loops(DENSE_BELOW_TOKENS - 1)
    assert loops(DENSE_BELOW_TOKENS)


@pytest.mark.parametrize('impl', IMPLS)
def test_vmap_maps_over_rows(impl):
    rows = [np.stack(x) for x in zip(tensors(0), tensors(7), strict=True)]
    row_ids = [np.stack(x) for x in zip(PACKED, SHARED, strict=True)]
    out = jax.vmap(lambda *a: attend(*a, impl))(*rows, *row_ids)
    np.testing.assert_allclose(out[0], attend(*tensors(0), *PACKED, impl), atol=1e-6)
    np.testing.assert_allclose(out[1], attend(*tensors(7), *SHARED, impl), atol=1e-6)


@pytest.mark.parametrize('impl', IMPLS)
def test_large_scores_do_not_overflow(impl):
    # scores of about 1e5 * .4: the softmax is an argmax
    q, k, v = tensors()
    out = attend(q * 1e3, k * 1e2, v, *PACKED, impl)
    np.testing.assert_allclose(out, by_loops(q * 1e3, k * 1e2, v, *PACKED), atol=1e-4)
    assert all(np.isfinite(g).all() for g in gradients(q * 1e3, k * 1e2, v, *PACKED, impl))


@pytest.mark.parametrize('impl', IMPLS)
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
    out, expected = attend(*bad, *SHARED, impl), attend(*clean, *SHARED, impl)
    others = np.r_[0:50, 70:T]
    lost = slice(55, 70) if where != 'q' else slice(55, 56)
    np.testing.assert_array_equal(out[others], expected[others])
    assert not np.isfinite(out[lost]).any()
    neighbours = np.r_[70:T]
    for got, plain in zip(gradients(*bad, *SHARED, impl), gradients(*clean, *SHARED, impl), strict=True):
        np.testing.assert_array_equal(got[neighbours], plain[neighbours])
        assert not np.isfinite(got[55:56]).any()
    d_k = gradients(*bad, *SHARED, impl)[1]
    assert not np.isfinite(d_k[:50]).any()


@pytest.mark.parametrize('impl', IMPLS)
def test_a_bad_cotangent_stays_in_its_segment(impl):
    # the gradient that comes back for token 60 is NaN: it reaches what 60 sees (0 to 60, without answer 3), no more
    q, k, v = tensors()
    _, pull = jax.vjp(lambda *x: attend(*x, *SHARED, impl), q, k, v)
    clean = np.random.default_rng(0).normal(size=q.shape).astype(np.float32)
    bad = clean.copy()
    bad[60, 1] = np.nan
    for index, (got, plain) in enumerate(zip(pull(bad), pull(clean), strict=True)):
        untouched = np.r_[0:60, 61:T] if index == 0 else np.r_[61:T]
        np.testing.assert_array_equal(got[untouched], plain[untouched])
        reached = got[60, 1] if index == 0 else got[:61, 0]
        assert not np.isfinite(reached).any()


def test_bfloat16_stays_bfloat16_and_near():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in tensors())
    expected = by_loops(*(np.asarray(x, np.float32) for x in (q, k, v)), *SHARED)
    for impl in IMPLS:
        out = attend(q, k, v, *SHARED, impl)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.03)
        assert [g.dtype for g in gradients(q, k, v, *SHARED, impl)] == [jnp.bfloat16] * 3


def test_wrong_arguments_are_named():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="impl='flash' is unknown; use one of auto, dense, blocked"):
        attend(q, k, v, *PACKED, 'flash')
    with pytest.raises(ValueError, match='3 query heads are not a multiple of 2 key heads'):
        attend(q[:, :3], k, v, *PACKED, 'dense')
