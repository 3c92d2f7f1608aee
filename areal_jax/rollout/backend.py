"""What stream.py drives: prefill, insert and generate as pure functions of weights and state, as in JetStream.

decode/backend.py implements it in JAX; tests/toys.py implements it on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from areal_jax.types import LARGEST_LOGPROB, GenerationRequest, Weights

State = Any  # a backend's own: its KV cache and what it knows of its slots, a tree of arrays
Prefix = Any  # a backend's own: the KV of one sequence, a tree of arrays


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
    valid: np.ndarray  # bool [steps, slots]; False from a slot's stop token (itself valid) or its limit on
    # float32 [steps, slots], of the cut softmax; None = a backend without cuts
    sampling_logprobs: np.ndarray | None = None

    def counts(self) -> np.ndarray:
        """int [slots]: valid tokens, the first of each slot."""
        return self.valid.sum(axis=0)

    def by_slot(self) -> DecodeOutput:
        """The same with arrays [slots, steps], so that the tokens of one slot are contiguous."""
        cut = None if self.sampling_logprobs is None else np.ascontiguousarray(self.sampling_logprobs.T)
        tokens, logprobs, valid = map(np.ascontiguousarray, (self.tokens.T, self.logprobs.T, self.valid.T))
        return DecodeOutput(tokens, logprobs, valid, cut)

    def unsound(self) -> list[tuple[int, float]]:
        """(slot, log-prob) of every valid token whose log-prob is NaN, infinite, or above 0 by more than rounding."""
        found: list[tuple[int, float]] = []
        for logprobs in (self.logprobs, self.sampling_logprobs):
            if logprobs is not None:
                wrong = self.valid & ~((logprobs > -np.inf) & (logprobs <= LARGEST_LOGPROB))
                found += [(int(slot), float(logprobs[step, slot])) for step, slot in np.argwhere(wrong)]
        return found


class DecodeBackend(Protocol):
    """Runs on the engine's lane; holds compiled programs, but neither weights nor state."""

    slots: int
    context_tokens: int
    devices: tuple[str, ...]  # names of those that hold the KV cache

    @property
    def state_bytes(self) -> int:
        """Of one state, its KV cache included."""
        ...

    def initial_state(self) -> State: ...

    def prefill(self, weights: Weights, sequences: Sequence[np.ndarray]) -> list[Prefix]:
        """The KV of each int32 [L] sequence (L may be 0), at most `slots` of them, padded to a declared bucket."""
        ...

    def insert(self, prefix: Prefix, state: State, inits: Sequence[SlotInit]) -> State:
        """Copies one prefix, the KV of `tokens[:-1]`, to the slots of all `inits`, which are decoded from then on."""
        ...

    def generate(self, weights: Weights, state: State, steps: int, width: int) -> tuple[State, DecodeOutput]:
        """Up to `steps` tokens for every live slot, attending to the first `width` cache positions."""
        ...

    def release(self, state: State, slots: Sequence[int]) -> State:
        """The state in which these slots are not decoded: they are cancelled, requeued or about to be rebuilt."""
        ...

    def width_for(self, longest: int) -> int:
        """The smallest declared decode width that holds `longest` positions."""
        ...

    def prefill_bucket(self, longest: int) -> int:
        """The smallest declared prefill bucket that holds `longest` tokens."""
        ...
