"""Packed rows for the tests of attention, and attention by definition: loops in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.attention.backends import packed_attention

T, N, K, D = 150, 4, 2, 8  # three blocks of 64 tokens, the last not full
SCALE = 0.4
OUR_OWN = ('dense', 'blocked', 'pallas')  # share prompts, slices; contain bad values
INTERPRETED = ('pallas', 'splash')
runs_here = pytest.mark.parametrize('impl', [*OUR_OWN, 'splash'])
runs_anything = pytest.mark.parametrize('impl', OUR_OWN)


def tensors(seed=0, tokens=T):
    shapes = (tokens, N, D), (tokens, K, D), (tokens, K, D)
    return [np.random.default_rng(seed + i).normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)]


def cotangent(shape=(T, N, D)):
    return np.random.default_rng(9).normal(size=shape).astype(np.float32)


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
# answers follow their prompt in the trajectory: 2 and 3 start at 50, 5 at 25
POSITIONS = np.r_[0:50, 50:70, 50:80, 0:25, 25:35, 0:15].astype(np.int32)
PLACES = np.arange(T, dtype=np.int32)  # each segment of PACKED counts on from the one before
both_packings = pytest.mark.parametrize(('segment', 'parent'), [PACKED, SHARED], ids=['packed', 'shared'])


def seen_by(segment, parent, positions=POSITIONS, window=None):
    """bool [T, T] from a loop over pairs."""
    seen = np.zeros((len(segment), len(segment)), bool)
    for t in range(len(segment)):
        for s in range(t + 1):
            near = window is None or positions[t] - positions[s] < window
            seen[t, s] = near and segment[s] in (segment[t], parent[t])
    return seen


def by_loops(q, k, v, seen, d_out=None, sinks=None):
    """Output, or with d_out also the gradients of q, k and v, token by token and head by head, in float64.

    With sinks [N] also their gradient: each is one more score of its head, whose weight multiplies no value.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, d_q, d_k, d_v = np.zeros(q.shape), np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    d_sinks = np.zeros(q.shape[1])
    for t in range(len(q)):
        near = np.flatnonzero(seen[t])
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = k[near, group] @ q[t, head] * SCALE
            if sinks is not None:
                scores = np.append(scores, sinks[head])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            weights, of_sink = weights[: len(near)], weights[len(near) :]
            out[t, head] = weights @ v[near, group]
            if d_out is not None:
                d_weights = v[near, group] @ d_out[t, head]
                d_scores = weights * (d_weights - weights @ d_weights) * SCALE
                d_q[t, head] = d_scores @ k[near, group]
                d_k[near, group] += np.outer(d_scores, q[t, head])
                d_v[near, group] += np.outer(weights, d_out[t, head])
                d_sinks[head] -= of_sink.sum() * (weights @ d_weights)
    if d_out is None:
        return out
    return (out, d_q, d_k, d_v) if sinks is None else (out, d_q, d_k, d_v, d_sinks)


@functools.partial(jax.jit, static_argnames=('impl', 'window'))  # one program for all tests of an implementation
def attend(q, k, v, segment, parent, impl, positions=None, window=None, first=0, sinks=None):
    first = first if len(q) < len(k) else 0
    return packed_attention(
        q, k, v, segment, parent, scale=SCALE, impl=impl, positions=positions, window=window, first=first,
        sinks=sinks, interpret=impl in INTERPRETED,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=('impl', 'window'))
def pull_back(q, k, v, d_out, segment, parent, impl, positions=None, window=None, first=0, sinks=None):
    """Output and gradients of q, k and v, and of sinks if there are some, for the gradient d_out of the output."""

    def run(q, k, v, *sinks):
        return attend(q, k, v, segment, parent, impl, positions, window, first, *sinks)

    out, pull = jax.vjp(run, q, k, v, *(() if sinks is None else (sinks,)))
    return out, *pull(jnp.asarray(d_out, out.dtype))
