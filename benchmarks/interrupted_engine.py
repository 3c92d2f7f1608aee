"""An engine that always has as many requests as slots while new weights arrive.

Policies:

  none       no new weights: the speed that nothing interrupts
  wait       new weights are loaded when the running requests have ended; none begins meanwhile
  recompute  they are loaded between two dispatches, and the KV of unfinished answers is computed again
  keep       likewise, and the KV is kept

Weights are due every `interval_s`, whatever the engine does, and are fetched while decoding goes on. Where those before
are not in use yet, they are due at once when they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import numpy as np

from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.events.schema import Event
from areal_jax.rollout.backend import DecodeBackend
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.types import GenerationRequest, PublishedWeights, SamplingParams, Weights
from benchmarks.workload import FIRST_TOKEN, draw_lengths

Policy = Literal['none', 'wait', 'recompute', 'keep']
POLICIES: tuple[Policy, ...] = get_args(Policy)
DRAWN = 4096  # lengths that are used again and again


@dataclasses.dataclass(frozen=True)
class Load:
    """What the engine is asked for, and when new weights come."""

    prompt_tokens: int
    mean_tokens: int  # of an answer
    limit_tokens: int
    sigma: float
    vocabulary: int
    seed: int
    group_size: int  # answers of a prompt
    warm_up: int  # intervals before the measured ones
    updates: int  # measured intervals, each ends when new weights are in use


class InterruptedEngine:
    """One run; `measure` returns what was decoded in the measured intervals.

    Args:
      on_mark: called where measuring begins and where it ends.
      receive: fetches a version; None = every version is `weights`.
    """

    def __init__(
        self,
        clock: LoopClock,
        log: EventLog,
        backend: DecodeBackend,
        weights: Weights,
        load: Load,
        policy: Policy,
        *,
        decode_steps: int,
        interval_s: float,
        on_mark: Callable[[], None] = lambda: None,
        receive: Callable[[PublishedWeights], Weights] | None = None,
    ):
        self._clock, self._load, self._policy, self._interval_s = clock, load, policy, interval_s
        self._supervisor, self._slots, self._on_mark = Supervisor(clock), backend.slots, on_mark
        self._engine = LocalEngine(
            0, backend, clock, log, receive=receive or (lambda published: weights), version=0, params=weights,
            rollout=RolloutSection(kv_policy='keep' if policy == 'keep' else 'recompute', decode_steps=decode_steps),
        )  # fmt: skip
        rng = np.random.default_rng(load.seed)
        self._lengths = draw_lengths(DRAWN, load.mean_tokens, load.limit_tokens, load.sigma, rng)
        self._begun = self._open = 0
        self._is_closed = False  # no request begins
        self._emptied, self._never = clock.event('the last running request has ended'), clock.event('an interval')
        self._counts = dict.fromkeys(('tokens', 'rebuilt', 'held_s', 'pause_s', 'dispatches', 'rows', 'ended'), 0.0)
        log.listeners.append(self._note)

    def measure(self) -> dict[str, float]:
        """Counts of the measured intervals, and their clock seconds."""
        return self._clock.execute(self._supervisor.run(self._program()))

    async def _program(self) -> dict[str, float]:
        self._engine.start(self._supervisor)
        self._fill()
        for version in range(1, 1 + self._load.warm_up):
            await self._pass_interval(version)
        before, began_s = dict(self._counts), self._clock.now()
        self._on_mark()
        for version in range(1 + self._load.warm_up, 1 + self._load.warm_up + self._load.updates):
            await self._pass_interval(version)
        self._on_mark()
        found = {name: value - before[name] for name, value in self._counts.items()}
        found['clock_s'] = self._clock.now() - began_s
        found['occupancy'] = found.pop('rows') / (self._slots * found['dispatches'])
        return found

    async def _pass_interval(self, version: int) -> None:
        left_s = version * self._interval_s - self._clock.now()
        if left_s > 0:
            await self._clock.wait(self._never, left_s)
        if self._policy == 'none':
            return
        await self._engine.stage(PublishedWeights(version, '', None))
        due_s = self._clock.now()
        if self._policy == 'wait':
            self._is_closed = True
            while self._open:
                self._emptied.clear()
                await self._clock.wait(self._emptied)
        self._counts['held_s'] += self._clock.now() - due_s
        self._counts['pause_s'] += await self._engine.swap(version)
        self._is_closed = False
        self._fill()

    def _fill(self) -> None:
        """As many requests as slots; they begin in the same order under every policy."""
        while self._open < self._slots and not self._is_closed:
            number, self._begun, self._open = self._begun, self._begun + 1, self._open + 1
            self._supervisor.start(f'request {number}', self._follow(self._make_request(number)))

    async def _follow(self, request: GenerationRequest) -> None:
        async for _ in self._engine.generate(request):
            pass
        self._open -= 1
        self._counts['ended'] += 1
        self._fill()
        if not self._open:
            self._emptied.set()

    def _make_request(self, number: int) -> GenerationRequest:
        load, (draw, sample) = self._load, divmod(number, self._load.group_size)
        rng = np.random.default_rng((load.seed, draw))
        prompt = rng.integers(min(FIRST_TOKEN, load.vocabulary - 1), load.vocabulary, load.prompt_tokens)
        sampling = SamplingParams(int(self._lengths[number % DRAWN]), 1.0, 0, 1.0, ())
        return GenerationRequest(draw, sample, load.seed, prompt.astype(np.int32), sampling)

    def _note(self, event: Event) -> None:
        if event['kind'] == 'decode':
            self._counts['tokens'] += event['tokens']
            self._counts['dispatches'] += 1
            self._counts['rows'] += sum(slot is not None for slot in event['slots'])
        elif event['kind'] == 'prefill':
            self._counts['rebuilt'] += event['rebuilt']


def gain_over_waiting(tokens_s: Mapping[Policy, float]) -> dict[str, float]:
    """By how much each policy is faster than waiting: 0.1 is 10 %."""
    return {policy: speed / tokens_s['wait'] - 1 for policy, speed in tokens_s.items() if policy != 'wait'}
