"""Verification: from an answer's tokens, or its text, to its reward, inline or in worker processes.

Worker processes (worker_process.py) are asked through `clock.call`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import json
import logging
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from areal_jax import files, lanes
from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.protocols import Clock, Event
from areal_jax.tasks.scoring.score_call import (
    MEASURED,
    MachineFaultError,
    Score,
    ScoringError,
    check_score,
    score_answer,
    shorten_reason,
    to_reward,
)
from areal_jax.tasks.scoring.worker import DescribeEpisode, complete_episode, join_scorers, takes_episode
from areal_jax.tasks.task import Problem, Scorer, TaskError, hash_fraction
from areal_jax.types import FinishReason, Prompt, Verdict, Work
from areal_jax.workers.worker_process import WorkerDiedError, WorkerProcess


class RecordedWorker(WorkerProcess):
    """A WorkerProcess that is never asked: the replay clock makes no call."""

    def __init__(self, scorer: str, memory_mb: int):
        self.scorer = scorer
        self.is_ready = False
        self._is_killed = False

    @property
    def is_killed(self) -> bool:
        return self._is_killed

    def wait_until_ready(self, end_s: float) -> None:
        self.is_ready = True

    async def become_ready(self) -> NoReturn:
        raise RuntimeError('a replay takes the replies of workers from its log')

    async def ask(self, request: JsonObject) -> NoReturn:
        raise RuntimeError('a replay takes the replies of workers from its log')

    def ask_at_once(self, request: JsonObject, end_s: float) -> NoReturn:
        raise RuntimeError('a replay takes the replies of workers from its log')

    def kill(self) -> None:
        self._is_killed = True

    def is_gone(self) -> bool:
        return self._is_killed

    def close(self, within_s: float = 0.0) -> None:
        self._is_killed = True


# A second comparison for a small share of the scored answers: disagreements are kept with their texts, for readers.
#
# It is for the kind of answers 'math'. It changes no reward.


FILE = 'audit.jsonl'  # in the workdir
MOST_BYTES = 16 * 2**20  # of the file; later disagreements are counted only

# (gold answer, text of an answer) -> whether they are equal; None if this comparison cannot tell
Comparison = Callable[[str, str], bool | None]


class Audit:
    """Compares a share of the answers a second time and appends each disagreement to WORKDIR/audit.jsonl.

    Draw and text alone decide which answers are compared. A line that the file already has is not written again,
    because a resumed run scores some answers a second time.

    Args:
      fraction: share of the answers.
      compare: the second comparison, in this process.
    """

    def __init__(self, workdir: pathlib.Path, fraction: float, compare: Comparison):
        self._path = workdir / FILE
        self._fraction, self._compare = fraction, compare
        self._written: set[str] | None = None  # lines of the file; read when the first disagreement is found

    def check(self, prompt: Prompt, text: str, reward: float) -> str:
        """'agrees', 'disagrees' or 'undecided'; '' for an answer outside the share."""
        if hash_fraction(f'{prompt.draw}\n{text}') >= self._fraction:
            return ''
        equal = self._compare(str(prompt.problem['answer']), text)
        if equal is None:
            return 'undecided'
        if equal == (reward > 0):
            return 'agrees'
        self._keep(prompt, text, reward)
        return 'disagrees'

    def _keep(self, prompt: Prompt, text: str, reward: float) -> None:
        if self._written is None:
            self._written = set(self._path.read_text().splitlines()) if self._path.exists() else set()
        question, gold = prompt.problem['question'], prompt.problem['answer']
        record = {'draw': prompt.draw, 'question': question, 'gold': gold, 'reward': reward, 'text': text}
        line = json.dumps(record)
        room = MOST_BYTES - sum(len(written) + 1 for written in self._written)
        if line in self._written or len(line) + 1 > room:
            return
        self._written.add(line)
        writer = files.LineWriter(self._path)
        writer.write(line)
        writer.close()


LANE = lanes.REWARD
# labels of attempts without a reward after which another attempt may succeed; 'error': the scorer raised, or gave none
_FAILED = {TimeoutError: 'timeout', WorkerDiedError: 'crash', MachineFaultError: 'sandbox'}

_CLOSE_S = 5.0  # a worker kills the processes of its scorer within 3 s

_log = logging.getLogger(__name__)

Decode = Callable[[np.ndarray], str]
StartWorker = Callable[[str, int], WorkerProcess]  # (worker.join_scorers, memory_mb)


class VerifierError(UserError, RuntimeError):
    """Raised if the workers of a verifier cannot be started."""


class InlineVerifier:
    """Scores on the event loop: for scorers that are fast and trusted to return.

    `trial` is a problem whose empty answer is scored at the start: if that fails, the run ends and names `scorer`.
    """

    def __init__(self, score: Scorer, decode: Decode, trial: Problem | None = None, scorer: str = ''):
        self.attempts_by_label: collections.Counter[str] = collections.Counter()
        self._score = score
        self._decode = decode
        self._trial, self._scorer = trial, scorer

    def launch(self) -> None:
        """Does nothing: there are no workers."""

    def start(self) -> None:
        """Scores the trial. Raises VerifierError if that fails."""
        if self._trial is not None:
            try:
                score_answer(self._score, copy.deepcopy(dict(self._trial)), '', 'stop', self._describe_trial())
            except ScoringError as error:
                raise _trial_failed(self._scorer, error) from error

    def close(self) -> None:
        """Does nothing: there are no workers."""

    def _describe_trial(self) -> JsonObject | None:
        return complete_episode({}, self._trial or {}, str, '', 'stop') if takes_episode(self._score) else None

    async def verify(
        self,
        prompt: Prompt,
        answer: np.ndarray | str,
        finish_reason: FinishReason,
        describe_episode: DescribeEpisode | None = None,
    ) -> Verdict:
        """Returns the verdict on an answer (tokens or a text); 'error' if the scorer raises or returns no reward."""
        text = answer if isinstance(answer, str) else self._decode(answer)
        problem = copy.deepcopy(dict(prompt.problem))  # a scorer that changes it must not change the next scoring
        episode = None
        if takes_episode(self._score):
            found = describe_answer(prompt, text, finish_reason, self._decode, describe_episode)
            episode = copy.deepcopy(found)
        try:
            score = score_answer(self._score, problem, text, finish_reason, episode)
            verdict = Verdict(float(score), label=score.label)
        except (ScoringError, MachineFaultError) as error:
            _log.warning('scoring draw %d of %s failed: %s', prompt.draw, prompt.task, error)
            verdict = Verdict(0.0, label='error', reason=str(error))
        self.attempts_by_label[verdict.label] += 1
        return verdict


class InlineMixture:
    """Scores each answer with the inline verifier of its source."""

    def __init__(self, of_sources: Mapping[str, InlineVerifier]):
        self._of_sources = of_sources

    @property
    def attempts_by_label(self) -> collections.Counter[str]:
        return collections.Counter(
            label for verifier in self._of_sources.values() for label in verifier.attempts_by_label.elements()
        )

    def launch(self) -> None:
        """Does nothing: there are no workers."""

    def start(self) -> None:
        """Scores the trials. Raises VerifierError if one fails."""
        for verifier in self._of_sources.values():
            verifier.start()

    def close(self) -> None:
        """Does nothing: there are no workers."""

    async def verify(
        self,
        prompt: Prompt,
        answer: np.ndarray | str,
        finish_reason: FinishReason,
        describe_episode: DescribeEpisode | None = None,
    ) -> Verdict:
        """Returns the verdict of the source of the prompt; see InlineVerifier.verify."""
        return await self._of_sources[prompt.source].verify(prompt, answer, finish_reason, describe_episode)


def describe_answer(
    prompt: Prompt, text: str, finish_reason: FinishReason, decode: Decode, describe_episode: DescribeEpisode | None
) -> JsonObject:
    """The episode of one answer as JSON, for a scorer that takes it."""
    found = describe_episode() if describe_episode else {}
    return complete_episode(found, prompt.problem, lambda: decode(prompt.tokens), text, finish_reason)


def _trial_failed(scorer: str, error: Exception) -> VerifierError:
    return VerifierError(
        f'the scorer {scorer} fails at an empty answer to the first problem: {shorten_reason(str(error))}; it must '
        'give every answer a number'
    )


@dataclasses.dataclass(frozen=True)
class TaskScoring:
    """How the answers to one task, the only one or a source of a mixture, are scored in worker processes."""

    scorer: str  # 'module:function' or '/path/to/file.py:function'
    trial: Problem | None = None  # whose empty answer is scored at the start
    references: Sequence[Problem] = ()  # whose answers must be scored 'ok' at the start
    audit: Audit | None = None  # compares a share of the scored answers a second time, which changes no reward
    with_episode: bool = False  # the scorer has a parameter `episode` (worker.takes_episode)


@dataclasses.dataclass(eq=False)
class _Slot:
    """Room for one worker at a time."""

    worker: WorkerProcess


@dataclasses.dataclass(eq=False)
class _Ticket:
    """A place in the queue for a slot; `slot` is set when its turn has come."""

    turn: Event
    slot: _Slot | None = None


class ProcessVerifier:
    """Scores in worker processes, first come, first served, each attempt with a deadline.

    If an attempt hangs ('timeout'), its worker ends or sends anything but one reply ('crash'), or the answer could not
    be judged ('sandbox'), the worker is killed with every process of its scorer and replaced, and the answer is scored
    again, `attempts` times at most. If the scorer raises or returns no reward ('error'), it would do so again, so there
    is no further attempt.

    `deadline_s` and `start_deadline_s` are wall seconds; for `memory_mb` see worker.limit_memory. Every worker scores
    the answers of all `scorings`, which are by `Prompt.source`; that of the only task is under ''.
    """

    def __init__(
        self,
        clock: Clock,
        scorings: Mapping[str, TaskScoring],
        decode: Decode,
        *,
        workers: int,
        deadline_s: float,
        attempts: int,
        memory_mb: int,
        start_deadline_s: float = 120.0,
        lane: str = LANE,
        start_worker: StartWorker = WorkerProcess,
    ):
        if workers < 1 or attempts < 1 or deadline_s <= 0:
            raise TaskError(
                f'task.verifier_workers={workers}, task.verifier_attempts={attempts}, '
                f'task.verifier_deadline_s={deadline_s}: at least one worker, one attempt and some time are needed'
            )
        self.attempts_by_label: collections.Counter[str] = collections.Counter()
        self._clock, self._lane = clock, lane
        self._scorings = scorings
        self._scorers = join_scorers({source: scoring.scorer for source, scoring in scorings.items()})
        self._decode = decode
        self._n_workers = workers
        self._is_closed = False
        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._attempts = attempts
        self._memory_mb = memory_mb
        self._start_worker = start_worker
        self._workers: list[WorkerProcess] = []  # every process that may still be in the process table
        self._free: collections.deque[_Slot] = collections.deque()
        self._queue: collections.deque[_Ticket] = collections.deque()

    def launch(self) -> None:
        """Starts all workers and returns at once; `start` waits for them. Call it before jax is in use.

        Raises VerifierError.
        """
        try:
            self._free.extend([_Slot(self._spawn()) for _ in range(self._n_workers)])
        except OSError as error:
            raise self._not_started(error) from error

    def start(self) -> None:
        """Blocks until all workers are ready; launches them first if that was not done. Raises VerifierError."""
        if not self._free:
            self.launch()
        end_s = time.monotonic() + self._start_deadline_s
        try:
            for slot in self._free:
                slot.worker.wait_until_ready(end_s)
        except (OSError, WorkerDiedError) as error:
            raise self._not_started(error) from error
        for source, scoring in self._scorings.items():
            if scoring.trial is not None:
                self._try_out(self._free[0].worker, source, scoring, scoring.trial)
        for source, scoring in self._scorings.items():
            if scoring.references:
                self._require_references(self._free[0].worker, source, scoring.references)

    def _not_started(self, error: Exception) -> VerifierError:
        """Ends the workers that have been started; returns the error to raise."""
        self.close()
        return VerifierError(
            f'no worker for the scorer {self._scorers!r} within {self._start_deadline_s} s: {error} '
            f'(task.verifier_memory_mb={self._memory_mb})'
        )

    def close(self) -> None:
        """Ends all workers and every process of their scorers, for good; takes a few seconds at most."""
        self._is_closed = True
        for worker in self._workers:
            worker.kill()
        end_s = time.monotonic() + _CLOSE_S
        for worker in self._workers:
            worker.close(max(0.0, end_s - time.monotonic()))
        self._workers.clear()

    async def verify(
        self,
        prompt: Prompt,
        answer: np.ndarray | str,
        finish_reason: FinishReason,
        describe_episode: DescribeEpisode | None = None,
    ) -> Verdict:
        """Returns the verdict on an answer (tokens or a text). The reward 0 of a failed one is not a score."""
        text = answer if isinstance(answer, str) else self._decode(answer)
        request = {'draw': prompt.draw, 'problem': dict(prompt.problem), 'text': text, 'finish_reason': finish_reason}
        request |= _name_source(prompt.source)
        if self._scorings[prompt.source].with_episode:
            request['episode'] = describe_answer(prompt, text, finish_reason, self._decode, describe_episode)
        waiting = len(self._queue)
        slot = await self._take_slot()
        try:
            for attempt in range(1, self._attempts + 1):
                verdict = await self._attempt(slot, request, prompt, attempt)
                self.attempts_by_label[verdict.label] += 1
                if verdict.label not in _FAILED.values():
                    break
            return self._audited(dataclasses.replace(verdict, waiting=waiting), prompt, request)
        finally:
            self._release_slot(slot)

    def _try_out(self, worker: WorkerProcess, source: str, scoring: TaskScoring, problem: Problem) -> None:
        request = {'draw': 0, 'problem': dict(problem), 'text': '', 'finish_reason': 'stop', **_name_source(source)}
        if scoring.with_episode:
            request['episode'] = complete_episode({}, problem, str, '', 'stop')
        try:
            reply = worker.ask_at_once(request, time.monotonic() + self._deadline_s)
            if 'error' in reply:
                raise ScoringError(reply['error'])
            to_reward(reply['reward'])
        except TimeoutError as error:
            self.close()
            late = ScoringError(f'it takes more than task.verifier_deadline_s={self._deadline_s:g}')
            raise _trial_failed(scoring.scorer, late) from error
        except (ScoringError, WorkerDiedError, TypeError, ValueError, OverflowError) as error:
            self.close()
            raise _trial_failed(scoring.scorer, error) from error

    def _require_references(self, worker: WorkerProcess, source: str, references: Sequence[Problem]) -> None:
        print(f'checking {len(references)} reference solutions', flush=True)
        for problem in references:
            request = {'draw': 0, 'problem': dict(problem), 'text': problem['answer'], 'finish_reason': 'stop'}
            request |= _name_source(source)
            try:
                reply = worker.ask_at_once(request, time.monotonic() + self._deadline_s)
            except (TimeoutError, WorkerDiedError) as error:
                reply = {'fault': str(error) or f'it takes more than task.verifier_deadline_s={self._deadline_s:g}'}
            label = reply.get('label', 'ok')
            if 'reward' in reply and label == 'ok':
                continue
            self.close()
            reason = shorten_reason(str(reply.get('reason', reply.get('fault', reply.get('error', '')))))
            if 'reward' not in reply:
                raise VerifierError(f'{problem["place"]}: its solution could not be judged: {reason}')
            which = 'its hidden tests' if label == 'visible_only' else 'its tests'
            raise TaskError(
                f'{problem["place"]}: its solution fails {which} ({label}: {reason}): mend the test or the solution, '
                'or remove the problem'
            )

    def _audited(self, verdict: Verdict, prompt: Prompt, request: JsonObject) -> Verdict:
        audit = self._scorings[prompt.source].audit
        if audit is None or verdict.failed or request['finish_reason'] != 'stop':
            return verdict
        return dataclasses.replace(verdict, audit=audit.check(prompt, request['text'], verdict.reward))

    async def _attempt(self, slot: _Slot, request: JsonObject, prompt: Prompt, attempt: int) -> Verdict:
        try:
            reply = await self._ask(slot, request, {'draw': prompt.draw, 'attempt': attempt})
            if 'fault' in reply:
                raise MachineFaultError(reply['fault'])
        except (TimeoutError, WorkerDiedError, MachineFaultError) as error:
            label = next(label for kind, label in _FAILED.items() if isinstance(error, kind))
            reason = shorten_reason(str(error))
            _log.warning('scoring draw %d of %s, attempt %d: %s (%s)', prompt.draw, prompt.task, attempt, label, reason)
            slot.worker.kill()
            slot.worker = self._spawn()  # loads its scorer before the next request needs it
            return Verdict(0.0, attempt, label, reason=reason)
        except BaseException:
            slot.worker.kill()  # cancelled: a late reply may still arrive, so the slot's next user starts a new worker
            raise
        try:
            if 'error' in reply:
                raise ScoringError(reply['error'])
            measured = {name: reply[name] for name in MEASURED if name in reply}
            reward = to_reward(reply['reward'])
            score = check_score(Score(reward, reply.get('label', 'ok'), **measured), reward)
            return Verdict(reward, attempt, score.label, **{name: getattr(score, name) for name in MEASURED})
        except (ScoringError, TypeError, ValueError, OverflowError) as error:
            reason = shorten_reason(str(error))
            _log.warning('scoring draw %d of %s failed: %s', prompt.draw, prompt.task, reason)
            return Verdict(0.0, attempt, 'error', reason=reason)

    async def _ask(self, slot: _Slot, request: JsonObject, detail: JsonObject) -> JsonObject:
        if slot.worker.is_killed:
            slot.worker = self._spawn()
        if not slot.worker.is_ready:
            start = Work('reward', 0.0, {**detail, 'worker': 'start'}, recorded=True)
            await self._clock.call(self._lane, slot.worker.become_ready, start, self._start_deadline_s)
            slot.worker.is_ready = True  # also in a replay, where the worker has no process
        ask = functools.partial(slot.worker.ask, request)
        work = Work('reward', 1.0, detail, recorded=True)
        return await self._clock.call(self._lane, ask, work, self._deadline_s)

    def _spawn(self) -> WorkerProcess:
        self._workers = [worker for worker in self._workers if not worker.is_gone()]
        if self._is_closed:
            raise VerifierError('the verifier was closed while an answer was being scored')
        self._workers.append(self._start_worker(self._scorers, self._memory_mb))
        return self._workers[-1]

    async def _take_slot(self) -> _Slot:
        if not self._workers:
            raise VerifierError('the verifier has no workers: call start() before, close() after the last answer')
        if self._free:
            return self._free.popleft()
        ticket = _Ticket(self._clock.event('a free verifier worker'))
        self._queue.append(ticket)
        try:
            await self._clock.wait(ticket.turn)
        except BaseException:
            if ticket.slot is None:
                self._queue.remove(ticket)
            else:
                self._release_slot(ticket.slot)
            raise
        assert ticket.slot is not None
        return ticket.slot

    def _release_slot(self, slot: _Slot) -> None:
        if not self._queue:
            self._free.append(slot)
            return
        ticket = self._queue.popleft()
        ticket.slot = slot
        ticket.turn.set()


def _name_source(source: str) -> JsonObject:
    """The part of a request that says which of several scorers it is for."""
    return {'source': source} if source else {}
