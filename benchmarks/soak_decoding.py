"""An engine of the soak: it decodes beside a fetch, and its log-probs are compared with those of another tree."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend, PreparedWeights
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.types import GenerationRequest, SamplingParams
from benchmarks.side_engine import LANES, STALL_S

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 12, 16


class Decoding:
    """Generates the same requests again and again with the weights that were swapped in last."""

    def __init__(self, backend: JaxDecodeBackend, seed: int):
        self._backend, self._seed = backend, seed
        rng = np.random.default_rng(seed)
        self._prompts = rng.integers(1, 500, (PROMPTS, PROMPT_TOKENS), np.int32)
        self._weights: PreparedWeights | None = None
        self._logprobs = np.zeros(0)  # of the last generation with these weights

    def beside(self, fetch: Callable[[], PreparedWeights]) -> tuple[PreparedWeights, int]:
        """(what `fetch` returns, generations that went on meanwhile); they must give what they gave before."""
        if self._weights is None:
            return fetch(), 0
        found: list[PreparedWeights] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                found.append(fetch())
            except BaseException as error:
                errors.append(error)

        thread, done = threading.Thread(target=run), 0
        thread.start()
        while True:
            again = self._generate(self._weights)
            if not np.array_equal(again, self._logprobs):
                raise AssertionError('the weights in use changed while the next version arrived')
            done += 1
            if not thread.is_alive():
                break
        thread.join()
        if errors:
            raise errors[0]
        return found[0], done

    def swap(self, weights: PreparedWeights) -> None:
        self._weights = weights
        self._logprobs = self._generate(weights)

    def compare(self, expected: PreparedWeights) -> tuple[int, int]:
        """(log-probs compared, how many differ) with an engine that has loaded the same version whole."""
        other = self._generate(expected)
        return len(other), int(np.count_nonzero(other != self._logprobs))

    def _generate(self, weights: PreparedWeights) -> np.ndarray:
        log = EventLog(keeps=False)
        clock = RealClock(LANES, log, STALL_S)
        supervisor = Supervisor(clock)
        engine = LocalEngine(
            0, self._backend, clock, log, receive=lambda published: weights, version=0, params=weights,
            rollout=RolloutSection(decode_steps=4),
        )  # fmt: skip

        async def answer(request: GenerationRequest) -> list[np.ndarray]:
            return [segment.behavior_logprobs async for segment in engine.generate(request)]

        async def program() -> Any:
            engine.start(supervisor)
            sampling = SamplingParams(ANSWER_TOKENS, 1.0, 0, 1.0, ())
            requests = [
                GenerationRequest(draw, 0, self._seed, prompt, sampling) for draw, prompt in enumerate(self._prompts)
            ]
            return [await answer(request) for request in requests]

        answers = clock.execute(supervisor.run(program()))
        return np.concatenate([part for parts in answers for part in parts])
