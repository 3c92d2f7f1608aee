"""The runs below a directory, read from their files, and the table of them. Imports no jax.

Only the ends of long files are read, so that a thousand workdirs take seconds.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from areal_jax import files
from areal_jax.app.workdir.run_directory import RESULTS
from areal_jax.config import CONFIG, default_config, flatten
from areal_jax.config.objectives import find_objective
from areal_jax.errors import ExitCode, UserError
from areal_jax.evaluation.results import FILE as ANSWERS
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.report.report import FILE as REPORT
from areal_jax.telemetry import names
from areal_jax.telemetry.facts import DURING, EVALUATIONS
from areal_jax.telemetry.metrics import FILE as METRICS
from areal_jax.telemetry.progress import format_bytes, format_duration, format_number

SWEEP = 'sweep.json'  # next to the workdirs of its arms
LOG = 'output.log'  # in the workdir of an arm: the output of its process
STARTED, ENDED = '--- started: ', '--- ended '  # lines in it
CHECKPOINTS = 'checkpoints'  # the name in run_directory.py, which imports numpy
_LOG_BYTES = 65536  # of the end of a log
RUNNING, FINISHED, STOPPED, KILLED, FAILED = 'running', 'finished', 'stopped', 'killed', 'failed'
NEVER_BEGAN, DAMAGED = 'never began', 'damaged'
_MARKS = (EVENTS, METRICS, ANSWERS)  # a directory with one of them but no config has lost its config
_TAIL_BYTES = 1 << 18
_ENDS = re.compile(rb'"kind": ?"(signal|error|restore)"')


@dataclasses.dataclass(frozen=True)
class Score:
    """The score of a run: 'gain', 'greedy' or 'nll', with a 95% interval if there is one."""

    name: str
    mean: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class RunEntry:
    """One workdir."""

    path: pathlib.Path
    name: str  # relative to the directory that is listed
    group: str  # name of its sweep, also relative; '' for none
    kind: str = ''  # 'rl', 'sft' or 'evaluation'; '' if the config cannot be read
    state: str = DAMAGED
    reason: str = ''  # why it failed, or the damage
    updates: int = 0  # answered problems of an evaluation
    planned: int | None = None
    started: float | None = None  # seconds since 1970
    active: float | None = None  # time of the last write to a file
    wall_seconds: float | None = None
    score: Score | None = None
    reward: float | None = None  # of the last update
    size: int = 0  # bytes on the disk
    config: Mapping[str, object] = dataclasses.field(default_factory=dict)  # by 'section.field', defaults filled in


def list_runs(directory: pathlib.Path) -> list[RunEntry]:
    """Lists all runs, supervised training and evaluations at or below the directory; raises UserError for none."""
    if not directory.is_dir():
        raise UserError(f'{directory} is no directory: name one that has workdirs in it, at any depth')
    defaults = dict(flatten(default_config()))
    found = [_read_entry(path, directory, defaults) for path in _find_workdirs(directory)]
    if not found:
        raise UserError(f'{directory} holds no run: no directory in it, at any depth, has the {CONFIG} of one')
    return sorted(found, key=lambda entry: (entry.group, entry.name))


def _find_workdirs(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the workdirs at or below the directory; does not search inside a workdir."""
    for place, below, inside in os.walk(directory):
        path = pathlib.Path(place)
        if any(mark in inside for mark in _MARKS) or (CONFIG in inside and _may_be_run(path / CONFIG)):
            below.clear()
            yield path
        below[:] = sorted(name for name in below if not name.startswith('.'))


def _may_be_run(config: pathlib.Path) -> bool:
    """Whether a config.json is of a run, damaged or not, rather than of a Hugging Face model."""
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
    """Adds size and times; the oldest file gives the age of the run, because most files are rewritten later."""
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
    """Returns (state, reason) of a run that has not finished, from its lock, its log and its process's output."""
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
    if entry.kind == 'sft' and newest and newest == entry.updates:  # a stopped one saves; it has no event log
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
    """Returns the newest evaluation of a run: after, during or before training."""
    if not (path / EVALUATIONS).exists():
        return None
    found = files.read_json(path / EVALUATIONS)
    rows = found.get(DURING) or []
    newest = found.get('after') or (rows[-1] if rows else found.get('before'))
    greedy = newest['greedy'] if newest else ()
    if not greedy:
        return None
    # imports numpy, which most listings of finished runs do not need
    from areal_jax.report.statistics import mean_interval

    interval = mean_interval(greedy)
    return Score('greedy', interval.mean, interval.low, interval.high)


def _last_line(path: pathlib.Path) -> files.JsonObject:
    """Returns the last complete line of a file of JSON lines; empty without such a line."""
    whole = _tail(path).rpartition(b'\n')[0].rpartition(b'\n')[2]
    return files.parse_object(whole, path.name, 'restore it') if whole else {}


def _tail(path: pathlib.Path) -> bytes:
    if not path.exists():
        return b''
    with path.open('rb') as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read()


def _plain(value: object) -> object:
    """Converts a JSON value to the form of default_config, where lists are tuples."""
    return tuple(value) if isinstance(value, list) else value


def read_end(log: pathlib.Path) -> str:
    """Describes why the process that wrote the log ended before the run had finished; '' without a log."""
    if not log.exists():
        return ''
    with log.open('rb') as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        lines = file.read().decode(errors='replace').splitlines()
    last = max((index for index, line in enumerate(lines) if line.startswith(STARTED)), default=0)
    lines = lines[last:]
    if not lines or not lines[-1].startswith(ENDED):
        return 'it is running, or ended together with the sweep'
    end = lines[-1].removeprefix(ENDED)
    if end == describe_code(ExitCode.STOPPED):
        return 'it was stopped'
    errors = [line.removeprefix('error: ') for line in lines if line.startswith('error: ')]
    told = [line for line in lines[1:-1] if line.strip()]
    said = errors[-1] if errors else told[-1] if told and end == describe_code(ExitCode.BUG) else ''
    return f'{end}: {said}' if said else end


def describe_code(code: int) -> str:
    """Describes a process's return code: 'with code 2', 'by signal 9'."""
    return f'by signal {-code}' if code < 0 else f'with code {code}'


# The list of runs as a table, one line each, or as JSON: filters, order, differing fields. Pure.


_HEAD = ('run', 'state', 'update', 'started', 'active', 'wall', 'score', 'reward', 'size', 'config')
_NOT_SHOWN = ('telemetry.',)  # differences that change no number
_MOST_SHOWN = 8  # differing fields that a line shows in full; if there are more, it omits defaults
_LEAST_LAST = 20  # least characters of the last column, however narrow the terminal
Differences = Mapping[str, Mapping[str, object]]  # by name of the run: field -> value

ORDERS: Mapping[str, Callable[[RunEntry], str | float]] = {
    'name': lambda entry: entry.name,
    'state': lambda entry: entry.state,
    'update': lambda entry: -entry.updates,
    'started': lambda entry: -(entry.started or 0),
    'active': lambda entry: -(entry.active or 0),
    'wall': lambda entry: -(entry.wall_seconds or 0),
    'score': lambda entry: -(entry.score.mean if entry.score else -math.inf),
    'reward': lambda entry: -(-math.inf if entry.reward is None else entry.reward),
    'size': lambda entry: -entry.size,
}


def select_runs(entries: Sequence[RunEntry], words: Sequence[str]) -> list[RunEntry]:
    """Returns the runs that match every FIELD=VALUE: a config field, or state, kind or name; VALUE may have * and ?.

    Raises UserError for a word of another form, and a field that no run has.
    """
    kept = list(entries)
    for word in words:
        field, equals, pattern = word.partition('=')
        if not equals:
            raise UserError(f'{word!r} is no filter: write FIELD=VALUE, such as staleness.eta=4 or state=failed')
        if field not in ('state', 'kind', 'name') and not any(field in entry.config for entry in entries):
            raise UserError(f'{word!r}: no run has the field {field}; name one of the config, or state, kind or name')
        kept = [entry for entry in kept if fnmatch.fnmatchcase(_value(entry, field), pattern)]
    return kept


def find_differences(entries: Sequence[RunEntry], defaults: Mapping[str, object] | None = None) -> Differences:
    """Returns the fields that differ between the runs, for each run; with `defaults`, those that differ from them."""
    known = [entry for entry in entries if entry.config]
    fields = sorted({field for entry in known for field in entry.config if not field.startswith(_NOT_SHOWN)})
    if defaults is None:
        fields = [field for field in fields if len({repr(entry.config.get(field)) for entry in known}) > 1]
    found: dict[str, dict[str, object]] = {}
    for entry in known:
        values = {field: entry.config[field] for field in fields if field in entry.config}
        if defaults is not None:
            values = {field: value for field, value in values.items() if repr(value) != repr(defaults.get(field))}
        found[entry.name] = values
    return found


def render_runs(
    entries: Sequence[RunEntry],
    differences: Differences,
    defaults: Mapping[str, object],
    now: float,
    width: int | None,
) -> str:
    """Renders one line for each run; the runs of a sweep are listed under its name.

    Args:
      defaults: of the config; used to shorten the lines of runs that have little in common.
      now: seconds since 1970.
      width: of the terminal; the last column is cut there; None = it is not cut.
    """
    shown = _shorten(differences, defaults)
    rows = [_row(entry, shown.get(entry.name, {}), now) for entry in entries]
    used = [index for index in range(len(_HEAD)) if any(row[index] for row in rows) or index < 2]
    head = [_HEAD[index] for index in used]
    cells = [[row[index] for index in used] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines, group = [_line(head, widths, width)], ''
    for entry, row in zip(entries, cells, strict=True):
        if entry.group and entry.group != group:
            lines.append(f'{entry.group}:')
        group = entry.group
        lines.append(_line(row, widths, width))
    return '\n'.join([*lines, _count(entries)])


def as_json(entries: Sequence[RunEntry], differences: Differences) -> list[dict[str, object]]:
    """Returns one object for each run, with its whole config; numbers that are not finite become text."""
    return [
        {
            'name': entry.name, 'workdir': str(entry.path), 'group': entry.group, 'kind': entry.kind,
            'state': entry.state, 'reason': entry.reason, 'updates': entry.updates, 'planned': entry.planned,
            'started': entry.started, 'active': entry.active, 'wall_seconds': entry.wall_seconds,
            'score': _score_object(entry.score), 'reward': entry.reward, 'bytes': entry.size,
            'differences': {field: _json(value) for field, value in differences.get(entry.name, {}).items()},
            'config': {field: _json(value) for field, value in entry.config.items()},
        }
        for entry in entries
    ]  # fmt: skip


def _shorten(differences: Differences, defaults: Mapping[str, object]) -> Differences:
    fields = {field for values in differences.values() for field in values}
    if len(fields) <= _MOST_SHOWN:
        return differences
    return {
        name: {field: value for field, value in values.items() if repr(value) != repr(defaults.get(field))}
        for name, values in differences.items()
    }


def _row(entry: RunEntry, differences: Mapping[str, object], now: float) -> tuple[str, ...]:
    indent = '  ' if entry.group else ''
    shown = entry.name.removeprefix(f'{entry.group}/') if entry.group != '.' else entry.name
    told = [entry.reason] if entry.reason else []
    told += [f'{field}={_text(value)}' for field, value in differences.items()]
    wall = format_duration(entry.wall_seconds)
    if entry.state == RUNNING and entry.updates and entry.wall_seconds and entry.planned:
        left = entry.wall_seconds / entry.updates * (entry.planned - entry.updates)
        wall = f'{wall}, {format_duration(left)} left'
    return (
        f'{indent}{shown}',
        entry.state,
        f'{entry.updates}/{"-" if entry.planned is None else entry.planned}',
        '-' if entry.started is None else time.strftime('%b %d %H:%M', time.localtime(entry.started)),
        '-' if entry.active is None else f'{format_duration(now - entry.active)} ago',
        wall,
        _format_score(entry.score),
        '' if entry.reward is None else format_number(entry.reward),
        format_bytes(entry.size),
        ', '.join(told),
    )


def _line(cells: Sequence[str], widths: Sequence[int], width: int | None) -> str:
    *fixed, last = (cell.ljust(wide) for cell, wide in zip(cells, widths, strict=True))
    start = '  '.join(fixed)
    text = ' '.join(last.split())
    room = None if width is None else max(_LEAST_LAST, width - len(start) - 2)
    if room is not None and len(text) > room:
        text = f'{text[: room - 1]}…'
    return f'{start}  {text}'.rstrip()


def _count(entries: Sequence[RunEntry]) -> str:
    states = [entry.state for entry in entries]
    counts = ', '.join(f'{states.count(state)} {state}' for state in dict.fromkeys(sorted(states)))
    return f'{len(entries)} {"run" if len(entries) == 1 else "runs"}: {counts}' if entries else 'no run'


def _format_score(score: Score | None) -> str:
    if score is None:
        return ''
    if score.low is None or score.high is None:
        return f'{score.name} {score.mean:.3f}'
    sign = '+' if score.name == 'gain' else ''
    return f'{score.name} {score.mean:{sign}.2f} [{score.low:{sign}.2f}, {score.high:{sign}.2f}]'


def _score_object(score: Score | None) -> dict[str, object] | None:
    return None if score is None else {'name': score.name, 'mean': score.mean, 'low': score.low, 'high': score.high}


def _value(entry: RunEntry, field: str) -> str:
    own = {'state': entry.state, 'kind': entry.kind, 'name': entry.name}
    return own[field] if field in own else _text(entry.config.get(field))


def _text(value: object) -> str:
    return f'{value:g}' if isinstance(value, float) else str(value)


def _json(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
