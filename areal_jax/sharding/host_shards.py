"""The part of an array over several processes that one of them saves. Nothing here imports jax.

Made by placement.py, read by learning/weights.py and checkpoint/.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class HostShards:
    """The part of an array over several processes that this one saves: copies on the host; no shard is saved twice.

    An integer index selects an entry of the first axis, as for an array; the result is a view.
    """

    shape: tuple[int, ...]  # of the whole array
    dtype: np.dtype
    parts: tuple[tuple[tuple[int, ...], np.ndarray], ...]  # (where it begins in the whole, values)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: int) -> HostShards:
        holding = [(s, part) for s, part in self.parts if s[0] <= index < s[0] + len(part)]
        entries = tuple((start[1:], part[index - start[0], ...]) for start, part in holding)
        return HostShards(self.shape[1:], self.dtype, entries)
