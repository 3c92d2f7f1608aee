"""A request that goes on elsewhere when its engine fails. Workflows iterate over it."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np

from areal_jax.protocols import Clock
from areal_jax.rollout.running_request import GrowingAnswer
from areal_jax.rollout.spare_engines import Entry
from areal_jax.types import LARGEST_LOGPROB, EngineFinish, GenerationRequest, Segment


class MovingRequest(GrowingAnswer):
    """`engine` is the last one that it was sent to, '' before the first."""

    def __init__(self, request: GenerationRequest, clock: Clock):
        super().__init__(request, clock)
        self.attempts = 0  # engines that failed it
        self.entry: Entry | None = None  # in the ledger, while an engine has it
        self.pump: asyncio.Task[None] | None = None  # takes what the engine delivers
        self.lowest_version = 0  # that the engine can generate with since it has the request
        self.taken_here = 0  # tokens from the engine that has it

    def take(self, segment: Segment) -> None:
        self.taken_here += len(segment.tokens)
        super().take(segment)

    def rest(self) -> GenerationRequest:
        """The request with everything received as its prefix."""
        return dataclasses.replace(self.request, prefix=tuple(self._received))

    def end_in_received(self) -> EngineFinish | None:
        """How the answer ended where its last token was received and the end was not."""
        sampling = self.request.sampling
        if self._received and int(self._received[-1].tokens[-1]) in sampling.stop_tokens:
            return 'stop'
        return 'length' if self.room_tokens <= 0 else None


def find_fault(segment: Segment, lowest_version: int, highest_version: int, room_tokens: int) -> str:
    """What is wrong with a segment that came from elsewhere, '' for nothing.

    The engine was given the versions from the lowest to the highest since it has the request.
    """
    tokens, logprobs = np.asarray(segment.tokens), np.asarray(segment.behavior_logprobs)
    if tokens.ndim != 1 or not len(tokens) or logprobs.shape != tokens.shape:
        return f'tokens of the shape {tokens.shape} with log-probs of the shape {logprobs.shape}'
    if not lowest_version <= segment.policy_version <= highest_version:
        return f'tokens of version {segment.policy_version}, and it was given {lowest_version} to {highest_version}'
    if len(tokens) > room_tokens:
        return f'{len(tokens)} tokens where {room_tokens} were left'
    sound = np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB)
    return '' if sound.all() else f'the log-prob {logprobs[~sound][0]}'
