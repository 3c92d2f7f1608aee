"""The optimizer steps of one update, over its minibatches and epochs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from areal_jax.learning.brakes import mean_lag
from areal_jax.learning.learner_state import LearnerState
from areal_jax.learning.objective.objective import COLLISION, END_VALUES, POLICY, REFERENCE, VALUES, Objective
from areal_jax.learning.objective.objectives import require_prepared, require_token_advantages
from areal_jax.learning.packing.packing_report import PackingReport
from areal_jax.learning.passes import Declared, Passes, StepResult
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.train_step import KnownTokens, training_rows
from areal_jax.learning.vocabulary_statistics import TeacherForm
from areal_jax.types import PackedBatch, TrajectoryGroup, Tree


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model beside the trained one that its objective compares it with; no update changes its weights.

    Its decoder may have another architecture than the trained one; the vocabulary is the same. It reads the rows that
    are packed for the trained model. Its log-probs of their tokens come from a pass before the steps. An objective that
    compares whole distributions has its pass, with `form` and `weights`, inside each step: hidden states of another
    pass would take N * d' numbers of memory for N tokens.
    """

    passes: Passes
    weights: Tree  # on the learner's mesh, in `settings.dtype`
    form: TeacherForm
    gives_logprobs: bool

    def logprobs(self, batch: PackedBatch, version: int) -> np.ndarray:
        """float32 [M, R, N] of the targets of a batch."""
        return self.passes.logprobs(self.weights, {}, batch, version)

    def declared_programs(self) -> Iterator[Declared]:
        """What `logprobs` runs, one for each shape of rows."""
        if self.gives_logprobs:
            for name, args in self.passes.declared_logprobs(self.weights, {}):
                yield self.passes.programs, name, args


@dataclasses.dataclass(frozen=True)
class Trained:
    """What the steps of an update did."""

    results: list[StepResult]  # number i is of minibatch i % minibatches
    known: list[KnownTokens]  # per minibatch, as the steps after the first used them
    batches: Sequence[PackedBatch]  # with the advantages that were trained

    def steps_applied(self) -> list[bool]:
        """Per step, whether it changed the weights: the others had a gradient that was not finite."""
        return [not float(result.step['skip_count']) for result in self.results]

    def was_applied(self, n_batches: int) -> list[bool]:
        """Per minibatch, whether one of its steps was."""
        steps = self.steps_applied()
        return [any(steps[index::n_batches]) for index in range(n_batches)]

    def policy_logprobs(self, batches: Sequence[PackedBatch]) -> list[np.ndarray]:
        """Per minibatch float32 [M, R, N]: log π_θ when its gradient was taken, the mean over the epochs."""
        own = lambda index: [result.logprobs for result in self.results[index :: len(batches)]]
        return [np.mean(own(i), axis=0).reshape(batch.targets.shape) for i, batch in enumerate(batches)]


@dataclasses.dataclass(frozen=True)
class Update:
    """One update: its data, how they were packed, and what its steps did."""

    groups: Sequence[TrajectoryGroup]
    kept: Sequence[TrajectoryGroup]  # those that the filter of equal rewards left
    batches: Sequence[PackedBatch]
    packing: PackingReport
    version: int  # of the weights before it
    oldest: int | None  # version whose tokens are still in the loss; None = all
    trained: Trained


def train(
    passes: Passes,
    state: LearnerState,
    settings: LearnerSettings,
    batches: Sequence[PackedBatch],
    groups: Sequence[TrajectoryGroup],
    version: int,
    scale: float,
    teacher: Teacher | None = None,
) -> Trained:
    """Trains on every minibatch, `settings.epochs` times.

    Args:
      groups: those that were packed.
      version: of the weights before the update.
      scale: multiplies every denominator, see counting.denominator_scale.
    """
    known = _known_tokens(passes, state, settings, batches, version, teacher)
    batches, known = _replace_advantages(passes, state, settings.objective, batches, groups, known, version)
    prompts = number_prompts(groups)
    results: list[StepResult] = []
    for number in range(settings.epochs * len(batches)):
        index, first = number % len(batches), number == 0
        prepared = _prepare(passes, state, settings, batches[index], version)
        rows, denominator = training_rows(batches[index], settings.objective, known[index], prepared, prompts)
        lag = mean_lag(batches[index], version, settings.steps, number)
        result = passes.step(state, rows, denominator * scale, version, first, settings.brake.lag_factor(lag))
        results.append(result._replace(prepared=prepared, lag=lag))
        if first and settings.recomputes:  # the first pass uses the weights before the update
            known[0] = dataclasses.replace(known[0], proximal=first_logprobs(results, batches))
    return Trained(results, known, batches)


def number_prompts(groups: Sequence[TrajectoryGroup]) -> np.ndarray:
    """int64 [trajectories]: the number of the group of each."""
    return np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])


def _replace_advantages(
    passes: Passes,
    state: LearnerState,
    objective: Objective,
    batches: Sequence[PackedBatch],
    groups: Sequence[TrajectoryGroup],
    known: list[KnownTokens],
    version: int,
) -> tuple[Sequence[PackedBatch], list[KnownTokens]]:
    """The batches with the advantages that need a pass before the first step, and what is known with their returns."""
    if not objective.replaces_advantages:
        return batches, known
    passed: list[dict[str, np.ndarray]] = []
    ends = passes.end_values(state, groups, version) if END_VALUES in objective.reads else None
    for batch, own in zip(batches, known, strict=True):
        of_batch = {REFERENCE: own.reference, VALUES: own.values, POLICY: own.policy}
        found = {name: values for name, values in of_batch.items() if values is not None}
        if COLLISION in objective.reads:
            found[POLICY], found[COLLISION] = passes.collisions(state, batch, version)
        if ends is not None:
            found[END_VALUES] = np.where(batch.loss_mask, ends[np.where(batch.loss_mask, batch.trajectory_ids, 0)], 0.0)
        passed.append(found)
    replaced = require_token_advantages(objective, groups, batches, passed)
    return (
        [dataclasses.replace(b, advantages=of.advantages) for b, of in zip(batches, replaced, strict=True)],
        [dataclasses.replace(own, returns=of.returns) for own, of in zip(known, replaced, strict=True)],
    )


def _prepare(
    passes: Passes, state: LearnerState, settings: LearnerSettings, batch: PackedBatch, version: int
) -> Mapping[str, np.ndarray]:
    """What the objective decides over a minibatch before a step on it; a pass of its own where it reads POLICY."""
    objective, logprobs = settings.objective, None
    if not objective.prepares:
        return {}
    if POLICY in objective.reads:
        logprobs = np.reshape(passes.logprobs(passes.working(state), state.frozen, batch, version), batch.targets.shape)
    return require_prepared(objective, batch, logprobs)


def _known_tokens(
    passes: Passes,
    state: LearnerState,
    settings: LearnerSettings,
    batches: Sequence[PackedBatch],
    version: int,
    teacher: Teacher | None,
) -> list[KnownTokens]:
    """Per batch the log-probs of the weights before the update, where a later step needs them, and of the reference.

    Those of a teacher stand in the place of the reference.

    The first batch needs no pass of its own: its first step computes the same log-probs. Where the objective reads
    values, one pass gives both.
    """
    recompute = settings.recomputes
    passed: Sequence[tuple[np.ndarray | None, np.ndarray | None]]
    if VALUES in settings.objective.reads:
        passed = [passes.values(state, batch, version) for batch in batches]
    else:
        working = passes.working(state) if recompute and len(batches) > 1 else None
        later = [passes.logprobs(working, state.frozen, batch, version) if recompute else None for batch in batches[1:]]
        passed = [(logprobs, None) for logprobs in (None, *later)][: len(batches)]
    known = []
    for batch, (policy, values) in zip(batches, passed, strict=True):
        reference = _compare(passes, state, batch, version, teacher)
        known.append(KnownTokens(policy if recompute else None, reference, values, policy=policy))
    return known


def _compare(
    passes: Passes, state: LearnerState, batch: PackedBatch, version: int, teacher: Teacher | None
) -> np.ndarray | None:
    if teacher is not None and teacher.gives_logprobs:
        return teacher.logprobs(batch, version)
    return None if state.reference is None else passes.logprobs(state.reference, state.frozen, batch, version)


def first_logprobs(results: Sequence[StepResult], batches: Sequence[PackedBatch]) -> np.ndarray:
    """float32 [M, R, N] of the first batch, under the weights before the update."""
    return np.reshape(results[0].logprobs, batches[0].targets.shape)
