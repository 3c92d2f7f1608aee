"""What changes logits before they are tempered: biases, least lengths of answers, and penalties for repetition.

decode_rows.py fills the arrays on the host, generate.py calls the traced functions. A penalty depends on the tokens
that a sequence has so far. They come from the host with each dispatch, because rows are given anew at every one and no
state but the KV cache outlives it; what a dispatch generates is counted from its own outputs. Shapes: B rows, C tokens
of the longest sequence, S declared steps, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from areal_jax.rollout.backend import DecodeRow

MOST_BIASED_TOKENS = 256  # of a request
_NONE = np.iinfo(np.int32).max  # a token beyond any vocabulary: scatters drop it
Array = Any  # numpy on the host, jax.Array on the device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adjustments:
    """Of the rows of a batch; a row that asks for none has values that change nothing."""

    asked: Array  # bool [B], SamplingParams.adjusts
    penalized: Array  # bool [B], SamplingParams.penalizes
    prompt_tokens: Array  # int32 [B], number of them; the answer begins behind
    least: Array  # int32 [B], min_new_tokens
    repetition: Array  # float32 [B], as the next three
    frequency: Array
    presence: Array
    scale: Array  # logit_scale
    biased: Array  # int32 [B, MOST_BIASED_TOKENS], _NONE where unused
    bias: Array  # float32 [B, MOST_BIASED_TOKENS]
    tokens: Array  # int32 [B, C], of sequences with penalties, _NONE behind them and everywhere else

    def fill(self, place: int, row: DecodeRow) -> None:
        """Writes the row to its place in the arrays, on the host."""
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
    """That change nothing; `tokens` can be written to where `penalized`."""
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
    """Most dispatches have no penalties: they share one array, of a few megabytes, instead of filling it anew."""
    tokens = np.full(shape, _NONE, np.int32)
    tokens.flags.writeable = False
    return tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCounts:
    """What the sequences have as a dispatch begins; of rows without penalties nothing."""

    in_prompt: jax.Array  # bool [B, V]
    in_answer: jax.Array  # int32 [B, V], how often


def count_tokens(rows: Adjustments, vocab_size: int) -> TokenCounts:
    """The tokens of prompts and answers; computed only where a row has penalties."""
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
    """Logits float32 [B, V]: biased, -inf at stop tokens where an answer is too short, penalized, and then scaled.

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
