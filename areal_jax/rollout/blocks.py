"""The blocks of an engine's KV cache: which are free, who refers to them, and the prompts of open requests.

cache_table.py gives them to requests. Host side only: what a block holds is known here and in blocks.py, never
looked up on the device.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from areal_jax.rollout.blocks import BlockIndex

PrefixKey = tuple[int, bytes]  # policy version and RunningRequest.prompt_key: KV of other weights is never found


class BlockPool:
    """Blocks 0 to `blocks` - 1 with the number of references to each.

    A free block keeps what it holds, for a later sequence that begins so, until it is allocated again: first those that
    hold nothing, then those that have been free for longest.
    """

    def __init__(self, blocks: int, index: BlockIndex):
        self.index = index
        self._counts = [0] * blocks
        self._empty = list(range(blocks))  # a heap: the lowest is taken first, whatever the order of releases
        self._kept: collections.OrderedDict[int, None] = (
            collections.OrderedDict()
        )  # free, in the index; freed last last

    @property
    def free(self) -> int:
        """Blocks without a reference, those that keep something included."""
        return len(self._empty) + len(self._kept)

    def count(self, block: int) -> int:
        """References to the block."""
        return self._counts[block]

    def allocate(self, number: int) -> list[int]:
        """Free blocks, each with one reference; raises RuntimeError where fewer are free."""
        if number > self.free:
            raise RuntimeError(f'{number} blocks are asked for, and {self.free} are free')
        return [self._take() for _ in range(number)]

    def share(self, blocks: Iterable[int]) -> None:
        """One reference more to each; raises RuntimeError for a free one that keeps nothing."""
        for block in blocks:
            if block in self._kept:
                del self._kept[block]
            else:
                self._require_held(block)
            self._counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; a block without any is free. Raises RuntimeError for a free one."""
        for block in blocks:
            self._require_held(block)
            self._counts[block] -= 1
            if not self._counts[block] and block in self.index:
                self._kept[block] = None
            elif not self._counts[block]:
                heapq.heappush(self._empty, block)

    def keep(self, version: int, digests: Sequence[bytes], tokens: np.ndarray, blocks: Sequence[int]) -> None:
        """Blocks of a sequence, with references, will be kept when they are free; see BlockIndex.name."""
        for block in self.index.name(version, digests, tokens, blocks):
            self._note_used(block)

    def keep_prompt(self, version: int, before: bytes, tokens: np.ndarray, block: int) -> None:
        """As `keep`, for a block in which a prompt ends; see BlockIndex.name_prompt."""
        self._note_used(self.index.name_prompt(version, before, tokens, block))

    def give_first(self, block: int) -> None:
        """The block, if it is free, will be the first to be given away of those that keep something."""
        if block in self._kept:
            self._kept.move_to_end(block, last=False)

    def forget(self) -> None:
        """No block keeps anything."""
        self.index.clear()
        for block in self._kept:
            heapq.heappush(self._empty, block)
        self._kept.clear()

    def check(self, held: Iterable[int]) -> None:
        """Asserts that the references are those in `held`, one entry each, and that all other blocks are free."""
        counts = collections.Counter(held)
        assert self._counts == [counts[block] for block in range(len(self._counts))]
        free = [block for block, count in enumerate(self._counts) if not count]
        assert sorted([*self._empty, *self._kept]) == free
        assert all((block in self._kept) == (block in self.index) for block in free)
        self.index.check()

    def _take(self) -> int:
        if self._empty:
            block = heapq.heappop(self._empty)
        else:
            block, _ = self._kept.popitem(last=False)
            self.index.forget(block)
        self._counts[block] = 1
        return block

    def _note_used(self, block: int) -> None:
        if block in self._kept:
            self._kept.move_to_end(block)

    def _require_held(self, block: int) -> None:
        if not self._counts[block]:
            raise RuntimeError(f'block {block} is free')


@dataclasses.dataclass(eq=False)
class Prefix:
    """The prompt of a group, without its last token, in the cache or on its way there."""

    key: PrefixKey
    tokens: np.ndarray  # int32 [L], L >= 1
    digests: Sequence[bytes]  # of the tokens, see block_index.extend_digests
    whole: list[int]  # blocks that hold nothing else; every sequence of the group reads them
    # the block in which the prompt ends; each sequence goes on writing in a copy, one of them in the block itself
    tail: int | None
    filled: int = 0  # positions that are in the cache, or will be after the copy
    copy: tuple[int, int] | None = (
        None  # (source, target) of a block that begins as a kept one, before the next dispatch
    )
    lent: bool = False  # a sequence has the tail as its own and gives it back at its end
    found: int = 0  # positions that a sequence before had left in the cache, until a dispatch of prefill tells of them
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

    version: int  # of the weights that its keys and values are computed with, the first where there are several
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
    """Finds the prefixes of open requests by policy version and tokens.

    When the last request that begins with a prefix has gone, its blocks are free, and the pool keeps what they hold.
    """

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._open: collections.Counter[PrefixKey] = collections.Counter()  # requests in slots or waiting
        self._prefixes: collections.OrderedDict[PrefixKey, Prefix] = collections.OrderedDict()  # last used last
        self._copied: list[Prefix] = []  # since the last dispatch

    def open(self, key: PrefixKey) -> None:
        """A request that begins with this prefix has come."""
        self._open[key] += 1

    def close(self, key: PrefixKey) -> None:
        """It has gone, and refers to no block."""
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]
            if key in self._prefixes:
                self._drop(self._prefixes[key])

    def find(self, key: PrefixKey) -> Prefix | None:
        return self._prefixes.get(key)

    def use(self, prefix: Prefix) -> None:
        """Adds the prefix, or notes that it is used again."""
        self._prefixes[prefix.key] = prefix
        self._prefixes.move_to_end(prefix.key)

    def copy(self, prefix: Prefix, source: int, target: int) -> None:
        """A block of the prefix begins as another does. Nothing is written before, so the other may be free."""
        if source != target:
            prefix.copy = source, target
            self._copied.append(prefix)

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, target) blocks to be copied before anything else is written, in this order."""
        prefixes = [one for one in self._copied if self._has(one)]  # one that is dropped has given its target away
        copies = [one.copy for one in prefixes if one.copy is not None]
        for prefix in prefixes:
            prefix.copy = None
        self._copied = []
        return copies

    def note_filled(self, prefix: Prefix) -> None:
        """Others may begin with the whole blocks of a prefix that is complete."""
        if prefix.is_complete and self._has(prefix):
            self._pool.keep(prefix.key[0], prefix.digests, self._whole_tokens(prefix), prefix.whole)

    def lend_tail(self, prefix: Prefix, block: int) -> None:
        """A sequence has this block as its tail: that of the prefix, or one that takes its place."""
        assert prefix.tail is not None
        self.copy(prefix, prefix.tail, block)
        prefix.tail, prefix.lent = block, True

    def give_back_tail(self, prefix: Prefix) -> bool:
        """Takes the tail over from the sequence that had it; False if the prefix will not be needed again."""
        if not self._has(prefix):
            return False
        prefix.lent = False
        return True

    def reclaim(self, number: int, keep: Prefix | None = None) -> bool:
        """Whether so many blocks are free; drops prefixes that no request in a slot is about to read, except `keep`."""
        while self._pool.free < number:
            prefix = next((one for one in self._prefixes.values() if one is not keep and self._frees_blocks(one)), None)
            if prefix is None:
                return False
            self._drop(prefix)
        return True

    def clear(self, open_keys: Iterable[PrefixKey]) -> None:
        """Forgets every prefix and what blocks keep; `open_keys` are those of the open requests from now on."""
        for prefix in self._prefixes.values():
            self._pool.release(prefix.held)
        self._prefixes.clear()
        self._pool.forget()
        self._open = collections.Counter(open_keys)

    def held(self) -> Sequence[int]:
        """The blocks to which prefixes refer."""
        return [block for prefix in self._prefixes.values() for block in prefix.held]

    def check(self) -> None:
        """Asserts what holds between two calls."""
        for key, prefix in self._prefixes.items():
            assert self._open[key]
            written = prefix.held[prefix.filled // self._pool.index.block_tokens :]
            assert prefix.is_complete or all(self._pool.count(block) == 1 for block in written)
            assert prefix.is_complete or not any(block in self._pool.index for block in written)

    def _has(self, prefix: Prefix) -> bool:
        return self._prefixes.get(prefix.key) is prefix

    def _frees_blocks(self, prefix: Prefix) -> bool:
        return not prefix.expected and any(self._pool.count(block) == 1 for block in prefix.held[-1:])

    def _drop(self, prefix: Prefix) -> None:
        del self._prefixes[prefix.key]
        version, whole = prefix.key[0], self._whole_tokens(prefix)
        if prefix.is_complete and prefix.tail is not None and not prefix.lent and prefix.copy is None:
            rest = prefix.tokens[len(whole) :]
            self._pool.keep_prompt(version, prefix.digests[len(prefix.whole)], rest, prefix.tail)
        self._pool.keep(version, prefix.digests, whole, prefix.whole)
        self._pool.release(reversed(prefix.held))

    def _whole_tokens(self, prefix: Prefix) -> np.ndarray:
        """Those in whole blocks that are in the cache."""
        size = self._pool.index.block_tokens
        return prefix.tokens[: min(prefix.filled // size, len(prefix.whole)) * size]
