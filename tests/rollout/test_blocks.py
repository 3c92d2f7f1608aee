"""Blocks and prefixes against plain models, under random operations."""

import collections
import random

import numpy as np
import pytest

from areal_jax.rollout.blocks import BlockPool, Prefix, PrefixIndex


@pytest.mark.parametrize('seed', range(10))
def test_a_pool_is_a_table_of_counts_from_which_the_lowest_free_blocks_are_taken(seed):
    chance, pool, counts = random.Random(seed), BlockPool(12), [0] * 12
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


def test_a_free_block_is_neither_shared_nor_released_nor_more_than_all_allocated():
    pool = BlockPool(3)
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
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check(held)


def key(number, version=0):
    return version, bytes([number])


class Shelf:
    """A pool with an index, and prefixes of two whole blocks and a tail."""

    def __init__(self, blocks):
        self.pool = BlockPool(blocks)
        self.index = PrefixIndex(self.pool)

    def add(self, number):
        self.index.open(key(number))
        *whole, tail = self.pool.allocate(3)
        prefix = Prefix(key(number), np.arange(5, dtype=np.int32), whole, tail, filled=5)
        self.index.use(prefix)
        return prefix

    def found(self, numbers):
        return [number for number in numbers if self.index.find(key(number))]


def test_the_prefix_that_was_without_a_request_for_longest_goes_first():
    shelf = Shelf(12)
    for number in range(4):
        shelf.add(number)
    for number in (2, 0, 1):  # a request of 3 is still open
        shelf.index.close(key(number))
    assert shelf.index.reclaim(1)
    assert shelf.found(range(4)) == [0, 1, 3]
    shelf.index.open(key(0))  # found again in time
    shelf.index.close(key(0))
    assert shelf.index.reclaim(4)
    assert shelf.found(range(4)) == [0, 3]
    assert not shelf.index.reclaim(10)  # nothing is dropped where that would not do
    assert shelf.found(range(4)) == [0, 3]
    assert shelf.index.reclaim(9)
    assert shelf.found(range(4)) == [3]
    shelf.index.check()
    shelf.pool.check(shelf.index.held())


def test_a_prefix_with_a_request_is_dropped_only_where_blocks_must_be_had():
    shelf = Shelf(9)
    first, second, third = (shelf.add(number) for number in range(3))
    first.expected = 1  # a request in a slot is about to read it
    assert not shelf.index.reclaim(1)
    assert shelf.index.reclaim_all(1, keep=second)
    assert shelf.found(range(3)) == [0, 1]
    assert not shelf.index.reclaim_all(4, keep=second)
    assert shelf.index.reclaim_all(4)
    assert shelf.found(range(3)) == [0]
    assert not shelf.index.reclaim_all(7)
    assert third.filled == 5


def test_a_prefix_whose_blocks_are_all_in_use_is_not_dropped_in_vain():
    shelf = Shelf(3)
    prefix = shelf.add(0)
    shelf.pool.share(prefix.whole)
    prefix.lent = True
    assert not shelf.index.reclaim_all(1)
    assert shelf.found([0]) == [0]
    assert shelf.index.give_back_tail(prefix)
    assert shelf.index.reclaim_all(1)  # the tail; the whole blocks stay with their reader
    assert shelf.found([0]) == []
    shelf.pool.check(prefix.whole)
    assert not shelf.index.give_back_tail(prefix)


@pytest.mark.parametrize('seed', range(10))
def test_an_index_keeps_its_books_under_random_operations(seed):
    chance, shelf = random.Random(seed), Shelf(15)
    opened, prefixes = collections.Counter(), {}
    for _ in range(300):
        number = chance.randrange(6)
        action = chance.choice(['open', 'close', 'add', 'reclaim', 'reclaim_all'])
        if action == 'open':
            shelf.index.open(key(number))
            opened[number] += 1
        elif action == 'close' and opened[number]:
            shelf.index.close(key(number))
            opened[number] -= 1
        elif action == 'add' and shelf.index.find(key(number)) is None and shelf.index.reclaim(3):
            prefixes[number] = shelf.add(number)
            opened[number] += 1
        elif action.startswith('reclaim'):
            before = shelf.found(range(6))
            idle = [number for number in before if not opened[number]]
            asked = chance.randrange(16)
            enough = getattr(shelf.index, action)(asked)
            gone = set(before) - set(shelf.found(range(6)))
            assert enough == (shelf.pool.free >= asked)
            assert action == 'reclaim_all' or gone <= set(idle)
            assert enough == (15 - 3 * len(before if action == 'reclaim' else []) + 3 * len(idle) >= asked) or (
                action == 'reclaim_all'
            )
        for one in range(6):
            found = shelf.index.find(key(one))
            assert found is None or found is prefixes[one]
        shelf.index.check()
        shelf.pool.check(shelf.index.held())
    shelf.index.clear([key(1)])
    assert (shelf.pool.free, shelf.found(range(6))) == (15, [])
    shelf.index.check()
