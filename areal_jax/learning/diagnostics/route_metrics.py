"""Which experts the tokens of an update reach: the choice of the routers, what engines recorded, loads. numpy only.

Always of the choice of the routers, also where the recorded one is followed (learner.routes='replay'): so the metrics
of two runs, with and without replay, mean the same. Measured with the weights before the update, on the minibatch of
the first step: at age 0 a difference comes from numerics alone, above it from the updates in between too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.columns import ROUTED_EXPERTS
from areal_jax.learning.passes import StepResult
from areal_jax.telemetry import names
from areal_jax.telemetry.names import age_ranges, range_label
from areal_jax.types import PackedBatch, TrajectoryGroup


def route_metrics(
    kept: Sequence[TrajectoryGroup], batches: Sequence[PackedBatch], results: Sequence[StepResult], version: int
) -> dict[str, float]:
    """{} of a model without experts; the parts that need a record only where there is one.

    Args:
      kept: the groups that were packed.
      results: of the steps; the first is of the first batch.
      version: of the weights before the update.
    """
    if not results or results[0].routes is None:
        return {}
    metrics = _loads([result.routes.loads for result in results if result.routes is not None])
    if (recorded := batches[0].inputs.get(ROUTED_EXPERTS.name)) is None:
        return metrics
    metrics[str(names.ROUTE_PROMPTS)] = float(count_differing_prompts(kept))
    return metrics | _differences(batches[0], recorded, results[0].routes.differs, version)


def _loads(loads: Sequence[np.ndarray]) -> dict[str, float]:
    """Of all steps together, tokens of prompts included."""
    total = np.sum(loads, axis=0, dtype=np.float64)  # [layers, experts]
    fullest = total.max(axis=1) / np.maximum(total.mean(axis=1), 1e-30)
    return {str(names.EXPERT_LOAD): float(fullest.mean()), str(names.EXPERTS_DEAD): float((total == 0).sum())}


def _differences(batch: PackedBatch, recorded: np.ndarray, differs: np.ndarray, version: int) -> dict[str, float]:
    """By the age of the loss tokens whose prediction has a record."""
    layers = recorded.shape[-2]
    first = np.take_along_axis(recorded[..., 0, 0], batch.sources, axis=-1)  # [M, R, N]
    known = batch.loss_mask & (first != np.iinfo(recorded.dtype).max)
    trained = int(batch.loss_mask.sum())
    metrics = {str(names.ROUTES_RECORDED): float(known.sum() / trained)} if trained else {}
    changed = differs[known]
    if not len(changed):
        return metrics
    metrics |= _shares(names.ROUTES, changed, layers)
    ranges = age_ranges(version - batch.policy_versions[known])
    for number in np.unique(ranges).tolist():
        metrics |= _shares(f'{names.ROUTES_OF_AGE}{range_label(number)}/', changed[ranges == number], layers)
    return metrics


def _shares(prefix: str, changed: np.ndarray, layers: int) -> dict[str, float]:
    """`changed` int [tokens]: layers in which the sets differ."""
    return {
        f'{prefix}tokens': float(len(changed)),
        f'{prefix}sets_changed': float(changed.mean() / layers),
        f'{prefix}tokens_changed': float((changed > 0).mean()),
    }


def count_differing_prompts(groups: Sequence[TrajectoryGroup]) -> int:
    """Answers for whose prompt their engine recorded something else than for the first answer of the group.

    New weights arrived between the two; such answers do not share a copy of the prompt.
    """
    count = 0
    for group in groups:
        known = [t.segments[0].context.get(ROUTED_EXPERTS.name) for t in group.trajectories if t.segments and not t.row]
        given = [context for context in known if context is not None]
        count += sum(not np.array_equal(given[0], context) for context in given[1:])
    return count
