"""Arrow 6: groups become rows of a fixed shape, without padding to the longest. numpy only.

A trajectory whose last loss token is token t needs t places in a row: that token is predicted and never read. In
shared-prompt packing the prompt of a group stands once in a row and each of its answers there sees it.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.learning.balance import EMPTY, CostCoefficients, place_rows, shard_costs
from areal_jax.learning.bins import pack_fewest_first, pack_first_fit, spread_remainder
from areal_jax.learning.rows import PADDING, BatchError, Example, NextTokenForm, Row, Unit, write_rows
from areal_jax.ranges import ConfigError
from areal_jax.types import LARGEST_LOGPROB, PackedBatch, Trajectory, TrajectoryGroup

MODES = ('shared_prompt', 'ordinary')
FILLS = ('first_fit', 'algorithm_1', 'padded')
_TOKENS_ONLY = CostCoefficients()
_TOKEN_FIELDS = ('tokens', 'positions', 'segment_ids', 'parent_ids')  # one value per token; all others per loss token
_MULTIPLE = 64  # tokens: tail buckets are multiples of it, as are the tiles of attention


def next_token_form(trajectory: Trajectory) -> NextTokenForm:
    """The only shift by one: arrays aligned by the token they describe go to the position that predicts it.

    The first answer token is predicted by the last prompt token. Environment tokens are context: read, never targets.
    Raises BatchError where the very first token was generated: nothing predicts it.
    """
    tokens = trajectory.tokens
    predicted = np.flatnonzero(trajectory.loss_mask)
    if len(predicted) and predicted[0] == 0:
        raise BatchError(f'draw {trajectory.prompt.draw}: the prompt is empty, so nothing predicts its first token')
    return NextTokenForm(
        inputs=tokens[: predicted[-1]] if len(predicted) else tokens[:0],
        sources=(predicted - 1).astype(np.int32),
        targets=tokens[predicted],
        behavior_logprobs=trajectory.behavior_logprobs[predicted],
        policy_versions=trajectory.policy_versions[predicted],
    )


@dataclasses.dataclass(frozen=True)
class PackingReport:
    """How well the rows of an update are filled, over all its minibatches."""

    rows: int = 0  # with at least one token
    microbatches: int = 0  # empty ones included
    tokens: int = 0  # that stand in rows, a prompt as often as it is repeated
    capacity_tokens: int = 0  # of the rows as they are computed, tail buckets considered
    loss_tokens: int = 0  # generated tokens, before any rejection
    capacity_loss_tokens: int = 0
    saved_tokens: int = 0  # that sharing prompts kept out of the rows
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


class RowShape(NamedTuple):
    """Static shape of a row."""

    tokens: int
    loss_tokens: int


def pack(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[np.ndarray],
    *,
    mode: str,
    row_tokens: int,
    row_loss_tokens: int,
    rows_per_microbatch: int,
    n_minibatches: int = 1,
    oldest_version: int | None = None,
    round_microbatches: bool = False,
    fill: str = 'first_fit',
    data_shards: int = 1,
    cost: CostCoefficients = _TOKENS_ONLY,
    buckets: Sequence[RowShape] = (),
    vocab_size: int | None = None,
) -> tuple[list[PackedBatch], PackingReport]:
    """Packs the groups of one update: one PackedBatch for each minibatch that has a token to train.

    A group goes whole into one minibatch, so fewer groups than `n_minibatches` give fewer batches, and nothing to train
    gives none. Tokens generated before `oldest_version` keep their place and trajectory id but leave `loss_mask`:
    denominators count trajectory ids (`denominators.denominator_weights`), hence tokens before this rejection. What is
    trained does not depend on `fill`, `data_shards` or `cost`: they decide only in which row and where a token stands.

    Args:
      advantages: per group float32 [trajectories of the group].
      mode: 'shared_prompt' | 'ordinary'.
      round_microbatches: add empty micro-batches up to a power of two.
      fill: 'first_fit' (decreasing) | 'algorithm_1' (bins.pack_fewest_first) | 'padded' (one trajectory per row, rows
        in the order given; to compare with).
      data_shards: devices that share the rows of a micro-batch evenly, an equal slice each.
      cost: by which they are balanced (balance.place_rows).
      buckets: row shapes, ascending to the full one, to which the caller trims micro-batches; () = it trims none. With
        'first_fit' a last micro-batch of few full rows is spread over more and shorter rows where one of them allows.
      vocab_size: token ids lie below it; None = any.

    Raises BatchError for what must not be learned from (`_require_sound`) or does not fit a row, and ValueError for an
    unknown mode or fill and for rows that the shards cannot share evenly.
    """
    require_known(mode, fill)
    capacity = (row_tokens, row_loss_tokens)
    examples_of = _examples(groups, advantages, capacity, vocab_size)
    loss_tokens = [sum(e.size[1] for e in examples) for examples in examples_of]
    batches, reports = [], []
    for members in split_minibatches(loss_tokens, n_minibatches):
        units = [unit for g in members for unit in _units(examples_of[g], mode, capacity)]
        rows = _rows(units, fill, rows_per_microbatch, buckets or [RowShape(*capacity)])
        costs = np.array([row.cost(cost) for row in rows])
        shares = np.array([row.share(capacity) for row in rows])
        placement = place_rows(costs, shares, rows_per_microbatch, data_shards, in_order=fill == 'padded')
        if round_microbatches:
            missing = (1 << (len(placement) - 1).bit_length()) - len(placement)
            placement = np.pad(placement, ((0, missing), (0, 0)), constant_values=EMPTY)
        batch = empty_batch(len(placement), rows_per_microbatch, row_tokens, row_loss_tokens)
        write_rows(batch, rows, placement, oldest_version)
        if batch.loss_mask.any():
            batches.append(batch)
            unshared_tokens = sum(len(e.form.inputs) for g in members for e in examples_of[g])
            reports.append(_report(batch, unshared_tokens, shard_costs(costs, placement, data_shards), buckets))
    return batches, _total(reports)


def empty_batch(microbatches: int, rows: int, row_tokens: int, row_loss_tokens: int) -> PackedBatch:
    """A batch of padding: nothing to read, nothing to train."""
    places, loss_places = (microbatches, rows, row_tokens), (microbatches, rows, row_loss_tokens)
    return PackedBatch(
        tokens=np.zeros(places, np.int32),
        positions=np.zeros(places, np.int32),
        segment_ids=np.zeros(places, np.int32),
        parent_ids=np.zeros(places, np.int32),
        sources=np.zeros(loss_places, np.int32),
        targets=np.zeros(loss_places, np.int32),
        loss_mask=np.zeros(loss_places, bool),
        behavior_logprobs=np.zeros(loss_places, np.float32),
        advantages=np.zeros(loss_places, np.float32),
        policy_versions=np.zeros(loss_places, np.int32),
        trajectory_ids=np.full(loss_places, PADDING, np.int32),
    )


def split_minibatches(loss_tokens: Sequence[int], n_minibatches: int) -> list[list[int]]:
    """Groups to minibatches of about equal loss tokens: largest first, to the minibatch that has least.

    A function of the groups alone, so that what an optimizer step sees does not depend on the packing. Groups without
    loss tokens are left out; minibatches are never empty, so there may be fewer than asked for.
    """
    members = [g for g, n in enumerate(loss_tokens) if n]
    heap = [(0, m) for m in range(min(n_minibatches, len(members)))]
    minibatches: list[list[int]] = [[] for _ in heap]
    for g in sorted(members, key=lambda g: (-loss_tokens[g], g)):
        load, m = heapq.heappop(heap)
        minibatches[m].append(g)
        heapq.heappush(heap, (load + loss_tokens[g], m))
    return [sorted(m) for m in minibatches]


def count_tokens(groups: Sequence[TrajectoryGroup], mode: str) -> int:
    """Tokens that packing would put into rows, if no group had to be split: cheap, to price an update before it."""
    total = 0
    for group in (group for group in groups if group.trajectories):
        prompts = 1 if mode == 'shared_prompt' else len(group.trajectories)
        answers = sum(len(s.tokens) for t in group.trajectories for s in t.segments)
        total += prompts * len(group.trajectories[0].prompt.tokens) + answers - len(group.trajectories)
    return total


def tail_buckets(row_tokens: int, row_loss_tokens: int, n: int, *, least_tokens: int = 256) -> tuple[RowShape, ...]:
    """The shapes a micro-batch may be cut to, ascending: the full one and up to n - 1 more, each half of the next.

    Args:
      least_tokens: below it no shape is worth its compilation.
    """
    buckets = [RowShape(row_tokens, row_loss_tokens)]
    for halvings in range(1, n):
        tokens, loss_tokens = (
            min(full, -(-full // (_MULTIPLE << halvings)) * _MULTIPLE) for full in (row_tokens, row_loss_tokens)
        )
        if tokens < least_tokens or tokens == buckets[-1].tokens:
            break
        buckets.append(RowShape(tokens, loss_tokens))
    return tuple(reversed(buckets))


def tail_bucket(rows: Mapping[str, np.ndarray], buckets: Sequence[RowShape]) -> RowShape:
    """The smallest shape that holds all tokens, and all loss tokens to train, of every row.

    Args:
      rows: fields of a PackedBatch or of one micro-batch, 'segment_ids' and 'loss_mask' among them.

    Raises ValueError where none does: `buckets` has to contain the full shape.
    """
    tokens, loss_tokens = _used(rows['segment_ids'] > 0), _used(rows['loss_mask'])
    holding = [b for b in buckets if b.tokens >= tokens and b.loss_tokens >= loss_tokens]
    if not holding:
        raise ValueError(
            f'no shape of {[tuple(b) for b in buckets]} holds a row of {tokens} tokens and {loss_tokens} loss tokens'
        )
    return min(holding)


def trim(rows: Mapping[str, np.ndarray], bucket: RowShape) -> dict[str, np.ndarray]:
    """Views of rows cut to the shape of the bucket; other fields than a PackedBatch's have one value per loss token.

    Raises ValueError where more than padding would go.
    """
    tail_bucket(rows, [bucket])
    return {name: x[..., : bucket.tokens if name in _TOKEN_FIELDS else bucket.loss_tokens] for name, x in rows.items()}


def require_known(mode: str, fill: str) -> None:
    """Raises ValueError for a mode or fill that is unknown, and for two that cannot go together."""
    if mode not in MODES:
        raise ConfigError(f'learner.packing={mode!r} is unknown; use one of {", ".join(MODES)}')
    if fill not in FILLS:
        raise ConfigError(f'learner.fill={fill!r} is unknown; use one of {", ".join(FILLS)}')
    if (mode, fill) == ('shared_prompt', 'padded'):
        raise ConfigError(
            "learner.fill='padded' puts one trajectory in a row, so learner.packing='shared_prompt' has no prompt to "
            "share: set learner.packing='ordinary'"
        )


def _examples(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[np.ndarray],
    capacity: tuple[int, int],
    vocab_size: int | None,
) -> list[list[Example]]:
    """Per group its trajectories with loss tokens; ids number all trajectories of the update."""
    examples_of, next_id = [], 0
    for group, values in zip(groups, advantages, strict=True):
        examples = []
        for trajectory, advantage in zip(group.trajectories, values, strict=True):
            _require_sound(trajectory, group, float(advantage), vocab_size)
            form = next_token_form(trajectory)
            if len(form.targets):
                _require_fit(trajectory, form, capacity)
                examples.append(Example(form, len(trajectory.prompt.tokens), float(advantage), next_id))
            next_id += 1
        examples_of.append(examples)
    return examples_of


def _require_sound(trajectory: Trajectory, group: TrajectoryGroup, advantage: float, vocab_size: int | None) -> None:
    """What no kernel would notice: it would read another row of the embedding, or weigh one token like millions."""
    where = f'draw {trajectory.prompt.draw}, sample {trajectory.sample}'
    if not np.isfinite(advantage):
        raise BatchError(
            f'{where}: advantage is {advantage}, which would poison the whole update; rewards must be finite'
        )
    tokens, mask, logprobs = trajectory.tokens, trajectory.loss_mask, trajectory.behavior_logprobs
    if len(logprobs) != len(tokens):
        raise BatchError(f'{where}: {len(logprobs)} behavior log-probs for {len(tokens)} tokens, prompt included')
    outside = (tokens < 0) | (tokens >= (vocab_size or np.inf))
    if outside.any():
        raise BatchError(
            f'{where}: token {tokens[outside][0]} lies outside the vocabulary of {vocab_size} of the model; the '
            'tokenizer or the engine belongs to another model'
        )
    wrong = mask & ~(np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB))
    if wrong.any():
        raise BatchError(
            f'{where}: a behavior log-prob is {logprobs[wrong][0]}; the engine must report finite ones of at most 0'
        )
    if not np.array_equal(trajectory.prompt.tokens, group.trajectories[0].prompt.tokens):
        raise BatchError(f'{where}: its prompt is not that of the other answers of its group')


def _require_fit(trajectory: Trajectory, form: NextTokenForm, capacity: tuple[int, int]) -> None:
    fields = ('learner.row_tokens', 'learner.row_loss_tokens')
    for field, needed, available in zip(fields, (len(form.inputs), len(form.targets)), capacity, strict=True):
        if needed > available:
            raise BatchError(
                f'draw {trajectory.prompt.draw}, sample {trajectory.sample}: {len(trajectory.tokens)} tokens of '
                f'trajectory need {needed} places of a row, but {field}={available}; raise {field} to at least '
                f'{needed} or lower rollout.max_new_tokens'
            )


def _units(examples: Sequence[Example], mode: str, capacity: tuple[int, int]) -> list[Unit]:
    """Shared: as many answers of the group beside one prompt as a row holds, then the next row's worth."""
    if mode == 'ordinary' or not examples:
        return [Unit((e,)) for e in examples]
    row_tokens, row_loss_tokens = capacity
    beside_prompt = (row_tokens - examples[0].prompt_tokens, row_loss_tokens)
    bins = pack_first_fit([e.size for e in examples], beside_prompt)
    return [Unit(tuple(examples[i] for i in sorted(b))) for b in bins]


def _rows(units: Sequence[Unit], fill: str, rows_per_microbatch: int, shapes: Sequence[RowShape]) -> list[Row]:
    sizes = [u.size for u in units]
    if fill == 'padded':
        bins = [[u] for u in range(len(units))]
    elif fill == 'algorithm_1':
        bins = pack_fewest_first(sizes, shapes[-1])
    else:
        bins = spread_remainder(pack_first_fit(sizes, shapes[-1]), sizes, rows_per_microbatch, shapes)
    return [Row(tuple(units[u] for u in members)) for members in bins]


def _report(batch: PackedBatch, unshared_tokens: int, costs: np.ndarray, buckets: Sequence[RowShape]) -> PackingReport:
    """Of one minibatch; `costs` by micro-batch and data shard."""
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


def _total(reports: Sequence[PackingReport]) -> PackingReport:
    columns = zip(*(dataclasses.astuple(r) for r in reports), strict=True)
    return PackingReport(*(sum(column) for column in columns))


def _used(mask: np.ndarray) -> int:
    """Places up to the last one in use, over all rows [..., places]."""
    used = np.flatnonzero(mask.reshape(-1, mask.shape[-1]).any(0))
    return int(used[-1]) + 1 if len(used) else 0
