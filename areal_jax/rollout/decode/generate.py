"""The traced program of `generate`: steps of decoding for the rows of a batch, until none is live or they are done.

Used by backend.py. Shapes: B rows, S declared steps, M blocks of a table row, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from areal_jax.models.decoder import Attend, Decoder, Params
from areal_jax.rollout.decode import sampling
from areal_jax.rollout.decode.attention.contract import Cache, CacheAttention, LayerCache
from areal_jax.rollout.decode.cache import CacheSizes
from areal_jax.rollout.decode.rows import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """Of all steps, with the meaning of rollout.backend.DecodeOutput."""

    tokens: jax.Array  # int32 [S, B]
    logprobs: jax.Array  # float32 [S, B]
    valid: jax.Array  # bool [S, B]
    sampling_logprobs: jax.Array | None  # float32 [S, B]; None = programs without cuts
    positions_read: jax.Array  # int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Rows:
    """What a step changes.

    A row that has ended is computed along with the others until the dispatch ends, and its position grows: so the rows
    stay in the descending order of their positions. It writes to the padding block, and nobody reads its results.
    """

    token: jax.Array  # int32 [B]
    position: jax.Array  # int32 [B]
    live: jax.Array  # bool [B]


_Carry = tuple[jax.Array, Cache, _Rows, Outputs]  # the first is the number of the step


@dataclasses.dataclass(frozen=True)
class Generate:
    """The program for one decoder; its batch is that of the arguments.

    Args:
      over_heads: makes the attention of all heads of one that is given those of a device.
      steps: the most of one call, S.
      filtered: whether rows may use top_k or top_p.
    """

    decoder: Decoder
    attention: CacheAttention
    over_heads: Callable[[Attend], Attend]
    sizes: CacheSizes
    steps: int
    filtered: bool

    def __call__(self, weights: Params, cache: Cache, batch: Batch, steps: jax.Array) -> tuple[Cache, Outputs]:
        """Up to `steps` tokens for every row; fewer when no row is live any more."""
        keys = sampling.request_keys(batch.seed[:, :2], batch.seed[:, 2], batch.seed[:, 3])

        def more(carry: _Carry) -> jax.Array:
            return (carry[0] < steps) & jnp.any(carry[2].live)

        def step(carry: _Carry) -> _Carry:
            i, cache, rows, outputs = carry
            lengths = self._lengths(batch, rows)
            cache, logits = self._forward(weights, cache, batch, rows, lengths)
            cut = _cut_where_asked(logits, batch, rows.live) if self.filtered else None
            sampled = sampling.sample_tokens(logits, keys, rows.position + 1, batch.temperature, cut)
            read = self.attention.positions_read(lengths, self.sizes.block_tokens)
            return i + 1, cache, _advance(batch, rows, sampled[0]), _record(outputs, i, rows.live, sampled, read)

        rows = _Rows(batch.token, batch.position, batch.limit > 0)
        _, cache, _, outputs = lax.while_loop(more, step, (jnp.int32(0), cache, rows, self._no_outputs(batch)))
        return cache, outputs

    def _no_outputs(self, batch: Batch) -> Outputs:
        shape = (self.steps, len(batch.token))
        zeros = jnp.zeros(shape, jnp.float32)
        return Outputs(
            tokens=jnp.zeros(shape, jnp.int32),
            logprobs=zeros,
            valid=jnp.zeros(shape, bool),
            sampling_logprobs=zeros if self.filtered else None,
            positions_read=jnp.int32(0),
        )

    def _lengths(self, batch: Batch, rows: _Rows) -> jax.Array:
        """int32 [B]: positions that a step attends to, its own included."""
        held = self.sizes.table_blocks * self.sizes.block_tokens
        return jnp.where(batch.limit > 0, jnp.minimum(rows.position + 1, held), 0)

    def _forward(
        self, weights: Params, cache: Cache, batch: Batch, rows: _Rows, lengths: jax.Array
    ) -> tuple[Cache, jax.Array]:
        """The cache with the tokens of the rows, and the logits behind them, float32 [B, V]."""
        place = jnp.minimum(rows.position // self.sizes.block_tokens, self.sizes.table_blocks - 1)
        block = jnp.take_along_axis(batch.table, place[:, None], axis=1)[:, 0]
        block = jnp.where(rows.live, block, self.sizes.padding_block)
        offset = rows.position % self.sizes.block_tokens

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, layer: LayerCache, window: int | None
        ) -> tuple[jax.Array, LayerCache]:
            layer = self.attention.write(layer, k, v, block, offset)
            return self.attention.attend(q, layer, batch.table, lengths, window), layer

        hidden, cache = self.decoder.hidden(weights, rows.token, rows.position, self.over_heads(attend), cache)
        return cache, self.decoder.logits(weights, hidden)


def _cut_where_asked(logits: jax.Array, batch: Batch, live: jax.Array) -> jax.Array:
    asked = live & ((batch.top_k > 0) | (batch.top_p < 1.0))
    cut = lambda x: sampling.cut_support(x, batch.temperature, batch.top_k, batch.top_p)
    return lax.cond(jnp.any(asked), cut, lambda x: x, logits)


def _advance(batch: Batch, rows: _Rows, tokens: jax.Array) -> _Rows:
    """The rows after each has generated its entry of `tokens`, int32 [B]."""
    stopped = jnp.any(batch.stop_tokens == tokens[:, None], axis=-1)
    length = rows.position + 2  # tokens of the sequence with the new one: its input was at `position`
    return _Rows(tokens, rows.position + 1, rows.live & ~stopped & (length < batch.limit))


def _record(
    outputs: Outputs,
    step: jax.Array,
    live: jax.Array,
    sampled: tuple[jax.Array, jax.Array, jax.Array | None],
    positions_read: jax.Array,
) -> Outputs:
    tokens, logprobs, cut = sampled
    kept = outputs.sampling_logprobs
    return Outputs(
        tokens=outputs.tokens.at[step].set(tokens),
        logprobs=outputs.logprobs.at[step].set(logprobs),
        valid=outputs.valid.at[step].set(live),
        sampling_logprobs=None if kept is None or cut is None else kept.at[step].set(cut),
        positions_read=outputs.positions_read + positions_read,
    )
