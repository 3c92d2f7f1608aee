"""The interface that stream.py drives: prefill, generate and copy as functions of weights and state (a block cache).

A block holds the keys and values of `block_tokens` consecutive positions of a sequence. Only the host knows which block
holds what (blocks.py): every call names the blocks that it reads and writes, and the state is the cache.
decode/jax_backend.py implements the interface in JAX; tests/toys.py implements it on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from areal_jax.columns import ColumnArrays, check, find
from areal_jax.errors import UserError
from areal_jax.rollout.state_pool import StateSizes
from areal_jax.rollout.window_blocks import WindowSizes
from areal_jax.types import LARGEST_LOGPROB, GenerationRequest, SamplingParams, Weights

# The least and most of a parameter. In between float32 logits stay finite.
_RANGES = {
    'temperature': (1e-5, 1e5),
    'top_p': (0.0, 1.0),
    'min_p': (0.0, 1.0),
    'repetition_penalty': (0.01, 100.0),
    'frequency_penalty': (-2.0, 2.0),
    'presence_penalty': (-2.0, 2.0),
    'logit_scale': (1e-5, 1e5),
}
_MOST_BIAS = 100.0


class SamplingError(UserError, ValueError):
    """A sampling parameter that no engine, or not this one, can decode with."""


@dataclasses.dataclass(frozen=True)
class SamplingSupport:
    """The sampling parameters that a backend's programs take besides temperature; made by the backend."""

    vocab_size: int
    cuts: bool  # top_k, top_p and min_p
    adjusts: bool  # parameters of SamplingParams.adjusts
    stop_tokens: int  # maximum of a request
    biased_tokens: int  # maximum of a request

    def check(self, request: GenerationRequest) -> None:
        """Raises SamplingError for a parameter that is out of its range, or that the programs cannot decode with."""
        if problem := _out_of_range(request.sampling):
            raise SamplingError(f'request {request.request_id}: {problem}')
        self.check_programs(request)

    def check_programs(self, request: GenerationRequest) -> None:
        """Does the second half of `check`, cheap enough for every row of every dispatch."""
        if problem := self._beyond_programs(request.sampling):
            raise SamplingError(f'request {request.request_id}: {problem}')

    def _beyond_programs(self, params: SamplingParams) -> str:
        if len(params.stop_tokens) > self.stop_tokens:
            return f'{len(params.stop_tokens)} stop tokens, but a row holds {self.stop_tokens}; use fewer'
        if params.cuts and not self.cuts:
            return (
                f'top_k={params.top_k}, top_p={params.top_p}, min_p={params.min_p}, but the programs were built '
                'without; build the backend with filtered=True'
            )
        if params.adjusts and not self.adjusts:
            return (
                f'{_name_adjustments(params)}, but the programs were built without; build the backend with '
                'adjusted=True'
            )
        if len(params.logit_bias) > self.biased_tokens:
            return f'logit_bias has {len(params.logit_bias)} tokens, but a row holds {self.biased_tokens}; use fewer'
        for token, _ in params.logit_bias:
            if not 0 <= token < self.vocab_size:
                return f'logit_bias has token {token}; use tokens from 0 to {self.vocab_size - 1}'
        return ''


def _out_of_range(params: SamplingParams) -> str:
    """Describes the first parameter that is out of range for every engine; '' = all are in range."""
    for name, (least, most) in _RANGES.items():
        value = getattr(params, name)
        if not (least <= value <= most or (name == 'temperature' and value == 0)):
            return f'{name}={value} must lie between {least:g} and {most:g}' + ', or be 0' * (name == 'temperature')
    if params.top_k < 0:
        return f'top_k={params.top_k} must not be negative; use 0 to turn it off'
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        return f'min_new_tokens={params.min_new_tokens} must lie between 0 and max_new_tokens={params.max_new_tokens}'
    for token, bias in params.logit_bias:
        if not abs(bias) <= _MOST_BIAS:  # NaN too
            return f'logit_bias of token {token} is {bias}; use values from {-_MOST_BIAS:g} to {_MOST_BIAS:g}'
    tokens = [token for token, _ in params.logit_bias]
    if len(set(tokens)) < len(tokens):
        return f'logit_bias={params.logit_bias} names a token twice; add the values up'
    if '' in params.stop_strings:
        return f'stop_strings={params.stop_strings} has an empty string; leave it out'
    return ''


def _name_adjustments(params: SamplingParams) -> str:
    """Lists the adjustments that differ from their defaults, as in 'min_new_tokens=3, presence_penalty=0.5'."""
    fields = {field.name: field.default for field in dataclasses.fields(params)}
    names = (
        'min_new_tokens',
        'repetition_penalty',
        'frequency_penalty',
        'presence_penalty',
        'logit_bias',
        'logit_scale',
    )
    changed = [f'{name}={getattr(params, name)}' for name in names if getattr(params, name) != fields[name]]
    return ', '.join(changed)


State = Any  # a backend's own: its KV cache, a tree of arrays


class Span(NamedTuple):
    """Positions [start, stop) of one sequence."""

    start: int
    stop: int


class PrefillBucket(NamedTuple):
    """The declared shape in which a prefill runs."""

    tokens: int  # of the packed row, padding included
    prior: int  # positions before the spans that are read from the cache, padding included; 0 = none


@dataclasses.dataclass(frozen=True)
class PrefillPiece:
    """Consecutive tokens of one sequence whose keys and values are to be computed."""

    tokens: np.ndarray  # int32 [n], n >= 1
    start: int  # position of the first; the cache holds the earlier ones
    blocks: Sequence[int]  # position p is in blocks[p // block_tokens]; they hold start + n positions or more
    parts: Sequence[int] | np.ndarray = ()  # where each block is in the pool of `windows`, if there is one
    # place of the recurrent state, if the model has `states`: it is behind the position before `start`, or unknown if
    # that is 0, and then begins with zeros; `prefill` leaves the state behind the last token there
    state: int = 0

    @property
    def span(self) -> Span:
        return Span(self.start, self.start + len(self.tokens))


class DecodeRow(NamedTuple):
    """One sequence of a `generate`."""

    request: GenerationRequest  # seed, draw, sample, sampling parameters
    token: int  # the next input; its keys and values are not in the cache yet
    position: int  # of that token; the cache holds the positions before it
    limit: int  # the sequence ends (reason 'length') when it has this many tokens
    blocks: Sequence[int]  # as in PrefillPiece; they hold min(position + steps, limit - 1) positions or more
    tokens: Sequence[int] | np.ndarray = ()  # int32 [position + 1], all so far; read if the request has penalties
    parts: Sequence[int] | np.ndarray = ()  # as in PrefillPiece
    state: int = 0  # as in PrefillPiece, before `position`; each token that the row processes moves it on


@dataclasses.dataclass(frozen=True)
class DecodeOutput:
    """Up to `steps` tokens of every row, on the host, in the order in which the rows were given."""

    tokens: np.ndarray  # int32 [steps, rows]
    logprobs: np.ndarray  # float32 [steps, rows], of the full softmax at the temperature
    valid: np.ndarray  # bool [steps, rows]; False from a row's stop token (itself valid) or its limit on
    columns: ColumnArrays = dataclasses.field(default_factory=dict)  # [steps, rows, *shape], see RunningRequest.extend
    positions_read: int = 0  # of the cache by attention, over rows and steps of one layer without a window
    # bool [rows]: the answer ends with its last valid token, whatever token that is; None: stop tokens tell
    ended: np.ndarray | None = None

    def __post_init__(self) -> None:
        check(self.columns, self.tokens.shape)

    def counts(self) -> np.ndarray:
        """The number of valid tokens, int [rows]; they are the first tokens of each row."""
        return self.valid.sum(axis=0)

    def by_row(self) -> DecodeOutput:
        """Returns a copy with arrays [rows, steps, ...], so that the tokens of one row are contiguous."""
        turn = lambda array: np.ascontiguousarray(np.swapaxes(array, 0, 1))
        columns = {name: turn(array) for name, array in self.columns.items()}
        return dataclasses.replace(
            self, tokens=turn(self.tokens), logprobs=turn(self.logprobs), valid=turn(self.valid), columns=columns
        )

    def unsound(self) -> list[tuple[int, float]]:
        """(row, log-prob) of every valid token whose log-prob is NaN, infinite, or above 0 by more than rounding."""
        found: list[tuple[int, float]] = []
        for logprobs in (self.logprobs, *(array for name, array in self.columns.items() if find(name).is_logprob)):
            wrong = self.valid & ~((logprobs > -np.inf) & (logprobs <= LARGEST_LOGPROB))
            found += [(int(row), float(logprobs[step, row])) for step, row in np.argwhere(wrong)]
        return found


class DecodeBackend(Protocol):
    """Runs on the engine's lane; holds compiled programs, but neither weights nor state.

    Every call that takes a state donates it: use only the state returned last. The content of a block beyond the
    positions that were written for its sequence, NaN included, never affects a result.
    """

    slots: int  # most rows of one `generate`
    context_tokens: int  # most tokens of a sequence
    block_tokens: int
    cache_blocks: int  # blocks 0 to cache_blocks - 1
    windows: WindowSizes | None  # the pool of the layers with a window; None = all layers are in the same blocks
    states: StateSizes | None  # the pool of the states of recurrent layers; None = there are none
    devices: tuple[str, ...]  # names of those that hold the KV cache
    sampling: SamplingSupport

    records_context: bool  # whether `read_context` knows anything

    @property
    def state_bytes(self) -> int: ...

    def prepare(self, weights: Weights) -> Weights:
        """Converts published weights to the form that the calls below take; runs where weights are fetched."""
        ...

    def initial_state(self) -> State: ...

    def prefill_bucket(self, spans: Sequence[Span]) -> PrefillBucket | None:
        """Returns the bucket in which one `prefill` computes the spans; None if no bucket holds all of them.

        One span of at most `largest_piece` tokens always fits.
        """
        ...

    @property
    def largest_piece(self) -> int:
        """The tokens of the longest piece; longer sequences are prefilled in pieces of this length, the rest last."""
        ...

    def prefill(self, weights: Weights, state: State, pieces: Sequence[PrefillPiece]) -> State:
        """Returns the state with the keys and values of all pieces; each piece is of another sequence."""
        ...

    def batch_bucket(self, rows: Sequence[DecodeRow]) -> int:
        """Returns the declared batch in which `generate` decodes the rows, by their number and sampling parameters."""
        ...

    def generate(
        self, weights: Weights, state: State, rows: Sequence[DecodeRow], steps: int
    ) -> tuple[State, DecodeOutput]:
        """Decodes up to `steps` tokens for every row; writes the new positions to the blocks of each row."""
        ...

    def read_context(self, state: State, blocks: Sequence[int], tokens: int) -> ColumnArrays:
        """Returns the columns [tokens, *shape] of the first `tokens` tokens of the sequence in these blocks.

        As for generated tokens, entry t is of the pass that read the tokens before t.
        """
        ...

    def copy(
        self,
        state: State,
        copies: Sequence[tuple[int, int]],
        parts: Sequence[tuple[int, int]] = (),
        states: Sequence[tuple[int, int]] = (),
    ) -> State:
        """Returns the state with the content of each block `source` copied to `target`, (source, target) in order.

        `parts` are the same in the pool of the layers with a window; the other layers copy the blocks. `states` are
        places of recurrent states. No source is the target of an earlier copy.
        """
        ...
