"""Scores of the evaluations before and after training: written to the workdir and printed. Used by session.py."""

from __future__ import annotations

import dataclasses
import pathlib

from areal_jax import files
from areal_jax.telemetry.facts import EVALUATIONS, EvaluationScores, read_scores


class Scores:
    """The scores of one run by phase, 'before' and 'after'; a resumed run also has its earlier attempts' scores."""

    def __init__(self, workdir: pathlib.Path, *, resume: bool):
        self._path = workdir / EVALUATIONS
        self._by_phase = read_scores(self._path) if resume else {}

    def get(self, phase: str) -> EvaluationScores | None:
        return self._by_phase.get(phase)

    def add(self, phase: str, scores: EvaluationScores) -> None:
        """Writes the scores to WORKDIR/evaluations.json and prints their means."""
        self._by_phase[phase] = scores
        known = {phase: dataclasses.asdict(scores) for phase, scores in self._by_phase.items()}
        files.write_json(self._path, known, indent=None)
        sampled = [score for row in scores.sampled for score in row]
        means = sum(sampled) / max(1, len(sampled)), sum(scores.greedy) / len(scores.greedy)
        print(f'accuracy {phase}: sampled {means[0]:.3f}, greedy {means[1]:.3f}', flush=True)
