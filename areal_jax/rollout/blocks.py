"""The blocks of an engine's KV cache: which are free, who refers to them, and which prompts they still hold.

cache_table.py gives them to requests. Host side only: what a block holds is known here, never looked up on the device.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Iterable, Sequence

import numpy as np

PrefixKey = tuple[int, bytes]  # policy version and RunningRequest.prompt_key: KV of other weights is never found


class BlockPool:
    """Blocks 0 to `blocks` - 1 with the number of references to each."""

    def __init__(self, blocks: int):
        self._counts = [0] * blocks
        self._free = list(range(blocks))  # a heap: the lowest is taken first, whatever the order of releases

    @property
    def free(self) -> int:
        return len(self._free)

    def count(self, block: int) -> int:
        """References to the block."""
        return self._counts[block]

    def allocate(self, number: int) -> list[int]:
        """The lowest free blocks, each with one reference; raises RuntimeError where fewer are free."""
        if number > len(self._free):
            raise RuntimeError(f'{number} blocks are asked for, and {len(self._free)} are free')
        blocks = [heapq.heappop(self._free) for _ in range(number)]
        for block in blocks:
            self._counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One reference more to each; raises RuntimeError for a free one."""
        for block in blocks:
            self._require_held(block)
            self._counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; a block without any is free. Raises RuntimeError for a free one."""
        for block in blocks:
            self._require_held(block)
            self._counts[block] -= 1
            if not self._counts[block]:
                heapq.heappush(self._free, block)

    def check(self, held: Iterable[int]) -> None:
        """Asserts that the references are those in `held`, one entry each, and that all other blocks are free."""
        counts = collections.Counter(held)
        assert self._counts == [counts[block] for block in range(len(self._counts))]
        assert sorted(self._free) == [block for block, count in enumerate(self._counts) if not count]

    def _require_held(self, block: int) -> None:
        if not self._counts[block]:
            raise RuntimeError(f'block {block} is free')


@dataclasses.dataclass(eq=False)
class Prefix:
    """The prompt of a group, without its last token, in the cache or on its way there."""

    key: PrefixKey
    tokens: np.ndarray  # int32 [L], L >= 1
    whole: list[int]  # blocks that hold nothing else; every sequence of the group reads them
    # the block in which the prompt ends; each sequence goes on writing in a copy, one of them in the block itself
    tail: int | None
    filled: int = 0  # positions that are in the cache
    lent: bool = False  # a sequence has the tail as its own and gives it back at its end
    expected: int = 0  # sequences in slots that are going to read it, and have not yet

    @property
    def is_complete(self) -> bool:
        return self.filled == len(self.tokens)

    @property
    def held(self) -> list[int]:
        """The blocks to which the index has a reference."""
        return self.whole if self.tail is None or self.lent else [*self.whole, self.tail]


@dataclasses.dataclass(eq=False)
class CachedSequence:
    """The blocks of one request in a slot."""

    prefix: Prefix | None  # None: the prompt has one token
    own: list[int]  # blocks behind the whole ones of the prefix
    blocks: list[int]  # position p is in blocks[p // block_tokens]
    has_tail: bool = False  # own[0] is the tail of the prefix itself
    is_attached: bool = False  # it reads the prefix: whole blocks are shared, and the tail is its own or copied
    is_logged: bool = False  # a prefill event has named the request
    filled: int = 0  # positions that are in the cache

    @property
    def tail_copy(self) -> tuple[int, int] | None:
        """(source, target) of the copy with which it can go on writing after the prefix."""
        if self.prefix is None or self.prefix.tail is None or self.has_tail:
            return None
        return self.prefix.tail, self.own[0]


class PrefixIndex:
    """Finds prefixes by policy version and tokens.

    A prefix is kept while a request that begins with it is open, and after that until its blocks are needed; the one
    that has been without a request for longest goes first.
    """

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._open: collections.Counter[PrefixKey] = collections.Counter()  # requests in slots or waiting
        self._prefixes: collections.OrderedDict[PrefixKey, Prefix] = collections.OrderedDict()  # last used last
        self._idle: collections.OrderedDict[PrefixKey, Prefix] = collections.OrderedDict()  # without an open request
        self._idle_blocks = 0

    def open(self, key: PrefixKey) -> None:
        """A request that begins with this prefix has come."""
        self._open[key] += 1
        if key in self._idle:
            self._idle_blocks -= len(self._idle.pop(key).held)

    def close(self, key: PrefixKey) -> None:
        """It has gone, and refers to no block."""
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]
            if key in self._prefixes:
                prefix = self._idle[key] = self._prefixes[key]
                self._idle_blocks += len(prefix.held)

    def find(self, key: PrefixKey) -> Prefix | None:
        return self._prefixes.get(key)

    def use(self, prefix: Prefix) -> None:
        """Adds the prefix, or notes that it is used again."""
        self._prefixes[prefix.key] = prefix
        self._prefixes.move_to_end(prefix.key)

    def give_back_tail(self, prefix: Prefix) -> bool:
        """Takes the tail over from the sequence that had it; False if the prefix will not be needed again."""
        if self._prefixes.get(prefix.key) is not prefix:
            return False
        prefix.lent = False
        return True

    def reclaim(self, number: int) -> bool:
        """Whether so many blocks are free; drops prefixes that no open request begins with where that makes it so."""
        if self._pool.free + self._idle_blocks < number:
            return False
        while self._pool.free < number:
            self._drop(next(iter(self._idle.values())))
        return True

    def reclaim_all(self, number: int, keep: Prefix | None = None) -> bool:
        """As `reclaim`, and drops also prefixes that waiting requests begin with, except `keep`."""
        if self.reclaim(number):
            return True
        while self._pool.free < number:
            prefix = next((one for one in self._prefixes.values() if one is not keep and self._frees_blocks(one)), None)
            if prefix is None:
                return False
            self._drop(prefix)
        return True

    def clear(self, open_keys: Iterable[PrefixKey]) -> None:
        """Forgets every prefix; `open_keys` are the keys of the open requests from now on."""
        for prefix in list(self._prefixes.values()):
            self._drop(prefix)
        self._open = collections.Counter(open_keys)

    def held(self) -> Sequence[int]:
        """The blocks to which prefixes refer."""
        return [block for prefix in self._prefixes.values() for block in prefix.held]

    def check(self) -> None:
        """Asserts what holds between two calls."""
        idle = {key for key in self._prefixes if not self._open[key]}
        assert self._idle.keys() == idle
        assert self._idle_blocks == sum(len(self._prefixes[key].held) for key in idle)
        for prefix in self._prefixes.values():
            assert prefix.is_complete or all(self._pool.count(block) == 1 for block in prefix.held)
        for key in idle:
            assert not self._prefixes[key].lent
            assert not self._prefixes[key].expected
            assert all(self._pool.count(block) == 1 for block in self._prefixes[key].held)

    def _frees_blocks(self, prefix: Prefix) -> bool:
        return not prefix.expected and any(self._pool.count(block) == 1 for block in prefix.held[-1:])

    def _drop(self, prefix: Prefix) -> None:
        del self._prefixes[prefix.key]
        if self._idle.pop(prefix.key, None) is not None:
            self._idle_blocks -= len(prefix.held)
        self._pool.release(prefix.held)
