"""A decode backend without weights: counts tokens and ends each answer at the length that was drawn for it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from areal_jax.checkpoint.store import Follower
from areal_jax.config.fields import ConfigError
from areal_jax.learning.objective.counting import UpdatePrice, data_metrics
from areal_jax.rollout.backend import DecodeOutput, DecodeRow, PrefillBucket, PrefillPiece, SamplingSupport, Span
from areal_jax.rollout.state_pool import StateSizes
from areal_jax.rollout.window_blocks import WindowSizes
from areal_jax.telemetry import names
from areal_jax.types import (
    NOT_GENERATED,
    GenerationRequest,
    PublishedWeights,
    TokenArrays,
    Trajectory,
    TrajectoryGroup,
    Weights,
    repeat,
)

DIGEST = 'simulated'  # of the weights of every version


class UpdateShape(NamedTuple):
    """The settings of an update on which the learner's counts depend."""

    optimizer_steps: int
    oldest_age: int | None  # tokens of a greater age are masked


class CountLearner:
    """Implements app.run.run.RunLearner; `price` says which groups are trained, and how tokens are counted."""

    followers: Sequence[Follower] = ()

    def __init__(self, price: UpdatePrice, shape: UpdateShape):
        self._price, self._shape = price, shape

    def warm_up(self) -> int:
        return 0

    def update_tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        return self._price.tokens(groups)

    def score(self, version: int, prompt_tokens: np.ndarray, answer_tokens: np.ndarray) -> None:
        return None

    def read_tokens(self, draws: Sequence[int]) -> list[list[TokenArrays]]:
        return [[] for _ in draws]

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, Any]:
        """The metrics of an update in which every optimizer step is applied."""
        kept = self._price.kept(groups)
        read = self._price.read(kept)
        everything, left = _count_ages(groups, version), _count_ages(kept, version)
        trained = {age: tokens for age, tokens in _count_ages(read, version).items() if self._is_trained(age)}
        masked = {age: tokens - trained.get(age, 0) for age, tokens in left.items()}
        filtered = {age: tokens - left[age] for age, tokens in everything.items()}
        total = sum(trained.values())
        metrics: dict[str, Any] = {
            **data_metrics(groups, kept),
            names.UPDATE_TOKENS: float(total),
            names.UPDATE_TRAJECTORIES: 0.0,
            names.TOKENS_MASKED: float(sum(masked.values())),
            names.TOKEN_AGE_HISTOGRAM: _list_by_age(trained),
            names.TRAINED_BY_AGE: _list_by_age(trained),
            names.FILTERED_BY_AGE: _list_by_age(filtered),
            names.MASKED_BY_AGE: _list_by_age(masked),
            names.UNUSED_BY_AGE: [],
            names.OPTIMIZER_STEPS: float(self._shape.optimizer_steps if total else 0),
            names.READ_TOKENS: float(self._price.tokens(groups)),
        }
        if total:
            versions = [count for row in _rows(read) if (count := self._count_versions(row, version))]
            metrics |= {
                names.TOKEN_AGE_MEAN: sum(age * tokens for age, tokens in trained.items()) / total,
                names.TOKEN_AGE_MAX: float(max(trained)),
                names.UPDATE_TRAJECTORIES: float(len(versions)),
                names.VERSIONS_MEAN: sum(versions) / len(versions),
                names.VERSIONS_MAX: float(max(versions)),
                names.STEPS_INSIDE_MEAN: (self._shape.optimizer_steps - 1) / 2,
                names.STEPS_INSIDE_MAX: float(self._shape.optimizer_steps - 1),
            }
        return metrics

    def publish(self, version: int) -> int:
        return version

    def save(self) -> dict[str, dict[str, np.ndarray]]:
        return {name: {'none': np.zeros(1, np.float32)} for name in ('params', 'optimizer')}

    def restore(self, saved: Weights) -> None:
        """Does nothing: there is no state."""

    def _is_trained(self, age: int) -> bool:
        return self._shape.oldest_age is None or age <= self._shape.oldest_age

    def _count_versions(self, row: Trajectory, version: int) -> int:
        """The number of policy versions among the trained tokens of a trajectory."""
        ages = {version - s.policy_version for s in row.segments if s.policy_version != NOT_GENERATED}
        return sum(map(self._is_trained, ages))


class CountChannel:
    """Implements protocols.Channel."""

    def transfer(self, version: int, copy: int) -> PublishedWeights:
        return PublishedWeights(version, DIGEST, copy)

    def receive(self, published: PublishedWeights) -> int:
        return published.version

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        """Does nothing: versions hold no memory."""


def _rows(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    return [row for group in groups for row in group.trajectories]


def _count_ages(groups: Sequence[TrajectoryGroup], version: int) -> collections.Counter[int]:
    """Generated tokens by age."""
    ages: collections.Counter[int] = collections.Counter()
    for row in _rows(groups):
        for segment in row.segments:
            if segment.policy_version != NOT_GENERATED:
                ages[version - segment.policy_version] += len(segment.tokens)
    return ages


def _list_by_age(ages: Mapping[int, int]) -> list[float]:
    known = [age for age, tokens in ages.items() if tokens]
    return [float(ages.get(age, 0)) for age in range(max(known, default=-1) + 1)]


LOGPROB = -1.0  # of every token
AnswerLength = Callable[[int, int, int], int]  # (draw, sample, turn) -> tokens after which the answer stops by itself
FIRST = 1024  # token of draw 0: it ends no answer; smaller tokens are results of tools
_NO_COUNTS = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True)
class CountOutput(DecodeOutput):
    """A DecodeOutput whose arrays repeat one value a row, so neither its memory nor its cost grows with the steps."""

    given: np.ndarray = dataclasses.field(default_factory=lambda: _NO_COUNTS)  # int64 [rows]: valid tokens

    def counts(self) -> np.ndarray:
        return self.given

    def by_row(self) -> CountOutput:
        return dataclasses.replace(self, tokens=self.tokens.T, logprobs=self.logprobs.T)

    def unsound(self) -> list[tuple[int, float]]:
        return []


@dataclasses.dataclass(frozen=True, eq=False)
class Jump:
    """One dispatch, and the equal dispatches that can follow it until the first answer ends.

    Args:
      tokens: int32 [rows], the token that a row repeats.
      left: int64 [rows], tokens until the answer ends.
      stops: bool [rows], whether it then ends by itself; else it has reached its limit.
      positions: int64 [rows], the positions that the row's first step sees.
      steps: of one dispatch.
    """

    tokens: np.ndarray
    left: np.ndarray
    stops: np.ndarray
    positions: np.ndarray
    steps: int

    @property
    def dispatches(self) -> int:
        """The number of dispatches up to and including the one in which the first answer ends."""
        return -(-int(self.left.min()) // self.steps)

    def finish(self, dispatches: int) -> CountOutput:
        """The output of the first `dispatches` dispatches."""
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
      answer_length: the length of an answer that no limit cuts.
      distinct: answers to a prompt differ in their tokens, so that a later turn finds its own conversation in the KV
        cache. Without it all tokens are equal, and take no memory.
      buckets: ascending token counts of a prefill dispatch; a longer sequence goes in pieces of the last size.
      devices: names of the devices of the engine.
      cache_bytes: of its KV cache.
      jumps: whether `generate` returns a Jump, which the simulated clock finishes, instead of one dispatch.
    """

    records_context = False
    windows: WindowSizes | None = None
    states: StateSizes | None = None
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
        """Returns (tokens until the answer ends, whether it then ends by itself)."""
        request = row.request
        begin = row.limit - request.sampling.max_new_tokens
        turn = _find_turn(request) if self._distinct else 0
        length = self._answer_length(request.draw, request.sample, turn)
        left = min(begin + length, row.limit) - row.position - 1
        return left, begin + length <= row.limit

    def read_context(self, state: int, blocks: Sequence[int], tokens: int) -> dict[str, np.ndarray]:
        return {}

    def copy(
        self,
        state: int,
        copies: Sequence[tuple[int, int]],
        parts: Sequence[tuple[int, int]] = (),
        states: Sequence[tuple[int, int]] = (),
    ) -> int:
        return state


def prompt_tokens(draw: int, count: int) -> np.ndarray:
    """int32 [count]: a prompt that no other draw has."""
    return repeat(_token(draw), count, np.int32)


def result_tokens(call: int, count: int) -> np.ndarray:
    """int32 [count]: the result of a tool after turn `call`; its token identifies the next turn.

    Raises ConfigError if there are more turns than such tokens.
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
