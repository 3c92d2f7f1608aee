"""Facts that only the running program knows, kept for the report in WORKDIR/facts.json.

Written by app/ when a run finishes, read by report/ and app/run/reports.py.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import typing
from collections.abc import Mapping, Sequence

import msgspec

from areal_jax import files
from areal_jax.errors import show
from areal_jax.events.records import fits, name_type
from areal_jax.labels import CODE
from areal_jax.telemetry.energy_meters import EnergyFacts
from areal_jax.workers.sandbox.sandbox_trial import SandboxRecord

FILE = 'facts.json'
EVALUATIONS = 'evaluations.json'
DURING = 'during'  # key of the rows of evaluations during training; the other keys are 'before' and 'after'
HELD_OUT_SCORES = 'held-out scores'  # an entry of RunFacts.missing on an evaluation begins with this

_FIX = 'restore the file as the run wrote it, or remove it'
_WITHOUT = 'remove it: a report can be made without it'
_Scores = typing.TypeVar('_Scores')


@dataclasses.dataclass(frozen=True)
class EvaluationScores:
    """Scores on held-out problems, one entry per problem; before and after use the same. Producer: evaluation/."""

    greedy: tuple[float, ...]  # score of the greedy answer
    sampled: tuple[tuple[float, ...], ...]  # scores of the sampled answers
    most_frequent_answer_share: float | None = None  # see most_frequent_share
    labels: Mapping[str, int] = dataclasses.field(default_factory=dict)  # answers by label, greedy ones included
    sources: tuple[str, ...] = ()  # of a mixture: the source of each problem

    def as_values(self) -> files.JsonObject:
        """The scores as JSON values; without the sources if the run has one task."""
        values = dataclasses.asdict(self)
        if not self.sources:
            del values['sources']
        return values

    def by_source(self) -> dict[str, EvaluationScores]:
        """The scores of the problems of each source, sorted by its name; {} for a single task."""
        rows: dict[str, list[int]] = {}
        for row, source in enumerate(self.sources):
            rows.setdefault(source, []).append(row)
        return {
            source: EvaluationScores(
                tuple(self.greedy[row] for row in rows[source]), tuple(self.sampled[row] for row in rows[source])
            )
            for source in sorted(rows)
        }


@dataclasses.dataclass(frozen=True)
class VersionScores:
    """Scores of one version, evaluated during training. Producer: evaluation/evaluator.py."""

    version: int
    seconds: float  # clock seconds that it took
    scores: EvaluationScores

    def as_row(self) -> files.JsonObject:
        """The row of evaluations.json."""
        return {'version': self.version, 'seconds': self.seconds, **self.scores.as_values()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts that the event log and the metrics do not hold. Producer: app/."""

    config: str  # path of the experiment file
    seed: int
    eta: float | None  # staleness.eta; inf = unbounded, None = not used by the schedule
    schedule: str  # staleness.schedule
    clock: str  # 'real' | 'virtual'
    planned_steps: int | None  # run.steps
    simulation: str = ''  # what was simulated, in words; '' = a real run
    objective: str = ''  # method and combination, see config.objectives.describe_method
    # texts of the tokens that end an answer, by their ids; empty: none, or not known
    ends: Mapping[str, str] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()  # about the combination in `objective`, and about a missing sandbox
    sandbox: SandboxRecord | None = None  # sandbox in which the scorer runs code; None: the config asks for none
    finished: bool = True
    running: str | None = None  # unfinished: files.find_holder
    missing: tuple[str, ...] = ()  # unfinished: what the report lacks, in words
    newest_checkpoint: int | None = None  # unfinished: its update, where --resume continues
    idle_fields: tuple[str, ...] = ()  # set in the config file but not used by the run: 'evaluation.samples=16'
    # by config field: 'function', 'file', 'sha256' of the user's own functions
    own_code: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    prolonged: tuple[Mapping[str, int], ...] = ()  # {'at_update', 'from_steps', 'to_steps'}, in order
    # of the whole run on a wall clock; None = span of the event log, if its clock is real
    wall_seconds: float | None = None
    evaluation_before: EvaluationScores | None = None
    evaluation_after: EvaluationScores | None = None
    compilations: int = 0  # XLA programs compiled after warm-up
    compilation_budget: int  # run.compilation_budget
    peak_memory_bytes: int | None = None  # ResourceSampler.peak_bytes
    kv_cache_bytes: int | None = None  # of one engine, without the slots for evaluation during training
    memory_parts: Mapping[str, int] = dataclasses.field(default_factory=dict)  # app.sizes.measure_parts, and programs
    event_loop_lag_max: float | None = None  # seconds, after warm-up
    weights_sha256: str | None = None  # of the last version
    git_commit: str | None = None
    # commits of models and data sets of the Hugging Face Hub, by config field
    revisions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of packages
    hardware: Mapping[str, object] = dataclasses.field(default_factory=dict)  # cores, platform, ...
    # 'generate', 'train': an update
    alone_seconds: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    cpu_seconds: float | None = None  # of the process tree, in the window; None if several processes made the run
    cores: int = 1
    hook: Mapping[str, object] = dataclasses.field(default_factory=dict)  # RowFacts; empty without one
    tracker: Mapping[str, object] = dataclasses.field(default_factory=dict)  # RowFacts; empty without one
    rollouts: Mapping[str, object] = dataclasses.field(default_factory=dict)  # RolloutFacts; empty without them
    energy: EnergyFacts | None = None  # None: telemetry.energy='off'
    problems: Mapping[str, int] = dataclasses.field(default_factory=dict)  # 'train', 'held_out', 'dropped': too long
    lanes_own_devices: bool = False  # engines and learner do not share a device or cores
    # ids by user: 'learner': [0], 'engines': {'engine/0': [0]}
    devices: Mapping[str, Sequence[int] | Mapping[str, Sequence[int]]] = dataclasses.field(default_factory=dict)

    def save(self, workdir: pathlib.Path | str) -> None:
        """Writes WORKDIR/facts.json atomically."""
        eta = None if self.eta is None else str(self.eta)  # a string: JSON has no infinity
        values = dataclasses.asdict(self) | {'eta': eta}
        files.write_json(pathlib.Path(workdir) / FILE, values)

    @classmethod
    def load(cls, workdir: pathlib.Path | str) -> RunFacts:
        """Reads WORKDIR/facts.json, written when a run finishes; raises FileError for an incomplete or edited file."""
        values = read_facts(workdir, cls)
        try:
            eta = None if values['eta'] is None else float(values['eta'])
        except ValueError as error:
            fault = f'eta={values["eta"]!r}, which is no number'
            raise files.FileError(f'{pathlib.Path(workdir) / FILE} has {fault}; {_WITHOUT}') from error
        return msgspec.convert(values | {'eta': eta}, cls)


def read_facts(workdir: pathlib.Path | str, kind: type) -> files.JsonObject:
    """Reads the fields of the dataclass `kind` from WORKDIR/facts.json, as JSON values; raises FileError."""
    path = pathlib.Path(workdir) / FILE
    fix = _WITHOUT
    values = files.read_json(path, fix)
    fields = dataclasses.fields(kind)
    required = {field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING}
    if wrong := sorted((set(values) - {field.name for field in fields}) | (required - set(values))):
        raise files.FileError(
            f'{path} was written by another version (fields that are missing or unknown: {wrong}); {fix}'
        )
    # types in the file: infinity is a text, a value that was not a number is null
    hints = typing.get_type_hints(kind) | {
        'eta': str | None,
        'held_out_pairs': Mapping[int, Mapping[str, float | None]],
    }
    for name, value in values.items():
        if not fits(value, hints[name]):
            raise files.FileError(f'{path} has {name}={show(value)}, which is not {name_type(hints[name])}; {fix}')
    return values


def discard_facts(workdir: pathlib.Path | str) -> None:
    """Removes facts.json before the run continues: only a finished workdir has the file."""
    (pathlib.Path(workdir) / FILE).unlink(missing_ok=True)


def most_frequent_share(answers: Sequence[str]) -> float | None:
    """Share of answers equal to the most frequent one; None without answers. Near 1: the policy has collapsed."""
    if not answers:
        return None
    return collections.Counter(answers).most_common(1)[0][1] / len(answers)


def visible_only_share(labels: Mapping[str, int]) -> float | None:
    """The share of passing code answers that fails a hidden test; None if no answer passes or none is code."""
    passing = labels.get('ok', 0) + labels.get('visible_only', 0)
    return labels.get('visible_only', 0) / passing if passing and set(labels) & set(CODE) else None


def read_scores(path: pathlib.Path) -> dict[str, EvaluationScores]:
    """Reads {'before': scores, 'after': scores} from an evaluations.json; a phase may be absent. {} without the file.

    Raises FileError for other content.
    """
    found = files.read_json(path, _FIX) if path.exists() else {}
    return {
        phase: _convert(path, phase, values, EvaluationScores) for phase, values in found.items() if phase != DURING
    }


def read_curve(path: pathlib.Path) -> list[VersionScores]:
    """Reads the evaluations during training from an evaluations.json, by version; [] without the file.

    Raises FileError for other content.
    """
    rows = files.read_json(path, _FIX).get(DURING, []) if path.exists() else []
    if not fits(rows, list[dict[str, object]]):
        raise files.FileError(f'{path}: {DURING!r} does not hold rows of evaluations; {_FIX}')
    return [_convert(path, DURING, row | {'scores': row}, VersionScores) for row in rows]


def _convert(path: pathlib.Path, phase: str, values: object, kind: type[_Scores]) -> _Scores:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        fault = f'does not hold the scores of an evaluation ({error})'
        raise files.FileError(f'{path}: {phase!r} {fault}; {_FIX}') from error
