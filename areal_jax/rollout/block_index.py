"""What the blocks of a KV cache hold, found by the tokens of a prompt.

A whole block is known by a digest of all tokens of its sequence up to its end, so that a lookup costs one hash a block,
however many sequences are kept. The last block of a sequence is known by the digest of the blocks before it and by its
own tokens. blocks.py forgets a block when it gives it away.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

_DIGEST_BYTES = 16  # two different sequences share a digest with a chance of 2^-128

# Policy version and digest of what stands before a block: KV of other weights is never found.
_Place = tuple[int, bytes]


def root_digest(salt: str) -> bytes:
    """Of no tokens; prompts of another `cache_salt` begin with another."""
    return hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()


def extend_digests(digests: Sequence[bytes], tokens: np.ndarray, block_tokens: int) -> list[bytes]:
    """Digest i of the result is of the first i whole blocks of `tokens`, int32 [T].

    `digests` are those of a beginning of the tokens, the one of no tokens first.
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
    tail: int | None  # whose first positions go on behind them
    length: int  # positions, those in the tail included
    goes_on: bool  # the kept sequence ends in the tail, and the prompt goes on behind it


class BlockIndex:
    """Names of blocks. A block has a name for what it holds, and another where a prompt ends inside it."""

    def __init__(self, block_tokens: int):
        self.block_tokens = block_tokens
        self._whole: dict[_Place, int] = {}  # by the digest that includes the block
        self._ends: dict[_Place, dict[bytes, int]] = collections.defaultdict(dict)  # by the tokens of the sequence
        self._prompts: dict[_Place, dict[bytes, int]] = collections.defaultdict(dict)  # by those of the prompt
        self._names: dict[int, list[tuple[dict[_Place, dict[bytes, int]], _Place, bytes]]] = {}
        self._names_of_whole: dict[int, _Place] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._names or block in self._names_of_whole

    def find(self, version: int, digests: Sequence[bytes], tokens: np.ndarray) -> Match:
        """Whole blocks of which all tokens match, and behind them a sequence that ends within a block.

        A prompt may end inside a block only where one with the same tokens has.

        Args:
          digests: of the tokens, as by `extend_digests`.
          tokens: int32 [T], of a prompt without its last.
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
        # of many sequences that end here a look into the table for each length is less than a comparison with each
        wanted = ends if len(ends) <= self.block_tokens else (rest[:size] for size in range(4, len(rest) + 1, 4))
        end = max((one for one in wanted if rest.startswith(one) and one in ends), key=len, default=b'')
        return Match(blocks, ends.get(end), start + len(end) // 4, goes_on=bool(end))

    def name(self, version: int, digests: Sequence[bytes], tokens: np.ndarray, blocks: Sequence[int]) -> Iterator[int]:
        """Names the blocks of a sequence, the last one first, and yields what has each name now.

        That is another block where one holds the same already. `tokens`, int32 [T], are in the first of the `blocks`.
        """
        whole = len(tokens) // self.block_tokens
        if rest := tokens[whole * self.block_tokens :].tobytes():
            yield self._name_end(self._ends, (version, digests[whole]), rest, blocks[whole])
        for index in range(whole - 1, -1, -1):
            name, block = (version, digests[index + 1]), blocks[index]
            if name not in self._whole:
                self._whole[name], self._names_of_whole[block] = block, name
            yield self._whole[name]

    def name_prompt(self, version: int, before: bytes, tokens: np.ndarray, block: int) -> int:
        """Names the block by the tokens of a prompt that ends inside it; returns what has the name now.

        `tokens`, int32 [n] with n < block_tokens, stand behind the blocks whose digest is `before`.
        """
        return self._name_end(self._prompts, (version, before), tokens.tobytes(), block)

    def forget(self, block: int) -> None:
        """The block will hold something else."""
        if (whole := self._names_of_whole.pop(block, None)) is not None:
            del self._whole[whole]
        for table, place, tokens in self._names.pop(block, ()):
            del table[place][tokens]
            if not table[place]:
                del table[place]

    def clear(self) -> None:
        """Forgets all blocks."""
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
            return found
        table[place][tokens] = block
        self._names.setdefault(block, []).append((table, place, tokens))
        return block
