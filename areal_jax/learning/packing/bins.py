"""Bin packing with one capacity or two: which items share a bin. numpy only."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

Size = tuple[int, ...]  # one size for each capacity, of which there are one or two
_REPACKED = 4  # bins for which sets of capacities are compared: few, so that there are few sets


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
    takes as long as a complete one; bins of a smaller capacity take less. The bins with the smallest items are
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
    """Repacks the emptiest bins so that the first capacities of the bins, each the smallest that holds it, sum to less.

    Sets of capacities are tried from the least sum on, by best fit and by the bin with the most room, largest item
    first. If none that costs less holds the items, the bins are returned unchanged.

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
    return [limits for _, limits in sorted(holding, key=lambda one: one[0])]  # those of one sum stay in their order


def _place_into(items: np.ndarray, limits: Sequence[Size]) -> list[int] | None:
    """The bin of each item, in bins of these capacities; None where neither rule places all."""
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
    """The capacities that can be short, the scarcer first.

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
