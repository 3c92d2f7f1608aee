"""Accuracy on held-out problems, sampled and greedy, under the weights that the engines hold.

Used by app/session.py before the first and after the last update; uses the run's pool and verifier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from areal_jax.control.episode import Episode
from areal_jax.control.events import EventLog
from areal_jax.control.failures import FailureCount
from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import Clock, Event, Generator, Verifier, Workflow
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.telemetry.facts import EvaluationScores, most_frequent_share
from areal_jax.types import Prompt, SamplingParams, Verdict, concatenate

SEED_OFFSET = 1_000_003  # noise of the evaluation is not that of any training draw


class Evaluator:
    """Generates one greedy and `samples` sampled answers per problem.

    The sampling noise is the same in every evaluation, so the scores of two evaluations are paired. No weights may be
    published while it runs: all answers are of the version that the engines hold. An answer that cannot be verified
    scores 0; `max_failed` of them in a row raise UnverifiedError. `announce` is called after each answer with the
    number of answers so far and in all. `version`: of an evaluation beside training (beside.py), whose events are of
    kinds of their own.
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
        final_answer: Callable[[str], str],
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
        """Scores under the weights in the engines; None if `stop` came first. `phase` is 'before' or 'after'."""
        self._note_start(phase)
        scores = np.zeros((len(self._problems), 1 + self._samples))
        answers: list[str] = []
        failed: list[str] = []
        failures = FailureCount(self._max_failed, f'answers of the evaluation {phase!r}')
        jobs = [(row, column) for row in range(len(self._problems)) for column in range(1 + self._samples)]
        left, done = len(jobs), self._clock.event(f'evaluation {phase}')

        async def job(row: int, column: int) -> None:
            nonlocal left
            scored = await self._answer(self._problems[row], column)
            if scored is None:
                return
            verdict, answer = scored
            scores[row, column] = verdict.reward
            if verdict.failed:
                failed.append(verdict.label)
                failures.note_failed(f'answer {column} to problem {row}', [verdict.label])
            else:
                failures.note_verified()
            if column:
                answers.append(answer)
            left -= 1
            self._announce(len(jobs) - left, len(jobs))
            if not left:
                done.set()

        async def watch_stop() -> None:
            await self._clock.wait(stop)
            done.set()

        tasks = [self._supervisor.start(f'evaluation {row}.{column}', job(row, column)) for row, column in jobs]
        watch = self._supervisor.start('evaluation stop', watch_stop())
        await self._clock.wait(done)
        watch.cancel()
        for task in tasks:
            task.cancel()
        self._note_end(phase, failed)
        if left:
            self._pool.cancel_all()
            return None
        sampled = tuple(tuple(row) for row in scores[:, 1:].tolist())
        return EvaluationScores(tuple(scores[:, 0].tolist()), sampled, most_frequent_share(answers))

    def _note_start(self, phase: str) -> None:
        if self._version is None:
            self._log.write('evaluate', phase=phase, mode='start')
        else:
            answers = len(self._problems) * (1 + self._samples)
            self._log.write('evaluation_start', version=self._version, answers=answers)

    def _note_end(self, phase: str, unverified: list[str]) -> None:
        """`unverified`: label of each answer that counts as 0 because it could not be verified."""
        if self._version is None:
            self._log.write('evaluate', phase=phase, mode='done', unverified=unverified)
        else:
            self._log.write('evaluation_done', version=self._version, unverified=unverified)

    async def _answer(self, prompt: Prompt, column: int) -> tuple[Verdict, str] | None:
        """(verdict, what counts as the answer) of the greedy (0) or a sampled answer; None for a cancelled one."""
        episode = Episode(column)
        await (self._sampled if column else self._greedy).run(prompt, episode)
        if episode.finish_reason is None:
            return None
        tokens = concatenate([segment.tokens for segment in episode.segments], np.int32)
        verdict = await self._verifier.verify(prompt, tokens, episode.finish_reason)
        return verdict, self._final_answer(self._decode(tokens))
