"""The declared batches of an engine: `generate` is compiled once for each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

MOST_BATCHES = 10  # programs of `generate`


def derive_batches(slots: int, most: int = MOST_BATCHES, least: int = 1) -> tuple[int, ...]:
    """Returns ascending batches up to `slots`: powers of two from `least` on, from 16 on also the value half way
    between two of them.

    Without a batch, its rows run in the next larger one. So while there are more than `most`, the batch whose
    neighbours are closest in ratio is removed, of several the smallest.
    """
    powers = (2**i for i in itertools.count())
    sizes = itertools.chain.from_iterable((n, 3 * n // 2) if n >= 16 else (n,) for n in powers)
    batches = [*(size for size in itertools.takewhile(lambda size: size < slots, sizes) if size >= least), slots]
    while len(batches) > most:
        inner = range(1, len(batches) - 1)
        del batches[min(inner, key=lambda i: batches[i + 1] / batches[i - 1]) if inner else 0]
    return tuple(batches)


def share_batches(slots: int, most: int, least: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns batches for plain rows and for any rows, `most` >= 2 in all; most are for plain rows, the usual ones."""
    others = max(1, most // 4)
    return derive_batches(slots, min(MOST_BATCHES, most - others), least), derive_batches(slots, others, least)


def smallest_that_holds(sizes: Sequence[int], needed: int) -> int:
    """Returns the smallest of ascending sizes that holds `needed` rows; raises ValueError if none does."""
    for size in sizes:
        if needed <= size:
            return size
    raise ValueError(f'{needed} rows do not fit batch_buckets={tuple(sizes)}; decode fewer at once')
