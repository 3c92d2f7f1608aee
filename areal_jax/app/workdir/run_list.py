"""The runs below a directory, each as its files tell: state, updates, scores, config. Imports no jax.

Only ends of long files are read, so that a thousand workdirs take seconds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping

from areal_jax import files
from areal_jax.app.evaluate.evaluation_workdir import RESULTS
from areal_jax.app.sweep.sweep_directory import CHECKPOINTS, LOG, SWEEP, describe_code, read_end
from areal_jax.config import CONFIG, default_config, flatten
from areal_jax.config.objectives import find_objective
from areal_jax.errors import ExitCode, UserError
from areal_jax.evaluation.results import FILE as ANSWERS
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.report.report import FILE as REPORT
from areal_jax.telemetry import names
from areal_jax.telemetry.facts import DURING, EVALUATIONS
from areal_jax.telemetry.metrics import FILE as METRICS

RUNNING, FINISHED, STOPPED, KILLED, FAILED = 'running', 'finished', 'stopped', 'killed', 'failed'
NEVER_BEGAN, DAMAGED = 'never began', 'damaged'
_MARKS = (EVENTS, METRICS, ANSWERS)  # a directory with one of them and without a config has lost it
_TAIL_BYTES = 1 << 18
_ENDS = re.compile(rb'"kind": ?"(signal|error|restore)"')


@dataclasses.dataclass(frozen=True)
class Score:
    """What the run is judged by: 'gain', 'greedy', 'nll', with a 95% interval where it has one."""

    name: str
    mean: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class RunEntry:
    """One workdir."""

    path: pathlib.Path
    name: str  # relative to the directory that is listed
    group: str  # name of its sweep, relative as well; '' for none
    kind: str = ''  # 'rl', 'sft' or 'evaluation'; '' where the config cannot be read
    state: str = DAMAGED
    reason: str = ''  # why it failed, or what is damaged
    updates: int = 0  # answered problems of an evaluation
    planned: int | None = None
    started: float | None = None  # seconds since 1970
    active: float | None = None  # when a file was written last
    wall_seconds: float | None = None
    score: Score | None = None
    reward: float | None = None  # of the last update
    size: int = 0  # bytes on the disk
    config: Mapping[str, object] = dataclasses.field(default_factory=dict)  # by 'section.field', defaults filled in


def list_runs(directory: pathlib.Path) -> list[RunEntry]:
    """Every run, supervised training and evaluation at or below the directory, by name; raises UserError for none."""
    if not directory.is_dir():
        raise UserError(f'{directory} is no directory: name one that has workdirs in it, at any depth')
    defaults = dict(flatten(default_config()))
    found = [_read_entry(path, directory, defaults) for path in _find_workdirs(directory)]
    if not found:
        raise UserError(f'{directory} holds no run: no directory in it, at any depth, has the {CONFIG} of one')
    return sorted(found, key=lambda entry: (entry.group, entry.name))


def _find_workdirs(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """What is inside a workdir is not looked at."""
    for place, below, inside in os.walk(directory):
        path = pathlib.Path(place)
        if any(mark in inside for mark in _MARKS) or (CONFIG in inside and _may_be_run(path / CONFIG)):
            below.clear()
            yield path
        below[:] = sorted(name for name in below if not name.startswith('.'))


def _may_be_run(config: pathlib.Path) -> bool:
    """Whether a config.json is of a run, damaged or not, rather than of a model of Hugging Face."""
    try:
        values = json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError):
        return True
    return isinstance(values, dict) and isinstance(values.get('run'), dict) and isinstance(values.get('loss'), dict)


def _read_entry(path: pathlib.Path, directory: pathlib.Path, defaults: Mapping[str, object]) -> RunEntry:
    name = str(path.relative_to(directory)) if path != directory else path.resolve().name
    group = str(path.parent.relative_to(directory)) if path != directory and (path.parent / SWEEP).exists() else ''
    entry = RunEntry(path, name, group)
    try:
        entry = _measure(entry)
        if not (path / CONFIG).exists():
            return dataclasses.replace(entry, reason=f'there is no {CONFIG}')
        values = files.read_json(path / CONFIG)
        config = {**defaults, **{field: _plain(value) for field, value in flatten(values)}}
        entry = dataclasses.replace(entry, config=config)
        if (path / ANSWERS).exists() or (path / RESULTS).exists():
            return _read_evaluation(entry)
        return _read_training(entry)
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = str(error).removeprefix(f'{path}/').partition(';')[0]
        reason = f'a file of it lacks {said}' if isinstance(error, KeyError) else said or type(error).__name__
        return dataclasses.replace(entry, state=DAMAGED, reason=reason)


def _measure(entry: RunEntry) -> RunEntry:
    """Size and times; the oldest file is as old as the run, since most are written again."""
    size, times = 0, []
    for place, _, inside in os.walk(entry.path):
        for name in inside:
            stat = os.lstat(os.path.join(place, name))
            size += stat.st_size
            times += [stat.st_mtime] if place == str(entry.path) else []
    started, active = (min(times), max(times)) if times else (None, None)
    wall = active - started if active and started else None
    return dataclasses.replace(entry, size=size, started=started, active=active, wall_seconds=wall)


def _read_training(entry: RunEntry) -> RunEntry:
    path, config = entry.path, entry.config
    kind = 'rl' if find_objective(str(config['loss.objective'])).generates else 'sft'
    planned = int(str(config['run.steps']))
    line = _last_line(path / METRICS)
    updates = int(line.get(names.STEP, 0))
    entry = dataclasses.replace(entry, kind=kind, planned=planned, updates=updates, reward=line.get('reward/mean'))
    report = files.read_json(path / REPORT) if (path / REPORT).exists() else {}
    if report.get('steps') == planned and report.get('finished', True):
        wall, score = report.get('wall_seconds') or entry.wall_seconds, _score_of(report) or _last_score(path)
        return dataclasses.replace(entry, state=FINISHED, wall_seconds=wall, score=score)
    nll = line.get('loss/nll')
    score = Score('nll', nll) if kind == 'sft' and nll is not None else _last_score(path)
    state, reason = _find_end(entry)
    return dataclasses.replace(entry, state=state, reason=reason, score=score)


def _read_evaluation(entry: RunEntry) -> RunEntry:
    planned, results = int(str(entry.config['evaluation.problems'])), entry.path / RESULTS
    entry = dataclasses.replace(entry, kind='evaluation', planned=planned)
    if results.exists():
        found = files.read_json(results)
        greedy, n = found['metrics'].get('greedy'), int(found['problems'])
        score = Score('greedy', greedy['mean'], greedy['low'], greedy['high']) if greedy else None
        return dataclasses.replace(entry, state=FINISHED, updates=n, planned=n, score=score)
    answers = entry.path / ANSWERS
    updates = answers.read_bytes().count(b'\n') if answers.exists() else 0
    return dataclasses.replace(entry, state=RUNNING if files.find_holder(entry.path) else STOPPED, updates=updates)


def _find_end(entry: RunEntry) -> tuple[str, str]:
    """(state, reason) of a run that has not finished, from its lock, its log and what its process printed."""
    path = entry.path
    if files.find_holder(path):
        return RUNNING, ''
    tail = _tail(path / EVENTS)
    if not entry.updates and not tail and not (path / LOG).exists():
        return NEVER_BEGAN, ''
    ends = list(_ENDS.finditer(tail))
    kind = ends[-1][1] if ends else b''
    if kind == b'error':
        begin = tail.rfind(b'\n', 0, ends[-1].start()) + 1
        return FAILED, str(json.loads(tail[begin:].partition(b'\n')[0])['message'])
    if kind == b'signal':
        return STOPPED, ''
    said = read_end(path / LOG)
    if said == 'it was stopped':
        return STOPPED, ''
    if said.startswith('with code'):
        failed = said.partition(': ')[2] if said.startswith(describe_code(ExitCode.USER_ERROR)) else said
        return FAILED, failed or said
    saved = [re.match(r'step_(\d+)', place.name) for place in (path / CHECKPOINTS).glob('step_*')]
    newest = max((int(step[1]) for step in saved if step), default=0)
    if entry.kind == 'sft' and newest and newest == entry.updates:  # a stopped one saves; it has no log of events
        return STOPPED, ''
    return KILLED, ''


def _score_of(report: Mapping[str, object]) -> Score | None:
    accuracy, held_out = report.get('accuracy'), report.get('held_out_nll')
    if isinstance(accuracy, dict):
        if gain := (accuracy.get('sampled') or {}).get('gain'):
            return Score('gain', gain['mean'], gain['low'], gain['high'])
        if after := (accuracy.get('greedy') or {}).get('after'):
            return Score('greedy', after['mean'], after['low'], after['high'])
    measured = [nll for nll in held_out.values() if nll is not None] if isinstance(held_out, dict) else []
    return Score('nll', measured[-1]) if measured else None


def _last_score(path: pathlib.Path) -> Score | None:
    """The newest evaluation of a run: beside training, or before it."""
    if not (path / EVALUATIONS).exists():
        return None
    found = files.read_json(path / EVALUATIONS)
    rows = found.get(DURING) or []
    newest = found.get('after') or (rows[-1] if rows else found.get('before'))
    greedy = newest['greedy'] if newest else ()
    if not greedy:
        return None
    # imports numpy, which most listings of finished runs do without
    from areal_jax.report.statistics import mean_interval

    interval = mean_interval(greedy)
    return Score('greedy', interval.mean, interval.low, interval.high)


def _last_line(path: pathlib.Path) -> files.JsonObject:
    """The last whole line of a file of JSON lines; empty where it has none."""
    whole = _tail(path).rpartition(b'\n')[0].rpartition(b'\n')[2]
    return files.parse_object(whole, path.name, 'restore it') if whole else {}


def _tail(path: pathlib.Path) -> bytes:
    if not path.exists():
        return b''
    with path.open('rb') as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read()


def _plain(value: object) -> object:
    """As default_config has it: lists of JSON are tuples there."""
    return tuple(value) if isinstance(value, list) else value
