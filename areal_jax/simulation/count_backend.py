"""A decode backend without weights: it counts tokens, and an answer ends at the length that was drawn for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from areal_jax.config.ranges import ConfigError
from areal_jax.rollout.backend import DecodeOutput, DecodeRow, PrefillBucket, PrefillPiece, SamplingSupport, Span
from areal_jax.types import GenerationRequest, repeat

LOGPROB = -1.0  # of every token
AnswerLength = Callable[[int, int, int], int]  # (draw, sample, turn) -> tokens after which it stops by itself
FIRST = 1024  # token of draw 0: no end of an answer; smaller ones are those of results of tools
_NO_COUNTS = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True)
class CountOutput(DecodeOutput):
    """A DecodeOutput whose arrays repeat one value a row, so that neither its memory nor its cost grows with steps."""

    given: np.ndarray = dataclasses.field(default_factory=lambda: _NO_COUNTS)  # int64 [rows]: valid tokens

    def counts(self) -> np.ndarray:
        return self.given

    def by_row(self) -> CountOutput:
        return dataclasses.replace(self, tokens=self.tokens.T, logprobs=self.logprobs.T)

    def unsound(self) -> list[tuple[int, float]]:
        return []


@dataclasses.dataclass(frozen=True, eq=False)
class Jump:
    """One dispatch, and the dispatches like it that can follow until the first answer ends.

    Args:
      tokens: int32 [rows], the token that a row repeats.
      left: int64 [rows], tokens until the answer ends.
      stops: bool [rows], whether it then ends by itself; else it has reached its limit.
      positions: int64 [rows], that the row's first step sees.
      steps: of one dispatch.
    """

    tokens: np.ndarray
    left: np.ndarray
    stops: np.ndarray
    positions: np.ndarray
    steps: int

    @property
    def dispatches(self) -> int:
        """Up to the one in which the first answer ends, that one included."""
        return -(-int(self.left.min()) // self.steps)

    def finish(self, dispatches: int) -> CountOutput:
        """What came of so many."""
        steps = dispatches * self.steps
        given = np.minimum(self.left, steps)
        shape = steps, len(given)
        positions = given * self.positions + given * (given - 1) // 2
        return CountOutput(
            tokens=np.broadcast_to(self.tokens, shape), logprobs=np.broadcast_to(np.float32(LOGPROB), shape),
            valid=np.broadcast_to(np.True_, shape), positions_read=int(positions.sum()),
            ended=self.stops & (given == self.left), given=given,
        )  # fmt: skip


class CountBackend:
    """Implements rollout.backend.DecodeBackend.

    Args:
      answer_length: of an answer that no limit cuts.
      distinct: answers to a prompt differ in their tokens, so that a later turn finds its own conversation in the KV
        cache. Without it all tokens are equal, and take no memory.
      buckets: ascending tokens of a dispatch of prefill; a longer sequence goes in pieces of the last.
      devices: names of the devices of the engine.
      cache_bytes: of its KV cache.
      jumps: whether `generate` gives a Jump, which the simulated clock finishes, in place of one dispatch.
    """

    records_context = False
    sampling = SamplingSupport(vocab_size=2**31 - 1, cuts=True, adjusts=False, stop_tokens=4, biased_tokens=0)

    def __init__(
        self,
        answer_length: AnswerLength,
        *,
        slots: int,
        context_tokens: int,
        block_tokens: int,
        cache_blocks: int,
        buckets: Sequence[int],
        devices: Sequence[str],
        cache_bytes: int = 0,
        jumps: bool = True,
        distinct: bool = False,
    ):
        self._answer_length, self._buckets, self._jumps = answer_length, tuple(buckets), jumps
        self._distinct = distinct
        self.slots, self.context_tokens, self.block_tokens = slots, context_tokens, block_tokens
        self.cache_blocks, self.devices, self.state_bytes = cache_blocks, tuple(devices), cache_bytes

    def prepare(self, weights: int) -> int:
        return weights

    def initial_state(self) -> int:
        return 0

    @property
    def largest_piece(self) -> int:
        return self._buckets[-1]

    def prefill_bucket(self, spans: Sequence[Span]) -> PrefillBucket | None:
        tokens = sum(span.stop - span.start for span in spans)
        prior = self.context_tokens if any(span.start for span in spans) else 0
        return next((PrefillBucket(size, prior) for size in self._buckets if tokens <= size), None)

    def prefill(self, weights: int, state: int, pieces: Sequence[PrefillPiece]) -> int:
        return state

    def batch_bucket(self, rows: Sequence[DecodeRow]) -> int:
        return self.slots

    def generate(self, weights: int, state: int, rows: Sequence[DecodeRow], steps: int) -> tuple[int, DecodeOutput]:
        ends = [self._find_ends(row) for row in rows]
        jump = Jump(
            tokens=np.array([_find_token(row) if self._distinct else row.token for row in rows], np.int32),
            left=np.array([left for left, _ in ends], np.int64),
            stops=np.array([stops for _, stops in ends]),
            positions=np.array([row.position for row in rows], np.int64) + 1,
            steps=steps,
        )
        return state, cast(DecodeOutput, jump) if self._jumps else jump.finish(1)

    def _find_ends(self, row: DecodeRow) -> tuple[int, bool]:
        """(tokens until the answer ends, whether it then ends by itself)."""
        request = row.request
        begin = row.limit - request.sampling.max_new_tokens
        turn = _find_turn(request) if self._distinct else 0
        length = self._answer_length(request.draw, request.sample, turn)
        left = min(begin + length, row.limit) - row.position - 1
        return left, begin + length <= row.limit

    def read_context(self, state: int, blocks: Sequence[int], tokens: int) -> dict[str, np.ndarray]:
        return {}

    def copy(self, state: int, sources: Sequence[int], targets: Sequence[int]) -> int:
        return state


def prompt_tokens(draw: int, count: int) -> np.ndarray:
    """int32 [count]: a prompt that no other draw has."""
    return repeat(_token(draw), count, np.int32)


def result_tokens(call: int, count: int) -> np.ndarray:
    """int32 [count]: what a tool gives after turn `call`; the next turn is known by it.

    Raises ConfigError for more turns than there are such tokens.
    """
    if call + 1 >= FIRST:
        raise ConfigError(f'simulation.turns: an episode has more than {FIRST} turns; bound it with agent.max_turns')
    return repeat(call + 1, count, np.int32)


def _find_turn(request: GenerationRequest) -> int:
    last = int(request.prompt_tokens[-1])
    return last if last < FIRST else 0


def _find_token(row: DecodeRow) -> int:
    return _token(row.request.draw, 1 + row.request.sample)


def _token(draw: int, further: int = 0) -> int:
    return FIRST + (draw + further) % (2**31 - 1 - FIRST)
