"""Sampling: draws the next token from logits and returns its behaviour log-prob; noise depends on the request alone.

The key of a token is folded from (seed, draw, sample, index of the token in the trajectory), so the noise does not
depend on the slot, the other requests of the batch, the engine or interruptions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from areal_jax.models.logprobs import (
    VOCABULARY_BLOCK,
    BlockSums,
    effective_temperature,
    logprob_of,
    scale_logits,
    sum_blocks,
)
from areal_jax.rollout.backend import DecodeRow

MOST_BIASED_TOKENS = 256  # of a request
_NONE = np.iinfo(np.int32).max  # a token beyond any vocabulary: scatters drop it
Array = Any  # numpy on the host, jax.Array on the device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adjustments:
    """The logit adjustments of a batch's rows; a row that asks for none has values that change nothing."""

    asked: Array  # bool [B], SamplingParams.adjusts
    penalized: Array  # bool [B], SamplingParams.penalizes
    prompt_tokens: Array  # int32 [B], their number; the answer begins after them
    least: Array  # int32 [B], min_new_tokens
    repetition: Array  # float32 [B], like the next three
    frequency: Array
    presence: Array
    scale: Array  # logit_scale
    biased: Array  # int32 [B, MOST_BIASED_TOKENS], _NONE where unused
    bias: Array  # float32 [B, MOST_BIASED_TOKENS]
    tokens: Array  # int32 [B, C], of sequences with penalties; _NONE everywhere else

    def fill(self, place: int, row: DecodeRow) -> None:
        """Writes the row to entry `place` of the arrays, on the host."""
        params = row.request.sampling
        self.asked[place], self.penalized[place] = params.adjusts, params.penalizes
        self.prompt_tokens[place] = len(row.request.prompt_tokens)
        self.least[place] = params.min_new_tokens
        self.repetition[place] = params.repetition_penalty
        self.frequency[place], self.presence[place] = params.frequency_penalty, params.presence_penalty
        self.scale[place] = params.logit_scale
        if params.logit_bias:
            n = len(params.logit_bias)
            self.biased[place, :n], self.bias[place, :n] = zip(*params.logit_bias, strict=True)
        if params.penalizes:
            self.tokens[place, : row.position + 1] = row.tokens


def empty_adjustments(rows: int, context_tokens: int, *, penalized: bool) -> Adjustments:
    """Returns adjustments that change nothing; `tokens` is writeable only if `penalized`."""
    shape = (rows, context_tokens)
    return Adjustments(
        asked=np.zeros(rows, bool),
        penalized=np.zeros(rows, bool),
        prompt_tokens=np.zeros(rows, np.int32),
        least=np.zeros(rows, np.int32),
        repetition=np.ones(rows, np.float32),
        frequency=np.zeros(rows, np.float32),
        presence=np.zeros(rows, np.float32),
        scale=np.ones(rows, np.float32),
        biased=np.full((rows, MOST_BIASED_TOKENS), _NONE, np.int32),
        bias=np.zeros((rows, MOST_BIASED_TOKENS), np.float32),
        tokens=np.full(shape, _NONE, np.int32) if penalized else _no_tokens(shape),
    )


@functools.cache
def _no_tokens(shape: tuple[int, int]) -> np.ndarray:
    """Returns a shared array: most dispatches have no penalties and need not fill a few megabytes each time."""
    tokens = np.full(shape, _NONE, np.int32)
    tokens.flags.writeable = False
    return tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """The tokens in the sequences when a dispatch begins; empty for rows without penalties."""

    in_prompt: jax.Array  # bool [B, V]
    in_answer: jax.Array  # int32 [B, V], number of occurrences


def count_tokens(rows: Adjustments, vocab_size: int) -> TokenCounts:
    """Counts the tokens of prompts and answers; computed only if a row has penalties."""
    shape = (len(rows.asked), vocab_size)

    def none(_: jax.Array) -> TokenCounts:
        return TokenCounts(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))

    def count(tokens: jax.Array) -> TokenCounts:
        is_prompt = jnp.arange(tokens.shape[1]) < rows.prompt_tokens[:, None]
        row = jnp.arange(shape[0])[:, None]
        prompt, answer = jnp.where(is_prompt, tokens, _NONE), jnp.where(is_prompt, _NONE, tokens)
        return TokenCounts(
            jnp.zeros(shape, bool).at[row, prompt].set(True, mode='drop'),
            jnp.zeros(shape, jnp.int32).at[row, answer].add(1, mode='drop'),
        )

    return lax.cond(jnp.any(rows.penalized), count, none, rows.tokens)


def adjust_logits(
    logits: jax.Array,
    rows: Adjustments,
    stop_tokens: jax.Array,
    indices: jax.Array,
    counts: TokenCounts,
    generated: jax.Array,
    step: jax.Array,
) -> jax.Array:
    """Returns logits float32 [B, V]: biased, -inf at stop tokens of too short answers, penalized, and then scaled.

    Args:
      logits: float32 [B, V]. stop_tokens: int32 [B, any], -1 where unused.
      indices: int32 [B], index in the sequence of the token to draw.
      generated: int32 [S, B], of which the first `step` are tokens of this dispatch.
    """
    row = jnp.arange(len(logits))[:, None]
    z = logits.at[row, rows.biased].add(rows.bias, mode='drop')
    too_short = (indices - rows.prompt_tokens < rows.least)[:, None]
    z = z.at[row, jnp.where(too_short & (stop_tokens >= 0), stop_tokens, _NONE)].set(-jnp.inf, mode='drop')

    def penalize(z: jax.Array) -> jax.Array:
        is_generated = (jnp.arange(len(generated)) < step)[:, None]
        in_answer = counts.in_answer.at[row, jnp.where(is_generated, generated, _NONE).T].add(1, mode='drop')
        repetition = rows.repetition[:, None]
        repeated = jnp.where(z > 0, z / repetition, z * repetition)
        z = jnp.where(counts.in_prompt | (in_answer > 0), repeated, z)
        return z - rows.frequency[:, None] * in_answer - rows.presence[:, None] * (in_answer > 0)

    z = lax.cond(jnp.any(rows.penalized), penalize, lambda z: z, z)
    return z * rows.scale[:, None]


def request_keys(seeds: jax.Array, draws: jax.Array, samples: jax.Array) -> jax.Array:
    """Returns key data uint32 [N, 2] of seeds uint32 [N, 2] (high and low word), draws and samples uint32 [N]."""

    def fold(seed: jax.Array, draw: jax.Array, sample: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl='threefry2x32')
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, draw), sample))

    return jax.vmap(fold)(seeds, draws, samples)


def draw_tokens(
    logits: jax.Array, keys: jax.Array, indices: jax.Array, temperature: jax.Array, sums: BlockSums
) -> jax.Array:
    """Draws one token per row, int32 [N], from the softmax of z = logits / temperature; at temperature 0 the argmax.

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
    """Sets logits to -inf outside the support that min-p, then top-k, then top-p of the remaining tokens, allow.

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

    # skipped if unused: each makes dozens of passes over the logits
    z = lax.cond(jnp.any(top_k > 0), likeliest, lambda z: z, z)
    z = lax.cond(jnp.any(top_p < 1.0), nucleus, lambda z: z, z)
    kept = jnp.isfinite(z)
    return jnp.where((temperature == 0)[:, None] | kept, logits, -jnp.inf)


def _heaviest(z: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Marks in each row the largest z whose weights add up to `target`, else the whole row; bool [N, V].

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
    sum_blocks: Callable[[jax.Array], BlockSums] = sum_blocks,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns (tokens int32 [N], their log-probs of the full softmax, and of the softmax drawn from, float32 [N]).

    Tokens are drawn from softmax(logits / temperature), or, if given, from the softmax of `changed_logits`: after
    `cut_support` a truncated and renormalised part of the full one, after `adjust_logits` any distribution. The learner
    can compute the log-probs of the full softmax only. Without `changed_logits` the last result is None. Temperature 0
    takes the argmax and records the log-probs of temperature 1. `sums`: of logits / temperature, if already computed;
    `sum_blocks` computes them.
    """
    sums = sum_blocks(scale_logits(logits, temperature)) if sums is None else sums
    if changed_logits is None:
        tokens = draw_tokens(logits, keys, indices, temperature, sums)
        return tokens, logprob_of(logits, tokens, temperature, sums), None
    changed_sums = sum_blocks(scale_logits(changed_logits, temperature))
    tokens = draw_tokens(changed_logits, keys, indices, temperature, changed_sums)
    changed_logprobs = logprob_of(changed_logits, tokens, temperature, changed_sums)
    return tokens, logprob_of(logits, tokens, temperature, sums), changed_logprobs
