"""The shapes to which micro-batches may be trimmed, so that a light one costs less. numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.columns import of_models

# [..., T, *shape], as the columns of models; all other fields are [..., N, *shape]
_TOKEN_FIELDS = ('tokens', 'positions', 'segment_ids', 'parent_ids')
_LEAST_TOKENS = 256  # the smallest T for which a shape is worth its compilation
_MULTIPLE = 64  # tokens: tail buckets are multiples of it, as are the tiles of attention


class RowShape(NamedTuple):
    """Static shape of a row."""

    tokens: int
    loss_tokens: int


def tail_buckets(tokens: int, loss_tokens: int, n: int) -> tuple[RowShape, ...]:
    """The shapes to which a micro-batch may be trimmed, ascending: up to n - 1 smaller ones, each half of the next, and
    the full one.
    """
    buckets = [RowShape(tokens, loss_tokens)]
    for halvings in range(1, n):
        bucket = RowShape(*(min(size, -(-size // (_MULTIPLE << halvings)) * _MULTIPLE) for size in buckets[0]))
        if bucket.tokens < _LEAST_TOKENS or bucket.tokens == buckets[-1].tokens:
            break
        buckets.append(bucket)
    return tuple(reversed(buckets))


def smaller_rows(full: RowShape, sizes: Sequence[int]) -> tuple[RowShape, ...]:
    """Shapes of rows with `sizes` tokens: the share of loss tokens is that in `full`, rounded up to a multiple of 8."""
    share = lambda tokens: -(-full.loss_tokens * tokens // full.tokens)
    return tuple(RowShape(tokens, min(full.loss_tokens, -(-share(tokens) // 8) * 8)) for tokens in sizes)


def tail_bucket(rows: Mapping[str, np.ndarray], buckets: Sequence[RowShape]) -> RowShape:
    """The smallest shape that holds all tokens, and all loss tokens to train, of every row.

    Args:
      rows: fields of a PackedBatch or of one micro-batch, 'segment_ids' and 'loss_mask' among them.

    Raises ValueError where none does: `buckets` has to contain the full shape.
    """
    tokens, loss_tokens = _used(rows['segment_ids'] > 0), _used(rows['loss_mask'])
    holding = [b for b in buckets if b.tokens >= tokens and b.loss_tokens >= loss_tokens]
    if not holding:
        raise ValueError(
            f'no shape of {[tuple(b) for b in buckets]} holds a row of {tokens} tokens and {loss_tokens} loss tokens'
        )
    return min(holding)


def trim(rows: Mapping[str, np.ndarray], bucket: RowShape) -> dict[str, np.ndarray]:
    """Views of rows trimmed to the shape of the bucket.

    Fields that are not in PackedBatch must be [..., N], columns [..., N, *shape]. Raises ValueError if anything but
    padding would be lost.
    """
    tail_bucket(rows, [bucket])
    leading = (slice(None),) * (rows['segment_ids'].ndim - 1)
    of_tokens = {*_TOKEN_FIELDS, *(column.name for column in of_models())}
    length = lambda name: bucket.tokens if name in of_tokens else bucket.loss_tokens
    return {name: array[*leading, : length(name)] for name, array in rows.items()}


def _used(mask: np.ndarray) -> int:
    """The number of places up to the last one in use in any row; mask is bool [..., places]."""
    used = np.flatnonzero(mask.reshape(-1, mask.shape[-1]).any(0))
    return int(used[-1]) + 1 if len(used) else 0
