"""Builds the evaluation beside training, and brings its rows to file, metrics and terminal."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence

from areal_jax import protocols
from areal_jax.app.run.observer import StepObserver
from areal_jax.app.run.scores import Scores, evaluation_row
from areal_jax.config import TrackedConfig
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.evaluation.during_training import EvaluationBeside
from areal_jax.evaluation.evaluator import Evaluator
from areal_jax.protocols import Clock, Generator, Pool, Verifier
from areal_jax.telemetry import names
from areal_jax.telemetry.facts import VersionScores
from areal_jax.telemetry.metrics import FILE, read_metrics
from areal_jax.types import Prompt

UNDER_WAY = 'evaluating'  # key of a checkpoint's state of the observer: the version that was being evaluated


def build_beside(
    config: TrackedConfig,
    *,
    pool: Pool,
    clock: Clock,
    supervisor: Supervisor,
    log: EventLog,
    verifier: Verifier,
    problems: Sequence[Prompt],
    make_evaluator: Callable[..., Evaluator],
    scores: Scores,
    observer: StepObserver,
    lost: protocols.Event | None = None,
) -> EvaluationBeside:
    """`problems`: of the evaluations before and after training; the first of them are used here.

    `make_evaluator` lacks problems, pool, verifier, samples and version, which this evaluation has its own of.
    `lost`: see EvaluationBeside.
    """
    samples, few = config.evaluation.every_samples, problems[: config.evaluation.every_problems]

    def evaluator_of(at_version: Generator, version: int) -> Evaluator:
        return make_evaluator(problems=few, pool=at_version, verifier=verifier, samples=samples, version=version)

    def note(row: VersionScores) -> None:
        scores.add_version(row)
        observer.note_evaluation(evaluation_row(row.scores, row.version))

    return EvaluationBeside(
        every=config.evaluation.every,
        steps=config.run.steps,
        pool=pool,
        clock=clock,
        supervisor=supervisor,
        log=log,
        make_evaluator=evaluator_of,
        on_scores=note,
        say=functools.partial(print, flush=True),
        lost=lost,
    )


def restore_rows(workdir: pathlib.Path, scores: Scores, observer: StepObserver) -> None:
    """Hands the observer of a resumed run the rows that ended before it and are in no line of its metrics."""
    written = {line.get(names.EVALUATION_VERSION) for line in read_metrics(workdir / FILE)}
    for row in scores.curve:
        if row.version not in written:
            observer.note_evaluation(evaluation_row(row.scores, row.version))
