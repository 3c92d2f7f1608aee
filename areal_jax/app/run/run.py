"""Builds, runs, reports, exports and frees one run. Nothing here imports jax.

A kind of run is a table entry whose function builds two parts: the site of the learner, and the program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import platform
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, NamedTuple, NotRequired, Protocol, Self, TypeAlias, TypedDict, TypeVar

import numpy as np
from ml_collections import config_dict

from areal_jax.app.parts import part_settings as build
from areal_jax.app.parts.host import LearnerAround, UsedDevices, build_feed, build_tracker, headline
from areal_jax.app.parts.task_builder import require_known_tasks
from areal_jax.app.process.ending import StopRequests
from areal_jax.app.process.setup import require_extras
from areal_jax.app.run.observer import Compilations
from areal_jax.app.workdir.environment import Hardware, git_commit, package_versions
from areal_jax.app.workdir.mirrored_run import RunMirror, fetch_workdir
from areal_jax.app.workdir.records import Digests, load_own_code, note_own_code
from areal_jax.app.workdir.run_directory import (
    CHECKPOINTS,
    Report,
    continue_run,
    describe_unmirrored,
    describe_unsaved,
    prepare_workdir,
    read_prolongations,
    read_report,
    settle_config,
    start_again,
)
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore, Follower
from areal_jax.config import TrackedConfig, flatten, validate
from areal_jax.config.cluster import DeviceSplit
from areal_jax.config.xla_flags import FIELD as XLA_FLAGS
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.lock_step import CopyVersion, VersionRing
from areal_jax.control.reallocation import DeviceSite
from areal_jax.control.supervisor import Supervisor
from areal_jax.files import DirectoryLock
from areal_jax.hub import find_revisions
from areal_jax.plugins import load_function
from areal_jax.protocols import Channel, Learner, Pool
from areal_jax.report.pages.html_page import FILE as WEB_PAGE
from areal_jax.report.report import PAGE
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.telemetry.devices import DeviceRates, ResourceSampler
from areal_jax.telemetry.facts import discard_facts
from areal_jax.telemetry.hook import FIELD as HOOK
from areal_jax.telemetry.hook import MetricsHook
from areal_jax.telemetry.metrics import FILE, Line, MetricsWriter, read_metrics
from areal_jax.telemetry.names import STEP
from areal_jax.telemetry.progress import StartProgress
from areal_jax.telemetry.rollout_writer import RolloutWriter, Split
from areal_jax.telemetry.trackers import TrackerFeed
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.types import PublishedWeights, TokenArrays, TrajectoryGroup, Tree

State = Mapping[str, Any]  # the run state of a checkpoint, JSON-able


class Closable(Protocol):
    """A part of a run that holds a file, a thread, a process or a connection."""

    def close(self) -> None: ...


Part = TypeVar('Part', bound=Closable)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The state from which a resumed run continues."""

    step: int
    arrays: Tree  # by name: trees of the learner, and other trees that this kind of run has saved
    state: State

    @property
    def of_learner(self) -> Tree:
        """The arrays that Learner.restore takes."""
        return {name: self.arrays[name] for name in ('params', 'optimizer')}


class CommonFacts(TypedDict):
    """The fields that RunFacts and SftFacts share; see there."""

    config: str
    seed: int
    planned_steps: int
    wall_seconds: float
    peak_memory_bytes: int
    git_commit: str | None
    revisions: Mapping[str, str]
    versions: Mapping[str, str]
    hardware: Mapping[str, object]
    prolonged: tuple[Mapping[str, int], ...]
    idle_fields: tuple[str, ...]
    own_code: Digests
    hook: Mapping[str, object]
    tracker: Mapping[str, object]
    rollouts: Mapping[str, object]


class RunContext:
    """The workdir of one run, and its open resources.

    Each part of a run that holds a file, a thread, a process or a connection is put onto `parts` when it is acquired.
    `close` frees them in reverse order, all of them even if one fails.

    Args:
      config: validated, as an experiment file gives it, overrides applied.
      workdir: the directory for everything that the run writes.
      own_code: the user's own functions that the config names.
      resume: continue from the newest checkpoint in the workdir, or start at update 0 if there is no checkpoint.
      source: where the config came from, for the report.
      overrides: the fields that the command line sets; one that the run does not use is refused.
      interrupts: asks the run to stop; None = it is never asked.
    """

    def __init__(
        self,
        config: config_dict.ConfigDict,
        workdir: pathlib.Path,
        own_code: Digests,
        *,
        resume: bool = False,
        source: str = '',
        overrides: Collection[str] = (),
        interrupts: StopRequests | None = None,
    ):
        self.workdir = workdir
        if resume:
            fetch_workdir(config, workdir)
        self.config = TrackedConfig(settle_config(config, workdir, overrides, resume=resume), overrides)
        self.config.note_used([XLA_FLAGS])  # by the command, before jax
        self.resume, self.interrupts = resume, interrupts
        self._source, self._own_code, self._started = source, own_code, time.monotonic()
        # a failure at the end, raised after everything else: of the last checkpoint, export, token ledger, mirror
        self.unsaved: Exception | None = None
        self.finished: Report | None = None  # the report of a resumed run that has nothing left to do
        self._idle_fields: list[str] = []
        self.hook: MetricsHook | None = None
        hook = self.config.telemetry.hook
        self._hook_function = load_function(hook, HOOK) if hook else None
        self.feed: TrackerFeed | None = None
        self.rollouts: RolloutWriter | None = None
        self._tracker = build_tracker(self.config)
        run = self.config.run
        self._mirror = RunMirror(run.mirror, workdir, self.config.checkpoint.keep) if run.mirror else None
        self._mirror_wait_s = run.mirror_wait_s if run.mirror else 0.0
        self.parts = contextlib.ExitStack()

    def open(self) -> None:
        """Locks and prepares the workdir, and starts to measure the resources that the run uses."""
        lock = DirectoryLock(self.workdir)
        self.parts.callback(lock.release)
        in_use = self._mirror.in_use if self._mirror else tuple
        self._store = CheckpointStore(self.workdir / CHECKPOINTS, self.config.checkpoint.keep, in_use)
        if self._mirror:
            self._mirror.require_own(self._store.latest(), resume=self.resume)
            self.own(self._mirror)
        prepare_workdir(self.workdir, self.config.as_dict(), resume=self.resume)
        note_own_code(self.workdir, self._own_code, resume=self.resume)
        self._store.remove_unfinished()
        self.resources = self.parts.enter_context(ResourceSampler())
        check = self.interrupts.check if self.interrupts else lambda: None
        self.start = StartProgress(self.config.telemetry.progress, check=check)
        self.parts.callback(self.start.end)

    def close(self) -> None:
        """Frees processes, threads and files. A second call does nothing."""
        self.parts.close()

    def own(self, part: Part) -> Part:
        """Puts a part onto the stack, and returns it."""
        self.parts.callback(part.close)
        return part

    def open_metrics(self, step: int, before: Line) -> MetricsWriter:
        """Opens metrics.jsonl and removes the updates after `step`, which will be made again.

        Args:
          before: the evaluation before training as a row of metrics; empty without one.
        """
        metrics = self.own(MetricsWriter(self.workdir, self.config.telemetry.tensorboard))
        metrics.truncate(step)
        if self._hook_function:
            self.hook = self.own(MetricsHook(self._hook_function, self.config.telemetry.hook, self.workdir))
            metrics.listeners.append(self.hook.put)
            self.hook.start(read_metrics(self.workdir / FILE))
        if self._tracker:
            self.feed = self.own(build_feed(self._tracker, self.config, self.workdir))
        if self.feed and self.finished is None:
            metrics.listeners.append(self.feed.put)
            rows = read_metrics(self.workdir / FILE)
            self.feed.start([{STEP: 0, **before}, *rows] if before else rows)
        return metrics

    def open_rollouts(self, step: int, split: Split) -> RolloutWriter | None:
        """Opens WORKDIR/rollouts, without the updates after `step`; None if telemetry.rollouts is '0'."""
        kept = self.config.telemetry.rollouts
        if kept.isdigit() and int(kept) == 0:
            return None
        self.rollouts = self.own(RolloutWriter(self.workdir, split, kept))
        self.rollouts.start(step)
        return self.rollouts

    def require_all_read(self) -> None:
        """Raises if a field was not read; to be called after all fields that the run uses have been read."""
        self.config.require_all_read()
        self._idle_fields = self.config.idle_fields()

    def deferred_signals(
        self, request: Callable[[signal.Signals], None], abandon: Callable[[], None] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, the first request to stop calls `request`; see StopRequests."""
        if self.interrupts is None:
            return contextlib.nullcontext()
        return self.interrupts.deferred(request, 'finishing the update under way, then saving', abandon)

    def ends_process(self) -> bool:
        """Whether the process ends with the run, as it does for a command."""
        return self.interrupts is not None and self.interrupts.ends_process

    def read_checkpoint(self) -> Checkpoint | None:
        """Reads the newest checkpoint of a resumed run; None if the run starts at update 0."""
        if not self.resume:
            return None
        if self._store.latest() is None:
            start_again(self.workdir, self.config.as_dict())
            return None
        return Checkpoint(*self._store.restore_latest())

    def go_on(self, step: int) -> None:
        """Prepares the workdir for a run that continues after update `step`."""
        continue_run(self.workdir, self.config.as_dict(), step)
        print(f'resumed after update {step} from {self.workdir / CHECKPOINTS}', flush=True)
        if step == self.config.run.steps:
            self.finished = read_report(self.workdir, step)

    def save(self, step: int, arrays: Tree, state: State, followers: Sequence[Follower]) -> None:
        """Writes a checkpoint and empties `arrays`. A failure after the last update is kept for the end: the report
        comes first.
        """
        try:
            self._store.save(step, arrays, state, followers, consume=True)
        except CheckpointError as error:
            if step < self.config.run.steps:
                raise
            self.unsaved = describe_unsaved(error, self.workdir)
            return
        if self._mirror:
            self._mirror.put(self._store.path(step))

    def start_mirror(self) -> None:
        """Begins to copy checkpoints; to be called when the records of a resumed run are cut to its checkpoint."""
        if self._mirror:
            saves = self._store.saves()
            self._mirror.start(saves[-1][1] if saves else None)

    def finish_mirror(self, *, finished: bool) -> None:
        """Waits at most run.mirror_wait_s for the last copies; one that a finished run lacks is an error at the end."""
        if self._mirror is None:
            return
        step = self.config.run.steps if finished else None
        if (missing := self._mirror.finish(self._mirror_wait_s, step)) and finished:
            self.unsaved = self.unsaved or describe_unmirrored(missing, self.workdir)

    def describe(self, hardware: Hardware) -> CommonFacts:
        """Returns the facts that every kind of run has; `hardware` describes the run's devices."""
        return {
            'config': self._source,
            'seed': self.config.run.seed,
            'planned_steps': self.config.run.steps,
            'wall_seconds': time.monotonic() - self._started,
            'peak_memory_bytes': self.resources.peak_bytes,
            'git_commit': git_commit(),
            'revisions': find_revisions(dict(flatten(self.config.as_dict()))),
            'versions': package_versions(),
            'hardware': {**hardware, 'platform': platform.platform()},
            'prolonged': tuple(read_prolongations(self.workdir)),
            'idle_fields': tuple(self._idle_fields),
            'own_code': self._own_code,
            'hook': self.hook.facts() if self.hook else {},
            'tracker': self.feed.facts() if self.feed else {},
            'rollouts': self.rollouts.facts() if self.rollouts else {},
        }


# The learner of a run that keeps answers: passes some groups of every update to the writer. No jax here.


ReadTokens = Callable[[Sequence[int]], Sequence[Sequence[TokenArrays]]]  # RunLearner.read_tokens


def keep_rollouts(learner: Learner, read_tokens: ReadTokens, rollouts: RolloutWriter | None) -> Learner:
    """Wraps the learner; returns the learner itself if no answers are kept."""
    return learner if rollouts is None else _KeepingLearner(learner, read_tokens, rollouts)


class _KeepingLearner(LearnerAround):
    """Passes updates through unchanged, bit for bit, and writes the answers that `rollouts` selects."""

    def __init__(self, learner: Learner, read_tokens: ReadTokens, rollouts: RolloutWriter):
        super().__init__(learner)
        self._read_tokens, self._rollouts = read_tokens, rollouts

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, float]:
        metrics = super().update(groups, version)
        kept = self._rollouts.select(groups)
        self._rollouts.put(version + 1, kept, self._read_tokens([group.draw for group in kept]))
        return metrics


# The site of a run's learner, in three steps. Each needs the one before it, so that no call can come too early:
# a Site has the learner with its weights, a LoopSite the channel to the engines, a Rollout engines with weights.
#
# own_site.py: in this process. controller_role.py: in other processes. simulated_site.py: no learner at all.


class ModelText(Protocol):
    """The properties of a model that a run needs outside its learner."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def source(self) -> pathlib.Path | None:
        """The file or directory of the weights; None = drawn."""
        ...


@dataclasses.dataclass(frozen=True)
class RemoteModel:
    """The model in a process without a learner; implements ModelText."""

    tokenizer: Tokenizer
    source: pathlib.Path | None
    vocab_size: int


class NoCompilations:
    """Counts the compilations of a process that compiles nothing."""

    count = 0

    def reset(self) -> None: ...


class RunLearner(Learner, Protocol):
    """The learner of a whole run, on one or several processes."""

    @property
    def followers(self) -> Sequence[Follower]:
        """Processes that each write their own shards of a checkpoint."""
        ...

    def warm_up(self) -> int:
        """Compiles every program; returns their number."""
        ...

    def update_tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Returns the number of tokens that an update of these groups reads."""
        ...

    def read_tokens(self, draws: Sequence[int]) -> Sequence[Sequence[TokenArrays]]:
        """Returns the token values of these draws in the last update, before `publish`; see SpmdLearner."""
        ...

    def score(self, version: int, prompt_tokens: np.ndarray, answer_tokens: np.ndarray) -> np.ndarray | None:
        """Returns float32 [A]: log-probs of an answer under that version; None if the learner no longer has it."""
        ...


LearnerT = TypeVar('LearnerT', bound=RunLearner, covariant=True)


class EngineFacts(TypedDict):
    """The fields of RunFacts about the devices of engines and learner."""

    memory_parts: Mapping[str, int]
    lanes_own_devices: bool
    devices: Mapping[str, Any]
    simulation: NotRequired[str]


class Moves(NamedTuple):
    """Devices that move between the learner and the engines of this process."""

    site: DeviceSite
    split: DeviceSplit  # at the start of the run
    rates_of: Callable[[DeviceSplit], DeviceRates]


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A pool that generates, and its engines if they are in this process."""

    pool: Pool
    engines: Sequence[LocalEngine] = ()
    compile: Callable[[], int] = lambda: 0  # the programs of these engines; returns their number
    cache_bytes: int | None = None  # the KV cache of one of them
    moves: Moves | None = None  # None: devices stay where they are


BuildRollout: TypeAlias = Callable[[PublishedWeights, LoopClock, EventLog, Supervisor], Rollout]


@dataclasses.dataclass(frozen=True)
class LocalEngines:
    """Engines that decode in the process of the learner, once there is a version for them."""

    build: BuildRollout
    copy_version: CopyVersion
    restore_ring: Callable[[VersionRing, Mapping[str, Tree]], None]  # adds the weights of a checkpoint, by version


@dataclasses.dataclass(frozen=True)
class LoopSite:
    """The parts that the asynchronous loop needs in addition to the built learner."""

    channel: Channel
    rates: DeviceRates  # at the start of the run
    compile: Callable[[Callable[[], int]], int]  # the programs needed first, with Rollout.compile; returns the number
    describe_engines: Callable[[DeviceSplit | None], EngineFacts]  # of the split in use, if devices move
    local: LocalEngines | None = None  # None: engines decode in other processes
    finish_compiling: Callable[[LoopClock], Awaitable[None]] | None = None  # compiles the other programs
    find_devices: Callable[[], UsedDevices | None] = lambda: None  # None: some are in other processes
    # the weights after the last update, in the engines' form, and their digest for the report
    find_final_weights: Callable[[], tuple[Tree, str]] = lambda: (None, '')
    close_learner: Callable[[], None] = lambda: None  # after the report of a finished run
    awaited_engines: int = 0  # engines in other processes that must serve before the run starts: for training,
    awaited_beside: int = 0  # and for evaluation


@dataclasses.dataclass(frozen=True)
class Site(Generic[LearnerT]):
    """The learner of a run, with the checkpoint's or else the model's weights, and functions for its place."""

    model: ModelText
    learner: LearnerT
    compilations: Compilations
    open_loop: Callable[[], LoopSite]  # called once, by a run of the asynchronous loop
    devices: Sequence[str] | None = None  # names of the learner's devices; None: jax knows them in this process
    xla_flags: str = ''  # of the learner's processes, where `devices` are theirs
    trace: Callable[[Learner], Learner] = lambda learner: learner  # traces the updates of telemetry.profile_steps
    # writes WORKDIR/export of final weights and their digest; a failure is kept for the end, after the results
    export: Callable[[Tree, str], None] = lambda weights, digest: None
    # writes the export of a finished run if it is missing, after a kill or because the disk was full
    complete_export: Callable[[], None] = lambda: None


def restore_learner(
    context: RunContext,
    learner: Learner,
    checkpoint: Checkpoint | None,
    broken: type[Exception],
    other: type[Exception],
) -> None:
    """Restores the weights of a checkpoint into the learner of a resumed run.

    Raises CheckpointError if `restore` raises `broken` (bad numbers) or `other` (shapes that differ from the model's).
    """
    if checkpoint is None or context.finished is not None:
        return
    try:
        learner.restore(checkpoint.of_learner)
    except broken as error:
        raise CheckpointError(f'{context.workdir / CHECKPOINTS}: {error}') from error
    except other as error:
        raise CheckpointError(f'{context.workdir / CHECKPOINTS} is of another model: {error}') from error


def find_split(config: TrackedConfig, checkpoint: Checkpoint | None) -> DeviceSplit | None:
    """Returns the split with which a run begins or resumes; None if devices do not move."""
    if not build.moves_devices(config):
        return None
    saved = None if checkpoint is None else checkpoint.state.get('reallocation')
    return build.find_initial_split(config) if saved is None else DeviceSplit(saved['learner'], saved['engines'])


# The run.


def require_sound(config: config_dict.ConfigDict) -> None:
    """Raises UserError for a config that breaks its rules, for a missing package, and for an unknown task."""
    validate(config)
    require_extras(config)
    require_known_tasks(config)


class Program(Protocol):
    """The work of a run after it is built."""

    def run(self) -> bool:
        """Makes all updates (True), or the updates up to a requested stop, then saves (False)."""
        ...

    def report(self) -> tuple[Report, Tree]:
        """Writes the facts and the report of a finished run; returns the report and the published weights."""
        ...

    def scores_of(self, phase: str) -> Line:
        """Returns the evaluation 'before' or 'after' training as a row of metrics; empty without one."""
        ...


ProgramT = TypeVar('ProgramT', bound=Program)
Built: TypeAlias = tuple[Site[RunLearner], ProgramT | None]  # None if a resumed run has nothing left to do


@dataclasses.dataclass(frozen=True)
class RunKind(Generic[ProgramT]):
    """The functions that check and build a run of one kind."""

    require_startable: Callable[[config_dict.ConfigDict], None]  # raises UserError for a config that cannot run here
    warn: Callable[[config_dict.ConfigDict], None]  # prints probable mistakes to stderr
    build: Callable[[RunContext], Built[ProgramT]]


class Run(Generic[ProgramT]):
    """A run. The constructor builds all parts; `train` runs them and frees them.

    All parts are freed when building fails, when `train` ends, and by `close`. A run that is not trained must be
    closed; it is a context manager.

    Args:
      kind: of the run.
      config: as an experiment file gives it, overrides applied.
      workdir: the directory for everything that the run writes.
      resume, source, overrides, interrupts: see RunContext.

    Raises UserError for errors that the user can fix.
    """

    def __init__(
        self,
        kind: RunKind[ProgramT],
        config: config_dict.ConfigDict,
        workdir: pathlib.Path,
        *,
        resume: bool = False,
        source: str = '',
        overrides: Collection[str] = (),
        interrupts: StopRequests | None = None,
    ):
        kind.require_startable(config)
        own_code = load_own_code(config)
        kind.warn(config)
        self.context = RunContext(
            config, workdir, own_code, resume=resume, source=source, overrides=overrides, interrupts=interrupts
        )
        with contextlib.ExitStack() as undo:
            undo.push(self)
            self.context.open()
            self.site, self._program = kind.build(self.context)
            self.context.start_mirror()
            self.context.start.end()
            undo.pop_all()

    @property
    def program(self) -> ProgramT:
        """The program of the run; raises RuntimeError for a finished run, which has nothing left to do."""
        if self._program is None:
            raise RuntimeError(f'the run in {self.context.workdir} has finished')
        return self._program

    def train(self) -> Report | None:
        """Runs to the end (the report) or to a requested stop (None; the checkpoint is saved), and frees all parts.

        Raises CheckpointError, after the report is written, if the checkpoint after the last update failed, and
        UserError if the export failed.
        """
        context = self.context
        with self:
            if context.finished is not None:
                self.site.complete_export()
                context.finish_mirror(finished=True)
                if context.unsaved:
                    raise context.unsaved
                return context.finished
            discard_facts(context.workdir)
            finished = self.program.run()
            if context.hook:
                context.hook.close()  # before the report, which counts the delivered rows
            if context.feed:
                context.feed.drain()
            if context.rollouts:
                context.rollouts.close()  # the report counts and shows the written rollouts
            report = None
            if finished:
                report, weights = self.program.report()
            self._end_tracking(report)
            if report:
                self.site.export(weights, report['weights_sha256'])
            context.finish_mirror(finished=finished)
            if context.unsaved:
                raise context.unsaved
            return report

    def _end_tracking(self, report: Report | None) -> None:
        """Tells the tracker that the run finished, with its report, or that it was stopped."""
        context = self.context
        if context.feed and report:
            pages = [context.workdir / PAGE, context.workdir / WEB_PAGE]
            context.feed.finish(context.config.run.steps, self.program.scores_of('after'), headline(report), pages)
        elif context.feed:
            context.feed.stop()

    def close(self) -> None:
        """Frees processes, threads and files; all of them, even if one fails. A second call does nothing."""
        self.context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception):  # the newest checkpoint of a run that fails leaves the machine too
                self.context.finish_mirror(finished=False)
            self.close()
        except OSError:
            if error is None:  # on a full disk the first error is the one to show
                raise
