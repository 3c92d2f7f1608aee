"""The rows of a dispatch as arrays of a declared batch, filled on the host.

Used by backend.py; generate.py reads them. Shapes: B rows of the batch, M blocks of the longest sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from areal_jax.rollout.backend import DecodeRow
from areal_jax.rollout.decode.cache import CacheSizes

MAX_STOP_TOKENS = 4  # of a request: chat models end an answer with one to three
Array = Any  # numpy on the host, jax.Array on the device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows by descending position; those of padding come last."""

    token: Array  # int32 [B], the next input; its keys and values are not in the cache yet
    position: Array  # int32 [B], of that token
    limit: Array  # int32 [B], tokens at which the sequence ends; 0 = a row of padding
    seed: Array  # uint32 [B, 4]: the seed's high and low word, draw, sample
    temperature: Array  # float32 [B]
    top_k: Array  # int32 [B]
    top_p: Array  # float32 [B]
    stop_tokens: Array  # int32 [B, MAX_STOP_TOKENS], -1 where unused
    table: Array  # int32 [B, M], blocks of the sequence, then the padding block


def empty_batch(rows: int, sizes: CacheSizes) -> Batch:
    """All padding."""
    return Batch(
        token=np.zeros(rows, np.int32),
        position=np.zeros(rows, np.int32),
        limit=np.zeros(rows, np.int32),
        seed=np.zeros((rows, 4), np.uint32),
        temperature=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        stop_tokens=np.full((rows, MAX_STOP_TOKENS), -1, np.int32),
        table=np.full((rows, sizes.table_blocks), sizes.padding_block, np.int32),
    )


def fill_batch(rows: Sequence[DecodeRow], size: int, sizes: CacheSizes) -> tuple[Batch, np.ndarray]:
    """(batch of `size` rows, its row of every given one, int [rows])."""
    order = sorted(range(len(rows)), key=lambda i: -rows[i].position)
    batch, places = empty_batch(size, sizes), np.empty(len(rows), np.intp)
    for place, i in enumerate(order):
        places[i] = place
        row, request, params = rows[i], rows[i].request, rows[i].request.sampling
        batch.token[place], batch.position[place], batch.limit[place] = row.token, row.position, row.limit
        batch.temperature[place], batch.top_k[place], batch.top_p[place] = (
            params.temperature,
            params.top_k,
            params.top_p,
        )
        batch.stop_tokens[place, : len(params.stop_tokens)] = params.stop_tokens
        words = request.seed >> 32, request.seed, request.draw, request.sample
        batch.seed[place] = [word & 0xFFFFFFFF for word in words]
        blocks = row.blocks[: sizes.table_blocks]
        batch.table[place, : len(blocks)] = blocks
    return batch, places


def check_row(row: DecodeRow, steps: int, sizes: CacheSizes, filtered: bool) -> None:
    """Raises ValueError for a row that the programs can not decode for `steps` tokens."""
    params, length = row.request.sampling, row.position + 1
    where = f'request {row.request.request_id}: '
    if row.position < 0 or not length < row.limit <= sizes.context_tokens:
        raise ValueError(
            f'{where}limit={row.limit} must exceed its {length} tokens and fit context_tokens={sizes.context_tokens}'
        )
    needed = min(row.position + steps, row.limit - 1)
    if len(row.blocks) * sizes.block_tokens < needed:
        raise ValueError(
            f'{where}{len(row.blocks)} blocks of {sizes.block_tokens} positions do not hold the {needed} that '
            f'{steps} steps from position {row.position} need; give it more'
        )
    if not all(0 <= block < sizes.blocks for block in row.blocks):
        raise ValueError(f'{where}blocks={[*row.blocks]} must lie between 0 and cache_blocks - 1 = {sizes.blocks - 1}')
    if len(params.stop_tokens) > MAX_STOP_TOKENS:
        raise ValueError(f'{where}{len(params.stop_tokens)} stop tokens, but a row holds {MAX_STOP_TOKENS}; use fewer')
    if (params.top_k > 0 or params.top_p < 1.0) and not filtered:
        raise ValueError(
            f'{where}top_k={params.top_k}, top_p={params.top_p}, but the programs were built without; '
            'build the backend with filtered=True'
        )
