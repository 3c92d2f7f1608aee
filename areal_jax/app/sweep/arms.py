"""The arms of a sweep and its directory: sweep.json, a workdir per arm, each arm's progress. Imports no jax."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import os
import pathlib
import queue
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar, cast

from absl import flags
from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.command_line import CommandLine, CommandLineError, call_in_file, parse_train_command
from areal_jax.app.process.ending import Interrupts
from areal_jax.app.workdir.run_list import CHECKPOINTS, ENDED, LOG, STARTED, SWEEP, describe_code, read_end
from areal_jax.config import CONFIG, TrackedConfig, flatten
from areal_jax.config.cluster import parse_learner
from areal_jax.config.declarations import FIELDS, FREE, find_free
from areal_jax.config.fields import ConfigError, Value
from areal_jax.config.kinds import find_server
from areal_jax.config.near_names import unknown_field
from areal_jax.config.objectives import find_objective
from areal_jax.errors import UserError, suggest
from areal_jax.installation import name_launcher
from areal_jax.report.report import FILE as REPORT
from areal_jax.telemetry.metrics import FILE as METRICS
from areal_jax.telemetry.progress import Bar, format_duration

TRAINER = 'areal_jax.main_train'
SEED = 'run.seed'
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._=+-]*')
# files next to the workdirs of the arms
_RESERVED = ('plots', 'sweep.json', 'results.csv', 'results.md', 'results.html', 'differences.csv')
_SEED_IN_NAME = re.compile(r'[-_.]?seed[-_=]?\d+')
_PURPOSE = "which returns {name of an arm: {'section.field': value}}"
Overrides: TypeAlias = Mapping[str, Value]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One run of a sweep."""

    name: str  # also the name of its workdir, a directory in the sweep's workdir
    workdir: pathlib.Path
    overrides: Overrides  # 'section.field' -> value
    arguments: tuple[str, ...]  # of main_train
    config: config_dict.ConfigDict  # overrides applied, valid

    @property
    def seed(self) -> int:
        return self.config.run.seed

    def values(self) -> dict[str, Value]:
        """Returns the resolved config by 'section.field', in the form of the run's config.json."""
        return dict(flatten(TrackedConfig(self.config).as_dict()))

    def command(self, resume: bool) -> list[str]:
        """Returns the command that runs the arm."""
        return [sys.executable, '-m', TRAINER, *self.arguments, *(['--resume'] if resume else [])]


@dataclasses.dataclass(frozen=True)
class Group:
    """Arms that differ only in seed, at most one per seed."""

    name: str
    arms: tuple[Arm, ...]

    @property
    def by_seed(self) -> dict[int, Arm]:
        return {arm.seed: arm for arm in self.arms}


def read_arms(command: CommandLine, workdir: pathlib.Path) -> list[Arm]:
    """Returns all arms, in the order of get_sweep(); a field that the command line sets is set in every arm.

    Raises UserError, which names arm, field, value and fix, for the first arm that could not run.
    """
    source = command.source
    found = call_in_file(source, 'get_sweep', _PURPOSE)
    if not isinstance(found, Mapping) or not found:
        said = 'no arm' if isinstance(found, Mapping) else f'a {type(found).__name__}'
        raise CommandLineError(f'--config={source}: get_sweep() returns {said}; it must return a dict {_PURPOSE[14:]}')
    return make_arms(command, found, workdir)


def make_arms(command: CommandLine, found: Mapping[str, object], workdir: pathlib.Path) -> list[Arm]:
    """Makes arms from {name: overrides}, in order, each with a workdir below `workdir`; raises like `read_arms`."""
    source = command.source
    base = dict(flatten(command.config.copy_and_resolve_references()))
    common = {path: base[path] for path in command.overrides}
    arms = []
    for name, overrides in found.items():
        _require_name(source, name)
        try:
            if not isinstance(overrides, Mapping):
                raise ConfigError(f"{overrides!r} is no dict; write {{'section.field': value}}")
            arms.append(_build_arm(source, name, workdir / name, overrides, common, base))
        except UserError as error:
            raise ConfigError(f'arm {name!r}: {error}') from error
    return arms


def select_arms(arms: Sequence[Arm], only: str) -> list[Arm]:
    """Returns the arms that --only names, 'eta4_*,eta0_seed1'; all for ''.

    Raises CommandLineError for a name without an arm.
    """
    if not only:
        return list(arms)
    patterns = only.split(',')
    names = [arm.name for arm in arms]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = suggest(pattern, names) or f'; the arms are {", ".join(names[:8])}{", ..." * (len(names) > 8)}'
            raise CommandLineError(f'--only={only}: no arm has the name {pattern!r}{near}')
    return [arm for arm in arms if any(fnmatch.fnmatchcase(arm.name, pattern) for pattern in patterns)]


def group_arms(arms: Sequence[Arm]) -> list[Group]:
    """Groups arms by config without the seed, in the order of the first arm of each group.

    An arm whose config and seed equal another arm's is put in a second group, so that the two are compared. A group is
    named after its arms without 'seed1' and the like if the rest is equal for all of them, else after its first arm.
    """
    found: dict[tuple[str, int], list[Arm]] = {}
    for arm in arms:
        values = arm.values()
        values.pop(SEED)
        key, copy = repr(sorted(values.items())), 0
        while any(other.seed == arm.seed for other in found.get((key, copy), [])):
            copy += 1
        found.setdefault((key, copy), []).append(arm)
    labels = [{_SEED_IN_NAME.sub('', arm.name).strip('-_.') for arm in members} for members in found.values()]
    shared = [next(iter(label)) if len(label) == 1 else '' for label in labels]
    return [
        Group(label if label and shared.count(label) == 1 else members[0].name, tuple(members))
        for label, members in zip(shared, found.values(), strict=True)
    ]


def render_command(arm: Arm, resume: bool) -> str:
    """Returns the command as one line for a shell."""
    return shlex.join(arm.command(resume))


def _require_name(source: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
        raise CommandLineError(
            f'--config={source}: the arm {name!r} cannot name a directory of the sweep: use letters, digits and _.=+-, '
            f'a letter or digit first, and not {", ".join(_RESERVED)}'
        )


def _build_arm(
    source: str,
    name: str,
    workdir: pathlib.Path,
    overrides: Mapping[object, object],
    common: Overrides,
    base: Overrides,
) -> Arm:
    """Parses and checks the arm's own command, so that a config that is valid here is valid there."""
    words = []
    for path, value in overrides.items():
        _require_field(path, value)
    own = cast(Overrides, dict(overrides))
    for path in own.keys() & common.keys():
        raise CommandLineError(
            f'--config.{path}={common[path]} is set for all arms and by this one: remove one of them'
        )
    wanted = {**common, **own}
    for path, value in wanted.items():
        if value is None and base.get(path, '') is None:
            continue  # unchanged from the file; a flag cannot express it
        words.append(f'--config.{path}={value if isinstance(value, str) else repr(value)}')
    arguments = (f'--config={source}', f'--workdir={workdir}', *words)
    values = flags.FlagValues()
    flags.DEFINE_string('workdir', None, '', flag_values=values)
    config = parse_train_command([TRAINER, *arguments], values).config
    _require_as_given(config, wanted)
    if mirror := config.run.mirror:  # each arm is a run, which needs its own
        config.run.mirror = f'{mirror}/{name}'
        arguments += (f'--config.run.mirror={mirror}/{name}',)
    _require_one_process(config)
    return Arm(name, workdir, own, arguments, config)


def _require_field(path: object, value: object) -> None:
    """Raises ConfigError for a name that is no field of the config, or a value of another type."""
    if not isinstance(path, str):
        raise ConfigError(f"{path!r} is no field; write 'section.field': value")
    if path in FIELDS and path not in FREE:
        FIELDS[path].require_type(path, value)
    elif free := find_free(path):
        nested = value
        for name in reversed(path.removeprefix(f'{free}.').split('.')):
            nested = {name: nested}
        FIELDS[free].require_type(free, nested)
    else:
        raise unknown_field(path)


def _require_as_given(config: config_dict.ConfigDict, wanted: Overrides) -> None:
    """Raises ConfigError if the command line changes a value."""
    got = dict(flatten(config.copy_and_resolve_references()))
    for path, value in wanted.items():
        if path not in got or got[path] != value:
            raise ConfigError(
                f'{path}={value!r} cannot be said on a command line, which makes {got.get(path)!r} of it: set it in '
                'get_config()'
            )


def _require_one_process(config: config_dict.ConfigDict) -> None:
    if not find_server(config.rollout.server).in_process and find_objective(config.loss.objective).generates:
        raise ConfigError(
            f"rollout.server={config.rollout.server!r}: a sweep starts no servers; use rollout.server='in_process', or "
            f'start the arms one by one with python -m {name_launcher("local")}'
        )
    if (layout := parse_learner(config.cluster.learner)).processes > 1:
        raise ConfigError(
            f'cluster.learner={config.cluster.learner!r} has {layout.processes} processes, and an arm of a sweep is '
            'one: leave out hosts'
        )


# The directory of a sweep: sweep.json, a workdir for each arm, and the progress of each arm, read from its files.


_STEPS = 'run.steps'
_EXPORT = 'export'  # finished_export.DIRECTORY
_ANOTHER = 'give another --workdir'


@dataclasses.dataclass(frozen=True)
class ArmState:
    """The progress of an arm."""

    updates: int
    is_finished: bool
    holds_updates: bool  # --resume continues there
    has_trained: bool  # of a finished arm: whether it made an optimizer step
    reason: str  # why it has not finished, or a defect of a finished arm; '' for nothing

    @property
    def word(self) -> str:
        """'finished', 'unfinished' or 'not started'."""
        if self.is_finished:
            return 'finished'
        return 'unfinished' if self.holds_updates or self.reason else 'not started'


def require_same_sweep(workdir: pathlib.Path, source: str, arms: Sequence[Arm]) -> None:
    """Raises ConfigError if the directory holds anything but this sweep, started or not; writes nothing.

    Workdirs of arms that were started one by one, without sweep.json, belong to this sweep.
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
    """Returns the progress of the arm; a damaged file of it becomes the reason."""
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
    """Returns the share of an arm's updates that are done; 0 if one of its files is damaged."""
    try:
        return _count_updates(arm) / arm.config.run.steps
    except UserError:
        return 0.0


def _require_same_arm(arm: Arm) -> None:
    """Raises ConfigError if the arm's workdir holds updates of another config; run.steps may be raised."""
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
    """Returns report.json of an arm that has made all its updates and written its export; None for any other."""
    path = arm.workdir / REPORT
    report = files.read_json(path, 'remove it: the arm writes it again') if path.exists() else {}
    is_whole = report.get('steps') == arm.config.run.steps and report.get('finished', True)
    has_export = not arm.config.run.export or (arm.workdir / _EXPORT).is_dir()
    return report if is_whole and has_export else None


def _count_updates(arm: Arm) -> int:
    path = arm.workdir / METRICS
    if not path.exists():
        return 0
    return len(re.findall(rb'\}\n', path.read_bytes()))


COMPILED = 'compiled'  # directory of the sweep in which arms share compiled programs
_LOOK_S = 0.1  # between two polls of the processes
_SHOW_S = 2.0  # between two updates of the bar, which read files of the arms
_MOST_STARTS = 3  # of an arm that a signal ends, in all
_KILL_S = 10.0


class Job(Protocol):
    """The work of a process: an arm, or several."""

    @property
    def name(self) -> str: ...

    @property
    def workdir(self) -> pathlib.Path: ...

    def command(self, resume: bool) -> list[str]: ...


AnyJob = TypeVar('AnyJob', bound=Job)


@dataclasses.dataclass
class RunningArm(Generic[AnyJob]):
    """The process of an arm; its output is appended to output.log in the arm's workdir."""

    arm: AnyJob
    process: subprocess.Popen[bytes]
    began_s: float

    @classmethod
    def start(cls, arm: AnyJob, resume: bool, compiled: pathlib.Path) -> RunningArm[AnyJob]:
        """Starts the arm; with `resume` it continues from its newest checkpoint.

        `compiled` is jax's cache of compiled programs, unless the environment names another.
        """
        arm.workdir.mkdir(parents=True, exist_ok=True)
        with (arm.workdir / LOG).open('ab') as log:
            log.write(f'{STARTED}{shlex.join(arm.command(resume))}\n'.encode())
            log.flush()
            process = subprocess.Popen(
                [sys.executable, '-m', 'areal_jax.app.sweep.arm_process', str(os.getpid()), *arm.command(resume)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={'JAX_COMPILATION_CACHE_DIR': str(compiled)} | os.environ,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the sweep
            )
        return cls(arm, process, time.monotonic())

    def note_end(self, code: int) -> None:
        """Writes to the log how the process ended."""
        writer = files.LineWriter(self.arm.workdir / LOG)
        writer.write(f'{ENDED}{describe_code(code)}')
        writer.close()


class Runner(Generic[AnyJob]):
    """Runs arms; an arm that fails does not keep the others from running.

    An arm that a signal ended, for lack of memory for example, is restarted, up to _MOST_STARTS starts in all.

    Args:
      jobs: the number of arms that run at a time.
      workdir: of the sweep.
      read_state: returns the progress of an arm, from its files.
      measure: returns the share of an arm that is done, for the bar of a terminal.
    """

    def __init__(
        self,
        arms: Sequence[AnyJob],
        jobs: int,
        workdir: pathlib.Path,
        read_state: Callable[[AnyJob], ArmState],
        measure: Callable[[AnyJob], float] = lambda arm: 0.0,
    ):
        self._waiting = collections.deque(arms)
        self._starts = collections.Counter[str]()
        self._count, self._jobs, self._compiled = len(arms), jobs, workdir / COMPILED
        self._running: list[RunningArm[AnyJob]] = []
        self._read_state, self._measure = read_state, measure
        self._bar, self._shown_s = Bar(), 0.0
        self._stops: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
        self.is_stopping = False

    def run(self, interrupts: Interrupts) -> None:
        """Returns when every arm has ended; a stop signal is passed on to the arms, and no further arm is started."""
        with interrupts.deferred(self._stops.put, 'the arms finish the update under way, then save'):
            try:
                self._bar.begin(f'running {self._count} arms')
                while self._waiting or self._running:
                    while self._waiting and len(self._running) < self._jobs:
                        self._start(self._waiting.popleft())
                    self._heed_stop()
                    self._look()
                    self._show()
            finally:
                self._bar.end()
                self._kill()

    def _start(self, arm: AnyJob) -> None:
        resume = self._read_state(arm).holds_updates
        self._starts[arm.name] += 1
        self._running.append(RunningArm.start(arm, resume, self._compiled))
        _say(f'[{len(self._starts)}/{self._count}] {arm.name} {"goes on" if resume else "starts"}')

    def _heed_stop(self) -> None:
        try:
            number = self._stops.get(timeout=_LOOK_S)
        except queue.Empty:
            return
        self.is_stopping = True
        self._waiting.clear()
        for running in self._running:
            running.process.send_signal(number)

    def _look(self) -> None:
        for running in list(self._running):
            code = running.process.poll()
            if code is None:
                continue
            self._running.remove(running)
            running.note_end(code)
            arm, took = running.arm, format_duration(time.monotonic() - running.began_s)
            state = self._read_state(arm)
            if state.is_finished:
                _say(f'{arm.name} finished in {took}{f", but {state.reason}" if state.reason else ""}')
                continue
            _say(f'{arm.name} ended after {took}, {state.reason}; see {arm.workdir / LOG}')
            if code < 0 and not self.is_stopping and self._starts[arm.name] < _MOST_STARTS:
                self._waiting.append(arm)

    def _show(self) -> None:
        """Counts the ended arms, and the shares of the running ones, on the bar."""
        if self._bar.is_possible and time.monotonic() - self._shown_s > _SHOW_S:
            self._shown_s = time.monotonic()
            ended = self._count - len(self._waiting) - len(self._running)
            self._bar.count(ended + sum(self._measure(one.arm) for one in self._running), self._count, 'arms')

    def _kill(self) -> None:
        """Ends the processes that still run if this process fails."""
        for running in self._running:
            running.process.kill()
        for running in self._running:
            running.process.wait(_KILL_S)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed terminal ends no arm
        print(sentence, flush=True)
