"""The declared batches of an engine: `generate` is compiled once for each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

MOST_BATCHES = 10  # programs of `generate`


def derive_batches(slots: int, most: int = MOST_BATCHES, least: int = 1) -> tuple[int, ...]:
    """Ascending batches that end with `slots`: powers of two from `least` on, from 16 on with the value half way
    between them.

    A batch costs the next larger one at worst, so while there are more than `most`, the one goes that is missed least:
    the one whose neighbours are closest in ratio, of several the smallest.
    """
    powers = (2**i for i in itertools.count())
    sizes = itertools.chain.from_iterable((n, 3 * n // 2) if n >= 16 else (n,) for n in powers)
    batches = [*(size for size in itertools.takewhile(lambda size: size < slots, sizes) if size >= least), slots]
    while len(batches) > most:
        inner = range(1, len(batches) - 1)
        del batches[min(inner, key=lambda i: batches[i + 1] / batches[i - 1]) if inner else 0]
    return tuple(batches)


def share_batches(slots: int, most: int, least: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Batches of plain rows and of any rows, `most` >= 2 in all; the plain ones, as most rows are, get most of them."""
    others = max(1, most // 4)
    return derive_batches(slots, min(MOST_BATCHES, most - others), least), derive_batches(slots, others, least)


def smallest_that_holds(sizes: Sequence[int], needed: int) -> int:
    """Of ascending sizes; raises ValueError where none does."""
    for size in sizes:
        if needed <= size:
            return size
    raise ValueError(f'{needed} rows do not fit batch_buckets={tuple(sizes)}; decode fewer at once')
