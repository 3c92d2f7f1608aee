"""The data that flow through the loop: prompts, segments, trajectories, batches and weights.

numpy only: nothing here imports jax, so host code can hold these anywhere. Arrays are aligned by the token they
describe: entry t of every per-token array describes token t itself (learning/packing.py shifts to next-token
form, once).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from areal_jax.columns import Column, ColumnArrays, check, check_alike, cut
from areal_jax.labels import SCORED

# A pytree of arrays (a nested dict by path), or with one sharding or shape for each array. jax has no type for it.
Tree = Any
# an update's arrays on the generated tokens of a trajectory, by name, [A] each; empty if it was not trained
TokenArrays = Mapping[str, np.ndarray]
Weights = Tree  # on any device; only learning/, publication/ and the backend of an engine look inside
FinishReason = Literal['stop', 'length']  # of answers that are verified and trained
# labels of an episode without a reward: its program or tool failed, or it took longer than rollout.episode_deadline_s
UNSCORED = ('agent_error', 'env_error', 'deadline')
EngineFinish = Literal['stop', 'length', 'cancelled']  # of a request, for engines, pool and event log
LogprobKind = Literal['behavior', 'sampling']
PauseMode = Literal['retract', 'in_place', 'abort']
KvPolicy = Literal['recompute', 'keep', 'wait']
NOT_GENERATED = -1  # policy version of a token that no policy generated (prompt, tool output)
MOST_ALTERNATIVES = 20  # alternatives that a request may ask for in the place of a token
_ROW_SHIFT = 16  # bits of the sample, below the row
LARGEST_LOGPROB = 1e-2  # rounding gives some almost certain tokens a log-prob above 0, never above this


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One draw from a task's stream of prompts. Producer: tasks/."""

    draw: int  # number of the draw, unique for ever; the lowest is served first
    tokens: np.ndarray  # int32 [P], chat template applied, generation prompt included
    task: str  # name of the task that verifies the answer
    problem: Mapping[str, Any]  # JSON-able: data for the task's verifier in addition to the answer
    source: str = ''  # of a mixture: the name of the source, whose task verifies the answer; '' = the run has one task


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The sampling of answers. Temperature is part of the policy: log-probs are taken after it.

    A token is drawn from the logits, in this order: `logit_bias`, `min_new_tokens`, `repetition_penalty`,
    `frequency_penalty` and `presence_penalty`, `logit_scale`, `temperature`, `min_p`, `top_k`, `top_p`.
    """

    max_new_tokens: int  # >= 1
    temperature: float  # > 0; 0 = greedy, with log-probs at temperature 1
    top_k: int  # 0 = off
    top_p: float  # 1.0 = off
    stop_tokens: tuple[int, ...]  # each is generated, recorded and trained like any other token; () ignores every EOS
    min_p: float = 0.0  # least probability of a token, as a share of the likeliest token's; 0 = off
    min_new_tokens: int = 0  # tokens of the answer before a stop token can be drawn, or a stop string can end it
    repetition_penalty: float = 1.0  # divides the positive logits of tokens of prompt and answer, multiplies others
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each time that it is in the answer
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the answer
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, bias added to its logit), each token once
    stop_strings: tuple[str, ...] = ()  # the token that completes one in the answer's text ends the answer, and is kept
    logit_scale: float = 1.0  # tokens are drawn at temperature / logit_scale; log-probs stay at the temperature

    @property
    def cuts(self) -> bool:
        """Whether tokens are drawn from only a part of the softmax."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on its earlier occurrences."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before the temperature, which changes greedy answers too."""
        is_held = self.min_new_tokens > 0 and bool(self.stop_tokens)
        return self.penalizes or bool(self.logit_bias) or is_held or self.logit_scale != 1

    @property
    def changes_softmax(self) -> bool:
        """Whether tokens are drawn from another distribution than the full softmax at the temperature."""
        return self.cuts or self.adjusts


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive tokens under one policy version, or environment tokens (loss mask 0). Producer: an engine."""

    tokens: np.ndarray  # int32 [n], n >= 1
    behavior_logprobs: np.ndarray  # float32 [n], recorded while sampling, of the full softmax; 0 for environment tokens
    policy_version: int  # version whose logits the tokens were sampled from; NOT_GENERATED for environment tokens
    columns: ColumnArrays = dataclasses.field(default_factory=dict)  # further quantities of each token
    # [C, *shape]: columns of the last C tokens before it, if its engine read but did not generate them
    context: ColumnArrays = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self.columns, (len(self.tokens),))
        check_alike(self.context)


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """One answer to generate: the unit that is queued, moved between engines and retried. Producer: a workflow."""

    draw: int
    sample: int  # index in the group, 0 <= sample < group_size
    seed: int  # noise of a token is a function of (seed, draw, sample, token position) alone
    prompt_tokens: np.ndarray  # int32 [P]
    sampling: SamplingParams
    prefix: tuple[Segment, ...] = ()  # output received before an interruption, a dead engine or a restart
    version: int | None = None  # None: the newest weights; else evaluation under a version that the engine has pinned
    name: str = ''  # id of a request that may share its noise with another one; '' = id from seed, draw, sample, row
    cache_salt: str = ''  # requests with different salts share no KV
    row: int = 0  # of the episode

    @property
    def request_id(self) -> str:
        own = f'{self.seed}/{self.draw}/{self.sample}'
        return self.name or (f'{own}/{self.row}' if self.row else own)

    @property
    def noise_sample(self) -> int:
        """The sample's number in the noise, which includes the row: rows of one episode have different noise."""
        return self.sample + (self.row << _ROW_SHIFT)

    @property
    def prefix_tokens(self) -> np.ndarray:
        return concatenate([s.tokens for s in self.prefix], np.int32)


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One row of an episode: its prompt, its answer and the data on both for the loss.

    Most episodes are one row, which begins with the prompt of its draw. If a program edits the history of its
    conversation, or a sub-agent begins a new one, the episode forks another row with a separate prompt. All rows of an
    episode have its reward. Producer: control/episode.py.
    """

    prompt: Prompt  # of this row
    sample: int
    segments: tuple[Segment, ...]
    reward: float
    finish_reason: FinishReason
    engine: str  # name of the engine that generated the last segment
    admitted_s: float  # clock seconds
    finished_s: float
    consumed_s: float = float('nan')
    label: str = 'ok'  # of its Verdict, one of SCORED
    row: int = 0  # of the episode: 0, 1, ... in the order in which they began

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T]: prompt, then segments."""
        return concatenate([self.prompt.tokens, *(s.tokens for s in self.segments)], np.int32)

    @property
    def loss_mask(self) -> np.ndarray:
        """bool [T]: tokens the loss may touch, i.e. generated ones, EOS included."""
        return self.policy_versions != NOT_GENERATED

    @property
    def behavior_logprobs(self) -> np.ndarray:
        """float32 [T], 0 where not generated."""
        prompt = np.zeros(len(self.prompt.tokens), np.float32)
        return concatenate([prompt, *(s.behavior_logprobs for s in self.segments)], np.float32)

    @property
    def policy_versions(self) -> np.ndarray:
        """int32 [T], NOT_GENERATED on prompt and environment tokens."""
        prompt = np.full(len(self.prompt.tokens), NOT_GENERATED, np.int32)
        spans = [np.full(len(s.tokens), s.policy_version, np.int32) for s in self.segments]
        return concatenate([prompt, *spans], np.int32)

    def column(self, column: Column) -> np.ndarray:
        """[T, *shape], the fill value where not generated."""
        own = [column.of(s.columns, s.behavior_logprobs) for s in self.segments]
        return np.concatenate([column.blank(len(self.prompt.tokens)), *own])

    def column_with_context(self, column: Column) -> np.ndarray:
        """`column`, with the first engine's record of a token that it read in place of the fill value."""
        whole, is_open = self.column(column), ~self.loss_mask
        start = len(self.prompt.tokens)
        for segment in self.segments:
            if (known := segment.context.get(column.name)) is not None:
                place = slice(start - len(known), start)
                whole[place][is_open[place]] = known[is_open[place]]
                is_open[place] = False
            start += len(segment.tokens)
        return whole

    @property
    def answer_tokens(self) -> np.ndarray:
        """int32 [A]: everything after the prompt."""
        return concatenate([s.tokens for s in self.segments], np.int32)


@dataclasses.dataclass(frozen=True)
class TrajectoryGroup:
    """The episodes of one prompt. Groups may be partial: count them, never assume group_size."""

    draw: int
    trajectories: tuple[Trajectory, ...]  # rows by (sample, row), >= 1

    @property
    def episodes(self) -> tuple[tuple[Trajectory, ...], ...]:
        """The rows of each episode, by sample."""
        by_sample = itertools.groupby(self.trajectories, lambda row: row.sample)
        return tuple(tuple(rows) for _, rows in by_sample)

    @property
    def heads(self) -> tuple[Trajectory, ...]:
        """The first row of each episode, from which the episode's reward and label are read."""
        return tuple(rows[0] for rows in self.episodes)

    def oldest_version(self) -> int:
        """Lowest policy version of any generated token."""
        versions = [s.policy_version for t in self.trajectories for s in t.segments]
        return min(v for v in versions if v != NOT_GENERATED)

    def has_equal_rewards(self) -> bool:
        """Whether all rewards are equal (also in a group of one): every advantage would be 0."""
        return len({trajectory.reward for trajectory in self.trajectories}) <= 1


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """One minibatch: M micro-batches of R rows of T tokens, and per row N loss tokens. Producer: learning/packing.py.

    A row holds segments. Token q sees token k of its row if k <= q and k's segment is q's own or q's parent. In
    ordinary packing a segment is its own parent; in shared-prompt packing the parent of each answer is the group's
    prompt, which the row contains once. Loss token n of a row is `targets[n]`, predicted by the hidden state at
    `sources[n]`.
    """

    tokens: np.ndarray  # int32 [M, R, T]
    positions: np.ndarray  # int32 [M, R, T], rotary position inside the trajectory
    segment_ids: np.ndarray  # int32 [M, R, T], >= 1 and unique in the row; 0 = padding
    parent_ids: np.ndarray  # int32 [M, R, T]
    sources: np.ndarray  # int32 [M, R, N], index into the row
    targets: np.ndarray  # int32 [M, R, N]
    loss_mask: np.ndarray  # bool [M, R, N]
    behavior_logprobs: np.ndarray  # float32 [M, R, N]
    advantages: np.ndarray  # float32 [M, R, N]
    policy_versions: np.ndarray  # int32 [M, R, N]
    trajectory_ids: np.ndarray  # int32 [M, R, N], trajectory of the loss token in the update, -1 = padding
    columns: ColumnArrays = dataclasses.field(default_factory=dict)  # packed columns, [M, R, N, *shape]
    # [M, R, T, *shape]: entry t belongs to the token after token t, so to the pass in which t was read
    inputs: ColumnArrays = dataclasses.field(default_factory=dict)

    def microbatch(self, index: int) -> PackedBatch:
        """The micro-batch `index`, leaves [R, ...]."""
        values = {name: array[index] for name, array in self.fields().items()}
        return PackedBatch(**values, columns=cut(self.columns, index), inputs=cut(self.inputs, index))

    def fields(self) -> dict[str, np.ndarray]:
        """The arrays by name, without the columns."""
        named = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in named if name not in ('columns', 'inputs')}


@dataclasses.dataclass(frozen=True)
class PublicationSize:
    """The size of a version on its way to the engines. Producer: publication/."""

    channel: str  # publication.channel
    record: str  # 'whole', or 'delta': the changes since the previous version
    nbytes: int  # of the record's parts: without headers, names and tokenizer
    changed: float | None = None  # share of the elements whose bits differ from the previous version; None: unknown


@dataclasses.dataclass(frozen=True)
class PublishedWeights:
    """Weights of one version on their way to the engines. Producer: publication/, and only it may open `handle`."""

    version: int
    manifest_hash: str  # of names, shapes, dtypes and contents
    handle: Any
    size: PublicationSize | None = None  # None: the channel does not tell


@dataclasses.dataclass(frozen=True)
class Dropped:
    """A group that will not be trained: cancellation is a value with a reason. Producer: control/."""

    draw: int
    reason: str  # 'verifier_failed', 'equal_rewards', 'success_rate', ...; of the buffer: OVER_AGE
    detail: str = ''


@dataclasses.dataclass(frozen=True)
class Work:
    """Work for a lane: its name in the event log, and the basis of its price under the virtual clock."""

    kind: str  # 'prefill', 'decode', 'train', 'snapshot', 'publish', 'load', 'reward', 'save', ...
    amount: float = 1.0  # in the unit of the kind: tokens, steps, bytes, calls
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fields for the event log, unchanged
    in_background: bool = False  # under the virtual clock it runs parallel to the lane's other work
    # further inputs of its price; not logged, because events of decoding and prefilling hold the same numbers
    size: Mapping[str, float] = dataclasses.field(default_factory=dict)
    recorded: bool = False  # of a call whose result is JSON: the real clock logs it, for a replay


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A verifier's result on one answer. Producer: tasks/."""

    reward: float
    attempts: int = 1  # more than 1: earlier attempts hung or crashed
    # one of SCORED; or why the last attempt has no reward: 'timeout', 'crash', 'sandbox' (the machine failed),
    # 'error' (the scorer raised, or returned no reward)
    label: str = 'ok'
    cpu_s: float = 0.0  # of the check of code
    wall_s: float = 0.0
    waiting: int = dataclasses.field(default=0, compare=False)  # answers that waited for a worker when this one came
    audit: str = ''  # result of a second comparison: 'agrees', 'disagrees', 'undecided'; '' = not compared
    reason: str = dataclasses.field(default='', compare=False)  # why the reward is not higher; a replay may lack it

    @property
    def failed(self) -> bool:
        return self.label not in SCORED


@dataclasses.dataclass(frozen=True)
class EngineStatus:
    """The status of one engine. Producer: the engine."""

    name: str
    policy_version: int  # of the weights that it decodes with
    running: int  # number of requests being decoded
    waiting: int  # number of requests waiting for a slot
    tokens_per_s: float  # decoded tokens per clock second of decoding since the start; 0 before the first
    devices: tuple[str, ...]  # names of the devices that it decodes on
    hardware: str = ''  # number and kind of these devices, '2 x H100': the class of the engine; '' = not told
    decoded_s: float = 0.0  # clock seconds of decoding over which tokens_per_s is the mean; 0 = not told


@dataclasses.dataclass(frozen=True)
class EngineCapabilities:
    """The capabilities of an engine; tests/rollout/engine_contract.py tests each field. Producer: the engine."""

    logprobs: tuple[LogprobKind, ...]  # 'sampling': also the log-probs of the distribution that was sampled
    spans: bool  # an answer that saw a swap comes in one segment per version
    abort: bool  # `cancel` ends a request that is being decoded
    # effects of a pause on a request being decoded: 'retract' returns it to the queue and rebuilds its KV after the
    # resume, 'in_place' keeps its KV, 'abort' returns it to the caller
    pause_modes: tuple[PauseMode, ...]
    staging: bool  # `stage` leaves decoding undisturbed
    # possible effects of a swap on unfinished answers: rebuild their KV, keep it, or wait until they have ended
    update: tuple[KvPolicy, ...]
    pinned: bool  # `pin` keeps the weights of a version, and requests of that version are decoded with them


def repeat(value: float, count: int, dtype: Any) -> np.ndarray:
    """[count]: an array of one value in constant memory, for the tokens of a simulation."""
    return np.ndarray((count,), dtype, np.asarray(value, dtype).tobytes(), strides=(0,))  # bytes: read-only


def is_repeated(array: np.ndarray) -> bool:
    """Whether `repeat` made the array, or an array of which it is a part."""
    return array.strides == (0,)


def concatenate(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Concatenates arrays (or none) to one of the dtype; arrays of `repeat` with equal values give such an array."""
    parts = [array for array in arrays if len(array)]
    if parts and all(map(is_repeated, parts)) and len({part[0].item() for part in parts}) == 1:
        return repeat(parts[0][0], sum(map(len, parts)), dtype)
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Log-probs of n consecutive tokens, and of the k likeliest tokens in the place of each."""

    logprobs: np.ndarray  # float32 [n], of the full softmax
    ids: np.ndarray  # int32 [n, k], descending by log-prob; ties by ascending id
    largest: np.ndarray  # float32 [n, k]; the entry of the token itself equals its log-prob bit for bit

    def ranked(self, k: int) -> list[list[tuple[int, float]]]:
        """(token, log-prob) of the k likeliest in the place of each token."""
        pairs = zip(self.ids[:, :k].tolist(), self.largest[:, :k].tolist(), strict=True)
        return [list(zip(ids, values, strict=True)) for ids, values in pairs]

    def part(self, start: int, stop: int) -> TokenScores:
        """The scores of tokens [start, stop)."""
        return TokenScores(self.logprobs[start:stop], self.ids[start:stop], self.largest[start:stop])
