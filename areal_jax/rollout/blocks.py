"""The blocks of an engine's KV cache: which are free, who refers to them, and the prompts of open requests.

cache_table.py gives them to requests. Host side only: the content of a block is known here and never read from the
device.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from areal_jax.rollout.state_pool import NoStates, States
from areal_jax.rollout.window_blocks import Need, OnePool, Windows

_DIGEST_BYTES = 16  # two different sequences share a digest with a chance of 2^-128

# Policy version and digest of the tokens before a block: KV of other weights is never found.
_Place = tuple[int, bytes]


def root_digest(salt: str) -> bytes:
    """The digest of the empty sequence under `salt`: prompts with different `cache_salt` never share a digest."""
    return hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()


def extend_digests(digests: Sequence[bytes], tokens: np.ndarray, block_tokens: int) -> list[bytes]:
    """Returns digests, of which entry i covers the first i whole blocks of `tokens`, int32 [T].

    `digests` are the entries that are known already; the first one is of no tokens.
    """
    extended = list(digests)
    data = np.ascontiguousarray(tokens, np.int32).data.cast('B')
    size = 4 * block_tokens
    for start in range((len(digests) - 1) * size, len(data) - size + 1, size):
        block = hashlib.blake2b(extended[-1], digest_size=_DIGEST_BYTES)
        block.update(data[start : start + size])
        extended.append(block.digest())
    return extended


@dataclasses.dataclass(frozen=True)
class Match:
    """The longest known beginning of a prompt."""

    blocks: Sequence[int]  # whole ones
    tail: int | None  # the block whose first positions follow them
    length: int  # positions, the tail's included
    goes_on: bool  # the kept sequence ends in the tail, and the prompt continues after it

    def cut(self, length: int, block_tokens: int) -> Match:
        """Returns the first `length` positions, fewer than there are; the tail may be a whole block of this match."""
        whole, inside = divmod(length, block_tokens)
        blocks = [*self.blocks, *(() if self.tail is None else (self.tail,))]
        return Match(self.blocks[:whole], blocks[whole] if inside else None, length, goes_on=False)


class BlockIndex:
    """Names of blocks. A block has a name for its content, and another one if a prompt ends inside it.

    Of two blocks with the same content the first has the name, unless `windows` prefers the second.
    """

    def __init__(self, block_tokens: int, windows: Windows | None = None):
        self.block_tokens, self.windows = block_tokens, windows or OnePool()
        self.replaced: list[int] = []  # blocks that another one has taken a name from; the pool empties the list
        self._whole: dict[_Place, int] = {}  # by the digest that includes the block
        self._ends: dict[_Place, dict[bytes, int]] = collections.defaultdict(dict)  # by the tokens of the sequence
        self._prompts: dict[_Place, dict[bytes, int]] = collections.defaultdict(dict)  # by the tokens of the prompt
        self._names: dict[int, list[tuple[dict[_Place, dict[bytes, int]], _Place, bytes]]] = {}
        self._names_of_whole: dict[int, _Place] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._names or block in self._names_of_whole

    def find(self, version: int, digests: Sequence[bytes], tokens: np.ndarray) -> Match:
        """Finds the whole blocks whose tokens all match, and a kept sequence that follows them and ends within a block.

        A prompt may end inside a kept block only if an earlier prompt with the same tokens ended there.

        Args:
          digests: of the tokens, from `extend_digests`.
          tokens: int32 [T], a prompt without its last token.
        """
        blocks = []
        for digest in digests[1:]:
            if (block := self._whole.get((version, digest))) is None:
                break
            blocks.append(block)
        start, place = len(blocks) * self.block_tokens, (version, digests[len(blocks)])
        rest = tokens[start : start + self.block_tokens].tobytes()
        if start + self.block_tokens > len(tokens) and rest in (named := self._prompts.get(place, {})):
            return Match(blocks, named[rest], len(tokens), goes_on=False)
        ends = self._ends.get(place, {})
        # if many sequences end here, one table lookup per length is cheaper than a comparison with each sequence
        wanted = ends if len(ends) <= self.block_tokens else (rest[:size] for size in range(4, len(rest) + 1, 4))
        end = max((one for one in wanted if rest.startswith(one) and one in ends), key=len, default=b'')
        return Match(blocks, ends.get(end), start + len(end) // 4, goes_on=bool(end))

    def name(self, version: int, digests: Sequence[bytes], tokens: np.ndarray, blocks: Sequence[int]) -> Iterator[int]:
        """Names the blocks of a sequence, the last one first, and yields the block that has each name now.

        That is another block if one holds the same tokens already. The first `blocks` hold `tokens`, int32 [T].
        """
        whole = len(tokens) // self.block_tokens
        if rest := tokens[whole * self.block_tokens :].tobytes():
            yield self._name_end(self._ends, (version, digests[whole]), rest, blocks[whole])
        for index in range(whole - 1, -1, -1):
            name, block = (version, digests[index + 1]), blocks[index]
            named = self._whole.get(name)
            if named is not None and self.windows.prefers(block, named):
                del self._names_of_whole[named]
                self.replaced.append(named)
                named = None
            if named is None:
                self._whole[name], self._names_of_whole[block] = block, name
            yield self._whole[name]

    def name_prompt(self, version: int, before: bytes, tokens: np.ndarray, block: int) -> int:
        """Names the block by the tokens of a prompt that ends inside it; returns the block that has the name now.

        `tokens`, int32 [n] with n < block_tokens, follow the blocks whose digest is `before`.
        """
        return self._name_end(self._prompts, (version, before), tokens.tobytes(), block)

    def forget(self, block: int) -> None:
        """Removes the block's names, because it will hold something else."""
        if (whole := self._names_of_whole.pop(block, None)) is not None:
            del self._whole[whole]
        for table, place, tokens in self._names.pop(block, ()):
            del table[place][tokens]
            if not table[place]:
                del table[place]

    def clear(self) -> None:
        for table in (self._whole, self._ends, self._prompts, self._names, self._names_of_whole):
            table.clear()

    def check(self) -> None:
        """Asserts that the tables name the same blocks."""
        assert {block: name for name, block in self._whole.items()} == self._names_of_whole
        ends = [
            (block, place, tokens)
            for table in (self._ends, self._prompts)
            for place, named in table.items()
            for tokens, block in named.items()
        ]
        assert sorted(ends) == sorted((block, *name[1:]) for block, names in self._names.items() for name in names)

    def _name_end(self, table: dict[_Place, dict[bytes, int]], place: _Place, tokens: bytes, block: int) -> int:
        if (found := table.get(place, {}).get(tokens)) is not None:
            if not self.windows.prefers(block, found):
                return found
            self._names[found].remove((table, place, tokens))
            if not self._names[found]:
                del self._names[found]
            self.replaced.append(found)
        table[place][tokens] = block
        self._names.setdefault(block, []).append((table, place, tokens))
        return block


PrefixKey = tuple[int, bytes]  # policy version and RunningRequest.prompt_key: KV of other weights is never found


class BlockPool:
    """Blocks 0 to `blocks` - 1 with the number of references to each.

    A free block keeps its content for a later sequence that begins with it, until the block is allocated again. Empty
    blocks are allocated first, then the blocks that have been free for longest. An empty block has no part in the pool
    of window layers (window_blocks.py).
    """

    def __init__(self, blocks: int, index: BlockIndex):
        self.index, self.windows = index, index.windows
        self._counts = [0] * blocks
        self._empty = list(range(blocks))  # a heap: the lowest is taken first, whatever the order of releases
        self._kept: collections.OrderedDict[int, None] = (
            collections.OrderedDict()
        )  # free, in the index; freed last last

    @property
    def free(self) -> int:
        """The number of blocks without a reference; blocks that keep something count too."""
        return len(self._empty) + len(self._kept)

    def count(self, block: int) -> int:
        return self._counts[block]

    def allocate(self, number: int) -> list[int]:
        """Returns `number` free blocks, each with one reference now; raises RuntimeError if fewer are free."""
        if number > self.free:
            raise RuntimeError(f'{number} blocks are asked for, and {self.free} are free')
        return [self._take() for _ in range(number)]

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block; raises RuntimeError for a free block that keeps nothing."""
        for block in blocks:
            if block in self._kept:
                del self._kept[block]
            else:
                self._require_held(block)
            self._counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Removes a reference from each block; a block without any is free. Raises RuntimeError for a free block."""
        for block in blocks:
            self._require_held(block)
            self._counts[block] -= 1
            if not self._counts[block] and block in self.index:
                self._kept[block] = None
            elif not self._counts[block]:
                self._empty_block(block)

    def keep(self, version: int, digests: Sequence[bytes], tokens: np.ndarray, blocks: Sequence[int]) -> None:
        """Marks blocks of a sequence, which have references, to be kept once they are free; see BlockIndex.name."""
        for block in self.index.name(version, digests, tokens, blocks):
            self._note_used(block)
        self._empty_replaced()

    def keep_prompt(self, version: int, before: bytes, tokens: np.ndarray, block: int) -> None:
        """Marks the block in which a prompt ends to be kept once it is free; see BlockIndex.name_prompt."""
        self._note_used(self.index.name_prompt(version, before, tokens, block))
        self._empty_replaced()

    def give_first(self, block: int) -> None:
        """Makes the block, if it is free, the first to be reallocated of the blocks that keep something."""
        if block in self._kept:
            self._kept.move_to_end(block, last=False)

    def forget(self) -> None:
        """Forgets what free blocks keep."""
        self.index.clear()
        for block in self._kept:
            self._empty_block(block)
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
            self.windows.discard(block)
        self._counts[block] = 1
        return block

    def _empty_block(self, block: int) -> None:
        self.windows.discard(block)
        heapq.heappush(self._empty, block)

    def _empty_replaced(self) -> None:
        for block in self.index.replaced:
            if block in self._kept and block not in self.index:
                del self._kept[block]
                self._empty_block(block)
        self.index.replaced = []

    def _note_used(self, block: int) -> None:
        if block in self._kept:
            self._kept.move_to_end(block)

    def _require_held(self, block: int) -> None:
        if not self._counts[block]:
            raise RuntimeError(f'block {block} is free')


@dataclasses.dataclass(eq=False)
class Prefix:
    """The prompt of a group, without its last token, whose KV is in the cache or being computed."""

    key: PrefixKey
    tokens: np.ndarray  # int32 [L], L >= 1
    digests: Sequence[bytes]  # of the tokens, see extend_digests
    whole: list[int]  # blocks that hold nothing else; every sequence of the group reads them
    # the block in which the prompt ends; each sequence continues in a copy of it, one of them in the block itself
    tail: int | None
    filled: int = 0  # positions that are in the cache, or will be after the copy
    copy: tuple[int, int] | None = (
        None  # (source, target): the target begins as a kept block does; to be copied before the next dispatch
    )
    lent: bool = False  # a sequence owns the tail and gives it back at its end
    found: int = 0  # positions that an earlier sequence left in the cache; reset once a prefill event has reported them
    expected: int = 0  # sequences in slots that will read it and have not yet
    need: Need = dataclasses.field(default_factory=Need)  # while it is expected
    state: int | None = None  # place of the recurrent state behind the `filled` positions, see state_pool.py

    @property
    def blocks(self) -> list[int]:
        return self.whole if self.tail is None else [*self.whole, self.tail]

    @property
    def is_complete(self) -> bool:
        return self.filled == len(self.tokens)

    @property
    def held(self) -> list[int]:
        """The blocks to which the prefix index has a reference."""
        return self.whole if self.tail is None or self.lent else [*self.whole, self.tail]


@dataclasses.dataclass(eq=False)
class CachedSequence:
    """The blocks of one request in a slot."""

    version: int  # of the weights that its keys and values are computed with; of several, the first
    prefix: Prefix | None  # None: the prompt has one token
    own: list[int]  # blocks after the whole blocks of the prefix
    blocks: list[int]  # position p is in blocks[p // block_tokens]
    has_tail: bool = False  # own[0] is the tail of the prefix itself
    is_attached: bool = False  # it reads the prefix: whole blocks are shared, and the tail is its own or copied
    is_logged: bool = False  # a prefill event has named the request
    filled: int = 0  # positions that are in the cache
    need: Need = dataclasses.field(default_factory=Need)
    state: int | None = None  # place of the recurrent state behind them

    @property
    def tail_copy(self) -> tuple[int, int] | None:
        """(source, target) of the copy in which the sequence continues after the prefix; None if it needs no copy."""
        if self.prefix is None or self.prefix.tail is None or self.has_tail:
            return None
        return self.prefix.tail, self.own[0]

    @property
    def state_copy(self) -> tuple[int, int] | None:
        """(source, target) places of the state with which the sequence continues after the prefix, if there is one."""
        if self.prefix is None or self.state is None:
            return None
        assert self.prefix.state is not None
        return self.prefix.state, self.state


class PrefixIndex:
    """Finds the prefixes of open requests by policy version and tokens.

    When the last request that begins with a prefix has ended, the prefix's blocks are free, and the pool keeps their
    content.
    """

    def __init__(self, pool: BlockPool, states: States | None = None):
        self._pool, self._windows, self._states = pool, pool.windows, states or NoStates()
        self._open: collections.Counter[PrefixKey] = collections.Counter()  # requests in slots or waiting
        self._prefixes: collections.OrderedDict[PrefixKey, Prefix] = collections.OrderedDict()  # last used last
        self._copied: list[Prefix] = []  # since the last dispatch

    def open(self, key: PrefixKey) -> None:
        """Counts a new request that begins with this prefix."""
        self._open[key] += 1

    def close(self, key: PrefixKey) -> None:
        """Removes an ended request, which refers to no block; drops the prefix with its last request."""
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]
            if key in self._prefixes:
                self.drop(self._prefixes[key])

    def find(self, key: PrefixKey) -> Prefix | None:
        return self._prefixes.get(key)

    def use(self, prefix: Prefix) -> None:
        """Adds the prefix, or marks it as the last used."""
        self._prefixes[prefix.key] = prefix
        self._prefixes.move_to_end(prefix.key)

    def expect(self, prefix: Prefix) -> None:
        """Notes that one more sequence in a slot will read the prefix, or compute the rest of it."""
        prefix.expected += 1
        self._states.need(prefix)
        self._windows.hold(prefix.need, prefix.blocks, prefix.filled, prefix.filled)

    def let_go(self, prefix: Prefix) -> None:
        """Notes that a sequence has read the prefix, or will not."""
        prefix.expected -= 1
        if not prefix.expected:
            self._windows.release(prefix.need)
            self._states.spare(prefix)

    def copy(self, prefix: Prefix, source: int, target: int, place: int) -> None:
        """Requests that `target`, a block of the prefix, begins as a copy of `source`, whose part is at `place`.

        Nothing is written before the copy, so `source` may be free.
        """
        self._windows.copy(place, target)
        if source != target:
            prefix.copy = source, target
            self._copied.append(prefix)

    def take_copies(self) -> list[tuple[int, int]]:
        """Returns (source, target) blocks to be copied before anything else is written, in this order."""
        prefixes = [one for one in self._copied if self._has(one)]  # a dropped prefix has released its target
        copies = [one.copy for one in prefixes if one.copy is not None]
        for prefix in prefixes:
            prefix.copy = None
        self._copied = []
        return copies

    def note_filled(self, prefix: Prefix) -> None:
        """Lets later prefixes begin with the whole blocks of this one, if it is complete."""
        if prefix.is_complete and self._has(prefix):
            self._pool.keep(prefix.key[0], prefix.digests, self._whole_tokens(prefix), prefix.whole)

    def lend_tail(self, prefix: Prefix, block: int, place: int | None) -> None:
        """Gives a sequence this block as its tail: a copy that replaces the prefix's, whose part was at `place`.

        `place` None: the tail of the prefix itself.
        """
        assert prefix.tail is not None
        if place is not None:
            self.copy(prefix, prefix.tail, block, place)
        prefix.tail, prefix.lent = block, True

    def give_back_tail(self, prefix: Prefix) -> bool:
        """Takes the tail back from the sequence that had it; False if the prefix was dropped."""
        if not self._has(prefix):
            return False
        prefix.lent = False
        return True

    def reclaim(self, number: int, keep: Prefix | None = None) -> bool:
        """Drops prefixes that no request in a slot will read, except `keep`, until `number` blocks are free.

        Returns False if there are not enough.
        """
        while self._pool.free < number:
            prefix = next((one for one in self._prefixes.values() if one is not keep and self._frees_blocks(one)), None)
            if prefix is None:
                return False
            self.drop(prefix)
        return True

    def drop(self, prefix: Prefix) -> None:
        """Removes a prefix that no request in a slot will read; what it holds is kept."""
        del self._prefixes[prefix.key]
        version, whole = prefix.key[0], self._whole_tokens(prefix)
        if prefix.is_complete and prefix.tail is not None and not prefix.lent and prefix.copy is None:
            rest = prefix.tokens[len(whole) :]
            self._pool.keep_prompt(version, prefix.digests[len(prefix.whole)], rest, prefix.tail)
        self._pool.keep(version, prefix.digests, whole, prefix.whole)
        self._pool.release(reversed(prefix.held))
        if prefix.is_complete:
            self._states.keep(prefix, version, prefix.digests, prefix.tokens)
        else:
            self._states.release(prefix)

    def clear(self, open_keys: Iterable[PrefixKey]) -> None:
        """Forgets every prefix and what blocks keep; `open_keys` replace the keys of the open requests."""
        for prefix in self._prefixes.values():
            self._pool.release(prefix.held)
            self._states.release(prefix)
        self._prefixes.clear()
        self._pool.forget()
        self._states.forget()
        self._open = collections.Counter(open_keys)

    def held(self) -> Sequence[int]:
        """The blocks to which prefixes refer."""
        return [block for prefix in self._prefixes.values() for block in prefix.held]

    def expected(self) -> list[Prefix]:
        return [prefix for prefix in self._prefixes.values() if prefix.expected]

    def spared(self) -> list[Prefix]:
        return [prefix for prefix in self._prefixes.values() if not prefix.expected]

    def needs(self) -> list[Need]:
        return [prefix.need for prefix in self._prefixes.values()]

    def check(self) -> None:
        """Asserts the invariants that hold between two calls."""
        for key, prefix in self._prefixes.items():
            assert self._open[key]
            assert prefix.expected or not prefix.need.blocks
            written = prefix.held[prefix.filled // self._pool.index.block_tokens :]
            assert prefix.is_complete or all(self._pool.count(block) == 1 for block in written)
            assert prefix.is_complete or not any(block in self._pool.index for block in written)

    def _has(self, prefix: Prefix) -> bool:
        return self._prefixes.get(prefix.key) is prefix

    def _frees_blocks(self, prefix: Prefix) -> bool:
        return not prefix.expected and any(self._pool.count(block) == 1 for block in prefix.held[-1:])

    def _whole_tokens(self, prefix: Prefix) -> np.ndarray:
        size = self._pool.index.block_tokens
        return prefix.tokens[: min(prefix.filled // size, len(prefix.whole)) * size]
