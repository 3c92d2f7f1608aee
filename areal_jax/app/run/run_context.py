"""What every run has: a locked workdir, counters, checkpoints, signals, facts, and one stack that frees all parts.

Nothing here imports jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import platform
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypedDict, TypeVar

from ml_collections import config_dict

from areal_jax.app.parts.own_code import Digests, note_own_code
from areal_jax.app.parts.part_settings import build_hook_function
from areal_jax.app.parts.tracker_builder import build_feed, build_tracker
from areal_jax.app.process.interrupt import StopRequests
from areal_jax.app.workdir.provenance import Hardware, git_commit, package_versions
from areal_jax.app.workdir.run_directory import (
    CHECKPOINTS,
    Report,
    continue_run,
    describe_unsaved,
    prepare_workdir,
    read_prolongations,
    read_report,
    settle_config,
    start_again,
)
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore, Follower
from areal_jax.config import TrackedConfig
from areal_jax.files import DirectoryLock
from areal_jax.telemetry.devices import ResourceSampler
from areal_jax.telemetry.hook import MetricsHook
from areal_jax.telemetry.metrics import FILE, Line, MetricsWriter, read_metrics
from areal_jax.telemetry.names import STEP
from areal_jax.telemetry.progress import StartProgress
from areal_jax.telemetry.rollouts.writer import Decode, RolloutWriter
from areal_jax.telemetry.trackers import TrackerFeed
from areal_jax.types import Tree

State = Mapping[str, Any]  # the run state of a checkpoint, JSON-able


class Closable(Protocol):
    """A part of a run that holds a file, a thread, a process or a connection."""

    def close(self) -> None: ...


Part = TypeVar('Part', bound=Closable)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a resumed run goes on from."""

    step: int
    arrays: Tree  # by name: trees of the learner, and what else a kind of run has saved
    state: State

    @property
    def of_learner(self) -> Tree:
        """What Learner.restore takes."""
        return {name: self.arrays[name] for name in ('params', 'optimizer')}


class CommonFacts(TypedDict):
    """The fields that RunFacts and SftFacts share; see there."""

    config: str
    seed: int
    planned_steps: int
    wall_seconds: float
    peak_memory_bytes: int
    git_commit: str | None
    versions: Mapping[str, str]
    hardware: Mapping[str, object]
    prolonged: list[dict[str, int]]
    idle_fields: list[str]
    own_code: Digests
    hook: Mapping[str, object]
    tracker: Mapping[str, object]
    rollouts: Mapping[str, object]


class RunContext:
    """The workdir of one run, and what is open in it.

    Each part of a run that holds a file, a thread, a process or a connection is put onto `parts` when it is acquired.
    `close` frees them in reverse order, all of them even if one fails.

    Args:
      config: validated, as an experiment file gives it, overrides applied.
      workdir: the directory for everything that the run writes.
      own_code: the user's own functions that the config names.
      resume: go on from the newest checkpoint in the workdir, or start again at update 0 where there is none.
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
        self.config = TrackedConfig(settle_config(config, workdir, overrides, resume=resume), overrides)
        self.resume, self.interrupts = resume, interrupts
        self._source, self._own_code, self._started = source, own_code, time.monotonic()
        # what failed at the end, raised when all else is done: the last checkpoint, the export, the token ledger
        self.unsaved: Exception | None = None
        self.finished: Report | None = None  # the report of a resumed run that has nothing left to do
        self._idle_fields: list[str] = []
        self.hook: MetricsHook | None = None
        self._hook_function = build_hook_function(self.config)
        self.feed: TrackerFeed | None = None
        self.rollouts: RolloutWriter | None = None
        self._tracker = build_tracker(self.config)
        self.parts = contextlib.ExitStack()

    def open(self) -> None:
        """Locks and prepares the workdir, and starts to count what the run uses."""
        lock = DirectoryLock(self.workdir)
        self.parts.callback(lock.release)
        prepare_workdir(self.workdir, self.config.as_dict(), resume=self.resume)
        note_own_code(self.workdir, self._own_code, resume=self.resume)
        self._store = CheckpointStore(self.workdir / CHECKPOINTS, keep=self.config.checkpoint.keep)
        self._store.remove_unfinished()
        self.resources = self.parts.enter_context(ResourceSampler())
        check = self.interrupts.check if self.interrupts else lambda: None
        self.start = StartProgress(self.config.telemetry.progress, check=check)
        self.parts.callback(self.start.end)

    def close(self) -> None:
        """Frees processes, threads and files. Nothing the second time."""
        self.parts.close()

    def own(self, part: Part) -> Part:
        """Puts a part onto the stack."""
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

    def open_rollouts(self, step: int, decode: Decode) -> RolloutWriter | None:
        """Opens WORKDIR/rollouts, without the updates after `step`; None where telemetry.rollouts is '0'."""
        kept = self.config.telemetry.rollouts
        if kept.isdigit() and int(kept) == 0:
            return None
        self.rollouts = self.own(RolloutWriter(self.workdir, decode, kept))
        self.rollouts.start(step)
        return self.rollouts

    def require_all_read(self) -> None:
        """To be called when every field that the run uses has been read."""
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
        """The newest one of a resumed run; None where the run starts at update 0."""
        if not self.resume:
            return None
        if self._store.latest() is None:
            start_again(self.workdir, self.config.as_dict())
            return None
        return Checkpoint(*self._store.restore_latest())

    def go_on(self, step: int) -> None:
        """Adapts the workdir to a run that goes on after update `step`."""
        continue_run(self.workdir, self.config.as_dict(), step)
        print(f'resumed after update {step} from {self.workdir / CHECKPOINTS}', flush=True)
        if step == self.config.run.steps:
            self.finished = read_report(self.workdir, step)

    def save(self, step: int, arrays: Tree, state: State, followers: Sequence[Follower]) -> None:
        """Writes a checkpoint and empties `arrays`. After the last update a failure is kept for the end: the report
        comes first."""
        try:
            self._store.save(step, arrays, state, followers, consume=True)
        except CheckpointError as error:
            if step < self.config.run.steps:
                raise
            self.unsaved = describe_unsaved(error, self.workdir)

    def describe(self, hardware: Hardware) -> CommonFacts:
        """The facts that every kind of run has; `hardware` is where it computes."""
        return {
            'config': self._source,
            'seed': self.config.run.seed,
            'planned_steps': self.config.run.steps,
            'wall_seconds': time.monotonic() - self._started,
            'peak_memory_bytes': self.resources.peak_bytes,
            'git_commit': git_commit(),
            'versions': package_versions(),
            'hardware': {**hardware, 'platform': platform.platform()},
            'prolonged': read_prolongations(self.workdir),
            'idle_fields': self._idle_fields,
            'own_code': self._own_code,
            'hook': self.hook.facts() if self.hook else {},
            'tracker': self.feed.facts() if self.feed else {},
            'rollouts': self.rollouts.facts() if self.rollouts else {},
        }
