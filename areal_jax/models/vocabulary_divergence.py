"""Divergences between two models over the whole vocabulary at each token, tile by tile: for distillation.

Shapes: N tokens, d and d' widths of the policy and of the teacher, V vocabulary, t devices of the axis that cuts V.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from areal_jax.models.logprobs import (
    LOWEST,
    TILE_BYTES,
    Index,
    choose_chunk,
    effective_temperature,
    fold_tiles,
    pull_back,
    shift_sums,
    tile_logits,
)

_Sums = tuple[jax.Array, jax.Array, jax.Array]
Caps = tuple[float | None, float | None]  # of the logits of the policy and of the teacher, see logprobs.cap_logits
_Reduce = Callable[[jax.Array], jax.Array]


class _Edge(NamedTuple):
    """The edge of the entries of the vocabulary that count at a token, float32 [N] each."""

    logit: jax.Array  # entries with larger logits count
    share: jax.Array  # the weight of an entry with exactly this logit


_Saved = tuple[jax.Array, jax.Array, jax.Array, _Edge, jax.Array, jax.Array]


def count_kept(vocabulary: int, clamp: float) -> int:
    """Tokens that remain of a vocabulary without the share `clamp` of its least likely ones; at least one."""
    return max(1, vocabulary - round(clamp * vocabulary))


def clamped_entropy(
    hidden: jax.Array,
    head: jax.Array,
    temperature: ArrayLike,
    kept: int,
    *,
    cap: float | None = None,
    chunk: int | None = None,
    block: int | None = None,
    axis_name: str | None = None,
) -> jax.Array:
    """Entropy of softmax(hidden @ head.T / temperature) renormalised over its `kept` likeliest entries, float32 [N].

      H = -Σ_{v in K} q_v log q_v,   q_v = e^{z_v} / Σ_{u in K} e^{z_u},   dH/dz_v = -[v in K] q_v (log q_v + H)

    The clamped entropy of AEnt, "On Entropy Control in LLM-RL Algorithms", arXiv 2509.03493. K is constant in the
    gradient with respect to `hidden` [N, d] and `head` [V, d]. Entries that tie for the last places of K have equal
    shares of these. With `kept` = V it is the entropy of the whole distribution.

    The edge of K needs all logits of a token at once: it is found for `block` tokens at a time (None: as many as fill
    32 MB with their logits), and is put between two logits, so that rounding does not decide. Sums and gradient are
    then computed by tiles of the vocabulary, which the backward pass recomputes. Compared with token_logprobs, this
    costs one more product with the head, and 32 passes over its logits.

    For `cap`, `chunk`, `axis_name` and the effect of NaN see logprobs.token_logprobs; `kept` counts in the whole
    vocabulary.
    """
    temperature = jnp.broadcast_to(effective_temperature(temperature), (len(hidden),))
    if block is None:
        block = TILE_BYTES // (4 * len(head))
    block = max(1, min(block, len(hidden)))
    edge = _find_edges(*jax.lax.stop_gradient((hidden, head)), temperature, kept, block, axis_name, cap)
    return _entropy(hidden, head, temperature, edge, choose_chunk(chunk, len(hidden), len(head)), axis_name, cap)


def _find_edges(
    hidden: jax.Array, head: jax.Array, temperature: jax.Array, kept: int, block: int, axis_name: str | None,
    cap: float | None,
) -> _Edge:  # fmt: skip
    tokens = len(hidden)
    padding = -tokens % block
    by_block = lambda x, fill: jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), constant_values=fill).reshape(
        -1, block, *x.shape[1:]
    )
    find = lambda of: _find_edge(tile_logits(of[0], head, of[1], cap), kept, axis_name)
    edges = jax.lax.map(find, (by_block(hidden, 0), by_block(temperature, 1)))
    return _Edge(*(x.reshape(-1)[:tokens] for x in edges))


def _find_edge(z: jax.Array, kept: int, axis_name: str | None) -> _Edge:
    """The edge of logits [c, V], given whole or as this device's columns."""
    total: _Reduce = lambda x: x if axis_name is None else jax.lax.psum(x, axis_name)
    largest: _Reduce = lambda x: x if axis_name is None else jax.lax.pmax(x, axis_name)
    count: _Reduce = lambda chosen: total(jnp.sum(chosen, axis=-1, dtype=jnp.int32))
    last = _kept_largest(z, kept, count)  # the smallest logit in K
    above, equal = count(z > last[:, None]), count(z == last[:, None])
    below = largest(jnp.max(jnp.where(z < last[:, None], z, LOWEST), axis=-1))
    between = below + (last - below) / 2
    fits = above + equal == kept  # no tie crosses the edge
    logit = jnp.where(fits & (between > below), between, last)
    return _Edge(logit, jnp.where(fits, 1.0, (kept - above) / equal))


def _kept_largest(z: jax.Array, kept: int, count: _Reduce) -> jax.Array:
    """The logit of rank `kept` in each row of z [c, V], exactly, float32 [c]: bit by bit from the highest."""
    bits = jax.lax.bitcast_convert_type(z, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    keys = jnp.where(bits >= sign, ~bits, bits | sign)  # in the order of the numbers

    def narrow(place: jax.Array, found: jax.Array) -> jax.Array:
        larger = found | (sign >> place.astype(jnp.uint32))
        return jnp.where(count(keys >= larger[:, None]) >= kept, larger, found)

    found = jax.lax.fori_loop(0, 32, narrow, jnp.zeros(len(z), jnp.uint32))
    return jax.lax.bitcast_convert_type(jnp.where(found >= sign, found ^ sign, ~found), jnp.float32)


def _count_entries(z: jax.Array, edge: _Edge) -> jax.Array:
    """The weight of each entry, in [0, 1]."""
    inside = (z > edge.logit[:, None]).astype(jnp.float32)
    return jnp.where(z == edge.logit[:, None], edge.share[:, None], inside)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _entropy(
    hidden: jax.Array, head: jax.Array, temperature: jax.Array, edge: _Edge, chunk: int, axis_name: str | None,
    cap: float | None,
) -> jax.Array:  # fmt: skip
    return _forward(hidden, head, temperature, edge, chunk, axis_name, cap)[0]


def _forward(
    hidden: jax.Array, head: jax.Array, temperature: jax.Array, edge: _Edge, chunk: int, axis_name: str | None,
    cap: float | None,
) -> tuple[jax.Array, _Saved]:  # fmt: skip
    def fold(state: _Sums, columns: jax.Array, first: Index) -> _Sums:
        top, total, moment = state  # largest z; sums over K of e^(z - top) and (z - top) e^(z - top)
        z = tile_logits(hidden, columns, temperature, cap)
        new_top = jnp.maximum(top, z.max(axis=-1))
        shifted = z - new_top[:, None]
        weights = _count_entries(z, edge) * jnp.exp(shifted)
        total, moment = shift_sums(total, moment, top - new_top)
        return new_top, total + weights.sum(axis=-1), moment + jnp.sum(weights * shifted, axis=-1)

    zeros = jnp.zeros(temperature.shape, jnp.float32)
    top, total, moment = fold_tiles(fold, (zeros + LOWEST, zeros, zeros), head, chunk)
    if axis_name is not None:
        highest = jax.lax.pmax(top, axis_name)
        total, moment = jax.lax.psum(shift_sums(total, moment, top - highest), axis_name)
        top = highest
    entropy = jnp.log(total) - moment / total
    return entropy, (hidden, head, temperature, edge, top + jnp.log(total), entropy)


def _backward(
    chunk: int, axis_name: str | None, cap: float | None, saved: _Saved, gradient: jax.Array
) -> tuple[jax.Array | None, ...]:
    hidden, head, temperature, edge, lse, entropy = saved
    if axis_name is not None:  # the result on every device depends on this slice
        gradient = jax.lax.psum(gradient, axis_name)

    def slopes(columns: tuple[jax.Array, ...], first: Index) -> jax.Array:
        z = tile_logits(hidden, columns[0], temperature, cap)
        log_q = z - lse[:, None]
        return -gradient[:, None] * _count_entries(z, edge) * jnp.exp(log_q) * (log_q + entropy[:, None])

    return *pull_back(slopes, hidden, (head,), temperature, chunk, cap), None, None


_entropy.defvjp(_forward, _backward)


class Divergences(NamedTuple):
    """Divergences of the policy's distribution π and the teacher's q at each token, float32 [N], nats."""

    reverse: jax.Array  # KL(π ‖ q) = Σ_v π_v (log π_v - log q_v)
    forward: jax.Array  # KL(q ‖ π)


class _VocabularyDivergenceSums(NamedTuple):
    """Running sums of one model over the vocabulary. z: this model's logits; x: policy minus teacher logits, each
    shifted by its maximum."""

    top: jax.Array  # largest z
    total: jax.Array  # sum of e^(z - top)
    moment: jax.Array  # sum of x e^(z - top)


class _VocabularyDivergenceSaved(NamedTuple):
    """The values that the backward pass reads in addition to the arguments."""

    lse: jax.Array  # log-sum-exp of the policy
    teacher_lse: jax.Array
    reverse: jax.Array


_Pair = tuple[_VocabularyDivergenceSums, _VocabularyDivergenceSums]  # of the policy and of the teacher
_Arguments = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def token_divergences(
    hidden: jax.Array,
    head: jax.Array,
    teacher_hidden: jax.Array,
    teacher_head: jax.Array,
    temperature: ArrayLike,
    *,
    caps: Caps = (None, None),
    chunk: int | None = None,
    axis_name: str | None = None,
) -> Divergences:
    """Divergences of softmax(hidden @ head.T / temperature) and of the teacher's, without logits [N, V].

    Differentiable in `hidden` [N, d] and `head` [V, d]; `teacher_hidden` [N, d'] and `teacher_head` [V, d'] are
    constant. With π and q of a token, d reverse / dz_v = π_v (log π_v - log q_v - reverse) and d forward / dz_v =
    π_v - q_v. Only log-sum-exps and the reverse divergence are saved; the backward pass recomputes the tiles of the
    vocabulary. Equal models give exactly 0, and gradients of exactly 0. Log-ratios are not clamped.

    For `chunk`, `axis_name` and the effect of NaN see logprobs.token_logprobs; inside jax.shard_map both heads are
    slices. `caps` are the `cap` of the policy and of the teacher.
    """
    rate = jnp.broadcast_to(effective_temperature(temperature), (len(hidden),))
    teacher = jax.lax.stop_gradient((teacher_hidden, teacher_head))
    return _divergences(hidden, head, *teacher, rate, choose_chunk(chunk, len(hidden), len(head)), axis_name, caps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _divergences(
    hidden: jax.Array,
    head: jax.Array,
    teacher_hidden: jax.Array,
    teacher_head: jax.Array,
    temperature: jax.Array,
    chunk: int,
    axis_name: str | None,
    caps: Caps,
) -> Divergences:
    return _forward_vocabulary_divergence(
        hidden, head, teacher_hidden, teacher_head, temperature, chunk, axis_name, caps
    )[0]


def _forward_vocabulary_divergence(
    hidden: jax.Array,
    head: jax.Array,
    teacher_hidden: jax.Array,
    teacher_head: jax.Array,
    temperature: jax.Array,
    chunk: int,
    axis_name: str | None,
    caps: Caps,
) -> tuple[Divergences, tuple[_Arguments, _VocabularyDivergenceSaved]]:
    def fold(state: _Pair, columns: tuple[jax.Array, jax.Array], first: Index) -> _Pair:
        z = tile_logits(hidden, columns[0], temperature, caps[0])
        other = tile_logits(teacher_hidden, columns[1], temperature, caps[1])
        tops = (jnp.maximum(sums.top, x.max(axis=-1)) for sums, x in zip(state, (z, other), strict=True))
        ours, theirs = _move(state, *tops)
        shifted, other_shifted = z - ours.top[:, None], other - theirs.top[:, None]
        x = shifted - other_shifted
        return _add(ours, shifted, x), _add(theirs, other_shifted, x)

    zeros = jnp.zeros(temperature.shape, jnp.float32)
    nothing = _VocabularyDivergenceSums(zeros + LOWEST, zeros, zeros)
    state = fold_tiles(fold, (nothing, nothing), (head, teacher_head), chunk)
    if axis_name is not None:
        # pmax may drop a NaN; the sums carry it to every device
        state = _move(state, *(jax.lax.pmax(sums.top, axis_name) for sums in state))
        ours, theirs = (_VocabularyDivergenceSums(sums.top, *jax.lax.psum(sums[1:], axis_name)) for sums in state)
        state = ours, theirs
    ours, theirs = state
    apart = jnp.log(theirs.total) - jnp.log(ours.total)
    found = Divergences(ours.moment / ours.total + apart, -theirs.moment / theirs.total - apart)
    lse, teacher_lse = (sums.top + jnp.log(sums.total) for sums in state)
    arguments = (hidden, head, teacher_hidden, teacher_head, temperature)
    return found, (arguments, _VocabularyDivergenceSaved(lse, teacher_lse, found.reverse))


def _move(state: _Pair, top: jax.Array, teacher_top: jax.Array) -> _Pair:
    """Rescales the sums to new values of the largest logits."""
    ours, theirs = state
    by = (ours.top - top) - (theirs.top - teacher_top)  # is added to every x

    def move(sums: _VocabularyDivergenceSums, top: jax.Array) -> _VocabularyDivergenceSums:
        down = jnp.exp(sums.top - top)
        return _VocabularyDivergenceSums(top, down * sums.total, down * (sums.moment + sums.total * by))

    return move(ours, top), move(theirs, teacher_top)


def _add(sums: _VocabularyDivergenceSums, shifted: jax.Array, x: jax.Array) -> _VocabularyDivergenceSums:
    weights = jnp.exp(shifted)
    return _VocabularyDivergenceSums(
        sums.top, sums.total + weights.sum(axis=-1), sums.moment + jnp.sum(weights * x, axis=-1)
    )


def _backward_vocabulary_divergence(
    chunk: int,
    axis_name: str | None,
    caps: Caps,
    saved: tuple[_Arguments, _VocabularyDivergenceSaved],
    gradients: Divergences,
) -> tuple[jax.Array | None, ...]:
    (hidden, head, teacher_hidden, teacher_head, temperature), sums = saved
    if axis_name is not None:  # the results on every device depend on this slice
        gradients = jax.lax.psum(gradients, axis_name)
    d_reverse, d_forward = (g[:, None] for g in gradients)

    def slopes(columns: tuple[jax.Array, ...], first: Index) -> jax.Array:
        log_p = tile_logits(hidden, columns[0], temperature, caps[0]) - sums.lse[:, None]
        log_q = tile_logits(teacher_hidden, columns[1], temperature, caps[1]) - sums.teacher_lse[:, None]
        p = jnp.exp(log_p)
        return d_reverse * p * (log_p - log_q - sums.reverse[:, None]) + d_forward * (p - jnp.exp(log_q))

    return *pull_back(slopes, hidden, (head, teacher_head), temperature, chunk, caps[0]), None, None, None


_divergences.defvjp(_forward_vocabulary_divergence, _backward_vocabulary_divergence)
