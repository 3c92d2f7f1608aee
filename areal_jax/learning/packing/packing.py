"""Packing: groups of trajectories become rows of a fixed shape, without padding to the longest. numpy only.

In shared-prompt packing the prompt of a group is written once per row, and each of the group's answers in that row sees
it. examples.py says what is packed, bins.py which examples share a row, balance.py which rows share a micro-batch;
rows.py writes them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from areal_jax.columns import Column
from areal_jax.config.declarations import choices
from areal_jax.config.ranges import ConfigError
from areal_jax.learning.packing.balance import EMPTY, CostCoefficients, place_rows, shard_costs
from areal_jax.learning.packing.bins import fit_capacities, pack_fewest_first, pack_first_fit, spread_remainder
from areal_jax.learning.packing.buckets import RowShape
from areal_jax.learning.packing.examples import make_examples
from areal_jax.learning.packing.packing_report import PackingReport, report_batch, total_report
from areal_jax.learning.packing.rows import PADDING, BatchError, Example, Row, Unit, write_rows
from areal_jax.types import PackedBatch, TrajectoryGroup

MODES, FILLS = choices('learner.packing'), choices('learner.fill')
_TOKENS_ONLY = CostCoefficients()


def pack(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[np.ndarray],
    *,
    mode: str,
    fill: str,
    row_tokens: int,
    row_loss_tokens: int,
    rows_per_microbatch: int,
    n_minibatches: int,
    oldest_version: int | None = None,
    round_microbatches: bool = False,  # add empty ones up to a power of two
    masks_truncated: bool = False,  # leave answers that ended at their limit out
    keeps_groups: bool = False,  # put all answers of a group into one row
    data_shards: int = 1,
    cost: CostCoefficients = _TOKENS_ONLY,
    buckets: Sequence[RowShape] = (),
    vocab_size: int | None = None,
    row_trajectories: int | None = None,
    columns: Sequence[Column] = (),  # packed beside the fields of a PackedBatch
    inputs: Sequence[Column] = (),  # likewise, of all tokens that are read
) -> tuple[list[PackedBatch], PackingReport]:
    """Packs the groups of one update: one PackedBatch for each minibatch that has a token to train.

    A group is never split, so fewer groups than `n_minibatches` give fewer batches, and nothing to train none. Tokens
    generated before `oldest_version` are left out of `loss_mask` but keep their place and trajectory id, which is what
    denominators count (objective/counting.py). `fill`, `data_shards` and `cost` decide only where a token is placed.

    Args:
      advantages: per group float32 [trajectories of the group].
      mode: 'shared_prompt' | 'ordinary'.
      fill: 'first_fit' (decreasing) | 'algorithm_1' (bins.pack_fewest_first) | 'padded' (one trajectory per row, rows
        in the order given; to compare with).
      data_shards: groups of devices that share the rows of a micro-batch, an equal slice each.
      cost: the measure by which the shards are balanced (balance.place_rows).
      buckets: the row shapes to which the caller trims micro-batches, ascending, the full shape last; () = no trimming.
        'first_fit' repacks an incomplete last micro-batch into more rows of a smaller shape if its items fit one; in
        micro-batches of one row, the emptiest rows so that their shapes come to the fewest tokens.
      vocab_size, row_trajectories: a token id is below it; most in a row in mode 'ordinary'. None = not bounded.

    Raises BatchError for what must not be learned from or fits no row, ValueError for what `require_known` refuses.
    """
    require_known(mode, fill)
    capacity = (row_tokens, row_loss_tokens)
    examples_of = make_examples(groups, advantages, capacity, vocab_size, columns, masks_truncated, inputs)
    batches, reports = [], []
    for members in split_minibatches([sum(e.size[1] for e in group) for group in examples_of], n_minibatches):
        units = [unit for g in members for unit in _units(examples_of[g], mode, capacity, keeps_groups)]
        rows = _rows(units, fill, rows_per_microbatch, buckets or [RowShape(*capacity)], row_trajectories)
        costs = np.array([row.cost(cost) for row in rows])  # [rows]
        shares = np.array([row.share(capacity) for row in rows])  # [rows]
        placement = place_rows(costs, shares, rows_per_microbatch, data_shards, in_order=fill == 'padded')
        placement = _round_up(placement) if round_microbatches else placement
        batch = empty_batch(len(placement), rows_per_microbatch, *capacity, columns, inputs)
        write_rows(batch, rows, placement, oldest_version)
        if batch.loss_mask.any():
            batches.append(batch)
            unshared_tokens = sum(len(e.form.inputs) for g in members for e in examples_of[g])
            reports.append(report_batch(batch, unshared_tokens, shard_costs(costs, placement, data_shards), buckets))
    return batches, total_report(reports)


def empty_batch(
    microbatches: int,
    rows: int,
    row_tokens: int,
    row_loss_tokens: int,
    columns: Sequence[Column] = (),
    inputs: Sequence[Column] = (),
) -> PackedBatch:
    """A batch of padding: nothing to read, nothing to train."""
    places, loss_places = (microbatches, rows, row_tokens), (microbatches, rows, row_loss_tokens)
    blank = lambda column, at: np.broadcast_to(column.blank(1), (*at, *(column.shape or ()))).copy()
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
        columns={column.name: blank(column, loss_places) for column in columns},
        inputs={column.name: blank(column, places) for column in inputs},
    )


def split_minibatches(loss_tokens: Sequence[int], n_minibatches: int) -> list[list[int]]:
    """Distributes groups over minibatches of about equal loss tokens: the largest group first, each to the smallest
    minibatch so far. Returns the indices of the groups of each minibatch.

    The result depends on the groups alone, so an optimizer step sees the same groups whatever the packing. Groups
    without loss tokens are left out. No minibatch is empty, so there may be fewer than `n_minibatches`.
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
    """Tokens that packing would put into rows if no group had to be split over rows; cheap, to price an update."""
    total = 0
    for group in groups:
        prompts = [row.prompt.tokens for row in group.trajectories]
        if mode == 'shared_prompt':
            prompts = list({tokens.tobytes(): tokens for tokens in prompts}.values())
        answers = sum(len(s.tokens) for t in group.trajectories for s in t.segments)
        total += sum(map(len, prompts)) + answers - len(group.trajectories)
    return total


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


def _round_up(placement: np.ndarray) -> np.ndarray:
    """Adds empty micro-batches to a placement [M, R] until their number is a power of two."""
    missing = (1 << (len(placement) - 1).bit_length()) - len(placement)
    return np.pad(placement, ((0, missing), (0, 0)), constant_values=EMPTY)


def _units(examples: Sequence[Example], mode: str, capacity: tuple[int, int], keeps_groups: bool = False) -> list[Unit]:
    """In shared-prompt packing, bins of as many answers as fit one row together with the prompt that they share."""
    if keeps_groups and examples:
        return [_whole_group(examples, mode, capacity)]
    if mode == 'ordinary':
        return [Unit((e,)) for e in examples]
    row_tokens, row_loss_tokens = capacity
    sharing: dict[bytes, list[Example]] = {}  # of the rows of a group that begin with one prompt
    for example in examples:
        sharing.setdefault(example.prompt_key, []).append(example)
    units = []
    for members in sharing.values():
        bins = pack_first_fit([e.size for e in members], (row_tokens - members[0].prompt_tokens, row_loss_tokens))
        units += [Unit(tuple(members[i] for i in sorted(b))) for b in bins]
    return units


def _whole_group(examples: Sequence[Example], mode: str, capacity: tuple[int, int]) -> Unit:
    """All answers of a group; raises BatchError where no row has room for them."""
    shares = mode == 'shared_prompt' and len({example.prompt_key for example in examples}) == 1
    unit = Unit(tuple(examples), shares_prompt=shares)
    for field, needed, room in zip(('learner.row_tokens', 'learner.row_loss_tokens'), unit.size, capacity, strict=True):
        if needed > room:
            raise BatchError(
                f'the {len(examples)} answers of a group must lie in one row and need {needed} places of it, but '
                f'{field}={room}: raise {field} to at least {needed}'
            )
    return unit


def _rows(
    units: Sequence[Unit], fill: str, rows_per_microbatch: int, shapes: Sequence[RowShape], most: int | None
) -> list[Row]:
    """Rows of at most `most` prompts each; a fuller one is cut, because few rows ever are."""
    sizes = [u.size for u in units]
    if fill == 'padded':
        bins = [[u] for u in range(len(units))]
    elif fill == 'algorithm_1':
        bins = pack_fewest_first(sizes, shapes[-1])
    elif rows_per_microbatch == 1 and len(shapes) > 1:
        bins = fit_capacities(pack_first_fit(sizes, shapes[-1]), sizes, shapes)
    else:
        bins = spread_remainder(pack_first_fit(sizes, shapes[-1]), sizes, rows_per_microbatch, shapes)
    if most is not None:
        most = max(most // max((u.prompts for u in units), default=1), 1)
        bins = [b[start : start + most] for b in bins for start in range(0, len(b), most)]
    return [Row(tuple(units[u] for u in members)) for members in bins]
