"""Sampling: from logits to the next token and its behaviour log-prob, with noise that depends on the request alone.

The key of a token is folded from (seed, draw, sample, index of the token in the trajectory), so the noise does not
depend on the slot, the other requests of the batch, the engine or interruptions.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from areal_jax.models.logprobs import (
    VOCABULARY_BLOCK,
    BlockSums,
    effective_temperature,
    logprob_of,
    scale_logits,
    sum_blocks,
)


def request_keys(seeds: jax.Array, draws: jax.Array, samples: jax.Array) -> jax.Array:
    """Key data uint32 [N, 2] of requests: seeds uint32 [N, 2] (high and low word), draws and samples uint32 [N]."""

    def fold(seed: jax.Array, draw: jax.Array, sample: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl='threefry2x32')
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, draw), sample))

    return jax.vmap(fold)(seeds, draws, samples)


def draw_tokens(
    logits: jax.Array, keys: jax.Array, indices: jax.Array, temperature: jax.Array, sums: BlockSums
) -> jax.Array:
    """One token per row from the softmax of z = logits / temperature, or its argmax where that is 0: int32 [N].

    Gumbel-max in two levels: with independent standard Gumbel noise g,
      block ~ argmax_b (logsumexp of z in b + g_b),   token ~ argmax_t (z_t + g_t) over that block,
    which is P(b) P(t | b) = softmax(z)_t exactly, and needs V/256 + 256 random numbers instead of V. A rounding error
    in z changes the token only at a near tie; an inverted cumulative sum could change it in any flat distribution.

    Args:
      logits: float32 [N, V]; -inf is never drawn.
      keys: request_keys, uint32 [N, 2]. indices: int32 [N], index in the trajectory of the token to draw.
      temperature: float32 [N].
      sums: of z, blocks first.
    """
    by_entry, greedy = logits.T, temperature == 0
    blocks, entries = len(sums.largest), min(VOCABULARY_BLOCK, len(by_entry))
    noise = jax.vmap(functools.partial(_noise, n=blocks + entries))(keys, indices)
    noise = jnp.where(greedy[:, None], 0.0, noise).T
    mass = jnp.where(greedy, sums.largest, sums.logsumexp)
    first = jnp.argmax(mass + noise[:blocks], axis=0) * entries
    block = first + jnp.arange(entries)[:, None]
    within = jnp.take_along_axis(by_entry, block, axis=0, mode='fill', fill_value=-jnp.inf)
    within = within / effective_temperature(temperature)
    return (first + jnp.argmax(within + noise[blocks:], axis=0)).astype(jnp.int32)


def _noise(key: jax.Array, index: jax.Array, n: int) -> jax.Array:
    wrapped = jax.random.wrap_key_data(key, impl='threefry2x32')
    return jax.random.gumbel(jax.random.fold_in(wrapped, index), (n,), jnp.float32)


def cut_support(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """Logits with -inf outside the support that min-p, then top-k, then top-p of what is left, allow.

    Min-p keeps the tokens that have at least `min_p` of the probability of the likeliest. Top-p keeps the smallest set
    of most probable tokens whose mass under softmax(logits / temperature) reaches `top_p`. All tokens that tie at the
    threshold are kept. Greedy rows are not cut.

    Args:
      logits: float32 [N, V]. temperature, top_p, min_p: float32 [N]; top_k: int32 [N]. 0 turns top_k and min_p off,
        1.0 top_p.
    """
    z = scale_logits(logits, temperature)
    z = jnp.where(z >= jnp.max(z, axis=-1, keepdims=True) + jnp.log(min_p)[:, None], z, -jnp.inf)

    def likeliest(z: jax.Array) -> jax.Array:
        enough = _heaviest(z, jnp.ones_like(z), top_k.astype(jnp.float32))
        return jnp.where((top_k == 0)[:, None] | enough, z, -jnp.inf)

    def nucleus(z: jax.Array) -> jax.Array:
        mass = jax.nn.softmax(z, axis=-1)
        enough = _heaviest(z, mass, top_p * jnp.sum(mass, axis=-1))
        return jnp.where((top_p >= 1.0)[:, None] | enough, z, -jnp.inf)

    # each passes over the logits dozens of times
    z = lax.cond(jnp.any(top_k > 0), likeliest, lambda z: z, z)
    z = lax.cond(jnp.any(top_p < 1.0), nucleus, lambda z: z, z)
    kept = jnp.isfinite(z)
    return jnp.where((temperature == 0)[:, None] | kept, logits, -jnp.inf)


def _heaviest(z: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """bool [N, V]: in each row the largest z whose weights add up to `target`, or the whole row if it weighs less.

    Bisects the bits of the threshold: 32 sums over the row are exact and much cheaper than a sort.
    """
    bits = lax.bitcast_convert_type(z, jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        enough = jnp.sum(jnp.where(ordered >= middle[:, None], weights, 0.0), axis=-1) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, _ = lax.fori_loop(0, 32, halve, (jnp.min(ordered, axis=-1), jnp.max(ordered, axis=-1) + 1))
    return ordered >= low[:, None]


def sample_tokens(
    logits: jax.Array,
    keys: jax.Array,
    indices: jax.Array,
    temperature: jax.Array,
    changed_logits: jax.Array | None = None,
    sums: BlockSums | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Tokens int32 [N] and their log-probs float32 [N]: (tokens, of the full softmax, of the one drawn from).

    Tokens are drawn from softmax(logits / temperature), or, with `changed_logits`, from theirs: of `cut_support` it is
    the truncated and renormalised part, of `adjust_logits` any other. The learner can compute the log-probs of the full
    softmax only. Without `changed_logits` the others are None. Temperature 0 takes the argmax and records the log-probs
    of temperature 1. `sums`: of logits / temperature, if already computed.
    """
    sums = sum_blocks(scale_logits(logits, temperature)) if sums is None else sums
    if changed_logits is None:
        tokens = draw_tokens(logits, keys, indices, temperature, sums)
        return tokens, logprob_of(logits, tokens, temperature, sums), None
    changed_sums = sum_blocks(scale_logits(changed_logits, temperature))
    tokens = draw_tokens(changed_logits, keys, indices, temperature, changed_sums)
    changed_logprobs = logprob_of(changed_logits, tokens, temperature, changed_sums)
    return tokens, logprob_of(logits, tokens, temperature, sums), changed_logprobs
