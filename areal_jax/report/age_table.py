"""Ages of the trained tokens over a run, in publications and in optimizer steps."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping

from areal_jax.report import aggregates
from areal_jax.report import report_keys as contents
from areal_jax.report.aggregates import Metrics
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import counts, number


def token_age(metrics: Metrics) -> contents.MeanMax:
    """Age of the trained tokens in versions: from the histograms, or from the means where no update has one."""
    tokens = _by_publications(metrics)
    if not (trained := sum(tokens.values())):
        mean = aggregates.weighted_mean(metrics, names.TOKEN_AGE_MEAN, names.TOKENS_TRAINED)
        return {'mean': mean, 'max': aggregates.largest(metrics, names.TOKEN_AGE_MAX)}
    mean = sum(age * count for age, count in tokens.items()) / trained
    return {'mean': mean, 'max': max(tokens)}


def token_age_steps(metrics: Metrics) -> contents.StepAge:
    """Age of the trained tokens in optimizer steps, and how much of it is inside their own update."""
    weighted = lambda name: aggregates.weighted_mean(metrics, name, names.TOKENS_TRAINED)
    return {
        'mean': weighted(names.STEP_AGE_MEAN),
        'max': aggregates.largest(metrics, names.STEP_AGE_MAX),
        'inside_mean': weighted(names.STEPS_INSIDE_MEAN),
        'inside_max': aggregates.largest(metrics, names.STEPS_INSIDE_MAX),
    }


def age_histograms(metrics: Metrics) -> contents.AgeHistograms:
    """Trained tokens by age when their batch was formed."""
    return {'publications': _pairs(_by_publications(metrics)), 'steps': _pairs(_by_steps(metrics))}


def _by_publications(metrics: Metrics) -> dict[int, int]:
    tokens: collections.Counter[int] = collections.Counter()
    for line in metrics:
        tokens.update({age: int(n) for age, n in enumerate(counts(line, names.TOKEN_AGE_HISTOGRAM)) if n})
    return tokens


def _by_steps(metrics: Metrics) -> dict[int, int]:
    """A token of age a was generated before the steps of the a updates that precede its own.

    Empty where the steps of an update are unknown.
    """
    histograms = [counts(line, names.TOKEN_AGE_HISTOGRAM) for line in metrics]
    steps = [number(line, names.OPTIMIZER_STEPS) for line in metrics]
    applied = [int(count) for count in steps if count is not None]
    if len(applied) < len(steps) or any(len(ages) > version + 1 for version, ages in enumerate(histograms)):
        return {}
    before = [0, *itertools.accumulate(applied)]  # optimizer steps before version 0, 1, ...
    tokens: collections.Counter[int] = collections.Counter()
    for version, ages in enumerate(histograms):  # at which the batch was formed
        for age, count in enumerate(ages):
            if count:
                tokens[before[version] - before[version - age]] += int(count)
    return tokens


def _pairs(tokens: Mapping[int, int]) -> list[list[int]]:
    return [[age, tokens[age]] for age in sorted(tokens)]
