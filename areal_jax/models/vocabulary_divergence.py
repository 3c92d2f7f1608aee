"""Divergences between two models over the whole vocabulary at each token, tile by tile: for distillation.

Shapes: N tokens, d and d' widths of the policy and of the teacher, V vocabulary, t devices of the axis that cuts V.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from areal_jax.models.logprobs import (
    LOWEST,
    Index,
    choose_chunk,
    effective_temperature,
    fold_tiles,
    pull_back,
    tile_logits,
)


class Divergences(NamedTuple):
    """Of the distributions π of the policy and q of the teacher at each token, float32 [N], nats."""

    reverse: jax.Array  # KL(π ‖ q) = Σ_v π_v (log π_v - log q_v)
    forward: jax.Array  # KL(q ‖ π)


class _Sums(NamedTuple):
    """Of one model over the entries so far, with z its logits and x those of the policy minus those of the teacher,
    each less their largest."""

    top: jax.Array  # largest z
    total: jax.Array  # sum of e^(z - top)
    moment: jax.Array  # sum of x e^(z - top)


class _Saved(NamedTuple):
    """What the backward pass reads, beside the arguments."""

    lse: jax.Array  # log-sum-exp of the policy
    teacher_lse: jax.Array
    reverse: jax.Array


_Pair = tuple[_Sums, _Sums]  # of the policy and of the teacher
_Arguments = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def token_divergences(
    hidden: jax.Array,
    head: jax.Array,
    teacher_hidden: jax.Array,
    teacher_head: jax.Array,
    temperature: ArrayLike,
    *,
    chunk: int | None = None,
    axis_name: str | None = None,
) -> Divergences:
    """Divergences of softmax(hidden @ head.T / temperature) and of the teacher's, without logits [N, V].

    Differentiable in `hidden` [N, d] and `head` [V, d]; `teacher_hidden` [N, d'] and `teacher_head` [V, d'] are
    constant. With π and q of a token, d reverse / dz_v = π_v (log π_v - log q_v - reverse) and d forward / dz_v =
    π_v - q_v. Of the vocabulary only log-sum-exps and the reverse divergence are saved; the backward pass computes the
    tiles again. Equal models give exactly 0, and gradients of exactly 0. Log-ratios are not clamped.

    `chunk`, `axis_name` and what NaN does: see logprobs.token_logprobs; inside jax.shard_map both heads are slices.
    """
    rate = jnp.broadcast_to(effective_temperature(temperature), (len(hidden),))
    teacher = jax.lax.stop_gradient((teacher_hidden, teacher_head))
    return _divergences(hidden, head, *teacher, rate, choose_chunk(chunk, len(hidden), len(head)), axis_name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _divergences(
    hidden: jax.Array,
    head: jax.Array,
    teacher_hidden: jax.Array,
    teacher_head: jax.Array,
    temperature: jax.Array,
    chunk: int,
    axis_name: str | None,
) -> Divergences:
    return _forward(hidden, head, teacher_hidden, teacher_head, temperature, chunk, axis_name)[0]


def _forward(
    hidden: jax.Array,
    head: jax.Array,
    teacher_hidden: jax.Array,
    teacher_head: jax.Array,
    temperature: jax.Array,
    chunk: int,
    axis_name: str | None,
) -> tuple[Divergences, tuple[_Arguments, _Saved]]:
    def fold(state: _Pair, columns: tuple[jax.Array, jax.Array], first: Index) -> _Pair:
        z = tile_logits(hidden, columns[0], temperature)
        other = tile_logits(teacher_hidden, columns[1], temperature)
        tops = (jnp.maximum(sums.top, x.max(axis=-1)) for sums, x in zip(state, (z, other), strict=True))
        ours, theirs = _move(state, *tops)
        shifted, other_shifted = z - ours.top[:, None], other - theirs.top[:, None]
        x = shifted - other_shifted
        return _add(ours, shifted, x), _add(theirs, other_shifted, x)

    zeros = jnp.zeros(temperature.shape, jnp.float32)
    nothing = _Sums(zeros + LOWEST, zeros, zeros)
    state = fold_tiles(fold, (nothing, nothing), (head, teacher_head), chunk)
    if axis_name is not None:
        # pmax may drop a NaN; the sums carry it to every device
        state = _move(state, *(jax.lax.pmax(sums.top, axis_name) for sums in state))
        ours, theirs = (_Sums(sums.top, *jax.lax.psum(sums[1:], axis_name)) for sums in state)
        state = ours, theirs
    ours, theirs = state
    apart = jnp.log(theirs.total) - jnp.log(ours.total)
    found = Divergences(ours.moment / ours.total + apart, -theirs.moment / theirs.total - apart)
    lse, teacher_lse = (sums.top + jnp.log(sums.total) for sums in state)
    arguments = (hidden, head, teacher_hidden, teacher_head, temperature)
    return found, (arguments, _Saved(lse, teacher_lse, found.reverse))


def _move(state: _Pair, top: jax.Array, teacher_top: jax.Array) -> _Pair:
    """The sums with other values in the place of the largest logits."""
    ours, theirs = state
    by = (ours.top - top) - (theirs.top - teacher_top)  # is added to every x

    def move(sums: _Sums, top: jax.Array) -> _Sums:
        down = jnp.exp(sums.top - top)
        return _Sums(top, down * sums.total, down * (sums.moment + sums.total * by))

    return move(ours, top), move(theirs, teacher_top)


def _add(sums: _Sums, shifted: jax.Array, x: jax.Array) -> _Sums:
    weights = jnp.exp(shifted)
    return _Sums(sums.top, sums.total + weights.sum(axis=-1), sums.moment + jnp.sum(weights * x, axis=-1))


def _backward(
    chunk: int, axis_name: str | None, saved: tuple[_Arguments, _Saved], gradients: Divergences
) -> tuple[jax.Array | None, ...]:
    (hidden, head, teacher_hidden, teacher_head, temperature), sums = saved
    if axis_name is not None:  # the results on every device depend on this slice
        gradients = jax.lax.psum(gradients, axis_name)
    d_reverse, d_forward = (g[:, None] for g in gradients)

    def slopes(columns: tuple[jax.Array, ...], first: Index) -> jax.Array:
        log_p = tile_logits(hidden, columns[0], temperature) - sums.lse[:, None]
        log_q = tile_logits(teacher_hidden, columns[1], temperature) - sums.teacher_lse[:, None]
        p = jnp.exp(log_p)
        return d_reverse * p * (log_p - log_q - sums.reverse[:, None]) + d_forward * (p - jnp.exp(log_q))

    return *pull_back(slopes, hidden, (head, teacher_head), temperature, chunk), None, None, None


_divergences.defvjp(_forward, _backward)
