"""What the files of a run must say after any number of deaths; every check returns its violations in words."""

from __future__ import annotations

import collections
import json
import pathlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.report.aggregates import ledger
from checks.processes import ROOT, python

CHECKPOINTS = 'checkpoints'
_SHOWN = 5  # violations of one rule that are written out


def check_finished(workdir: pathlib.Path, steps: int, groups_per_update: int, *, has_events: bool) -> list[str]:
    """Violations in the workdir of a run that has finished all updates.

    Args:
      has_events: whether the run keeps an event log; supervised training does not.
    """
    wrong = check_metrics(workdir / 'metrics.jsonl', steps)
    if has_events:
        wrong += check_events(workdir / 'events.jsonl', steps, groups_per_update)
    if newest_update(workdir) != steps:
        wrong.append(f'the newest checkpoint is of update {newest_update(workdir)}, the run finished {steps}')
    wrong += [f'{path.name} was left behind' for path in (workdir, workdir / CHECKPOINTS) for path in _partial(path)]
    try:
        json.loads((workdir / 'report.json').read_text())
    except (OSError, ValueError) as error:
        wrong.append(f'report.json: {error}')
    return wrong


def load(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The events of a run up to the first line that is torn."""
    return _read(workdir / 'events.jsonl')[0]


def check_metrics(path: pathlib.Path, steps: int) -> list[str]:
    """Every update has one line."""
    lines, wrong = _read(path)
    found = [line.get('step') for line in lines]
    if found != [*range(1, steps + 1)]:
        wrong.append(f'{path.name}: updates {_brief(found)}, expected 1 to {steps}, each once')
    return wrong


def check_events(path: pathlib.Path, steps: int, groups_per_update: int) -> list[str]:
    """A gapless log in which every update was trained once, and every draw at most once."""
    events, wrong = _read(path)
    if wrong:
        return wrong
    wrong += _gaps(path.name, events)
    consumed = [event for event in events if event['kind'] == 'consume']
    if [event['update'] for event in consumed] != [*range(1, steps + 1)]:
        updates = _brief([event['update'] for event in consumed])
        wrong.append(f'{path.name}: batches were taken for the updates {updates}, expected 1 to {steps}, each once')
    draws = collections.Counter(draw for event in consumed for draw in event['draws'])
    if twice := sorted(draw for draw, times in draws.items() if times > 1):
        wrong.append(f'{path.name}: draws trained more than once: {_brief(twice)}')
    if len(draws) != steps * groups_per_update:
        wrong.append(f'{path.name}: {len(draws)} groups were trained, expected {steps * groups_per_update}')
    published = [event['version'] for event in events if event['kind'] == 'publish' and event['version'] > 0]
    if published != [*range(1, steps + 1)]:
        wrong.append(f'{path.name}: published versions {_brief(published)}, expected 1 to {steps}, each once')
    found = ledger(events)
    wrong += [f'{path.name}: {violation}' for violation in found.violations[:_SHOWN]]
    if found.count('trained') != steps * groups_per_update:
        wrong.append(
            f'{path.name}: {found.count("trained")} draws end as trained, expected {steps * groups_per_update}'
        )
    return wrong


def check_with_commands(workdir: pathlib.Path, *, replay: bool = False) -> list[str]:
    """What main_check_log, and on request main_replay, says of the run."""
    wrong = []
    programs = {'main_check_log': str(workdir)} | ({'main_replay': f'--workdir={workdir}'} if replay else {})
    for name, argument in programs.items():
        command = python('-m', f'areal_jax.{name}', argument)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            wrong.append(f'{name}: {done.returncode}: {(done.stdout + done.stderr).strip()[-500:]}')
    return wrong


def newest_update(workdir: pathlib.Path) -> int | None:
    """The update of the newest complete checkpoint; None without one."""
    return max((update for update, _ in checkpoints(workdir)), default=None)


def checkpoints(workdir: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """(update, directory) of the complete checkpoints, oldest first."""
    found = []
    for path in (workdir / CHECKPOINTS).glob('step_*'):
        if match := re.fullmatch(r'step_(\d{8,})(?:_(\d+))?', path.name):
            found.append((int(match[1]), int(match[2] or 0), path))
    return [(update, path) for update, _, path in sorted(found)]


def check_resumed(stdout: str, newest: int | None) -> list[str]:
    """A run goes on at the newest checkpoint that it found, or at update 0 without one.

    Args:
      stdout: of a run with --resume that came at least to the end of the compilation.
      newest: update of the newest undamaged checkpoint before it began.
    """
    said = re.search(r'^resumed after update (\d+)', stdout, re.MULTILINE)
    if said and newest is None:
        return [f'it went on after update {said[1]}, and there was no checkpoint']
    if newest is not None and not (said and int(said[1]) == newest):
        return [f'it went on after update {said[1] if said else "0"}: updates lost, the checkpoint was of {newest}']
    return []


def check_kept_logs(workdir: pathlib.Path, before: Sequence[str]) -> list[str]:
    """A run that starts again at update 0 keeps its logs as events.1.jsonl, metrics.1.jsonl, ...

    Args:
      before: names of the logs that were not empty before the start.
    """
    wrong = []
    for name in before:
        stem = name.removesuffix('.jsonl')
        if not any(path.stat().st_size for path in workdir.glob(f'{stem}.*.jsonl')):
            wrong.append(f'{name} was overwritten: no {stem}.1.jsonl')
    return wrong


def logs_with_updates(workdir: pathlib.Path) -> list[str]:
    """The logs of an attempt that has trained something; others may be replaced."""
    metrics, events = workdir / 'metrics.jsonl', workdir / 'events.jsonl'
    if not (metrics.is_file() and metrics.stat().st_size):
        return []
    return [path.name for path in (metrics, events) if path.is_file() and path.stat().st_size]


def weights_digest(workdir: pathlib.Path) -> str | None:
    """Digest of the final weights of a finished run, as facts.json or report.json say."""
    for name in ('facts.json', 'report.json'):
        if (workdir / name).exists():
            found = json.loads((workdir / name).read_text()).get('weights_sha256')
            if found:
                return str(found)
    return None


def _gaps(name: str, events: Sequence[Mapping[str, Any]]) -> list[str]:
    wrong = [
        f'{name}: line {line + 1} has seq {event.get("seq")}, expected {line}'
        for line, event in enumerate(events)
        if event.get('seq') != line
    ]
    return wrong[:1]  # the first shifts all that follow


def _read(path: pathlib.Path) -> tuple[list[dict[str, Any]], list[str]]:
    if not path.exists():
        return [], [f'{path.name} is missing']
    records = []
    for number, line in enumerate(path.read_text(errors='replace').splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            return records, [f'{path.name}: line {number} is not JSON: {line[:60]!r}']
    return records, []


def _partial(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(directory.glob('.*.partial'))


def _brief(values: Sequence[Any]) -> str:
    shown = ', '.join(map(str, values[:_SHOWN]))
    return f'{shown}, ... ({len(values)} in all)' if len(values) > _SHOWN else shown or 'none'
