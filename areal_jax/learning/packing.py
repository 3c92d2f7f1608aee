"""Packing: groups of trajectories become rows of a fixed shape, without padding to the longest. numpy only.

In shared-prompt packing the prompt of a group is written once per row, and each of the group's answers in that row sees
it. Trajectories become examples, bins decide which examples share a row, and packed_rows.py writes them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from areal_jax.columns import Column
from areal_jax.config.declarations import choices
from areal_jax.config.fields import ConfigError
from areal_jax.config.training import ROW_ROOM
from areal_jax.learning.packed_rows import (
    EMPTY,
    PADDING,
    BatchError,
    CostCoefficients,
    Example,
    NextTokenForm,
    PackingReport,
    Row,
    RowShape,
    Unit,
    place_rows,
    report_batch,
    shard_costs,
    total_report,
    write_rows,
)
from areal_jax.types import LARGEST_LOGPROB, NOT_GENERATED, PackedBatch, Trajectory, TrajectoryGroup

Size = tuple[int, ...]  # one size for each of the one or two capacities
_REPACKED = 4  # the number of bins that fit_capacities repacks: small, because it compares sets of capacities


def pack_first_fit(sizes: Sequence[Size] | np.ndarray, capacity: Size) -> list[list[int]]:
    """Places every item, largest first, into the first bin where it still fits.

    'Largest' is by the biggest share of a capacity, ties by index, so the result is a function of the input alone.
    O(n log n). If both capacities can be the limit, first fit would need O(bins) per item, so best fit is used instead:
    choose the bin that will have the least room left in the scarcer capacity, O(log capacity) per item. It needs as few
    bins.

    Args:
      sizes: per item one size for each capacity, 0 <= size <= capacity; an array is int [n, capacities].

    Returns:
      per bin the indices of its items, in the order of placing.

    Raises:
      ValueError: an item that does not fit an empty bin.
    """
    items, limit = _checked(sizes, capacity)
    order = _largest_first(items, limit)
    if len(items) and (items.sum(0) <= limit).all():
        return [order.tolist()]
    axes = _deciding(items, limit)
    columns, limits = [items[order, axis].tolist() for axis in axes], [int(limit[axis]) for axis in axes]
    places = _place_first(columns[0], limits[0]) if len(axes) == 1 else _place_best(*columns, *limits)
    return _members(order.tolist(), places)


def pack_fewest_first(sizes: Sequence[Size] | np.ndarray, capacity: Size) -> list[list[int]]:
    """Places every item, largest first, into the bin with the fewest items among those where it fits.

    A bin is opened if no open one has room. Algorithm 1 (dynamic batching) of arXiv 2505.24298, with k_min = 1. The
    paper leaves ties open: here the lowest index, of items and of bins. O(n * bins).

    Args, Returns, Raises: as `pack_first_fit`.
    """
    items, limit = _checked(sizes, capacity)
    order = _largest_first(items, limit)
    free = np.repeat(limit[:, None], len(items), axis=1)  # [capacities, bins]
    counts = np.zeros(len(items), np.int64)
    opened, places = 0, []
    for size in items[order]:
        fits = np.flatnonzero((free[:, :opened] >= size[:, None]).all(0))
        if not len(fits):
            found, opened = opened, opened + 1
        else:
            found = int(fits[counts[fits].argmin()])
        free[:, found] -= size
        counts[found] += 1
        places.append(found)
    return _members(order.tolist(), places)


def spread_remainder(
    bins: Sequence[Sequence[int]], sizes: Sequence[Size] | np.ndarray, bins_per_batch: int, capacities: Sequence[Size]
) -> list[list[int]]:
    """Repacks the bins of an incomplete last batch into more bins of a smaller capacity, at most one batch of them.

    Well-filled bins leave a last batch of a few full bins. If the bins of a batch are computed in parallel, that batch
    takes as long as a complete one; bins of a smaller capacity take less time. The bins with the smallest items are
    repacked. If their items fit no smaller capacity, the bins are returned unchanged.

    Args:
      bins: as packed, indices of items.
      capacities: ascending; the last is the capacity of `bins`.
    """
    left_over = len(bins) % bins_per_batch
    if not left_over:
        return [list(b) for b in bins]
    items = np.asarray(sizes, np.int64).reshape(len(sizes), -1)
    shares = (items / np.maximum(capacities[-1], 1)).max(1)
    by_largest_item = sorted(range(len(bins)), key=lambda b: shares[list(bins[b])].max())
    chosen, kept = sorted(by_largest_item[:left_over]), sorted(by_largest_item[left_over:])
    members = [item for b in chosen for item in bins[b]]
    for capacity in capacities[:-1]:
        if (items[members] <= capacity).all():
            spread = pack_first_fit(items[members], capacity)
            if len(spread) <= bins_per_batch:
                return [list(bins[b]) for b in kept] + [[members[i] for i in b] for b in spread]
    return [list(b) for b in bins]


def fit_capacities(
    bins: Sequence[Sequence[int]], sizes: Sequence[Size] | np.ndarray, capacities: Sequence[Size]
) -> list[list[int]]:
    """Repacks the emptiest bins into capacities with a smaller sum; a bin counts the smallest capacity that holds it.

    The sum is of first capacities. Sets of capacities are tried in the order of their sums, each by best fit and by the
    bin with the most room, largest item first. If no set with a smaller sum holds the items, the bins are returned
    unchanged.

    Args:
      bins: as packed, indices of items.
      capacities: ascending; the last is the capacity of `bins`.
    """
    items = np.asarray(sizes, np.int64).reshape(len(sizes), len(capacities[-1]))
    used = [items[list(b)].sum(0) for b in bins]
    by_size = sorted(range(len(bins)), key=lambda b: int(used[b][0]))
    chosen, kept = sorted(by_size[:_REPACKED]), sorted(by_size[_REPACKED:])
    now = sum(min(c[0] for c in capacities if (used[b] <= c).all()) for b in chosen)
    members = [item for b in chosen for item in bins[b]]
    for limits in _sets_of(capacities, len(chosen) + 1, items[members].sum(0), now):
        if (places := _place_into(items[members], limits)) is not None:
            fitted = [[members[i] for i in b] for b in _members(range(len(members)), places) if b]
            return [list(bins[b]) for b in kept] + fitted
    return [list(b) for b in bins]


def _sets_of(capacities: Sequence[Size], most: int, needed: np.ndarray, below: int) -> list[tuple[Size, ...]]:
    """Up to `most` capacities that hold `needed` together and whose first ones sum to less than `below`: the least sum
    first, then the fewest bins."""
    sets = itertools.chain.from_iterable(
        itertools.combinations_with_replacement(capacities, count) for count in range(1, most + 1)
    )
    together = [(np.sum(limits, 0), limits) for limits in sets]
    holding = [(int(room[0]), limits) for room, limits in together if (room >= needed).all() and room[0] < below]
    return [limits for _, limits in sorted(holding, key=lambda one: one[0])]  # stable: equal sums keep their order


def _place_into(items: np.ndarray, limits: Sequence[Size]) -> list[int] | None:
    """The bin of each item, in bins of these capacities; None if neither rule places all items."""
    for choose in (np.argmin, np.argmax):
        free, places = np.array(limits, np.int64), np.full(len(items), -1)
        for item in np.argsort(-items[:, 0], kind='stable'):
            fits = np.flatnonzero((free >= items[item]).all(1))
            if not len(fits):
                break
            places[item] = fits[choose(free[fits, 0])]
            free[places[item]] -= items[item]
        if (places >= 0).all():
            return [int(place) for place in places]
    return None


def _checked(sizes: Sequence[Size] | np.ndarray, capacity: Size) -> tuple[np.ndarray, np.ndarray]:
    """(items [n, capacities], capacity), int64."""
    limit = np.array(capacity, np.int64)
    items = np.asarray(sizes, np.int64).reshape(len(sizes), len(limit))
    too_large = np.flatnonzero((items > limit).any(1))
    if len(too_large):
        index = int(too_large[0])
        size = tuple(items[index].tolist())
        raise ValueError(f'item {index} of size {size} does not fit a bin of capacity {tuple(capacity)}')
    return items, limit


def _largest_first(items: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.argsort(-(items / np.maximum(limit, 1)).max(1), kind='stable')


def _deciding(items: np.ndarray, limit: np.ndarray) -> tuple[int, ...]:
    """The axes of the capacities that can run out, the scarcer first.

    If every item takes at least as large a share of one capacity as of the other, only the first can run out.
    """
    if len(limit) == 1:
        return (0,)
    first, second = items[:, 0] * max(limit[1], 1), items[:, 1] * max(limit[0], 1)
    if (first >= second).all():
        return (0,)
    if (first <= second).all():
        return (1,)
    return (0, 1) if first.sum() >= second.sum() else (1, 0)


def _place_first(sizes: Sequence[int], capacity: int) -> list[int]:
    """First fit in the order given, by a tree whose nodes hold the largest free space of the bins below.

    The first item of a bin did not fit any earlier bin, so any two bins together hold more than one capacity. This
    bounds the number of bins, and with it the number of leaves.
    """
    most_bins = min(len(sizes), 2 * sum(sizes) // max(capacity, 1) + 1)
    leaves = 1 << max(most_bins - 1, 0).bit_length()
    free = [capacity] * (2 * leaves)
    places = []
    for size in sizes:
        node = 1
        while node < leaves:  # an empty bin is always left, so the root has room
            node += node
            if free[node] < size:
                node += 1
        places.append(node - leaves)
        most = free[node] = free[node] - size
        while node > 1:
            if (beside := free[node ^ 1]) > most:
                most = beside
            node >>= 1
            if free[node] == most:
                break
            free[node] = most
    return places


def _place_best(firsts: Sequence[int], seconds: Sequence[int], first_capacity: int, second_capacity: int) -> list[int]:
    """Best fit in the order given: the bin with the least of the first capacity left; ties go to the bin with the most
    of the second left, then to the lowest index."""
    empty = first_capacity + 1  # sorts after every bin in use: a new bin is the last choice
    bins = _FreeSpace(empty)
    bins.put(empty, second_capacity, 0)
    opened, places = 0, []
    for first, second in zip(firsts, seconds, strict=True):
        first_free, second_free, found = bins.take(first, second)
        if first_free == empty:
            first_free, opened = first_capacity, opened + 1
            bins.put(empty, second_capacity, opened)
        bins.put(first_free - first, second_free - second, found)
        places.append(found)
    return places


class _FreeSpace:
    """Bins ordered by their free space of a first capacity; each node of a tree knows the largest free space of the
    second capacity below it."""

    def __init__(self, most_first_free: int):
        self._leaves = 1 << most_first_free.bit_length()
        self._most = [-1] * (2 * self._leaves)  # -1 = no bin
        self._bins: dict[int, list[tuple[int, int]]] = {}  # per leaf a heap of (-free of the second, bin)

    def put(self, first_free: int, second_free: int, index: int) -> None:
        node = self._leaves + first_free
        heapq.heappush(self._bins.setdefault(node, []), (-second_free, index))
        while node and self._most[node] < second_free:
            self._most[node] = second_free
            node >>= 1

    def take(self, first: int, second: int) -> tuple[int, int, int]:
        """Removes the tightest bin with room for both; returns (free of the first, free of the second, its index)."""
        most, node = self._most, self._leaves + first
        while most[node] < second:  # an empty bin always has enough
            node += 1
            node //= node & -node  # the largest subtree that starts here
        while node < self._leaves:
            node += node
            node += most[node] < second
        bins, first_free = self._bins[node], node - self._leaves
        second_free, index = heapq.heappop(bins)
        most[node] = -bins[0][0] if bins else -1
        while node > 1:
            node >>= 1
            most[node] = max(most[2 * node], most[2 * node + 1])
        return first_free, -second_free, index


def _members(items: Sequence[int], places: Sequence[int]) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(max(places, default=-1) + 1)]
    for item, place in zip(items, places, strict=True):
        bins[place].append(item)
    return bins


# Trajectories in the form that the learner reads, after a check for errors that no kernel would notice.
#
# A trajectory whose last loss token is token t needs t places in a row: that token is predicted and never read.


def make_examples(
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[np.ndarray],
    capacity: tuple[int, int],
    vocab_size: int | None,
    columns: Sequence[Column] = (),
    masks_truncated: bool = False,
    inputs: Sequence[Column] = (),
) -> list[list[Example]]:
    """For each group, its trajectories that have loss tokens. Ids count all trajectories of the update.

    With `masks_truncated`, trajectories that ended at their limit are left out.
    """
    examples_of, next_id = [], 0
    for group, values in zip(groups, advantages, strict=True):
        examples = []
        for trajectory, advantage in zip(group.trajectories, values, strict=True):
            _require_sound(trajectory, float(advantage), vocab_size)
            form = next_token_form(trajectory, columns, inputs)
            if len(form.targets) and not (masks_truncated and trajectory.finish_reason == 'length'):
                _require_fit(trajectory, form, capacity)
                examples.append(Example(form, len(trajectory.prompt.tokens), float(advantage), next_id))
            next_id += 1
        examples_of.append(examples)
    return examples_of


def _require_sound(trajectory: Trajectory, advantage: float, vocab_size: int | None) -> None:
    """Raises BatchError for values with which training would be silently wrong.

    A token id outside the vocabulary reads another row of the embedding; a behavior log-prob of -inf gives its token
    the largest weight possible.
    """
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


def _require_fit(trajectory: Trajectory, form: NextTokenForm, capacity: tuple[int, int]) -> None:
    for field, needed, available in zip(ROW_ROOM, (len(form.inputs), len(form.targets)), capacity, strict=True):
        if needed > available:
            raise BatchError(
                f'draw {trajectory.prompt.draw}, sample {trajectory.sample}: {len(trajectory.tokens)} tokens of '
                f'trajectory need {needed} places of a row, but {field}={available}; raise {field} to at least '
                f'{needed} or lower rollout.max_new_tokens'
            )


def next_token_form(
    trajectory: Trajectory, columns: Sequence[Column] = (), inputs: Sequence[Column] = ()
) -> NextTokenForm:
    """Aligns arrays with the token that predicts, not the token that they describe; no other code shifts them.

    The first answer token is predicted by the last prompt token. Environment tokens are context: inputs, never targets.
    An input has the entry of the next token in columns of `inputs`: it was recorded by the pass that read the input.
    Raises BatchError if the very first token was generated, because no token predicts it.
    """
    tokens = trajectory.tokens
    predicted = np.flatnonzero(trajectory.loss_mask)  # [A], indices of the loss tokens
    if len(predicted) and predicted[0] == 0:
        raise BatchError(f'draw {trajectory.prompt.draw}: the prompt is empty, so nothing predicts its first token')
    return NextTokenForm(
        inputs=tokens[: predicted[-1]] if len(predicted) else tokens[:0],
        sources=(predicted - 1).astype(np.int32),
        targets=tokens[predicted],
        behavior_logprobs=trajectory.behavior_logprobs[predicted],
        policy_versions=trajectory.policy_versions[predicted],
        columns={column.name: trajectory.column(column)[predicted] for column in columns},
        read={
            column.name: trajectory.column_with_context(column)[1 : predicted[-1] + 1 if len(predicted) else 1]
            for column in inputs
        },
    )


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
    newest_version: int | None = None,  # the version from which the update starts; None = not checked
    round_microbatches: bool = False,  # add empty ones up to a power of two
    masks_truncated: bool = False,  # leave answers that ended at their limit out
    keeps_groups: bool = False,  # put all answers of a group into one row
    data_shards: int = 1,
    cost: CostCoefficients = _TOKENS_ONLY,
    buckets: Sequence[RowShape] = (),
    vocab_size: int | None = None,
    row_trajectories: int | None = None,
    columns: Sequence[Column] = (),  # packed in addition to the fields of a PackedBatch
    inputs: Sequence[Column] = (),  # likewise, for all tokens that are read
) -> tuple[list[PackedBatch], PackingReport]:
    """Packs the groups of one update: one PackedBatch for each minibatch that has a token to train.

    A group is never split, so fewer groups than `n_minibatches` give fewer batches, and without a token to train there
    is no batch. Tokens of versions before `oldest_version` are left out of `loss_mask` but keep their place and
    trajectory id, which denominators count (objective/counting.py). `fill`, `data_shards` and `cost` decide only where
    a token is placed.

    Args:
      advantages: per group float32 [trajectories of the group].
      mode: 'shared_prompt' | 'ordinary'.
      fill: 'first_fit' (decreasing) | 'algorithm_1' (pack_fewest_first) | 'padded' (one trajectory per row, rows in the
        order given; for comparison).
      data_shards: groups of devices that share the rows of a micro-batch, an equal slice each.
      cost: the measure by which the shards are balanced (rows.place_rows).
      buckets: the row shapes to which the caller trims micro-batches, ascending, the full shape last; () = no trimming.
        'first_fit' repacks an incomplete last micro-batch into more rows of a smaller shape if its items fit one; with
        micro-batches of one row, it repacks the emptiest rows so that their shapes have the fewest tokens in all.
      vocab_size: the bound of token ids; None = unbounded.
      row_trajectories: the most trajectories in a row in mode 'ordinary'; None = unbounded.

    Raises BatchError for a trajectory that must not be learned from or fits no row, ValueError as `require_known`.
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
    if newest_version is not None:
        _require_published(batches, newest_version)
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
    """Raises ValueError for a mode or fill that is unknown, and for two that cannot be combined."""
    if mode not in MODES:
        raise ConfigError(f'learner.packing={mode!r} is unknown; use one of {", ".join(MODES)}')
    if fill not in FILLS:
        raise ConfigError(f'learner.fill={fill!r} is unknown; use one of {", ".join(FILLS)}')
    if (mode, fill) == ('shared_prompt', 'padded'):
        raise ConfigError(
            "learner.fill='padded' puts one trajectory in a row, so learner.packing='shared_prompt' has no prompt to "
            "share: set learner.packing='ordinary'"
        )


def _require_published(batches: Sequence[PackedBatch], version: int) -> None:
    for batch in batches:
        newest = int(batch.policy_versions[batch.trajectory_ids >= 0].max(initial=NOT_GENERATED))
        if newest > version:
            raise BatchError(f'a token has policy version {newest}, but the update starts from version {version}')


def _round_up(placement: np.ndarray) -> np.ndarray:
    missing = (1 << (len(placement) - 1).bit_length()) - len(placement)
    return np.pad(placement, ((0, missing), (0, 0)), constant_values=EMPTY)


def _units(examples: Sequence[Example], mode: str, capacity: tuple[int, int], keeps_groups: bool = False) -> list[Unit]:
    """Groups examples into units; in shared-prompt packing, as many answers as fit one row with their shared prompt."""
    if keeps_groups and examples:
        return [_whole_group(examples, mode, capacity)]
    if mode == 'ordinary':
        return [Unit((e,)) for e in examples]
    tokens, loss_tokens = capacity
    sharing: dict[bytes, list[Example]] = {}  # rows of the group by the prompt with which they begin
    for example in examples:
        sharing.setdefault(example.prompt_key, []).append(example)
    units = []
    for members in sharing.values():
        bins = pack_first_fit([e.size for e in members], (tokens - members[0].prompt_tokens, loss_tokens))
        units += [Unit(tuple(members[i] for i in sorted(b))) for b in bins]
    return units


def _whole_group(examples: Sequence[Example], mode: str, capacity: tuple[int, int]) -> Unit:
    shares = mode == 'shared_prompt' and len({example.prompt_key for example in examples}) == 1
    unit = Unit(tuple(examples), shares_prompt=shares)
    for field, needed, room in zip(ROW_ROOM, unit.size, capacity, strict=True):
        if needed > room:
            raise BatchError(
                f'the {len(examples)} answers of a group must lie in one row and need {needed} places of it, but '
                f'{field}={room}: raise {field} to at least {needed}'
            )
    return unit


def _rows(
    units: Sequence[Unit], fill: str, rows_per_microbatch: int, shapes: Sequence[RowShape], most: int | None
) -> list[Row]:
    """Rows of at most `most` prompts each; fuller rows are cut, not repacked, because there are few of them."""
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
