"""The optimizer steps of one update, over its minibatches and epochs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from areal_jax.learning import diagnostics
from areal_jax.learning.by_age import metrics_by_age
from areal_jax.learning.likelihood import finalize_likelihood
from areal_jax.learning.losses import finalize_metrics, merge_metrics
from areal_jax.learning.optimizer import step_metrics
from areal_jax.learning.passes import Passes, StepResult
from areal_jax.learning.quantized_policy import quantization_metrics
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.state import LearnerState
from areal_jax.learning.train_step import KnownLogprobs, training_rows
from areal_jax.telemetry.metrics import merge
from areal_jax.types import PackedBatch


@dataclasses.dataclass(frozen=True)
class Trained:
    """What the steps of an update did."""

    metrics: dict[str, float]  # of the loss and of the steps
    results: list[StepResult]  # number i is of minibatch i % minibatches

    def was_applied(self, n_batches: int) -> list[bool]:
        """Per minibatch, whether one of its steps was: the others had a gradient that was not finite."""
        return [any(map(_was_applied, self.results[index::n_batches])) for index in range(n_batches)]

    def policy_logprobs(self, batches: Sequence[PackedBatch]) -> list[np.ndarray]:
        """Per minibatch float32 [M, R, N]: log π_θ when its gradient was taken, the mean over the epochs."""
        own = lambda index: [result.logprobs for result in self.results[index :: len(batches)]]
        return [np.mean(own(i), axis=0).reshape(batch.targets.shape) for i, batch in enumerate(batches)]


def train(
    passes: Passes,
    state: LearnerState,
    settings: LearnerSettings,
    batches: Sequence[PackedBatch],
    version: int,
    scale: float,
    engines: Sequence[str] = (),
) -> Trained:
    """Trains on every minibatch, `settings.epochs` times.

    Args:
      version: of the weights before the update.
      scale: multiplies every denominator, see denominators.denominator_scale.
      engines: see diagnostics.mismatch_metrics.
    """
    known = _known_logprobs(passes, state, settings, batches, version)
    results: list[StepResult] = []
    for number in range(settings.epochs * len(batches)):
        index, first = number % len(batches), number == 0
        rows, denominator = training_rows(batches[index], settings.aggregation, known[index])
        results.append(passes.step(state, rows, denominator * scale, version, first))
        if first and settings.recomputes:  # the first pass uses the weights before the update
            known[0] = KnownLogprobs(_first_logprobs(results, batches), known[0].reference)
    return Trained(_metrics(settings, results, batches, known, version, engines), results)


def _known_logprobs(
    passes: Passes, state: LearnerState, settings: LearnerSettings, batches: Sequence[PackedBatch], version: int
) -> list[KnownLogprobs]:
    """Per batch the log-probs of the weights before the update, where a later step needs them, and of the reference.

    The first batch needs no pass of its own: its first step computes the same log-probs.
    """
    recompute = settings.recomputes
    working = passes.working(state) if recompute and len(batches) > 1 else None
    logprobs = lambda weights, batch: passes.logprobs(weights, state.frozen, batch, version)
    return [
        KnownLogprobs(
            proximal=logprobs(working, batch) if recompute and index else None,
            reference=None if state.reference is None else logprobs(state.reference, batch),
        )
        for index, batch in enumerate(batches)
    ]


def _first_logprobs(results: Sequence[StepResult], batches: Sequence[PackedBatch]) -> np.ndarray:
    """float32 [M, R, N] of the first batch, under the weights before the update."""
    return np.reshape(results[0].logprobs, batches[0].targets.shape)


def _metrics(
    settings: LearnerSettings,
    results: Sequence[StepResult],
    batches: Sequence[PackedBatch],
    known: Sequence[KnownLogprobs],
    version: int,
    engines: Sequence[str],
) -> dict[str, float]:
    metrics = step_metrics([result.step for result in results])
    merged = merge_metrics([microbatch for result in results for microbatch in result.microbatches])
    if results:
        metrics['loss/value'] = merged['loss_sum'] / len(results)
    if settings.objective == 'sft':
        return merge(steps=metrics, likelihood=finalize_likelihood(merged))
    before = [_first_logprobs(results, batches)] if results else []
    before += [k.proximal for k in known[1:] if k.proximal is not None]
    compared = batches[: len(before)]
    mismatch = diagnostics.mismatch_metrics(compared, before, version, engines)
    quantization = quantization_metrics(compared, before, version) if settings.quantized else {}
    return merge(
        steps=metrics,
        loss=finalize_metrics(merged),
        mismatch=mismatch,
        quantization=quantization,
        by_age=metrics_by_age(settings, batches, results, known, version),
        inside=diagnostics.inside_metrics(batches, [_was_applied(result) for result in results]),
    )


def _was_applied(result: StepResult) -> bool:
    return not float(result.step['skip_count'])
