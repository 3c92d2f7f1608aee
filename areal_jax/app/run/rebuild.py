"""The report of a workdir, made again: of a run that finished, was stopped or was killed."""

from __future__ import annotations

import pathlib
import re
import types
from collections.abc import Mapping, Sequence
from typing import TypedDict, TypeVar, cast

from areal_jax import files
from areal_jax.app.run.held_out import read_pairs_measured
from areal_jax.app.run.overlap import alone_seconds
from areal_jax.app.run.sft_report import SftFacts, write_sft_report
from areal_jax.app.run.start_records import FILE as STARTS
from areal_jax.app.run.start_records import Start, read_starts
from areal_jax.config import CONFIG, default_config
from areal_jax.config.objective_constraints import find_objective_warnings
from areal_jax.config.objectives import describe_method, find_objective
from areal_jax.config.sandbox_fields import find_sandbox_warnings
from areal_jax.config.structure import read_saved
from areal_jax.errors import UserError
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.report.event_log import lane_intervals, load_events, window
from areal_jax.report.report import load_run, write_report
from areal_jax.report.run_record import Run
from areal_jax.telemetry import facts as fact_file
from areal_jax.telemetry import metrics as metric_log
from areal_jax.telemetry import names
from areal_jax.telemetry.facts import EVALUATIONS, HELD_OUT_SCORES, EvaluationScores, RunFacts, read_scores
from areal_jax.telemetry.metrics import Line, number

_CHECKPOINTS = 'checkpoints'  # as in run_directory.py, which imports jax
Config = Mapping[str, object]  # as config.json has it: sections of fields
Value = TypeVar('Value', str, int, float)


class ReportError(UserError):
    """A directory that holds no run, or a file of one that cannot be read; the message names it."""


def rebuild_report(workdir: pathlib.Path, plots: bool) -> None:
    """Writes the report again. Without facts.json the run has not finished, and the report says so.

    Raises ReportError for a directory without a run, and UserError for a file that was torn or edited.
    """
    config = _read_config(workdir)
    if _is_supervised(workdir, config):
        finished = (workdir / fact_file.FILE).exists()
        write_sft_report(workdir, SftFacts.load(workdir) if finished else unfinished_sft_facts(workdir, config))
    else:
        write_report(workdir, _facts(workdir, config), plots=plots)


def read_run(workdir: pathlib.Path) -> Run:
    """A run with its report, made anew and not written. Raises as `rebuild_report`, and for supervised training."""
    config = _read_config(workdir)
    if _is_supervised(workdir, config):
        raise ReportError(
            f'{workdir} holds supervised training, which has no event log; give runs of reinforcement learning'
        )
    return load_run(workdir, _facts(workdir, config))


def _is_supervised(workdir: pathlib.Path, config: Config) -> bool:
    return not find_objective(_field(workdir, config, 'loss.objective', str)).generates


def _facts(workdir: pathlib.Path, config: Config) -> RunFacts:
    finished = (workdir / fact_file.FILE).exists()
    return RunFacts.load(workdir) if finished else unfinished_facts(workdir, config)


def unfinished_facts(workdir: pathlib.Path, config: Config) -> RunFacts:
    """What config.json, the event log and the metrics know of a run that has not finished."""
    schedule = _field(workdir, config, 'staleness.schedule', str)
    eta = float(_field(workdir, config, 'staleness.eta', float))
    events, scores = load_events(workdir / EVENTS), read_scores(workdir / EVALUATIONS)
    metrics = metric_log.read_metrics(workdir / metric_log.FILE)
    intervals, within = lane_intervals(events), window(events)
    origin = _origin(workdir)
    starts = _read_starts(workdir)
    return RunFacts(
        config=CONFIG,
        seed=_field(workdir, config, 'run.seed', int),
        eta=eta if schedule == 'natural' else None,
        schedule=schedule,
        clock=_field(workdir, config, 'run.clock', str),
        **_describe_objective(config),
        planned_steps=_field(workdir, config, 'run.steps', int),
        finished=False,
        running=files.find_holder(workdir),
        missing=_missing(workdir, config, scores),
        newest_checkpoint=_newest_checkpoint(workdir),
        evaluation_before=scores.get('before'),
        evaluation_after=scores.get('after'),
        compilations=_total(metrics, names.COMPILATIONS),
        compilation_budget=_field(workdir, config, 'run.compilation_budget', int),
        alone_seconds=alone_seconds(intervals, within, len(metrics)) if metrics else {},
        cores=cast(int, origin['hardware'].get('cores', 1)),
        sandbox=starts[-1].get('sandbox') if starts else None,
        **origin,
    )


class _Objective(TypedDict):
    """The fields of facts that tell of the objective."""

    objective: str
    warnings: tuple[str, ...]


def _describe_objective(config: Config) -> _Objective:
    """From a config of this version or an earlier one, whose missing fields have their defaults."""
    sections = default_config().to_dict()
    known = {name: fields | cast(dict[str, object], config.get(name, {})) for name, fields in sections.items()}
    c = types.SimpleNamespace(**{name: types.SimpleNamespace(**fields) for name, fields in known.items()})
    return {'objective': describe_method(c.loss), 'warnings': (*find_objective_warnings(c), *find_sandbox_warnings(c))}


class _Origin(TypedDict):
    """The fields of facts that say where a run computes, known since its start."""

    git_commit: str | None
    versions: Mapping[str, str]
    hardware: Mapping[str, object]


def _origin(workdir: pathlib.Path) -> _Origin:
    """Of the newest start; nothing where the run was killed before it noted one."""
    starts = _read_starts(workdir)
    if not starts:
        return {'git_commit': None, 'versions': {}, 'hardware': {}}
    found = starts[-1]['environment']
    hardware = {name: found[name] for name in ('cores', 'machine', 'devices')}
    return {'git_commit': found['commit'], 'versions': found['versions'], 'hardware': hardware}


def _read_starts(workdir: pathlib.Path) -> list[Start]:
    path = workdir / STARTS
    return read_starts(path.read_bytes(), str(path)) if path.exists() else []


def unfinished_sft_facts(workdir: pathlib.Path, config: Config) -> SftFacts:
    """What config.json and the metrics know of supervised training that has not finished."""
    metrics = metric_log.read_metrics(workdir / metric_log.FILE)
    last = metrics[-1] if metrics else {}
    measured = [line for line in metrics if names.HELD_OUT_NLL in line]
    return SftFacts(
        config=CONFIG,
        seed=_field(workdir, config, 'run.seed', int),
        steps=int(number(last, names.STEP) or 0),
        epochs=number(last, names.EPOCH) or 0.0,
        held_out_nll={int(number(line, names.STEP) or 0): number(line, names.HELD_OUT_NLL) for line in measured},
        held_out_pairs=read_pairs_measured(metrics),
        trained_tokens=_total(metrics, names.TOKENS_TRAINED),
        training_seconds=number(last, names.TIME) or 0.0,
        compilations=_total(metrics, names.COMPILATIONS),
        planned_steps=_field(workdir, config, 'run.steps', int),
        finished=False,
        running=files.find_holder(workdir),
        missing=('sizes of the data', 'memory', 'hash and export of the weights'),
        newest_checkpoint=_newest_checkpoint(workdir),
        **_origin(workdir),
    )


def _missing(workdir: pathlib.Path, config: Config, scores: Mapping[str, EvaluationScores]) -> tuple[str, ...]:
    """What the report of an unfinished asynchronous run lacks."""
    wanted = _field(workdir, config, 'evaluation.problems', int) > 0
    unscored = [
        f'{HELD_OUT_SCORES} {phase} training' for phase in ('before', 'after') if wanted and phase not in scores
    ]
    return (*unscored, 'memory', 'lag of the event loop', 'processor time', 'hash of the weights')


def _newest_checkpoint(workdir: pathlib.Path) -> int | None:
    """Its update; None without one. Only names are read: a damaged one is found when the run resumes."""
    steps = [re.match(r'step_(\d+)', path.name) for path in (workdir / _CHECKPOINTS).glob('step_*')]
    return max((int(step[1]) for step in steps if step), default=None)


def _total(metrics: Sequence[Line], name: str) -> int:
    return int(sum(number(line, name) or 0 for line in metrics))


def _read_config(workdir: pathlib.Path) -> Config:
    path = workdir / CONFIG
    if not path.exists():
        raise ReportError(f'{workdir} holds no run: there is no {CONFIG}; give the --workdir of a run')
    return read_saved(path)


def _field(workdir: pathlib.Path, config: Config, path: str, kind: type[Value]) -> Value:
    """The value of 'section.field'; a float may be written as an integer."""
    section, name = path.split('.')
    fields = config.get(section)
    value = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(value, (int, float) if kind is float else kind):
        raise ReportError(
            f'{workdir / CONFIG} holds {path}={value!r}: it was edited or is of another program; give the --workdir of '
            'a run'
        )
    return cast(Value, value)
