"""Accuracy on held-out problems, sampled and greedy, under the weights that the engines hold.

It scores a run before the first and after the last update, with the run's pool and verifier, or a model alone.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from areal_jax.control.episode import LOST, Episode, describe_episode
from areal_jax.control.event_writer import EventLog
from areal_jax.control.groups import FailureCount, RequestLostError
from areal_jax.control.supervisor import Supervisor
from areal_jax.evaluation.results import Answer
from areal_jax.protocols import Clock, Event, Generation, Generator, Pool, Verifier, Workflow
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.telemetry.facts import EvaluationScores, VersionScores, most_frequent_share
from areal_jax.types import UNSCORED, GenerationRequest, Prompt, PublishedWeights, SamplingParams, Verdict, concatenate

SEED_OFFSET = 1_000_003  # keeps the noise of evaluation apart from every draw of training
Deliver = Callable[[int, int, Answer], None]  # (index of the problem, column, answer); column 0 is the greedy answer


class Evaluator:
    """Generates one greedy and `samples` sampled answers per problem.

    The sampling noise is the same in every evaluation, so the scores of two evaluations are paired. No weights may be
    published while it runs: all answers come from the version that the engines hold. An answer that cannot be verified
    scores 0; `max_failed` such answers in a row raise UnverifiedError. `announce` is called after each answer with the
    number of answers so far and in all. `version` is set for an evaluation during training, which has separate kinds
    of events.
    """

    def __init__(
        self,
        *,
        pool: Generator,
        verifier: Verifier,
        clock: Clock,
        supervisor: Supervisor,
        log: EventLog,
        problems: Sequence[Prompt],
        sampling: SamplingParams,
        samples: int,
        seed: int,
        decode: Callable[[np.ndarray], str],
        final_answer: Callable[[Prompt, str], str],
        max_failed: int,
        announce: Callable[[int, int], None] = lambda done, total: None,
        version: int | None = None,
        make_workflow: Callable[[Generator, SamplingParams, int], Workflow] = SingleTurn,
    ):
        self._pool, self._verifier, self._clock, self._supervisor, self._log = pool, verifier, clock, supervisor, log
        self._problems, self._samples, self._decode, self._announce = problems, samples, decode, announce
        self._final_answer, self._max_failed, self._version = final_answer, max_failed, version
        greedy = dataclasses.replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
        self._sampled = make_workflow(pool, sampling, seed + SEED_OFFSET)
        self._greedy = make_workflow(pool, greedy, seed + 2 * SEED_OFFSET)

    async def evaluate(self, phase: str, stop: Event) -> EvaluationScores | None:
        """Scores the weights in the engines; None if `stop` came first. `phase` names the evaluation in the log."""
        scores = np.zeros((len(self._problems), 1 + self._samples))
        answers: list[str] = []
        labels: collections.Counter[str] = collections.Counter()

        def note(row: int, column: int, answer: Answer) -> None:
            scores[row, column] = answer.verdict.reward
            labels[answer.verdict.label] += 1
            if column:
                answers.append(answer.final)

        if not await self.answer_all(phase, stop, note):
            return None
        sampled = tuple(tuple(row) for row in scores[:, 1:].tolist())
        sources = tuple(prompt.source for prompt in self._problems)
        return EvaluationScores(
            tuple(scores[:, 0].tolist()),
            sampled,
            most_frequent_share(answers),
            dict(sorted(labels.items())),
            sources if any(sources) else (),
        )

    async def answer_all(self, phase: str, stop: Event, deliver: Deliver, most_open: int | None = None) -> bool:
        """Delivers each answer as soon as it is verified; False if `stop` came before the last.

        The answers to a problem start one after the other, so engines share the prefill of its prompt.

        Args:
          phase: names the evaluation in the event log.
          most_open: largest number of answers under way at once, which bounds memory; None = all. It does not affect
            the answers.
        """
        total = len(self._problems) * (1 + self._samples)
        self._note_start(phase, total)
        jobs = itertools.product(range(len(self._problems)), range(1 + self._samples))
        failed: list[str] = []
        failures = FailureCount(self._max_failed, f'answers of the evaluation {phase!r}')
        left, done = total, self._clock.event(f'evaluation {phase}')

        async def work(jobs: Iterator[tuple[int, int]]) -> None:
            nonlocal left
            for row, column in jobs:
                answer = await self._answer(self._problems[row], column)
                if answer is None:
                    return
                label = answer.verdict.label
                if answer.verdict.failed:
                    failed.append(label)
                    failures.note_failed(f'answer {column} to problem {row}', [label])
                else:
                    failures.note_verified()
                deliver(row, column, answer)
                left -= 1
                self._announce(total - left, total)
                if not left:
                    done.set()

        async def watch_stop() -> None:
            await self._clock.wait(stop)
            done.set()

        if not total:
            done.set()
        workers = range(total if most_open is None else min(total, most_open))
        tasks = [self._supervisor.start(f'evaluation, worker {index}', work(jobs)) for index in workers]
        watch = self._supervisor.start('evaluation stop', watch_stop())
        await self._clock.wait(done)
        watch.cancel()
        for task in tasks:
            task.cancel()
        self._note_end(phase, failed)
        if left:
            self._pool.cancel_all()
        return not left

    def _note_start(self, phase: str, answers: int) -> None:
        if self._version is None:
            self._log.write('evaluate', phase=phase, mode='start')
        else:
            self._log.write('evaluation_start', version=self._version, answers=answers)

    def _note_end(self, phase: str, unverified: list[str]) -> None:
        if self._version is None:
            self._log.write('evaluate', phase=phase, mode='done', unverified=unverified)
        else:
            self._log.write('evaluation_done', version=self._version, unverified=unverified)

    async def _answer(self, prompt: Prompt, column: int) -> Answer | None:
        episode = Episode(column)
        lost: Verdict | None = None
        try:
            await (self._sampled if column else self._greedy).run(prompt, episode)
        except RequestLostError:
            lost, episode.finish_reason = Verdict(0.0, attempts=0, label=LOST), 'length'
        if episode.label in UNSCORED:
            lost, episode.finish_reason = Verdict(0.0, attempts=0, label=episode.label), 'length'
        if episode.finish_reason is None:
            return None
        tokens = concatenate([segment.tokens for segment in episode.segments], np.int32)
        describe = functools.partial(describe_episode, episode)
        verdict = lost or await self._verifier.verify(prompt, tokens, episode.finish_reason, describe)
        text = self._decode(tokens)
        return Answer(tokens, text, self._final_answer(prompt, text), episode.finish_reason, verdict)


# Evaluation during training: every `every` updates, under the weights of that version, while training continues.
#
# The engines keep the weights of the version until its answers are done (rollout/local_engine.py). The state of
# training does not contain the evaluation.


MakeEvaluator = Callable[[Generator, int], Evaluator]  # (pool at a version, version) -> evaluator


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
    """Evaluates the versions that are multiples of `every`, except the last version; at most one at a time.

    Args:
      steps: updates of the run; its last version is evaluated after training.
      lost: set while the pool has no engine with the pinned version; None: the pool always has one.
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
        """Continues from a checkpoint taken at the version `published`.

        Repeats the evaluation of that version if it was due and is not in `finished`. The evaluation of an earlier
        version, `under_way` when the checkpoint was taken, is lost: its weights are gone.
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
