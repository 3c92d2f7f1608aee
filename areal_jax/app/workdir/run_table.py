"""The list of runs as a table, a line each, or as JSON: what is kept, in which order, which fields differ. Pure."""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Mapping, Sequence

from areal_jax.app.workdir.run_list import RUNNING, RunEntry, Score
from areal_jax.errors import UserError
from areal_jax.telemetry.progress import format_bytes, format_duration, format_number

_HEAD = ('run', 'state', 'update', 'started', 'active', 'wall', 'score', 'reward', 'size', 'config')
_NOT_SHOWN = ('telemetry.',)  # differences that change no number
_MOST_SHOWN = 8  # differing fields, of which a line shows all; of more it leaves out values that are the default
_LEAST_LAST = 20  # characters of the last column, however narrow the terminal
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
    """Those that every FIELD=VALUE holds for: a field of the config, or state, kind or name; VALUE may have * and ?.

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
    """The fields whose values differ between the runs, for each run; with `defaults`, those that differ from them."""
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
    """A line for each run; the runs of a sweep are listed under its name.

    Args:
      defaults: of the config; they shorten the lines of runs that have little in common.
      now: seconds since 1970.
      width: of the terminal, at which the last column is cut; None = it is not.
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
    """One object for each run, with its whole config; what is not finite is text."""
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
