"""Loads of experts: the tokens that reached each expert of each layer in an update, and by age of the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from areal_jax.columns import ROUTED_EXPERTS
from areal_jax.learning.diagnostics.ratio_split import by_range
from areal_jax.learning.passes import StepResult
from areal_jax.models.families import ModelConfig
from areal_jax.telemetry import names
from areal_jax.types import PackedBatch


def load_metrics(
    config: ModelConfig, batches: Sequence[PackedBatch], results: Sequence[StepResult], version: int
) -> dict[str, list[int] | int]:
    """Counts the tokens that reached each expert, a list for each layer; {} for a model without experts.

    The counts of the update are of all tokens that its steps read, prompts included, along the routes that the learner
    followed. The counts by age are of the trained tokens, along the routes that engines recorded: a token's age is that
    of the weights that chose its experts. Without a record they are absent.

    Args:
      batches: of one epoch.
      results: one for each step.
      version: of the weights before the update.
    """
    loads = [result.routes.loads for result in results if result.routes is not None]
    if config.experts is None or not loads:
        return {}
    layers = [layer for layer in range(config.n_layers) if config.has_experts(layer)]
    total = sum(loads, np.zeros_like(loads[0], np.float64))  # [layers, experts]
    found: dict[str, list[int] | int] = {}
    for layer, counts in zip(layers, total.astype(np.int64), strict=True):
        found[f'{names.EXPERT_LOADS}{layer}'] = counts.tolist()
    for label, routes in _routes_by_age(batches, version):
        prefix = f'{names.EXPERT_LOADS_OF_AGE}{label}/'
        found[f'{prefix}tokens'] = len(routes)
        for index, layer in enumerate(layers):
            chosen = routes[:, index].ravel()
            found[f'{prefix}{layer}'] = np.bincount(chosen, minlength=config.experts.count).tolist()
    return found


def _routes_by_age(batches: Sequence[PackedBatch], version: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each range of ages with the recorded routes [tokens, layers, choices] of its trained tokens."""
    routes, ages = [], []
    for batch in batches:
        if (recorded := batch.inputs.get(ROUTED_EXPERTS.name)) is None:
            return
        *rows, number = np.nonzero(batch.loss_mask)
        own = recorded[(*rows, batch.sources[(*rows, number)])]  # the entry of an input belongs to the token behind it
        known = own[:, 0, 0] != np.iinfo(recorded.dtype).max
        routes.append(own[known])
        ages.append(version - batch.policy_versions[(*rows, number)][known])
    if batches:
        joined = np.concatenate(routes)
        for label, chosen in by_range(np.concatenate(ages)):
            yield label, joined[chosen]
