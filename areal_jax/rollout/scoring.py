"""Scoring: log-probs of given tokens by one forward pass over whole sequences, while an engine decodes others.

Requests wait in a queue. A pass takes as many of them as a row holds, in their order, and runs on the engine's lane
between two dispatches with the weights then in use, so that every sequence has the log-probs of one version. It neither
reads nor writes the cache of the engine. decode/jax_backend.py implements ScoringBackend in JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Sequence
from typing import Protocol

import numpy as np

from areal_jax.errors import UserError
from areal_jax.protocols import Clock, Event
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.stream import LogprobError
from areal_jax.types import (
    LARGEST_LOGPROB,
    TokenScores,
    Weights,
    Work,
)

NO_SCORES = TokenScores(np.zeros(0, np.float32), np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))


class ScoringError(UserError):
    """A sequence that can not be scored."""


@dataclasses.dataclass(frozen=True, eq=False)
class ScoringRequest:
    """Tokens to be scored. Requests compare by identity, so one can be ended even if another has the same name."""

    name: str  # need not be unique
    tokens: np.ndarray  # int32 [n], n >= 2
    first: int  # 1 <= first < n: tokens [first, n) are scored, each given all before it
    temperatures: np.ndarray  # float32 [n - first], of the softmax of each; 0 counts as 1
    alternatives: int = 0  # k, at most MOST_ALTERNATIVES
    group: str = ''  # shared by all sequences of one call


@dataclasses.dataclass(frozen=True)
class Scored:
    """The result of a scoring pass for one sequence."""

    scores: TokenScores
    version: str  # of the weights
    number: int  # the service's number of these weights


class ScoringBackend(Protocol):
    """Forward passes over packed sequences in shapes from a short declared list."""

    @property
    def programs(self) -> int: ...

    def program_for(self, lengths: Sequence[int], alternatives: int) -> Hashable | None:
        """Returns the program whose row holds sequences of these lengths; None if they need more than one pass."""
        ...

    def is_compiled(self, program: Hashable) -> bool: ...

    def compile(self, program: Hashable, weights: Weights) -> None: ...

    def score(self, program: Hashable, weights: Weights, requests: Sequence[ScoringRequest]) -> list[TokenScores]:
        """Scores the requests on the engine's lane; raises ValueError if the row of the program does not hold them."""
        ...


@dataclasses.dataclass
class ScoringTotals:
    """Totals of all passes since the start."""

    passes: int = 0
    tokens: int = 0  # that went through the model, without padding


@dataclasses.dataclass
class _Waiting:
    request: ScoringRequest
    done: Event
    version: int = 0
    scores: TokenScores | None = None  # None: cancelled


class Scorer:
    """The queue of one engine; `serve` is its coroutine."""

    def __init__(self, engine: LocalEngine, backend: ScoringBackend, clock: Clock):
        self._engine, self.backend, self._clock = engine, backend, clock
        self.totals = ScoringTotals()
        self._queue: list[_Waiting] = []
        self._pass: list[_Waiting] = []  # being scored
        self._pausing = self._passing = False
        self._wake = clock.event(f'{engine.name}: a sequence to score')
        self._passed = clock.event(f'{engine.name}: a scoring pass has ended')
        self._emptied = clock.event(f'{engine.name}: nothing left to score')

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._pass)

    async def score(self, request: ScoringRequest) -> tuple[int, TokenScores] | None:
        """Returns (version of the weights, scores); None: it was cancelled. Raises ScoringError and LogprobError."""
        if self.backend.program_for([len(request.tokens)], request.alternatives) is None:
            raise ScoringError(f'{len(request.tokens)} tokens are more than this server scores at once: shorten them')
        waiting = _Waiting(request, self._clock.event(f'{request.name}: scored'))
        self._queue.append(waiting)
        self._wake.set()
        await self._clock.wait(waiting.done)
        if waiting.scores is None:
            return None
        self._require_sound(waiting.scores, waiting.version)
        return waiting.version, waiting.scores

    def open_requests(self) -> list[ScoringRequest]:
        return [waiting.request for waiting in (*self._pass, *self._queue)]

    def cancel(self, requests: Collection[ScoringRequest]) -> None:
        """Ends these requests; a pass that runs is not interrupted, its result is dropped."""
        for waiting in [*self._queue, *self._pass]:
            if waiting.request in requests:
                self._queue = [one for one in self._queue if one is not waiting]
                self._pass = [one for one in self._pass if one is not waiting]
                waiting.done.set()
        self._note_emptied()

    async def pause(self) -> None:
        """Returns when no pass runs; waiting requests are scored after `resume`, which ends this wait too."""
        self._pausing = True
        while self._pausing and self._passing:
            self._passed.clear()
            await self._clock.wait(self._passed)

    def resume(self) -> None:
        self._pausing = False
        self._passed.set()
        self._wake.set()

    async def drain(self) -> None:
        """Returns when nothing waits."""
        while self.waiting:
            self._emptied.clear()
            await self._clock.wait(self._emptied)

    async def serve(self) -> None:
        """Scores requests forever."""
        while True:
            if self._pausing or not self._queue:
                self._wake.clear()
                await self._clock.wait(self._wake)
            else:
                self._passing = True
                await self._run_pass()
                self._passing = False
                self._passed.set()
                self._note_emptied()

    async def _run_pass(self) -> None:
        program = self._fill_row()
        requests = [waiting.request for waiting in self._pass]
        began, backend = list(self._pass), self.backend
        if not backend.is_compiled(program):  # while decoding continues
            compiling = Work('compile', 1)
            await self._engine.run_beside(lambda weights: backend.compile(program, weights), compiling, decodes=True)
        tokens = sum(len(request.tokens) for request in requests)
        version, found = await self._engine.run_beside(
            lambda weights: backend.score(program, weights, requests), Work('score', tokens)
        )
        self.totals.passes += 1
        self.totals.tokens += tokens
        for waiting, scores in zip(began, found, strict=True):
            if any(waiting is one for one in self._pass):
                waiting.version, waiting.scores = version, scores
                waiting.done.set()
        self._pass = []

    def _fill_row(self) -> Hashable:
        """Moves the requests of one pass out of the queue: the first, then all that fit with it, in their order."""
        first, *others = self._queue
        taken, left, wide = [first], [], first.request.alternatives > 1
        alternatives = first.request.alternatives
        program = self.backend.program_for([len(first.request.tokens)], alternatives)
        assert program is not None
        for waiting in others:
            fits = None
            if (waiting.request.alternatives > 1) == wide:
                lengths = [len(one.request.tokens) for one in (*taken, waiting)]
                fits = self.backend.program_for(lengths, alternatives)
            if fits is None:
                left.append(waiting)
            else:
                taken.append(waiting)
                program = fits
        self._pass, self._queue = taken, left
        return program

    def _note_emptied(self) -> None:
        if not self.waiting:
            self._emptied.set()

    def _require_sound(self, scores: TokenScores, version: int) -> None:
        wrong = scores.logprobs[~((scores.logprobs > -np.inf) & (scores.logprobs <= LARGEST_LOGPROB))]
        if len(wrong):
            raise LogprobError(
                f'{self._engine.name}, version {version}: the log-prob of a scored token is {wrong[0]}; mend the '
                "weights or use publication.dtype='float32'"
            )
