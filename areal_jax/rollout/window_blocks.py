"""The keys and values of layers with a sliding window: what a sequence has left behind is given to other sequences.

A block (blocks.py) has a part in the layers without a window, which it keeps while it is in use, and a part in the
layers with one. A token sees no further back than the window, so that the second parts are in a smaller pool, and
`places` says where in it the part of a block is. A block gets its part before its first position is written, and the
part holds the same positions. Parts that a sequence or a prefix sees next, or writes, stay. The others stay until their
places are needed: a prompt that begins with kept blocks needs the parts of the last window before its own tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class WindowSizes(NamedTuple):
    """The pool of the layers with a window."""

    tokens: int  # the longest window: positions that a token sees, its own included
    blocks: int  # parts 0 to blocks - 1; padding is written to the part `blocks`, and nothing to the part behind it

    @property
    def padding(self) -> int:
        return self.blocks

    @property
    def blank(self) -> int:
        """The part of zeros that stands for a part that is gone, so that a kernel may read it and mask it."""
        return self.blocks + 1


def size_windows(
    window: int | None, *, slots: int, cache_blocks: int, block_tokens: int, steps: int, piece_tokens: int
) -> WindowSizes | None:
    """Returns the pool that never lacks a part; None if there is no window, or if every block may have its part.

    A row reads `window` - 1 positions and writes `steps`, which lie in at most `of_row` blocks; one more block is a
    copy whose source is still read, and one the rounding of a piece of prefill. The pieces of a dispatch write
    `piece_tokens` in all. Half as many windows as slots are for prefixes and kept sequences.
    """
    if window is None:
        return None
    of_row = -(-max(window + steps - 2, 0) // block_tokens) + 1
    kept = max(1, slots // 2) * (-(-window // block_tokens) + 1)
    blocks = slots * (of_row + 2) + -(-piece_tokens // block_tokens) + kept
    return WindowSizes(window, blocks) if blocks < cache_blocks else None


@dataclasses.dataclass(eq=False)
class Need:
    """The consecutive blocks whose parts a sequence, or a prefix, sees or writes next."""

    first: int = 0  # the number of the first in the sequence
    blocks: list[int] = dataclasses.field(default_factory=list)


class OnePool:
    """Does the work of WindowPool where all layers are in the same blocks: nothing."""

    def place(self, block: int) -> int:
        return 0

    def table(self, need: Need, blocks: int) -> Sequence[int] | np.ndarray:
        return ()

    def covers(self, blocks: Sequence[int], length: int) -> bool:
        return True

    def longest(self, blocks: Sequence[int]) -> int:
        return len(blocks)

    def prefers(self, block: int, other: int) -> bool:
        return False

    def hold(self, need: Need, blocks: list[int], start: int, stop: int) -> None:
        pass

    def release(self, need: Need) -> None:
        pass

    def mark_end(self, blocks: Sequence[int], length: int) -> None:
        pass

    def discard(self, block: int) -> None:
        pass

    def copy(self, source: int, target: int) -> None:
        pass

    def take_copies(self) -> Sequence[tuple[int, int]]:
        return ()

    def pair(self, copies: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        return ()

    def check(self, needs: Iterable[Need]) -> None:
        pass


class WindowPool:
    """The parts of blocks in the layers with a window.

    A part that nothing needs is taken for another block, first those that sequences have gone past, the oldest first,
    then those at the end of a sequence, and those where a kept sequence was found to branch.

    Args:
      blocks: of the cache, which may have a part.
    """

    def __init__(self, sizes: WindowSizes, blocks: int, block_tokens: int):
        self._sizes, self._block_tokens = sizes, block_tokens
        self.places = np.full(blocks, sizes.blank, np.int32)
        self._needs = [0] * blocks  # by block
        self._empty = list(range(sizes.blocks))  # a heap
        self._passed: collections.OrderedDict[int, None] = collections.OrderedDict()  # blocks; the oldest first
        self._kept: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._ends: set[int] = set()  # blocks in the last window of a beginning that prompts share
        self._copies: dict[int, int] = {}  # place of the source by the target, a block, in the order of the requests

    @property
    def needed(self) -> int:
        """The number of parts that are not to be had for another block."""
        return self._sizes.blocks - len(self._empty) - len(self._passed) - len(self._kept)

    def place(self, block: int) -> int:
        """Returns the place of a block's part, WindowSizes.blank if it has none."""
        return int(self.places[block])

    def table(self, need: Need, blocks: int) -> Sequence[int] | np.ndarray:
        """Returns the places of the needed parts of a sequence of `blocks` blocks, blank elsewhere; int32 [blocks]."""
        table = np.full(blocks, self._sizes.blank, np.int32)
        table[need.first : need.first + len(need.blocks)] = self.places[need.blocks]
        return table

    def covers(self, blocks: Sequence[int], length: int) -> bool:
        """Whether a token that follows the first `length` positions of the blocks finds all that it sees."""
        return all(self._has(block) for block in blocks[self._range(length)])

    def longest(self, blocks: Sequence[int]) -> int:
        """Returns the largest number of the first blocks, all of them full, behind which a token can follow."""
        count = len(blocks)
        while count:
            seen = self._range(count * self._block_tokens)
            missing = [index for index in range(seen.start, seen.stop) if not self._has(blocks[index])]
            if not missing:
                break
            count = missing[-1]  # every longer beginning that ends in this window sees it too
        return count

    def prefers(self, block: int, other: int) -> bool:
        """Whether the first of two blocks with the same tokens can follow more prompts."""
        return self._has(block) and not self._has(other)

    def hold(self, need: Need, blocks: list[int], start: int, stop: int) -> None:
        """Sets the need to the blocks that the tokens of positions [start, stop) see and write.

        A block at or behind `start` that has no part gets one. Raises RuntimeError if all parts are needed, or for a
        block before `start` that has none.
        """
        seen = self._range(start)
        wanted = blocks[seen.start : max(seen.stop, -(-stop // self._block_tokens))]
        if seen.start == need.first and wanted == need.blocks:
            return
        held, stays = set(need.blocks), set(wanted)
        new = [block for block in wanted if block not in held]
        missing = [block for block in new if not self._has(block)]
        if gone := set(missing).intersection(wanted[: start // self._block_tokens - seen.start]):
            raise RuntimeError(f'blocks {sorted(gone)} are to be seen, and their parts in window layers are gone')
        for block in new:
            self._add(block)
        for number, block in enumerate(need.blocks, start=need.first):
            if block not in stays:
                self._drop(block, passed=number < seen.start)
        for block in missing:
            self.places[block] = self._take_place()
        need.first, need.blocks = seen.start, wanted

    def release(self, need: Need) -> None:
        """Ends the need; its parts are the last to be given to other blocks."""
        for block in need.blocks:
            self._drop(block, passed=False)
        need.blocks = []

    def mark_end(self, blocks: Sequence[int], length: int) -> None:
        """Notes that prompts share the first `length` positions of the blocks, so that their end is kept for longer."""
        self._ends.update(blocks[self._range(length)])

    def discard(self, block: int) -> None:
        """Takes the part of a block that holds nothing any more."""
        self._ends.discard(block)
        if not self._has(block):
            return
        if self._needs[block]:
            raise RuntimeError(f'block {block} is free, and its part in the layers with a window is needed')
        self._passed.pop(block, None)
        self._kept.pop(block, None)
        heapq.heappush(self._empty, self._lose(block))

    def copy(self, source: int, target: int) -> None:
        """Requests that the part of block `target` begins as a copy of the place `source`; it may lose its part yet.

        Nothing is written before the copy, so the place may have another block by then.
        """
        self._copies[target] = source

    def take_copies(self) -> Sequence[tuple[int, int]]:
        """Returns (source, target) places to be copied before anything else is written, in this order."""
        pairs = [(source, self.place(target)) for target, source in self._copies.items()]
        self._copies = {}
        return [(source, target) for source, target in pairs if source != target]

    def pair(self, copies: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Returns the places of the parts of (source, target) blocks."""
        return [(self.place(source), self.place(target)) for source, target in copies]

    def check(self, needs: Iterable[Need]) -> None:
        """Asserts that these are the needs, and that every part is empty, has one block, or is needed."""
        counts = collections.Counter(block for need in needs for block in need.blocks)
        assert self._needs == [counts[block] for block in range(len(self._needs))]
        owners = [block for block in range(len(self.places)) if self._has(block)]
        assert sorted(owners) == sorted([*self._passed, *self._kept, *counts])
        taken = [self.place(block) for block in owners]
        assert sorted([*taken, *self._empty]) == list(range(self._sizes.blocks))

    def _range(self, length: int) -> slice:
        """The numbers of the blocks before position `length` of which a token at that position sees a part."""
        first = max(0, length + 1 - self._sizes.tokens) // self._block_tokens
        return slice(first, -(-length // self._block_tokens))

    def _has(self, block: int) -> bool:
        return self.place(block) != self._sizes.blank

    def _add(self, block: int) -> None:
        self._passed.pop(block, None)
        self._kept.pop(block, None)
        self._needs[block] += 1

    def _drop(self, block: int, *, passed: bool) -> None:
        self._needs[block] -= 1
        if not self._needs[block]:
            (self._passed if passed and block not in self._ends else self._kept)[block] = None

    def _take_place(self) -> int:
        if self._empty:
            return heapq.heappop(self._empty)
        if not (taken := self._passed or self._kept):
            raise RuntimeError(f'all {self._sizes.blocks} parts of layers with a window are needed')
        block, _ = taken.popitem(last=False)
        return self._lose(block)

    def _lose(self, block: int) -> int:
        place, self.places[block] = self.place(block), self._sizes.blank
        self._copies.pop(block, None)
        return place


Windows = OnePool | WindowPool


def build_windows(sizes: WindowSizes | None, blocks: int, block_tokens: int) -> Windows:
    return OnePool() if sizes is None else WindowPool(sizes, blocks, block_tokens)
