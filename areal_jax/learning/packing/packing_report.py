"""How well the rows of an update are filled. numpy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from areal_jax.learning.packing.buckets import RowShape, tail_bucket
from areal_jax.learning.packing.rows import PADDING
from areal_jax.types import PackedBatch


@dataclasses.dataclass(frozen=True)
class PackingReport:
    """How well the rows of an update are filled, over all its minibatches."""

    rows: int = 0  # with at least one token
    microbatches: int = 0  # empty ones included
    tokens: int = 0  # in rows; a repeated prompt counts each time
    capacity_tokens: int = 0  # places of the rows after trimming to buckets
    loss_tokens: int = 0  # generated tokens, before any rejection
    capacity_loss_tokens: int = 0
    saved_tokens: int = 0  # prompt tokens that sharing kept out of the rows
    mean_shard_cost: float = 0.0  # of the data shards, summed over micro-batches
    max_shard_cost: float = 0.0

    def metrics(self) -> dict[str, float]:
        return {
            'train/rows': float(self.rows),
            'train/microbatches': float(self.microbatches),
            'train/row_tokens': float(self.tokens),
            'train/saved_tokens': float(self.saved_tokens),
            'train/packing_utilization': self.tokens / max(self.capacity_tokens, 1),
            'train/loss_utilization': self.loss_tokens / max(self.capacity_loss_tokens, 1),
            'train/shard_balance': self.mean_shard_cost / (self.max_shard_cost or 1.0),
        }


def report_batch(
    batch: PackedBatch, unshared_tokens: int, costs: np.ndarray, buckets: Sequence[RowShape]
) -> PackingReport:
    """Of one minibatch; `costs` by micro-batch and data shard."""
    microbatches, rows, row_tokens = batch.tokens.shape
    shapes = [RowShape(row_tokens, batch.targets.shape[-1])] * microbatches
    if buckets:
        fields = zip(batch.segment_ids, batch.loss_mask, strict=True)
        shapes = [tail_bucket({'segment_ids': s, 'loss_mask': m}, buckets) for s, m in fields]
    tokens = int((batch.segment_ids > 0).sum())
    return PackingReport(
        rows=int((batch.segment_ids > 0).any(-1).sum()),
        microbatches=microbatches,
        tokens=tokens,
        capacity_tokens=rows * sum(shape.tokens for shape in shapes),
        loss_tokens=int((batch.trajectory_ids != PADDING).sum()),
        capacity_loss_tokens=rows * sum(shape.loss_tokens for shape in shapes),
        saved_tokens=unshared_tokens - tokens,
        mean_shard_cost=float(costs.mean(-1).sum()),
        max_shard_cost=float(costs.max(-1).sum()),
    )


def total_report(reports: Sequence[PackingReport]) -> PackingReport:
    columns = zip(*(dataclasses.astuple(r) for r in reports), strict=True)
    return PackingReport(*(sum(column) for column in columns))
