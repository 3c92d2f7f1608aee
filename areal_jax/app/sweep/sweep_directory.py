"""The directory of a sweep: sweep.json, a workdir for each arm, and how far each arm has come, as the files say.

Imports no jax.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from areal_jax import files
from areal_jax.app.sweep.arms import Arm
from areal_jax.config import CONFIG, flatten
from areal_jax.config.ranges import ConfigError
from areal_jax.errors import ExitCode, UserError
from areal_jax.report.report import FILE as REPORT
from areal_jax.telemetry.metrics import FILE as METRICS

SWEEP = 'sweep.json'
LOG = 'output.log'  # in the workdir of an arm: what its process printed
STARTED, ENDED = '--- started: ', '--- ended '  # lines in it
CHECKPOINTS, EXPORT = (
    'checkpoints',
    'export',
)  # as app/workdir/ and app/export/ have them, which import jax
_STEPS = 'run.steps'
_TAIL_BYTES = 65536
_ANOTHER = 'give another --workdir'


@dataclasses.dataclass(frozen=True)
class ArmState:
    """How far an arm has come."""

    updates: int
    is_finished: bool
    holds_updates: bool  # --resume goes on there
    has_trained: bool  # of a finished arm: whether it made an optimizer step
    reason: str  # why it has not finished, or what a finished one lacks; '' for nothing

    @property
    def word(self) -> str:
        """'finished', 'unfinished' or 'not started'."""
        if self.is_finished:
            return 'finished'
        return 'unfinished' if self.holds_updates or self.reason else 'not started'


def require_same_sweep(workdir: pathlib.Path, source: str, arms: Sequence[Arm]) -> None:
    """Raises ConfigError where the directory holds anything but this sweep, started or not; writes nothing.

    Workdirs of arms that were started one by one, without sweep.json, are of this sweep.
    """
    names = {arm.name for arm in arms}
    record = workdir / SWEEP
    if record.exists():
        saved = files.read_json(record, f'restore it, or {_ANOTHER}')
        for name in saved.get('arms', ()):
            if name not in names and (workdir / name).exists():
                raise ConfigError(
                    f'--workdir={workdir} holds the sweep of {saved.get("config")}, whose arm {name!r} is not one of '
                    f'{source}; {_ANOTHER}'
                )
    elif workdir.is_dir():
        for path in sorted(workdir.iterdir()):
            if path.name not in names and not path.name.startswith('.'):
                raise ConfigError(
                    f'--workdir={workdir} holds {path.name} and no {SWEEP}, so it is no sweep; {_ANOTHER}'
                )
    for arm in arms:
        _require_same_arm(arm)


def note_sweep(workdir: pathlib.Path, source: str, arms: Sequence[Arm]) -> None:
    """Writes sweep.json."""
    files.write_json(
        workdir / SWEEP, {'config': source, 'arms': {arm.name: dict(arm.overrides) for arm in arms}}, allow_nan=True
    )


def read_state(arm: Arm) -> ArmState:
    """How far the arm has come; a damaged file of it becomes the reason."""
    try:
        report = _read_report(arm)
        updates = _count_updates(arm)
    except UserError as error:
        return ArmState(0, False, True, False, str(error))
    if report is None:
        return ArmState(updates, False, _holds_updates(arm.workdir), False, read_end(arm.workdir / LOG))
    has_trained = bool(report.get('optimizer_steps', {}).get('applied'))
    reason = '' if has_trained else 'it made no optimizer step: the weights are those of the start'
    return ArmState(int(report['steps']), True, True, has_trained, reason)


def measure_arm(arm: Arm) -> float:
    """Returns the share of the updates of an arm that are done; 0 where a file of it is damaged."""
    try:
        return _count_updates(arm) / arm.config.run.steps
    except UserError:
        return 0.0


def read_end(log: pathlib.Path) -> str:
    """Why the process that wrote the log ended before the run had finished, in words; '' without a log."""
    if not log.exists():
        return ''
    with log.open('rb') as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
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
    """'with code 2', 'by signal 9': of a process's return code."""
    return f'by signal {-code}' if code < 0 else f'with code {code}'


def _require_same_arm(arm: Arm) -> None:
    """Raises ConfigError where the arm's workdir holds updates of another config; run.steps may be raised."""
    path = arm.workdir / CONFIG
    if not path.exists() or not (_holds_updates(arm.workdir) or (arm.workdir / REPORT).exists()):
        return
    saved, wanted = dict(flatten(files.read_json(path, f'restore it, or {_ANOTHER}'))), arm.values()
    for field in sorted({*saved, *wanted}):
        before, after = (repr(values[field]) if field in values else 'not set' for values in (saved, wanted))
        if before == after or (field == _STEPS and saved.get(field, 0) < wanted.get(field, 0)):
            continue
        raise ConfigError(
            f'arm {arm.name!r}: {arm.workdir} was begun with {field}={before}, and the sweep sets {after}; set it '
            f'back, or {_ANOTHER}'
        )


def _holds_updates(workdir: pathlib.Path) -> bool:
    written = workdir / METRICS
    return any((workdir / CHECKPOINTS).glob('step_*')) or (written.exists() and written.stat().st_size > 0)


def _read_report(arm: Arm) -> files.JsonObject | None:
    """report.json of an arm that has made all its updates and written its export; None for any other."""
    path = arm.workdir / REPORT
    report = files.read_json(path, 'remove it: the arm writes it again') if path.exists() else {}
    is_whole = report.get('steps') == arm.config.run.steps and report.get('finished', True)
    has_export = not arm.config.run.export or (arm.workdir / EXPORT).is_dir()
    return report if is_whole and has_export else None


def _count_updates(arm: Arm) -> int:
    path = arm.workdir / METRICS
    if not path.exists():
        return 0
    return len(re.findall(rb'\}\n', path.read_bytes()))
