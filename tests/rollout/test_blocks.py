"""Blocks, prefixes and what blocks hold, found by tokens, against plain models. Blocks have 4 tokens."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal_jax.rollout.blocks import BlockIndex, BlockPool, Prefix, PrefixIndex, extend_digests, root_digest

SIZE = 4


def pool_of(blocks):
    return BlockPool(blocks, BlockIndex(SIZE))


@pytest.mark.parametrize('seed', range(10))
def test_a_pool_is_a_table_of_counts_from_which_the_lowest_empty_blocks_are_taken(seed):
    chance, pool, counts = random.Random(seed), pool_of(12), [0] * 12
    for _ in range(400):
        free = [block for block, count in enumerate(counts) if not count]
        held = [block for block, count in enumerate(counts) if count]
        assert (pool.free, [pool.count(block) for block in range(12)]) == (len(free), counts)
        action = chance.choice(['allocate', 'share', 'release'])
        if action == 'allocate':
            number = chance.randint(0, len(free))
            assert pool.allocate(number) == free[:number]
            counts = [1 if block in free[:number] else count for block, count in enumerate(counts)]
        elif held:
            chosen = chance.sample(held, chance.randint(1, len(held)))
            (pool.share if action == 'share' else pool.release)(chosen)
            step = 1 if action == 'share' else -1
            counts = [count + step * (block in chosen) for block, count in enumerate(counts)]
        pool.check([block for block, count in enumerate(counts) for _ in range(count)])


class Conversations(RuleBasedStateMachine):
    """Sequences come, are kept and found again; beside them a list of the free kept blocks, last used last."""

    def __init__(self):
        super().__init__()
        self.pool, self.holds, self.free_kept, self.live = pool_of(9), {}, [], []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def begin(self, tokens):
        digests = extend_digests([root_digest('')], np.array(tokens, np.int32), SIZE)
        match = self.pool.index.find(0, digests, np.array(tokens, np.int32))
        assert all(self.holds[block] == tuple(tokens[: SIZE * (i + 1)]) for i, block in enumerate(match.blocks))
        self.pool.share(match.blocks)
        self.free_kept = [block for block in self.free_kept if block not in match.blocks]
        missing = -(-len(tokens) // SIZE) - len(match.blocks)
        if missing > self.pool.free:
            self._release(match.blocks[::-1])
            return
        empty = self.pool.free - len(self.free_kept)
        lost, self.free_kept = self.free_kept[: max(0, missing - empty)], self.free_kept[max(0, missing - empty) :]
        new = self.pool.allocate(missing)
        assert set(lost) <= set(new)  # the least recently used go, and only where no other block is free
        for block in new:
            self.holds.pop(block, None)
        self.live.append((tokens, digests, [*match.blocks, *new]))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data, keep):
        tokens, digests, blocks = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        if keep:
            known = {content: block for block, content in self.holds.items()}
            for place in range(len(blocks) - 1, -1, -1):
                content = tuple(tokens[: SIZE * (place + 1)])
                if content in known and known[content] in self.free_kept:
                    self.free_kept.remove(known[content])
                    self.free_kept.append(known[content])
                self.holds.setdefault(known.get(content, blocks[place]), content)
            self.pool.keep(0, digests, np.array(tokens, np.int32), blocks)
        self._release(blocks[::-1])

    @rule()
    def forget(self):
        self.pool.forget()
        self.holds, self.free_kept = {}, []

    def _release(self, blocks):
        self.pool.release(blocks)
        held = [block for _, _, own in self.live for block in own]
        self.free_kept += [block for block in blocks if block in self.holds and block not in held]

    @invariant()
    def agrees(self):
        held = [block for _, _, own in self.live for block in own]
        self.pool.check(held)
        assert list(self.pool._kept) == self.free_kept
        assert self.pool.free == 9 - len(set(held))


Conversations.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_a_pool_keeps_what_ended_sequences_hold_and_gives_the_least_recently_used_away = Conversations.TestCase


def test_a_free_block_is_neither_shared_nor_released_nor_more_than_all_allocated():
    pool = pool_of(3)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(RuntimeError, match='block 0 is free'):
        pool.release([block])
    with pytest.raises(RuntimeError, match='block 2 is free'):
        pool.share([2])
    with pytest.raises(RuntimeError, match='4 blocks are asked for, and 3 are free'):
        pool.allocate(4)


@pytest.mark.parametrize('held', [[], [0, 0], [0, 1], [1]])
def test_a_check_of_the_pool_finds_a_lost_and_a_second_reference(held):
    pool = pool_of(2)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check(held)


def key(number, version=0):
    return version, bytes([number])


def test_what_is_kept_twice_is_used_where_it_was_kept_first():
    pool = pool_of(3)
    tokens = [np.array([number] * SIZE, np.int32) for number in (1, 2, 1)]
    for content in tokens:
        digests = extend_digests([root_digest('')], content, SIZE)
        blocks = pool.allocate(1)
        pool.keep(0, digests, content, blocks)
        pool.release(blocks)
    assert [block in pool.index for block in range(3)] == [True, True, False]
    assert pool.allocate(2) == [2, 1]  # the empty one, and of the kept ones that of 2: 1 was used again


class Shelf:
    """A pool with an index, and prefixes of two whole blocks and a tail."""

    def __init__(self, blocks):
        self.pool = pool_of(blocks)
        self.index = PrefixIndex(self.pool)

    def add(self, number):
        self.index.open(key(number))
        *whole, tail = self.pool.allocate(3)
        tokens = np.arange(10 * number, 10 * number + 9, dtype=np.int32)
        digests = extend_digests([root_digest('')], tokens, SIZE)
        prefix = Prefix(key(number), tokens, digests, whole, tail, filled=9)
        self.index.use(prefix)
        return prefix

    def found(self, numbers):
        return [number for number in numbers if self.index.find(key(number))]

    def kept(self, prefixes):
        """Those of which everything is still in the cache."""
        find = lambda one: self.pool.index.find(0, one.digests, one.tokens)
        return [one.key[1][0] for one in prefixes if find(one).length == 9]


def test_the_blocks_of_a_prefix_without_a_request_are_free_and_keep_it_until_they_are_needed():
    shelf = Shelf(12)
    prefixes = [shelf.add(number) for number in range(4)]
    assert shelf.pool.free == 0
    for number in (2, 0, 1):  # a request of 3 is still open
        shelf.index.close(key(number))
    assert (shelf.pool.free, shelf.found(range(4)), shelf.kept(prefixes)) == (9, [3], [0, 1, 2])
    blocks = shelf.pool.allocate(1)  # the one in which the prefix ends that was without a request for longest
    assert (blocks, shelf.kept(prefixes)) == ([prefixes[2].tail], [0, 1])
    shelf.pool.allocate(3)
    assert shelf.kept(prefixes) == [1]
    assert not shelf.index.reclaim(9)
    assert shelf.found(range(4)) == []  # without a request in a slot that reads it
    shelf.index.check()


def test_a_prefix_with_a_request_is_dropped_only_where_blocks_must_be_had():
    shelf = Shelf(9)
    first, second, _ = (shelf.add(number) for number in range(3))
    first.expected = 1  # a request in a slot is about to read it
    assert shelf.index.reclaim(0)
    assert shelf.index.reclaim(1, keep=second)
    assert shelf.found(range(3)) == [0, 1]
    assert not shelf.index.reclaim(4, keep=second)
    assert shelf.index.reclaim(4)
    assert shelf.found(range(3)) == [0]
    assert not shelf.index.reclaim(7)


def test_a_prefix_whose_blocks_are_all_in_use_is_not_dropped_in_vain():
    shelf = Shelf(3)
    prefix = shelf.add(0)
    shelf.pool.share(prefix.whole)
    prefix.lent = True
    assert not shelf.index.reclaim(1)
    assert shelf.found([0]) == [0]
    assert shelf.index.give_back_tail(prefix)
    assert shelf.index.reclaim(1)  # the tail; the whole blocks stay with their reader
    assert shelf.found([0]) == []
    shelf.pool.check(prefix.whole)
    assert not shelf.index.give_back_tail(prefix)


def test_a_prefix_that_is_not_complete_keeps_its_whole_blocks_alone_and_loses_a_copy_that_was_not_made():
    shelf = Shelf(3)
    prefix = shelf.add(0)
    prefix.filled = 7
    shelf.index.close(key(0))
    find = lambda: shelf.pool.index.find(0, prefix.digests, prefix.tokens)
    assert (find().length, find().blocks, shelf.index.take_copies()) == (4, prefix.whole[:1], [])
    other = Shelf(4)
    prefix = other.add(0)
    other.index.copy(prefix, 3, prefix.tail, 0)
    other.index.close(key(0))
    assert other.pool.index.find(0, prefix.digests, prefix.tokens).length == 8
    assert other.index.take_copies() == []


def test_nothing_is_kept_after_a_clear():
    shelf = Shelf(6)
    prefixes = [shelf.add(0), shelf.add(1)]
    shelf.index.close(key(0))
    shelf.index.clear([key(1)])
    assert (shelf.pool.free, shelf.found(range(2)), shelf.kept(prefixes)) == (6, [], [])
    shelf.index.check()
    shelf.pool.check([])


# Names of blocks.


def digests_of(tokens, salt=''):
    return extend_digests([root_digest(salt)], np.array(tokens, np.int32), SIZE)


def name(index, tokens, blocks, version=0):
    return list(index.name(version, digests_of(tokens), np.array(tokens, np.int32), blocks))


def find(index, tokens, version=0, salt=''):
    found = index.find(version, digests_of(tokens, salt), np.array(tokens, np.int32))
    return list(found.blocks), found.tail, found.length


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 40))
def test_digests_go_on_behind_those_of_a_beginning(tokens, cut):
    whole = digests_of(tokens)
    assert len(whole) == 1 + len(tokens) // SIZE
    assert extend_digests(digests_of(tokens[:cut]), np.array(tokens, np.int32), SIZE) == whole


def test_a_digest_is_of_all_tokens_before_it_and_of_the_salt():
    one, other, salted = digests_of([1, 2, 3, 4, 5, 6, 7, 8]), digests_of([0, 2, 3, 4, 5, 6, 7, 8]), digests_of([], 'a')
    assert len({*one, *other, *salted}) == 6  # the digest of no tokens is in both


def test_a_prompt_finds_whole_blocks_and_a_sequence_that_ends_behind_them():
    index = BlockIndex(SIZE)
    assert name(index, range(10), [7, 8, 9]) == [9, 8, 7]
    assert find(index, range(10)) == ([7, 8], 9, 10)
    assert find(index, range(99)) == ([7, 8], 9, 10)  # its next turn
    assert find(index, range(9)) == ([7, 8], None, 8)  # ends inside block 9: whole blocks alone
    assert find(index, [0, 1, 2, 3, 4, 5, 6, 0, 8]) == ([7], None, 4)
    assert find(index, range(10), version=1) == find(index, range(10), salt='a') == ([], None, 0)


def test_a_prompt_that_has_ended_inside_a_block_is_found_by_an_equal_one_alone():
    index = BlockIndex(SIZE)
    name(index, range(8), [0, 1])
    index.name_prompt(0, digests_of(range(4))[-1], np.array([4, 5], np.int32), 1)  # block 1 holds 4 5 6 7
    assert find(index, range(6)) == ([0], 1, 6)
    assert find(index, range(5)) == find(index, [0, 1, 2, 3, 4, 5, 9]) == ([0], None, 4)
    assert find(index, range(9)) == ([0, 1], None, 8)
    index.forget(1)
    assert find(index, range(6)) == ([0], None, 4)
    index.check()


def test_what_another_block_holds_already_is_not_named_again():
    index = BlockIndex(SIZE)
    name(index, range(6), [0, 1])
    assert name(index, range(9), [2, 3, 4]) == [4, 3, 0]  # block 2 holds what block 0 does
    assert [block in index for block in range(5)] == [True, True, False, True, True]


def test_of_many_sequences_that_end_in_one_block_the_longest_that_the_prompt_begins_with_is_found():
    index = BlockIndex(SIZE)
    for number in range(2 * SIZE):
        name(index, [number], [number])
        name(index, [number, number], [100 + number])
        assert find(index, [number, number, 7]) == ([], 100 + number, 2)
        assert find(index, [number, 9]) == ([], number, 1)
        assert find(index, [99]) == ([], None, 0)


@pytest.mark.parametrize('table', ['_whole', '_ends'])
def test_a_check_finds_a_name_that_was_not_forgotten(table):
    index = BlockIndex(SIZE)
    name(index, range(6), [0, 1])
    index.check()
    getattr(index, table).clear()
    with pytest.raises(AssertionError):
        index.check()


@dataclasses.dataclass
class Plain:
    """Sequences with their blocks; a lookup compares the prompt with all of them."""

    sequences: list

    def longest(self, prompt):
        """Tokens of the longest match: whole blocks of any sequence, or a sequence that ends behind them."""
        best = 0
        for tokens in self.sequences:
            common = next((i for i, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b), None)
            common = min(len(tokens), len(prompt)) if common is None else common
            best = max(best, common if common == len(tokens) else common // SIZE * SIZE)
        return best


SEQUENCES = st.lists(st.integers(0, 1), max_size=13)


@given(st.lists(SEQUENCES, max_size=12), SEQUENCES)
def test_the_match_is_the_longest_of_all_kept_sequences(sequences, prompt):
    index, holds = BlockIndex(SIZE), {}
    for number, tokens in enumerate(sequences):
        blocks = range(4 * number, 4 * number + 4)
        holds |= {block: tokens[: SIZE * (place + 1)] for place, block in enumerate(blocks)}
        name(index, tokens, blocks)
    index.check()
    blocks, tail, length = find(index, prompt)
    assert length == Plain(sequences).longest(prompt)
    for place, block in enumerate(blocks):
        assert holds[block] == prompt[: SIZE * (place + 1)]
    assert tail is None or holds[tail] == prompt[:length]
    for block in reversed(range(4 * len(sequences))):
        index.forget(block)
    index.check()
    assert find(index, prompt) == ([], None, 0)
