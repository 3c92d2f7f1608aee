"""What every run has: a locked workdir, counters, checkpoints, signals, common facts, and an end that frees all parts.

loop_run.py (asynchronous RL) and sft.py (supervised training) add what is special to each, own_learner.py and
controller_run.py where the learner is: in this process, or in others. Nothing here imports jax.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import pathlib
import platform
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypedDict, TypeVar

import numpy as np
from ml_collections import config_dict

from areal_jax.app.build import build_hook_function
from areal_jax.app.extras import require_extras
from areal_jax.app.interrupt import StopRequests
from areal_jax.app.observer import Compilations
from areal_jax.app.own_code import Digests, load_own_code, note_own_code
from areal_jax.app.provenance import Hardware, git_commit, package_versions
from areal_jax.app.tracking import build_feed, build_tracker, headline
from areal_jax.app.workdir import (
    CHECKPOINTS,
    Report,
    continue_run,
    describe_unsaved,
    prepare_workdir,
    read_prolongations,
    read_report,
    start_again,
)
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore, Follower
from areal_jax.config import TrackedConfig, validate
from areal_jax.files import DirectoryLock
from areal_jax.protocols import Learner
from areal_jax.report.html_page import FILE as WEB_PAGE
from areal_jax.report.report import PAGE
from areal_jax.telemetry.facts import discard_facts
from areal_jax.telemetry.hook import MetricsHook
from areal_jax.telemetry.metrics import FILE, MetricsWriter, read_metrics
from areal_jax.telemetry.names import STEP
from areal_jax.telemetry.progress import StartProgress
from areal_jax.telemetry.resources import ResourceSampler
from areal_jax.telemetry.tracking import TrackerFeed
from areal_jax.telemetry.values import Line
from areal_jax.types import TrajectoryGroup, Tree

State = Mapping[str, Any]  # the run state of a checkpoint, JSON-able


class Closable(Protocol):
    """A part of a run that holds a file, a thread, a process or a connection."""

    def close(self) -> None: ...


Part = TypeVar('Part', bound=Closable)


class RunLearner(Learner, Protocol):
    """The learner of a whole run, wherever its processes are."""

    @property
    def followers(self) -> Sequence[Follower]:
        """Processes that write shards of a checkpoint of their own."""
        ...

    def warm_up(self) -> int:
        """Compiles every program; returns their number."""
        ...

    def update_tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Tokens that an update of these groups reads."""
        ...

    def score(self, version: int, prompt_tokens: np.ndarray, answer_tokens: np.ndarray) -> np.ndarray | None:
        """float32 [A]: log-probs of an answer under the weights of a version; None where it has others by now."""
        ...


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a resumed run goes on from."""

    step: int
    arrays: Tree  # by name: trees of the learner, and what else a kind of run has saved
    state: State


class CommonFacts(TypedDict):
    """The fields that RunFacts and SftFacts share; see there."""

    config: str
    seed: int
    planned_steps: int
    wall_seconds: float
    compilations: int
    peak_memory_bytes: int
    git_commit: str | None
    versions: Mapping[str, str]
    hardware: Mapping[str, object]
    prolonged: list[dict[str, int]]
    idle_fields: list[str]
    own_code: Digests
    hook: Mapping[str, object]
    tracker: Mapping[str, object]


class Run(abc.ABC):
    """One run from a config to its report. The constructor builds all parts; `train` runs them and frees them.

    Each part that holds a file, a thread, a process or a connection is pushed onto one stack when it is acquired. The
    stack is left when building fails, when `train` ends, and by `close`: parts are freed in reverse order, all of them
    even if one fails. A run that is not trained must be closed; it is a context manager.

    Args:
      config: as an experiment file gives it, overrides applied.
      workdir: the directory for everything that the run writes.
      resume: go on from the newest checkpoint in the workdir, or start again at update 0 where there is none.
      source: where the config came from, for the report.
      overrides: the fields that the command line sets; one that the run does not use is refused.
      interrupts: asks the run to stop; None = it is never asked.

    Raises UserError for what the user can mend.
    """

    learner: RunLearner

    def __init__(
        self,
        config: config_dict.ConfigDict,
        workdir: pathlib.Path,
        *,
        resume: bool = False,
        source: str = '',
        overrides: Collection[str] = (),
        interrupts: StopRequests | None = None,
    ):
        validate(config)
        require_extras(config)
        self._require_startable(config)
        self._own_code = load_own_code(config)
        self._print_warnings(config)
        self.workdir, self.config = workdir, TrackedConfig(config, overrides)
        self._source, self._resume, self._interrupts = source, resume, interrupts
        self._started = time.monotonic()
        # what failed at the end, raised when all else is done: the last checkpoint, the export, the token ledger
        self._unsaved: Exception | None = None
        self._finished: Report | None = None  # the report of a resumed run that has nothing left to do
        self._idle_fields: list[str] = []
        self._hook: MetricsHook | None = None
        self._hook_function = build_hook_function(self.config)
        self._feed: TrackerFeed | None = None
        self._tracker = build_tracker(self.config)
        self._parts = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.push(self)
            self._open_workdir()
            self._open_counters()
            self._build()
            self._start.end()
            undo.pop_all()

    # What a kind of run adds.

    @abc.abstractmethod
    def _build(self) -> None:
        """Builds all parts, the learner among them, in the order in which they need each other."""

    @abc.abstractmethod
    def _run(self) -> bool:
        """Makes all updates (True), or the updates up to a requested stop, which is saved (False)."""

    @abc.abstractmethod
    def _report(self) -> tuple[Report, Tree]:
        """Writes the facts and the report of a finished run; returns the report and the published weights."""

    # What depends on where the learner is.

    @abc.abstractmethod
    def _require_startable(self, config: config_dict.ConfigDict) -> None:
        """Raises UserError for a config that cannot run here; nothing has been made yet."""

    @abc.abstractmethod
    def _print_warnings(self, config: config_dict.ConfigDict) -> None:
        """Says on stderr what is probably a mistake."""

    @abc.abstractmethod
    def _use_compilation_cache(self) -> None:
        """Until the run ends, compiled programs are kept in run.compilation_cache."""

    @abc.abstractmethod
    def _count_compilations(self) -> Compilations:
        """Counts the programs that this process compiles from now on."""

    @abc.abstractmethod
    def _traced_learner(self) -> Learner:
        """The learner, or one that traces the updates that telemetry.profile_steps names."""

    @abc.abstractmethod
    def _export(self, weights: Tree, digest: str) -> None:
        """Writes WORKDIR/export. The results of the run are on the disk, so that a failure is kept for the end."""

    @abc.abstractmethod
    def _complete_export(self) -> None:
        """Writes the export of a finished run where it is missing, after a kill or on a disk that was full."""

    @abc.abstractmethod
    def _find_hardware(self) -> Hardware:
        """Where the run computes."""

    # From start to end.

    def train(self) -> Report | None:
        """Run to the end (the report) or to a requested stop (None; the checkpoint is saved), and free all parts.

        Raises CheckpointError, after the report is written, where the checkpoint after the last update failed, and
        UserError where the export did.
        """
        with self:
            if self._finished is not None:
                self._complete_export()
                return self._finished
            discard_facts(self.workdir)
            finished = self._run()
            if self._hook:
                self._hook.close()  # before the report, which counts what became of the rows
            if self._feed:
                self._feed.drain()
            report = None
            if finished:
                report, weights = self._report()
            self._end_tracking(report)
            if report:
                self._export(weights, report['weights_sha256'])
            if self._unsaved:
                raise self._unsaved
            return report

    def _end_tracking(self, report: Report | None) -> None:
        """Tells the tracker that the run finished, with its report, or that it was stopped."""
        if self._feed and report:
            pages = [self.workdir / PAGE, self.workdir / WEB_PAGE]
            self._feed.finish(self.config.run.steps, self._scores_of('after'), headline(report), pages)
        elif self._feed:
            self._feed.stop()

    def _scores_of(self, phase: str) -> Line:
        """The evaluation 'before' or 'after' training as a row of metrics; empty without one."""
        return {}

    def close(self) -> None:
        """Frees processes, threads and files; all of them, even if one fails. Nothing the second time."""
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError:
            if error is None:  # on a full disk the first error is the one to show
                raise

    def _own(self, part: Part) -> Part:
        """Puts a part onto the stack."""
        self._parts.callback(part.close)
        return part

    # Building.

    def _open_workdir(self) -> None:
        lock = DirectoryLock(self.workdir)
        self._parts.callback(lock.release)
        prepare_workdir(self.workdir, self.config.as_dict(), resume=self._resume)
        note_own_code(self.workdir, self._own_code, resume=self._resume)
        self._store = CheckpointStore(self.workdir / CHECKPOINTS, keep=self.config.checkpoint.keep)
        self._store.remove_unfinished()

    def _open_counters(self) -> None:
        self._use_compilation_cache()
        self.resources = self._parts.enter_context(ResourceSampler())
        self.compilations = self._count_compilations()
        check = self._interrupts.check if self._interrupts else lambda: None
        self._start = StartProgress(self.config.telemetry.progress, check=check)
        self._parts.callback(self._start.end)

    def _open_metrics(self, step: int) -> MetricsWriter:
        """Opens metrics.jsonl and removes the updates after `step`, which will be made again."""
        metrics = self._own(MetricsWriter(self.workdir, self.config.telemetry.tensorboard))
        metrics.truncate(step)
        if self._hook_function:
            self._hook = self._own(MetricsHook(self._hook_function, self.config.telemetry.hook, self.workdir))
            metrics.listeners.append(self._hook.put)
            self._hook.start(read_metrics(self.workdir / FILE))
        if self._tracker:
            self._feed = self._own(build_feed(self._tracker, self.config, self.workdir))
        if self._feed and self._finished is None:
            metrics.listeners.append(self._feed.put)
            before, rows = self._scores_of('before'), read_metrics(self.workdir / FILE)
            self._feed.start([{STEP: 0, **before}, *rows] if before else rows)
        return metrics

    def _require_all_read(self) -> None:
        """To be called when every field that the run uses has been read."""
        self.config.require_all_read()
        self._idle_fields = self.config.idle_fields()

    # Running.

    def _warm_up(self) -> None:
        began = time.monotonic()
        programs = self._compile()
        self._start.end()
        self.compilations.reset()
        print(f'compiled {programs} programs in {time.monotonic() - began:.0f} s', flush=True)

    def _compile(self) -> int:
        """Compiles every program of the run; returns their number."""
        self._start.begin('compiling what trains:')
        return self.learner.warm_up()

    def _deferred_signals(
        self, request: Callable[[signal.Signals], None], abandon: Callable[[], None] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, the first request to stop calls `request`; see StopRequests."""
        if self._interrupts is None:
            return contextlib.nullcontext()
        return self._interrupts.deferred(request, 'finishing the update under way, then saving', abandon)

    def _ends_process(self) -> bool:
        """Whether the process ends with the run, as it does for a command."""
        return self._interrupts is not None and self._interrupts.ends_process

    # Checkpoints.

    def _read_checkpoint(self) -> Checkpoint | None:
        """The newest one of a resumed run; None where the run starts at update 0."""
        if not self._resume:
            return None
        if self._store.latest() is None:
            start_again(self.workdir, self.config.as_dict())
            return None
        return Checkpoint(*self._store.restore_latest())

    def _continue(self, step: int) -> None:
        """Adapts the workdir to a run that goes on after update `step`."""
        continue_run(self.workdir, self.config.as_dict(), step)
        print(f'resumed after update {step} from {self.workdir / CHECKPOINTS}', flush=True)
        if step == self.config.run.steps:
            self._finished = read_report(self.workdir, step)

    def _save(self, step: int, arrays: Tree, state: State) -> None:
        """Writes a checkpoint and empties `arrays`. After the last update a failure is kept for the end: the report
        comes first."""
        try:
            self._store.save(step, arrays, state, self.learner.followers, consume=True)
        except CheckpointError as error:
            if step < self.config.run.steps:
                raise
            self._unsaved = describe_unsaved(error, self.workdir)

    def _common_facts(self) -> CommonFacts:
        return {
            'config': self._source,
            'seed': self.config.run.seed,
            'planned_steps': self.config.run.steps,
            'wall_seconds': time.monotonic() - self._started,
            'compilations': self.compilations.count,
            'peak_memory_bytes': self.resources.peak_bytes,
            'git_commit': git_commit(),
            'versions': package_versions(),
            'hardware': {**self._find_hardware(), 'platform': platform.platform()},
            'prolonged': read_prolongations(self.workdir),
            'idle_fields': self._idle_fields,
            'own_code': self._own_code,
            'hook': self._hook.facts() if self._hook else {},
            'tracker': self._feed.facts() if self._feed else {},
        }
