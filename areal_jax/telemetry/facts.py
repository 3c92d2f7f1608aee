"""Beside the loop: what only the running program knows, kept for the report in WORKDIR/facts.json."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax import files
from areal_jax.errors import UserError

FILE = 'facts.json'


class FactsError(UserError, ValueError):
    """Facts that cannot be read; the message names the file and the fix."""


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
    eta: float | None  # staleness.eta; inf = unbounded, None = not used by the schedule
    schedule: str = 'natural'  # staleness.schedule
    clock: str = 'real'  # 'real' | 'virtual'
    planned_steps: int | None = None  # run.steps
    finished: bool = True
    idle_fields: tuple[str, ...] = ()  # of the config, set or not: those that the run as built does not use
    prolonged: tuple[Mapping[str, int], ...] = ()  # {'at_update', 'from_steps', 'to_steps'}, in order
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
    cpu_seconds: float | None = None  # of the process tree, in the window; None where several processes made the run
    cores: int = 1
    lanes_own_devices: bool = False  # engines and learner do not share a device or cores

    def save(self, workdir: pathlib.Path | str) -> None:
        """Write WORKDIR/facts.json, all or nothing."""
        eta = None if self.eta is None else str(self.eta)  # a string: JSON has no infinity
        values = dataclasses.asdict(self) | {'eta': eta}
        files.write_json(pathlib.Path(workdir) / FILE, values)

    @classmethod
    def load(cls, workdir: pathlib.Path | str) -> RunFacts:
        """Read WORKDIR/facts.json, written when a run finishes; raises FactsError for a file that is not whole."""
        values = read_facts(workdir, cls)
        for name in ('evaluation_before', 'evaluation_after'):
            values[name] = read_scores(values.get(name))
        for name in ('idle_fields', 'prolonged'):
            values[name] = tuple(values[name])
        return cls(**values | {'eta': None if values['eta'] is None else float(values['eta'])})


def read_facts(workdir: pathlib.Path | str, kind: type) -> dict[str, Any]:
    """The fields of the dataclass `kind` in WORKDIR/facts.json, as JSON has them; raises FactsError."""
    path = pathlib.Path(workdir) / FILE
    try:
        values = json.loads(path.read_text(encoding='utf-8'))
    except ValueError as error:
        raise FactsError(f'{path} is not JSON ({error}); remove it: a report can be made without it') from error
    known = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(values, dict) or set(values) != known:
        wrong = sorted(set(values) ^ known) if isinstance(values, dict) else 'no JSON object'
        raise FactsError(
            f'{path} was written by another version (fields that are missing or unknown: {wrong}); remove it: a report '
            'can be made without it'
        )
    return values


def discard_facts(workdir: pathlib.Path | str) -> None:
    """Remove what an earlier end of the run left: from now on it has not finished."""
    (pathlib.Path(workdir) / FILE).unlink(missing_ok=True)


def most_frequent_share(answers: Sequence[str]) -> float | None:
    """Share of the answers that equal the most frequent one; None without answers. Near 1: the policy has collapsed."""
    if not answers:
        return None
    return collections.Counter(answers).most_common(1)[0][1] / len(answers)


def read_scores(values: Mapping[str, Any] | None) -> EvaluationScores | None:
    """What JSON made of the fields of EvaluationScores."""
    if values is None:
        return None
    sampled = tuple(tuple(scores) for scores in values['sampled'])
    return EvaluationScores(tuple(values['greedy']), sampled, values['most_frequent_answer_share'])
