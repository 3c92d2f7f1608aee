"""One run from a config to its report: built, run, reported, exported, and freed. Nothing here imports jax.

A kind of run is a table entry: where its learner is (site.py), and the program that its parts make.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from ml_collections import config_dict

from areal_jax.app.parts.extras import require_extras
from areal_jax.app.parts.own_code import load_own_code
from areal_jax.app.parts.tracker_builder import headline
from areal_jax.app.process.interrupt import StopRequests
from areal_jax.app.run.run_context import RunContext
from areal_jax.app.run.site import Site
from areal_jax.app.workdir.run_directory import Report
from areal_jax.config import validate
from areal_jax.report.pages.html_page import FILE as WEB_PAGE
from areal_jax.report.report import PAGE
from areal_jax.tasks.registry import require_known
from areal_jax.telemetry.facts import discard_facts
from areal_jax.telemetry.metrics import Line
from areal_jax.types import Tree


class Program(Protocol):
    """What a run does once it is built."""

    def run(self) -> bool:
        """Makes all updates (True), or the updates up to a requested stop, which is saved (False)."""
        ...

    def report(self) -> tuple[Report, Tree]:
        """Writes the facts and the report of a finished run; returns the report and the published weights."""
        ...

    def scores_of(self, phase: str) -> Line:
        """The evaluation 'before' or 'after' training as a row of metrics; empty without one."""
        ...


ProgramT = TypeVar('ProgramT', bound=Program)
SiteT = TypeVar('SiteT', bound=Site)


@dataclasses.dataclass(frozen=True)
class RunKind(Generic[SiteT, ProgramT]):
    """How a run of one kind is built."""

    require_startable: Callable[[config_dict.ConfigDict], None]  # raises UserError where it cannot run here
    warn: Callable[[config_dict.ConfigDict], None]  # says on stderr what is probably a mistake
    make_site: Callable[[RunContext], SiteT]
    build: Callable[[RunContext, SiteT], ProgramT | None]  # None where a resumed run has nothing left to do


class Run(Generic[SiteT, ProgramT]):
    """The constructor builds all parts; `train` runs them and frees them.

    All parts are freed when building fails, when `train` ends, and by `close`. A run that is not trained must be
    closed; it is a context manager.

    Args:
      kind: of the run.
      config: as an experiment file gives it, overrides applied.
      workdir: the directory for everything that the run writes.
      resume, source, overrides, interrupts: see RunContext.

    Raises UserError for what the user can mend.
    """

    def __init__(
        self,
        kind: RunKind[SiteT, ProgramT],
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
        require_known(config.task.name)
        kind.require_startable(config)
        own_code = load_own_code(config)
        kind.warn(config)
        self.context = RunContext(
            config, workdir, own_code, resume=resume, source=source, overrides=overrides, interrupts=interrupts
        )
        with contextlib.ExitStack() as undo:
            undo.push(self)
            self.context.open()
            self.site = kind.make_site(self.context)
            self._program = kind.build(self.context, self.site)
            self.context.start.end()
            undo.pop_all()

    @property
    def program(self) -> ProgramT:
        """What the run does; raises RuntimeError for a finished run, which has nothing left to do."""
        if self._program is None:
            raise RuntimeError(f'the run in {self.context.workdir} has finished')
        return self._program

    def train(self) -> Report | None:
        """Run to the end (the report) or to a requested stop (None; the checkpoint is saved), and free all parts.

        Raises CheckpointError, after the report is written, where the checkpoint after the last update failed, and
        UserError where the export did.
        """
        context = self.context
        with self:
            if context.finished is not None:
                self.site.complete_export()
                return context.finished
            discard_facts(context.workdir)
            finished = self.program.run()
            if context.hook:
                context.hook.close()  # before the report, which counts what became of the rows
            if context.feed:
                context.feed.drain()
            if context.rollouts:
                context.rollouts.close()  # the report counts and shows what is written
            report = None
            if finished:
                report, weights = self.program.report()
            self._end_tracking(report)
            if report:
                self.site.export(weights, report['weights_sha256'])
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
        """Frees processes, threads and files; all of them, even if one fails. Nothing the second time."""
        self.context.close()

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
