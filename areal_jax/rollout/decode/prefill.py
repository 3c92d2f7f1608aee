"""Prefill of packed rows: keys and values of several sequences, written to their blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.decoder import Decoder, Params
from areal_jax.rollout.backend import PrefillBucket, PrefillPiece, Span
from areal_jax.rollout.decode.attention.contract import Cache, CacheAttention, LayerCache

Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedPieces:
    tokens: Array  # int32 [T]
    positions: Array  # int32 [T]
    segments: Array  # int32 [T], 0 = padding
    blocks: Array  # int32 [T]
    offsets: Array  # int32 [T]
    prior_blocks: Array  # int32 [C]
    prior: Array  # int32, positions of the only piece before it


def declare_buckets(buckets: Sequence[int], block_tokens: int, context_tokens: int) -> tuple[PrefillBucket, ...]:
    prior = -(-context_tokens // block_tokens) * block_tokens
    return tuple(PrefillBucket(tokens, p) for tokens in buckets for p in (0, prior))


def bucket_for(
    spans: Sequence[Span], buckets: Sequence[int], block_tokens: int, context_tokens: int
) -> PrefillBucket | None:
    tokens, prior = sum(span.stop - span.start for span in spans), max([0, *(span.start for span in spans)])
    if prior and len(spans) > 1:
        return None
    declared = declare_buckets(buckets, block_tokens, context_tokens)
    return next((b for b in declared if tokens <= b.tokens and prior <= b.prior), None)


def pack_pieces(
    pieces: Sequence[PrefillPiece], bucket: PrefillBucket, block_tokens: int, padding_block: int
) -> PackedPieces:
    zeros = lambda: np.zeros(bucket.tokens, np.int32)
    packed = PackedPieces(
        zeros(), zeros(), zeros(), zeros() + padding_block, zeros(),
        np.full(bucket.prior // block_tokens, padding_block, np.int32), np.int32(0),
    )  # fmt: skip
    at = 0
    for number, piece in enumerate(pieces):
        part, positions = slice(at, at + len(piece.tokens)), np.arange(*piece.span)
        packed.tokens[part], packed.positions[part], packed.segments[part] = piece.tokens, positions, number + 1
        packed.blocks[part] = np.asarray(piece.blocks)[positions // block_tokens]
        packed.offsets[part] = positions % block_tokens
        at = part.stop
        if piece.start:
            packed.prior_blocks[: len(piece.blocks)] = piece.blocks
            packed = dataclasses.replace(packed, prior=np.int32(piece.start))
    return packed


def prefill_pieces(
    decoder: Decoder, attention: CacheAttention, weights: Params, cache: Cache, packed: PackedPieces
) -> Cache:
    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, layer: LayerCache, window: int | None
    ) -> tuple[jax.Array, LayerCache]:
        prior_k, prior_v = attention.read(layer, packed.prior_blocks)
        at = jnp.arange(len(prior_k))
        positions = jnp.concatenate([at, packed.positions])
        segments = jnp.concatenate([jnp.where(at < packed.prior, 1, -1), packed.segments])
        keys, values = jnp.concatenate([prior_k, k]), jnp.concatenate([prior_v, v])
        back = packed.positions[:, None] - positions
        seen = (packed.segments[:, None] == segments) & (back >= 0)
        if window is not None:
            seen &= back < window
        values = jnp.where(jnp.any(seen, axis=0)[:, None, None], values, 0)
        grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
        scores = jnp.einsum('qkgd,skd->kgqs', grouped, keys, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(v.dtype)
        out = jnp.einsum('kgqs,skd->qkgd', weights, values).reshape(q.shape)
        return out, attention.write(layer, k, v, packed.blocks, packed.offsets)

    return decoder.hidden(weights, packed.tokens, packed.positions, attend, cache)[1]
