"""What an update reports, measured after its last step from what the steps computed anyway. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.learning.brakes import BrakeSettings, sequence_effective_sample_size
from areal_jax.learning.diagnostics import data_metrics as diagnostics
from areal_jax.learning.diagnostics.data_metrics import Metrics
from areal_jax.learning.diagnostics.quantized_policy import quantization_metrics
from areal_jax.learning.diagnostics.ratios_by_age import metrics_by_age
from areal_jax.learning.diagnostics.route_metrics import route_metrics
from areal_jax.learning.objective import counting
from areal_jax.learning.objective.counting import find_starts
from areal_jax.learning.objective.metrics import merge_metrics
from areal_jax.learning.objective.objectives import require_finite_loss
from areal_jax.learning.optimizer.optimizer import step_metrics
from areal_jax.learning.passes import StepResult
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.update import Update, first_logprobs
from areal_jax.telemetry.metrics import merge
from areal_jax.types import PackedBatch


def measure(update: Update, settings: LearnerSettings) -> Metrics:
    """Metrics of data, packing and steps; one that is not defined (the mean over nothing) is absent."""
    groups, kept, batches, version = update.groups, update.kept, update.batches, update.version
    measured = {
        'data': diagnostics.data_metrics(groups, kept),
        'ages': diagnostics.age_metrics(kept, batches, version),
        'packing': update.packing.metrics(),
        'routes': route_metrics(kept, batches, update.trained.results, version),
        'sampling': counting.kept_mass_metrics(kept, update.oldest),
        'training': _measure_training(update, settings),
    }
    if settings.objective.learns_from_answers:
        applied = update.trained.was_applied(len(batches))
        measured['fates'] = diagnostics.fate_metrics(groups, kept, batches, applied, version)
        measured['useful'] = diagnostics.useful_metrics(batches, applied)
    return merge(**measured)


def _measure_training(update: Update, settings: LearnerSettings) -> dict[str, float]:
    trained, batches, version = update.trained, update.batches, update.version
    results, known = trained.results, trained.known
    metrics = step_metrics([result.step for result in results])
    merged = merge_metrics([microbatch for result in results for microbatch in result.microbatches])
    if results:
        metrics['loss/value'] = merged['loss_sum'] / len(results)
        require_finite_loss(settings.objective, metrics['loss/value'], version)
    of_loss = settings.objective.metrics(merged)
    if results and settings.router_aux_loss:
        of_loss = of_loss | {'loss/router_balance': merged['router_balance_sum'] / len(results)}
    if not settings.objective.learns_from_answers:
        return merge(steps=metrics, loss=of_loss)
    before = [first_logprobs(results, batches)] if results else []
    before += [k.proximal for k in known[1:] if k.proximal is not None]
    compared = batches[: len(before)]
    engines = [trajectory.engine for group in update.kept for trajectory in group.trajectories]
    return merge(
        steps=metrics,
        loss=of_loss,
        mismatch=diagnostics.mismatch_metrics(compared, before, version, engines),
        quantization=quantization_metrics(compared, before, version) if settings.quantized else {},
        by_age=metrics_by_age(settings, batches, results, known, version),
        inside=diagnostics.inside_metrics(batches, trained.steps_applied()),
        staleness=_staleness_metrics(settings.brake, results, batches),
    )


def _staleness_metrics(
    brake: BrakeSettings, results: Sequence[StepResult], batches: Sequence[PackedBatch]
) -> dict[str, float]:
    """What brakes of the learning rate read, the mean over the steps."""
    if not results:
        return {}
    mean = lambda values: sum(values) / len(results)
    sizes = []
    for number, result in enumerate(results):
        batch = batches[number % len(batches)]
        policy = np.reshape(result.logprobs, batch.loss_mask.shape)
        starts = find_starts(batch.trajectory_ids)
        sizes.append(float(sequence_effective_sample_size(policy, batch.behavior_logprobs, batch.loss_mask, starts)))
    metrics = {'loss/sequence_effective_sample_size': mean(sizes)}
    if brake.shown or brake.kind == 'lag':
        metrics['update/lag_steps'] = mean([result.lag for result in results])
    if brake.kind == 'lag':
        metrics['update/brake'] = mean([brake.lag_factor(result.lag) for result in results])
    return metrics
