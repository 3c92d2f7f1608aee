"""The program of the asynchronous loop: warm up, evaluate, loop, evaluate, report. Nothing here imports jax."""

from __future__ import annotations

import contextlib
import math
import time

from areal_jax.app.parts.part_settings import find_ends
from areal_jax.app.parts.server_parts import Servers
from areal_jax.app.run.ledger_check import find_ledger_fault
from areal_jax.app.run.loop_parts import LoopParts, Outside, build_parts
from areal_jax.app.run.overlap import alone_seconds
from areal_jax.app.run.run_context import RunContext
from areal_jax.app.run.scores import evaluation_row
from areal_jax.app.run.site import LoopSite
from areal_jax.app.run.start_records import note_start
from areal_jax.app.workdir.run_directory import Report
from areal_jax.config.objective_constraints import find_objective_warnings
from areal_jax.config.objectives import describe_method
from areal_jax.config.sandbox_fields import find_sandbox_warnings
from areal_jax.control.clocks.real import RealClock
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.report.event_log import lane_intervals, load_events, window
from areal_jax.report.report import write_report
from areal_jax.telemetry.facts import RunFacts
from areal_jax.telemetry.metrics import Line
from areal_jax.types import Tree

_RETURN_S = 30.0  # for engines to serve again after a restart of the run, which leaves them alone
_IN_THE_WORLD = Outside()


def build_loop(context: RunContext, site: LoopSite, outside: Outside = _IN_THE_WORLD) -> Loop | None:
    """None for a resumed run that has finished."""
    parts = build_parts(context, site, outside)
    if parts is None:
        return None
    loop = Loop(context, site, parts)
    context.require_all_read()
    return loop


class Loop:
    """See run.Program."""

    def __init__(self, context: RunContext, site: LoopSite, parts: LoopParts):
        self.parts, self._context, self._site = parts, context, site
        self._plots = context.config.telemetry.plots
        self._compilation_budget = context.config.run.compilation_budget

    def run(self) -> bool:
        parts, site = self.parts, self._site
        host, clock = parts.host, parts.host.clock
        try:
            note_start(
                self._context.workdir, host.first_seq, host.config, host.model.source, host.sandbox,
                site.read_environment(),
            )  # fmt: skip
            self.warm_up()
            if isinstance(clock, RealClock):
                clock.restart()
            stop = parts.controller.stop_requested
            with self._context.deferred_signals(lambda number: clock.post_signal(number, stop), clock.abandon):
                finished = clock.execute(self._run_to_end())
            if parts.generation.servers is not None:
                parts.generation.servers.ended_by.require_nothing()
            return finished
        except BaseException as error:
            with contextlib.suppress(OSError):  # on a full disk the first error is the one to show
                host.log.write('error', message=f'{type(error).__name__}: {error}')
            raise

    def warm_up(self) -> None:
        """Compiles what the run needs first."""
        parts, began = self.parts, time.monotonic()
        programs = self._site.compile(parts.generation.engines, parts.host.origin.version)
        if parts.reallocation and parts.generation.moves:
            for split in parts.reallocation.prepared:  # before the run was stopped
                parts.generation.moves.prepare(split)
        self._context.start.end()
        self._site.compilations.reset()
        print(f'compiled {programs} programs in {time.monotonic() - began:.0f} s', flush=True)

    async def _run_to_end(self) -> bool:
        """However the program ends, no server stays paused for its other clients."""
        try:
            return await self.parts.host.supervisor.run(self._program())
        finally:
            if self.parts.generation.servers is not None:
                await self.parts.generation.servers.close()

    async def _program(self) -> bool:
        parts = self.parts
        controller, beside = parts.controller, parts.evaluations.beside
        for engine in parts.generation.engines:
            engine.start(parts.host.supervisor)
        if parts.generation.servers is not None:
            parts.generation.servers.start(parts.host.supervisor)
            await self._await_engines(parts.generation.servers)
        if parts.host.origin.version == 0:
            if not await self._evaluate('before') or controller.stop_requested.is_set():
                return False  # nothing is trained: --resume begins at update 0 without a checkpoint too
            await self._site.finish_compiling(parts.host.clock)
        elif beside:
            finished = [row.version for row in parts.host.scores.curve]
            beside.resume(parts.generation.newest, parts.evaluations.under_way, finished)
        has_finished = await controller.run()
        fault = find_ledger_fault(parts.observer.ledger, controller.snapshot())
        self._context.unsaved = self._context.unsaved or fault
        if not has_finished:
            return False
        if beside and not await beside.finish(controller.stop_requested):
            await controller.save_for_good()
            return False
        if not (is_evaluated := await self._evaluate('after')):
            await controller.save_for_good()  # --resume repeats the evaluation
        return is_evaluated

    async def _await_engines(self, servers: Servers) -> None:
        """Nothing is generated before all of them hold the first weights, or run.stall_timeout_s has passed.

        A run that goes on waits for those that were lost no longer than _RETURN_S: they may join later.
        """
        of_training, beside = self._site.awaited_engines, self._site.awaited_beside
        deadline_s = self._context.config.run.stall_timeout_s
        patience_s = _RETURN_S if self.parts.host.origin.version else math.inf
        if not (wanted := of_training + beside):
            return
        self._context.start.begin(f'waiting for {wanted} engines')
        clock, stop = self.parts.host.clock, self.parts.controller.stop_requested
        begun_s = clock.now()
        serving = await servers.pool.await_serving(of_training, deadline_s, stop, patience_s)
        if servers.beside:
            serving += await servers.beside.pool.evaluation.await_serving(beside, deadline_s, stop, patience_s)
        self._context.start.end()
        if serving < wanted and not stop.is_set():
            waited_s = clock.now() - begun_s
            print(f'warning: {serving} of {wanted} engines serve after {waited_s:.0f} s: the run begins', flush=True)

    async def _evaluate(self, phase: str) -> bool:
        """True when the evaluation is done, or none is wanted."""
        evaluator = self.parts.evaluations.evaluator
        if evaluator is None:
            return True
        self._context.start.begin(f'evaluating {self._context.config.evaluation.problems} problems')
        scores = await evaluator.evaluate(phase, self.parts.controller.stop_requested)
        self._context.start.end()
        if scores is None:
            return False
        self.parts.host.scores.add(phase, scores)
        if self._context.feed and phase == 'before':
            self._context.feed.put(0, self.scores_of(phase))
        return True

    def scores_of(self, phase: str) -> Line:
        steps = 0 if phase == 'before' else self._context.config.run.steps
        return evaluation_row(self.parts.host.scores.get(phase), steps)

    def report(self) -> tuple[Report, Tree]:
        parts, site, context = self.parts, self._site, self._context
        context.resources.stop()  # the report is not part of what is measured
        config, clock, tokenizer = context.config, parts.host.clock, parts.host.model.tokenizer
        events = load_events(context.workdir / EVENTS)
        weights, digest = site.find_final_weights()
        hardware = site.find_hardware()
        facts = RunFacts(
            **context.describe(hardware),
            compilations=site.compilations.count,
            eta=config.staleness.eta if config.staleness.schedule == 'natural' else None,
            schedule=config.staleness.schedule,
            clock=config.run.clock,
            objective=describe_method(config.loss),
            ends=tokenizer.token_bytes.name(find_ends(config, tokenizer)),
            warnings=(*find_objective_warnings(config), *find_sandbox_warnings(config)),
            sandbox=parts.host.sandbox,
            evaluation_before=parts.host.scores.get('before'),
            evaluation_after=parts.host.scores.get('after'),
            compilation_budget=self._compilation_budget,
            event_loop_lag_max=clock.max_lag_s if isinstance(clock, RealClock) else 0.0,
            weights_sha256=digest,
            alone_seconds=alone_seconds(lane_intervals(events), window(events), config.run.steps),
            cpu_seconds=None if context.resume else parts.observer.cpu_seconds_in_window,
            cores=hardware['cores'],
            **site.describe_engines(),
            problems=parts.host.task.sizes(),
            energy=parts.observer.energy.facts() if parts.observer.energy else None,
            simulation=site.describe_simulation(),
        )
        facts.save(context.workdir)
        report = write_report(context.workdir, facts, plots=self._plots, events=events)
        site.close_learner()
        return report, weights
