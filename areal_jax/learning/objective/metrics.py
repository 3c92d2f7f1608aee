"""Metrics of losses: sums (`*_sum`, `*_count`) and maxima (`*_max`) of micro-batches, joined for an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def merge_metrics(metrics: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Joins the metrics of micro-batches, each value a scalar or an array over micro-batches."""
    merged = {}
    for name in metrics[0] if metrics else ():
        values = np.concatenate([np.ravel(m[name]) for m in metrics]).astype(np.float64)
        merged[name] = float(values.max() if name.endswith('_max') else values.sum())
    return merged
