"""Scores of the evaluations before, after and beside training: written to the workdir and printed."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from areal_jax import files
from areal_jax.telemetry import names
from areal_jax.telemetry.facts import (
    DURING,
    EVALUATIONS,
    EvaluationScores,
    VersionScores,
    read_curve,
    read_scores,
    visible_only_share,
)


class Scores:
    """The scores of one run by phase, 'before' and 'after', and by version; a resumed run also has its earlier
    attempts' scores, except for versions after `step`, which it evaluates again.
    """

    def __init__(self, workdir: pathlib.Path, *, resume: bool, step: int = 0):
        self._path = workdir / EVALUATIONS
        self._by_phase = read_scores(self._path) if resume else {}
        found = read_curve(self._path) if resume else []
        self._curve = {row.version: row for row in found if row.version <= step}
        if len(self._curve) < len(found):
            self._write()

    @property
    def curve(self) -> Sequence[VersionScores]:
        """Of the evaluations beside training, by version."""
        return [self._curve[version] for version in sorted(self._curve)]

    def get(self, phase: str) -> EvaluationScores | None:
        return self._by_phase.get(phase)

    def add(self, phase: str, scores: EvaluationScores) -> None:
        """Writes the scores to WORKDIR/evaluations.json and prints their means."""
        self._by_phase[phase] = scores
        self._write()
        print(
            f'accuracy {phase}: sampled {mean_sampled(scores) or 0:.3f}, greedy {mean_greedy(scores):.3f}', flush=True
        )

    def add_version(self, row: VersionScores) -> None:
        """Writes the row to WORKDIR/evaluations.json and prints its means."""
        self._curve[row.version] = row
        self._write()
        sampled = mean_sampled(row.scores)
        means = ('' if sampled is None else f'sampled {sampled:.3f}, ') + f'greedy {mean_greedy(row.scores):.3f}'
        print(f'accuracy of version {row.version}: {means} ({row.seconds:.1f} s beside training)', flush=True)

    def _write(self) -> None:
        known: files.JsonObject = {phase: dataclasses.asdict(scores) for phase, scores in self._by_phase.items()}
        if self._curve:
            known[DURING] = [row.as_row() for row in self.curve]
        files.write_json(self._path, known, indent=None)


def evaluation_row(scores: EvaluationScores | None, version: int) -> dict[str, float]:
    """The scores of a version as metrics, under the names of evaluation beside training; none without scores."""
    if scores is None:
        return {}
    row: dict[str, float] = {names.EVALUATION_VERSION: version, names.GREEDY_ACCURACY: mean_greedy(scores)}
    known = {names.SAMPLED_ACCURACY: mean_sampled(scores), names.VISIBLE_ONLY_SHARE: visible_only_share(scores.labels)}
    return row | {name: value for name, value in known.items() if value is not None}


def mean_greedy(scores: EvaluationScores) -> float:
    return sum(scores.greedy) / len(scores.greedy)


def mean_sampled(scores: EvaluationScores) -> float | None:
    """None where no answer was sampled."""
    sampled = [score for row in scores.sampled for score in row]
    return sum(sampled) / len(sampled) if sampled else None
