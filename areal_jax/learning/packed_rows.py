"""Rows: their contents, their placement and trimming, and how well they are filled.

A row holds units. A unit holds one answer with its prompt, or several answers, which share one prompt or have a copy
each; each answer is an example.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from areal_jax.columns import ColumnArrays, of_models
from areal_jax.models.families import ModelConfig, count_parameters
from areal_jax.models.layer_parts import DeltaNet
from areal_jax.types import PackedBatch

EMPTY = -1  # in a placement: no row here
_Number = TypeVar('_Number', float, np.ndarray)


@dataclasses.dataclass(frozen=True)
class CostCoefficients:
    """The cost of a token and of a visible pair of tokens, in any common unit. By default pairs cost nothing."""

    per_token: float = 1.0
    per_pair: float = 0.0


def cost_coefficients(
    *, n_layers: int, n_parameters_per_layer: int, n_heads: int, head_dim: int, n_head_parameters: int = 0
) -> CostCoefficients:
    """Floating-point operations of the forward and the backward pass.

      per token = 6 P,   P the parameters that multiply it: 2 forward, 2 for each of the two gradients
      per pair  = 12 H D layers: scores and weighted sum are 2 H D each, and the gradient costs twice as much

    P counts the head in full: nearly every token of a long answer is a loss token. Kaplan et al., arXiv 2001.08361,
    section 2.1, with pairs counted instead of context lengths.

    Args:
      n_parameters_per_layer: parameters in matrices that a token meets, on average.
      n_heads: query heads; the number of key heads does not change the cost.
      n_head_parameters: parameters of the matrix to the vocabulary.
    """
    return CostCoefficients(
        per_token=6.0 * (n_layers * n_parameters_per_layer + n_head_parameters),
        per_pair=12.0 * n_layers * n_heads * head_dim,
    )


def _mlp_parameters(c: ModelConfig) -> int:
    """The number of parameters in the MLPs of all layers; with experts, in the router and the experts reached."""
    dense = 3 * c.d_model * c.d_ff
    if c.experts is None:
        return c.n_layers * dense
    reached = c.d_model * (c.experts.count + 3 * (c.experts.per_token * c.experts.d_expert + c.experts.d_shared))
    return len(c.experts.dense_layers) * dense + c.n_expert_layers * reached


def decoder_cost(c: ModelConfig) -> CostCoefficients:
    """`cost_coefficients` of a decoder; the rule of delta nets counts as parameters of as many operations."""
    if c.delta is not None:
        return _hybrid_cost(c, c.delta)
    attention = 2 * c.d_model * (c.n_heads + c.n_kv_heads) * c.head_dim
    if c.latent is not None:
        own = (count for row, count in count_parameters(c) if '/attention/' in row.path and ' ' in row.shape)
        attention = sum(own) // c.n_layers
    return cost_coefficients(
        n_layers=c.n_layers,
        n_parameters_per_layer=attention + _mlp_parameters(c) // c.n_layers,
        n_heads=c.n_heads,
        head_dim=c.mixed_dim,
        n_head_parameters=c.vocab_size * c.d_model,
    )


def _hybrid_cost(c: ModelConfig, delta: DeltaNet) -> CostCoefficients:
    with_attention = c.n_layers - c.n_delta_layers
    attention = c.d_model * ((2 + c.gated_attention) * c.n_heads + 2 * c.n_kv_heads) * c.head_dim
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    projections = c.d_model * (2 * keys + 3 * values + 2 * delta.value_heads)
    of_layers = with_attention * attention + _mlp_parameters(c)
    of_layers += c.n_delta_layers * (projections + delta.rule_flops // 2)
    per_token = 6.0 * (of_layers + c.vocab_size * c.d_model)
    return CostCoefficients(per_token, 12.0 * with_attention * c.n_heads * c.head_dim)


def visible_pairs(tokens: int, tokens_before: int = 0) -> int:
    """Pairs (q, k) with k visible from q: of `tokens` in causal order, each also seeing all of `tokens_before`."""
    return tokens * tokens_before + tokens * (tokens + 1) // 2


def row_cost(tokens: _Number, pairs: _Number, coefficients: CostCoefficients) -> _Number:
    """a * tokens + b * pairs, in the coefficients' unit; numbers or arrays of rows."""
    return coefficients.per_token * tokens + coefficients.per_pair * pairs


def place_rows(
    costs: np.ndarray, shares: np.ndarray, rows_per_microbatch: int, data_shards: int = 1, *, in_order: bool = False
) -> np.ndarray:
    """Assigns rows to places of as few micro-batches as hold them; each shard has an equal slice of every micro-batch.

    The least filled rows form the last micro-batch, which may be incomplete, so that it may fit a smaller bucket. The
    other rows are sorted by cost, so that rows of one micro-batch cost about the same. Within a micro-batch, each row,
    most expensive first, goes to the shard with the lowest cost so far (longest processing time first, with equal
    counts of rows).

    Args:
      costs: float [rows].
      shares: float [rows], the share of a row's places that are used.
      rows_per_microbatch: R, a multiple of `data_shards`.
      in_order: put row i at place i, without balancing.

    Returns:
      int [M, R], the index of a row or EMPTY.

    Raises:
      ValueError: `rows_per_microbatch` is not a multiple of `data_shards`.
    """
    if data_shards < 1 or rows_per_microbatch % data_shards:
        raise ValueError(
            f'learner.rows_per_microbatch={rows_per_microbatch} must be a multiple of the {data_shards} data shards '
            '(data * fsdp * expert of cluster.learner)'
        )
    n_microbatches = -(-len(costs) // rows_per_microbatch)
    if in_order:
        empty = n_microbatches * rows_per_microbatch - len(costs)
        return np.append(np.arange(len(costs)), np.full(empty, EMPTY)).reshape(n_microbatches, rows_per_microbatch)
    n_before_last = max(n_microbatches - 1, 0) * rows_per_microbatch
    fullest_first = np.argsort(-shares, kind='stable')
    before_last, last = np.sort(fullest_first[:n_before_last]), np.sort(fullest_first[n_before_last:])
    order = np.concatenate([chosen[np.argsort(-costs[chosen], kind='stable')] for chosen in (before_last, last)])
    microbatches = [order[m * rows_per_microbatch :][:rows_per_microbatch] for m in range(n_microbatches)]
    placed = [_share_out(rows, costs, rows_per_microbatch // data_shards, data_shards) for rows in microbatches]
    return np.array(placed, np.int64).reshape(n_microbatches, rows_per_microbatch)


def shard_costs(costs: np.ndarray, placement: np.ndarray, data_shards: int) -> np.ndarray:
    """float [M, data_shards]: the cost of each shard in each micro-batch of a placement [M, R]."""
    by_place = np.where(placement == EMPTY, 0.0, np.append(costs, 0.0)[placement])
    microbatches, rows = placement.shape
    return by_place.reshape(microbatches, data_shards, rows // data_shards).sum(-1)


def _share_out(rows: Iterable[int], costs: np.ndarray, rows_per_shard: int, data_shards: int) -> list[int]:
    shards: list[list[int]] = [[] for _ in range(data_shards)]
    loads = [(0.0, s) for s in range(data_shards)]
    for row in rows:
        load, s = heapq.heappop(loads)
        shards[s].append(int(row))
        if len(shards[s]) < rows_per_shard:
            heapq.heappush(loads, (load + float(costs[row]), s))
    return [place for shard in shards for place in shard + [EMPTY] * (rows_per_shard - len(shard))]


# The shapes to which micro-batches may be trimmed, so that a light one costs less.


# fields [..., T, *shape], like the columns of models; all other fields are [..., N, *shape]
_TOKEN_FIELDS = ('tokens', 'positions', 'segment_ids', 'parent_ids')
_LEAST_TOKENS = 256  # the smallest T for which a shape is worth its compilation
_MULTIPLE = 64  # tokens: tail buckets are multiples of it, as are the tiles of attention


class RowShape(NamedTuple):
    """Static shape of a row."""

    tokens: int
    loss_tokens: int


def tail_buckets(tokens: int, loss_tokens: int, n: int) -> tuple[RowShape, ...]:
    """The shapes to which a micro-batch may be trimmed, ascending: up to n - 1 smaller ones, each half of the next, and
    the full one.
    """
    buckets = [RowShape(tokens, loss_tokens)]
    for halvings in range(1, n):
        bucket = RowShape(*(min(size, -(-size // (_MULTIPLE << halvings)) * _MULTIPLE) for size in buckets[0]))
        if bucket.tokens < _LEAST_TOKENS or bucket.tokens == buckets[-1].tokens:
            break
        buckets.append(bucket)
    return tuple(reversed(buckets))


def smaller_rows(full: RowShape, sizes: Sequence[int]) -> tuple[RowShape, ...]:
    """Shapes of rows with `sizes` tokens and the share of loss tokens in `full`, rounded up to a multiple of 8."""
    share = lambda tokens: -(-full.loss_tokens * tokens // full.tokens)
    return tuple(RowShape(tokens, min(full.loss_tokens, -(-share(tokens) // 8) * 8)) for tokens in sizes)


def tail_bucket(rows: Mapping[str, np.ndarray], buckets: Sequence[RowShape]) -> RowShape:
    """The smallest shape that holds all tokens, and all loss tokens to train, of every row.

    Args:
      rows: fields of a PackedBatch or of one micro-batch, 'segment_ids' and 'loss_mask' among them.

    Raises ValueError if none does: `buckets` must contain the full shape.
    """
    tokens, loss_tokens = _used(rows['segment_ids'] > 0), _used(rows['loss_mask'])
    holding = [b for b in buckets if b.tokens >= tokens and b.loss_tokens >= loss_tokens]
    if not holding:
        raise ValueError(
            f'no shape of {[tuple(b) for b in buckets]} holds a row of {tokens} tokens and {loss_tokens} loss tokens'
        )
    return min(holding)


def trim(rows: Mapping[str, np.ndarray], bucket: RowShape) -> dict[str, np.ndarray]:
    """Views of rows trimmed to the shape of the bucket.

    Fields that are not in PackedBatch must be [..., N], columns [..., N, *shape]. Raises ValueError if anything but
    padding would be lost.
    """
    tail_bucket(rows, [bucket])
    leading = (slice(None),) * (rows['segment_ids'].ndim - 1)
    of_tokens = {*_TOKEN_FIELDS, *(column.name for column in of_models())}
    length = lambda name: bucket.tokens if name in of_tokens else bucket.loss_tokens
    return {name: array[*leading, : length(name)] for name, array in rows.items()}


def _used(mask: np.ndarray) -> int:
    """The number of places up to the last one in use in any row; mask is bool [..., places]."""
    used = np.flatnonzero(mask.reshape(-1, mask.shape[-1]).any(0))
    return int(used[-1]) + 1 if len(used) else 0


PADDING = -1  # trajectory id where a row has no loss token


class BatchError(ValueError):
    """Trajectories that must not be learned from; the message names the draw, the sample and the defect."""


@dataclasses.dataclass(frozen=True)
class NextTokenForm:
    """A trajectory as the learner reads it: input tokens, and for each loss token the input that predicts it."""

    inputs: np.ndarray  # int32 [places], tokens up to the one that predicts the last loss token
    sources: np.ndarray  # int32 [A], index into inputs of the token whose hidden state predicts the loss token
    targets: np.ndarray  # int32 [A], the loss tokens
    behavior_logprobs: np.ndarray  # float32 [A]
    policy_versions: np.ndarray  # int32 [A]
    columns: ColumnArrays = dataclasses.field(default_factory=dict)  # the packed ones, [A, *shape]
    read: ColumnArrays = dataclasses.field(default_factory=dict)  # of the input tokens, see PackedBatch.inputs


@dataclasses.dataclass(frozen=True)
class Example:
    """One trajectory with its advantage and id, which the loss needs besides its tokens."""

    form: NextTokenForm
    prompt_tokens: int
    advantage: float
    trajectory_id: int

    @property
    def prompt(self) -> np.ndarray:
        return self.form.inputs[: self.prompt_tokens]

    @property
    def prompt_key(self) -> bytes:
        """Equal for two examples that may share one copy of the prompt: their tokens and records of it are equal.

        New weights may arrive while the answers of a group begin; then engines record two versions of a prompt.
        """
        read = (np.ascontiguousarray(values[: self.prompt_tokens]).tobytes() for values in self.form.read.values())
        return b''.join((self.prompt.tobytes(), *read))

    @property
    def size(self) -> tuple[int, int]:
        """(row tokens, loss tokens) without the prompt."""
        return len(self.form.inputs) - self.prompt_tokens, len(self.form.targets)


@dataclasses.dataclass(frozen=True)
class Unit:
    """Answers that must be in one row: with one prompt that they share, or with a prompt each."""

    examples: tuple[Example, ...]
    shares_prompt: bool = True

    @property
    def prompt(self) -> np.ndarray:
        return self.examples[0].prompt

    @property
    def size(self) -> tuple[int, int]:
        """(row tokens, loss tokens), prompts included."""
        tokens, loss_tokens = (sum(s) for s in zip(*(e.size for e in self.examples), strict=True))
        return sum(self._prompt_lengths) + tokens, loss_tokens

    @property
    def pairs(self) -> int:
        """Visible pairs of tokens: an answer sees itself and the prompt, never another answer."""
        own = sum(visible_pairs(e.size[0], e.prompt_tokens) for e in self.examples)
        return sum(map(visible_pairs, self._prompt_lengths)) + own

    @property
    def prompts(self) -> int:
        return len(self._prompt_lengths)

    @property
    def _prompt_lengths(self) -> list[int]:
        """Lengths of the prompts that are written."""
        return [e.prompt_tokens for e in (self.examples[:1] if self.shares_prompt else self.examples)]


@dataclasses.dataclass(frozen=True)
class Row:
    """The units that share a row."""

    units: tuple[Unit, ...]

    @property
    def size(self) -> tuple[int, int]:
        """(row tokens, loss tokens)."""
        tokens, loss_tokens = (sum(s) for s in zip(*(u.size for u in self.units), strict=True))
        return tokens, loss_tokens

    def cost(self, coefficients: CostCoefficients) -> float:
        return row_cost(float(self.size[0]), float(sum(u.pairs for u in self.units)), coefficients)

    def share(self, capacity: tuple[int, int]) -> float:
        """The used share of a capacity (tokens or loss tokens), the larger of the two."""
        return max(used / available for used, available in zip(self.size, capacity, strict=True))


def write_rows(batch: PackedBatch, rows: Sequence[Row], placement: np.ndarray, oldest_version: int | None) -> None:
    """Writes rows into a batch of padding, in place.

    Args:
      placement: int [M, R], the index of a row or EMPTY.
      oldest_version: tokens generated by an older version are left out of `loss_mask`; None = all are trained.
    """
    for m, place in np.argwhere(placement != EMPTY):
        writer = _RowWriter(batch.microbatch(m).microbatch(place), oldest_version)
        for unit in rows[placement[m, place]].units:
            writer.write(unit)


class _RowWriter:
    """Appends units to one row in place: the arrays of `row`, [T] or [N], are views of the batch."""

    def __init__(self, row: PackedBatch, oldest_version: int | None):
        self._row, self._oldest_version = row, oldest_version
        self._token = self._loss_token = self._segment = 0

    def write(self, unit: Unit) -> None:
        if len(unit.examples) == 1 or not unit.shares_prompt:  # one segment each: prompt and answer
            for example in unit.examples:
                start = self._append(example.form, slice(None), parent=None)
                self._append_loss(example, example.form.sources + start)
            return
        first = unit.examples[0]  # all examples have the same record of the prompt
        prompt_start = self._append(first.form, slice(first.prompt_tokens), parent=None)
        prompt_segment = self._segment
        for example in unit.examples:
            n = example.prompt_tokens
            start = self._append(example.form, slice(n, None), parent=prompt_segment)
            sources = example.form.sources
            self._append_loss(example, np.where(sources < n, prompt_start + sources, start + sources - n))

    def _append(self, form: NextTokenForm, part: slice, parent: int | None) -> int:
        """Appends a part of the inputs as one segment; returns the index of its first token in the row."""
        tokens, first_position = form.inputs[part], part.start or 0
        self._segment += 1
        start, self._token = self._token, self._token + len(tokens)
        place = slice(start, self._token)
        self._row.tokens[place] = tokens
        self._row.positions[place] = first_position + np.arange(len(tokens))
        self._row.segment_ids[place] = self._segment
        self._row.parent_ids[place] = self._segment if parent is None else parent
        for name, values in form.read.items():
            self._row.inputs[name][place] = values[part]
        return start

    def _append_loss(self, example: Example, sources: np.ndarray) -> None:
        form = example.form
        place = slice(self._loss_token, self._loss_token + len(sources))
        self._loss_token = place.stop
        self._row.sources[place] = sources
        self._row.targets[place] = form.targets
        self._row.loss_mask[place] = self._oldest_version is None or form.policy_versions >= self._oldest_version
        self._row.behavior_logprobs[place] = form.behavior_logprobs
        self._row.advantages[place] = example.advantage
        self._row.policy_versions[place] = form.policy_versions
        self._row.trajectory_ids[place] = example.trajectory_id
        for name, values in form.columns.items():
            self._row.columns[name][place] = values


# The report on how well the rows of an update are filled.
@dataclasses.dataclass(frozen=True)
class PackingReport:
    """Counts that tell how well the rows of an update are filled, over all its minibatches."""

    rows: int = 0  # with at least one token
    microbatches: int = 0  # empty ones included
    tokens: int = 0  # in rows; a repeated prompt counts each time
    capacity_tokens: int = 0  # places of the rows after trimming to buckets
    loss_tokens: int = 0  # generated tokens, before any rejection
    capacity_loss_tokens: int = 0
    saved_tokens: int = 0  # prompt tokens that sharing kept out of the rows
    mean_shard_cost: float = 0.0  # of the data shards, summed over micro-batches
    max_shard_cost: float = 0.0

    def metrics(self) -> dict[str, float]:
        return {
            'train/rows': float(self.rows),
            'train/microbatches': float(self.microbatches),
            'train/row_tokens': float(self.tokens),
            'train/saved_tokens': float(self.saved_tokens),
            'train/packing_utilization': self.tokens / max(self.capacity_tokens, 1),
            'train/loss_utilization': self.loss_tokens / max(self.capacity_loss_tokens, 1),
            'train/shard_balance': self.mean_shard_cost / (self.max_shard_cost or 1.0),
        }


def report_batch(
    batch: PackedBatch, unshared_tokens: int, costs: np.ndarray, buckets: Sequence[RowShape]
) -> PackingReport:
    """The report of one minibatch; `costs` by micro-batch and data shard."""
    microbatches, rows, row_tokens = batch.tokens.shape
    shapes = [RowShape(row_tokens, batch.targets.shape[-1])] * microbatches
    if buckets:
        fields = zip(batch.segment_ids, batch.loss_mask, strict=True)
        shapes = [tail_bucket({'segment_ids': s, 'loss_mask': m}, buckets) for s, m in fields]
    tokens = int((batch.segment_ids > 0).sum())
    return PackingReport(
        rows=int((batch.segment_ids > 0).any(-1).sum()),
        microbatches=microbatches,
        tokens=tokens,
        capacity_tokens=rows * sum(shape.tokens for shape in shapes),
        loss_tokens=int((batch.trajectory_ids != PADDING).sum()),
        capacity_loss_tokens=rows * sum(shape.loss_tokens for shape in shapes),
        saved_tokens=unshared_tokens - tokens,
        mean_shard_cost=float(costs.mean(-1).sum()),
        max_shard_cost=float(costs.max(-1).sum()),
    )


def total_report(reports: Sequence[PackingReport]) -> PackingReport:
    columns = zip(*(dataclasses.astuple(r) for r in reports), strict=True)
    return PackingReport(*(sum(column) for column in columns))
