"""Evaluation beside training: every so many updates, under the weights of that version, while the loop goes on.

The engines keep the weights of the version until its answers are done (rollout/local_engine.py). The state of training knows
nothing of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.evaluation.evaluator import Evaluator
from areal_jax.protocols import Clock, Event, Generation, Generator, Pool
from areal_jax.telemetry.facts import VersionScores
from areal_jax.types import GenerationRequest, PublishedWeights

MakeEvaluator = Callable[[Generator, int], Evaluator]  # from the pool at a version, and the version


class PoolAtVersion:
    """A pool whose requests are all pinned to one version. Implements protocols.Generator."""

    def __init__(self, pool: Pool, version: int):
        self._pool, self._version = pool, version

    def generate(self, request: GenerationRequest, prefer: str = '') -> Generation:
        return self._pool.generate(dataclasses.replace(request, version=self._version), prefer)

    def cancel(self, request: GenerationRequest) -> None:
        self._pool.cancel(dataclasses.replace(request, version=self._version))

    def cancel_all(self) -> None:
        self._pool.cancel_all(self._version)


class EvaluationBeside:
    """Evaluates the versions that are multiples of `every`, but for the last one; at most one at a time.

    Args:
      steps: updates of the run; its last version is evaluated after training.
      lost: while it is set, the pool has no engine with the pinned version; None: it always has.
      on_scores: called with the scores of each version.
      say: prints a line.
    """

    def __init__(
        self,
        *,
        every: int,
        steps: int,
        pool: Pool,
        clock: Clock,
        supervisor: Supervisor,
        log: EventLog,
        make_evaluator: MakeEvaluator,
        on_scores: Callable[[VersionScores], None],
        say: Callable[[str], None],
        lost: Event | None = None,
    ):
        self._every, self._steps, self._pool, self._clock = every, steps, pool, clock
        self._supervisor, self._log, self._make_evaluator = supervisor, log, make_evaluator
        self._on_scores, self._say = on_scores, say
        self._lost = lost or clock.event('loss of an evaluation beside training')
        self._ended = clock.event('end of the evaluation beside training')
        self.under_way: int | None = None  # the version that is being evaluated

    def is_due(self, version: int) -> bool:
        return 0 < version < self._steps and version % self._every == 0

    def note_published(self, published: PublishedWeights) -> None:
        """Starts the evaluation of the version if it is due; skips it while an earlier one is under way."""
        version = published.version
        if not self.is_due(version):
            return
        if self.under_way is None:
            self._start(published)
            return
        self._log.write('evaluation_skip', version=version, under_way=self.under_way)
        self._say(f'version {version} is not evaluated: the evaluation of version {self.under_way} is still under way')

    def resume(self, published: PublishedWeights, under_way: int | None, finished: Collection[int]) -> None:
        """Goes on from a checkpoint taken at the version `published`.

        Repeats the evaluation of that version where it was due and is not in `finished`. That of an earlier version,
        `under_way` when the checkpoint was taken, is lost: its weights are gone.
        """
        repeats = self.is_due(published.version) and published.version not in finished
        if under_way not in (None, published.version, *finished):
            self._log.write('evaluation_lost', version=under_way)
            self._say(f'the evaluation of version {under_way} was under way when the run ended: it has no row')
        if repeats:
            self._start(published)

    async def finish(self, stop: Event) -> bool:
        """Returns when no evaluation is under way (True) or a stop is requested (False)."""
        if self.under_way is None:
            return True
        watch = self._supervisor.start('evaluation stop', self._wake_at(stop))
        while self.under_way is not None and not stop.is_set():
            self._ended.clear()
            await self._clock.wait(self._ended)
        watch.cancel()
        return self.under_way is None

    async def _wake_at(self, stop: Event) -> None:
        await self._clock.wait(stop)
        self._ended.set()

    def _start(self, published: PublishedWeights) -> None:
        self.under_way = published.version
        self._supervisor.start(f'evaluation of version {published.version}', self._evaluate(published))

    async def _evaluate(self, published: PublishedWeights) -> None:
        version, began_s = published.version, self._clock.now()
        await self._pool.pin(published)
        evaluator = self._make_evaluator(PoolAtVersion(self._pool, version), version)
        scores = await evaluator.evaluate(f'of version {version}', self._lost)
        self._pool.unpin(version)
        self.under_way = None
        seconds = self._clock.now() - began_s
        if scores is None:
            self._log.write('evaluation_lost', version=version)
            self._say(f'the evaluation of version {version} ends after {seconds:.0f} s: no server has its weights')
        else:
            self._on_scores(VersionScores(version, seconds, scores))
        self._ended.set()
