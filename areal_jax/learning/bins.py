"""Part of arrow 6: first-fit decreasing over several capacities at once. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

Size = tuple[int, ...]


def pack_first_fit(sizes: Sequence[Size], capacity: Size) -> list[list[int]]:
    """Places every item, largest first, into the first bin where each of its sizes still fits.

    'Largest' is by the biggest share of a capacity, ties by index, so the result is a function of the input alone.
    O(n log n) for one capacity: a tree over the bins holds the largest free space below each node. With several
    capacities a node may promise what none of its bins holds at once, and the search goes on to the right.

    Args:
      sizes: per item one size for each capacity, 0 <= size <= capacity.

    Returns:
      per bin the indices of its items, in the order of placing.

    Raises:
      ValueError: an item that does not fit an empty bin.
    """
    for index, size in enumerate(sizes):
        if any(s > c for s, c in zip(size, capacity, strict=True)):
            raise ValueError(f'item {index} of size {size} does not fit a bin of capacity {capacity}')
    free = _FreeSpace(len(sizes), capacity)
    bins: dict[int, list[int]] = {}
    by_share = sorted(range(len(sizes)), key=lambda i: -max(s / c for s, c in zip(sizes[i], capacity, strict=True)))
    for index in by_share:
        bins.setdefault(free.take(sizes[index]), []).append(index)
    return [bins[b] for b in sorted(bins)]


class _FreeSpace:
    """A complete binary tree over n bins; a node holds, per capacity, the most that one bin below it has free."""

    def __init__(self, n: int, capacity: Size):
        self._leaves = 1 << max(n - 1, 0).bit_length()
        self._free = [capacity] * (2 * self._leaves)

    def take(self, size: Size) -> int:
        """Takes `size` out of the first bin that has it free, and returns that bin."""
        pending = [1]
        while True:  # n bins for n items: an empty one is always left
            node = pending.pop()
            if any(s > f for s, f in zip(size, self._free[node], strict=True)):
                continue
            if node >= self._leaves:
                break
            pending += [2 * node + 1, 2 * node]
        self._free[node] = tuple(f - s for s, f in zip(size, self._free[node], strict=True))
        found = node - self._leaves
        while node > 1:
            node //= 2
            pair = zip(self._free[2 * node], self._free[2 * node + 1], strict=True)
            self._free[node] = tuple(max(left, right) for left, right in pair)
        return found
