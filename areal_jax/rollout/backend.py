"""What an engine drives: prefill, insert, generate as pure functions of weights and state (JetStream's contract)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from areal_jax.types import LARGEST_LOGPROB, GenerationRequest


@dataclasses.dataclass(frozen=True)
class SlotInit:
    """What a slot needs to start decoding."""

    slot: int
    request: GenerationRequest  # seed, draw, sample, sampling parameters
    tokens: np.ndarray  # int32 [L], L >= 1: prompt and what was generated so far; the last is the next decode input
    limit: int  # the sequence ends (reason 'length') when it has this many tokens


@dataclasses.dataclass(frozen=True)
class DecodeOutput:
    """Up to `steps` tokens of every slot, on the host."""

    tokens: np.ndarray  # int32 [steps, slots]
    logprobs: np.ndarray  # float32 [steps, slots], of the full softmax at the temperature
    valid: np.ndarray  # bool [steps, slots]; False after a slot's stop token (itself valid) or its limit
    sampling_logprobs: np.ndarray | None = (
        None  # float32 [steps, slots], of the cut softmax; None = a backend without cuts
    )

    def unsound(self) -> list[tuple[int, float]]:
        """(slot, log-prob) of every valid token whose log-prob is NaN, infinite, or above 0 by more than rounding."""
        found: list[tuple[int, float]] = []
        for logprobs in (self.logprobs, self.sampling_logprobs):
            if logprobs is not None:
                wrong = self.valid & ~((logprobs > -np.inf) & (logprobs <= LARGEST_LOGPROB))
                found += [(int(slot), float(logprobs[step, slot])) for step, slot in np.argwhere(wrong)]
        return found


class DecodeBackend(Protocol):
    """Runs on the engine's lane; holds compiled programs and no weights, no state."""

    slots: int
    context_tokens: int

    def initial_state(self) -> Any: ...

    def prefill(self, weights: Any, sequences: Sequence[np.ndarray]) -> list[Any]:
        """The KV of each int32 [L] sequence (L may be 0), at most `slots` of them, padded to a declared bucket."""
        ...

    def insert(self, prefix: Any, state: Any, inits: Sequence[SlotInit]) -> Any:
        """One prefix, the KV of `tokens[:-1]`, goes to the slots of all `inits`; they are live afterwards."""
        ...

    def generate(self, weights: Any, state: Any, steps: int, width: int) -> tuple[Any, DecodeOutput]:
        """Up to `steps` tokens for every live slot, attending to the first `width` cache positions."""
        ...

    def release(self, state: Any, slots: Sequence[int]) -> Any:
        """The slots are dead: finished by the scheduler, cancelled or about to be rebuilt."""
        ...

    def width_for(self, longest: int) -> int:
        """The smallest declared decode width that holds `longest` positions."""
        ...

    def prefill_bucket(self, longest: int) -> int:
        """The smallest declared prefill bucket that holds `longest` tokens."""
        ...

    def warm_up(self, weights: Any, announce: Callable[[int, int], None] = ...) -> int:
        """Compile every declared program; returns how many. `announce` gets (done, of how many) before each."""
        ...
