"""Beside the loop: what only the running program knows, kept for the report in WORKDIR/facts.json."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax import files

FILE = 'facts.json'


@dataclasses.dataclass(frozen=True)
class EvaluationScores:
    """Scores on held-out problems, one entry a problem, the same problems before and after. Producer: evaluation/."""

    greedy: tuple[float, ...]  # score of the greedy answer
    sampled: tuple[tuple[float, ...], ...]  # scores of the sampled answers
    most_frequent_answer_share: float | None = None  # see most_frequent_share


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Facts that the event log and the metrics do not hold. Producer: app/."""

    config: str  # path of the experiment file
    seed: int
    eta: float  # staleness.eta; inf = unbounded
    clock: str = 'real'  # 'real' | 'virtual'
    wall_seconds: float | None = (
        None  # of the whole run on a wall clock; None = span of the event log, if its clock is real
    )
    evaluation_before: EvaluationScores | None = None
    evaluation_after: EvaluationScores | None = None
    compilations: int = 0  # XLA programs compiled after warm-up
    compilation_budget: int = 0  # run.compilation_budget
    peak_memory_bytes: int | None = None  # ResourceSampler.peak_bytes
    event_loop_lag_max: float | None = None  # seconds, after warm-up
    weights_sha256: str | None = None  # of the last version
    git_commit: str | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of packages
    hardware: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # cores, platform, ...
    alone_seconds: Mapping[str, float | None] = dataclasses.field(
        default_factory=dict
    )  # 'generate', 'train': an update
    cpu_seconds: float | None = None  # of the process tree, in the window
    cores: int = 1
    lanes_own_devices: bool = False  # engines and learner do not share a device or cores
    prolonged: Sequence[Mapping[str, int]] = ()

    def save(self, workdir: pathlib.Path | str) -> None:
        """Write WORKDIR/facts.json, all or nothing."""
        values = dataclasses.asdict(self) | {'eta': str(self.eta)}  # a string: JSON has no infinity
        files.write_json(pathlib.Path(workdir) / FILE, values)

    @classmethod
    def load(cls, workdir: pathlib.Path | str) -> RunFacts:
        """Read WORKDIR/facts.json.

        Raises:
            FileNotFoundError: the run has not written its facts.
            ValueError: a field is not one of these; the message names it.
        """
        path = pathlib.Path(workdir) / FILE
        if not path.exists():
            raise FileNotFoundError(
                f'{path} does not exist: the run writes it when it ends; is this its work directory?'
            )
        values = json.loads(path.read_text())
        if unknown := set(values) - {field.name for field in dataclasses.fields(cls)}:
            raise ValueError(f'{path}: unknown fields {sorted(unknown)}; it was written by another version')
        values['prolonged'] = tuple(values.get('prolonged', ()))
        for name in ('evaluation_before', 'evaluation_after'):
            values[name] = _scores(values.get(name))
        return cls(**values | {'eta': float(values['eta'])})


def most_frequent_share(answers: Sequence[str]) -> float | None:
    """Share of the answers that equal the most frequent one; None without answers. Near 1: the policy has collapsed."""
    if not answers:
        return None
    return collections.Counter(answers).most_common(1)[0][1] / len(answers)


def _scores(values: Mapping[str, Any] | None) -> EvaluationScores | None:
    if values is None:
        return None
    sampled = tuple(tuple(scores) for scores in values['sampled'])
    return EvaluationScores(tuple(values['greedy']), sampled, values['most_frequent_answer_share'])
