"""Which blocks a request gets. Blocks have 4 tokens, a dispatch 3 steps."""

import numpy as np
import pytest

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.rollout.cache_table import CacheBudgetError, CacheTable
from areal_jax.rollout.running_request import RunningRequest
from areal_jax.types import GenerationRequest, SamplingParams, Segment


def running(sample, prompt=10, answered=0, draw=0, new=20):
    """`answered` is a number of tokens, and so is `prompt` where it is not the tokens themselves."""
    tokens = np.array(prompt, np.int32) if isinstance(prompt, list) else np.arange(prompt, dtype=np.int32) + 100 * draw
    prefix = (Segment(np.ones(answered, np.int32), np.zeros(answered, np.float32), 0),) if answered else ()
    request = GenerationRequest(draw, sample, 0, tokens, SamplingParams(new, 1.0, 0, 1.0, ()), prefix)
    return RunningRequest(request, VirtualClock({}, EventLog(), {}), 'engine/0', len(tokens) + new)


def table_of(blocks=16):
    return CacheTable(blocks, 4, context_tokens=32, steps=3, version=0)


def place(table, *requests):
    for one in requests:
        table.open(one)
        assert table.place(one, at_any_cost=False)
    return [one.cached for one in requests]


def test_a_group_shares_whole_blocks_and_each_further_request_copies_the_last():
    # 10 tokens of prompt, 9 in the prefix: blocks 0 and 1, and one position of block 2. The first goes on there, to
    # position 9 + 3 = 12, which needs 3 blocks.
    table, requests = table_of(), [running(sample) for sample in range(3)]
    first, second, third = place(table, *requests)
    assert [one.blocks for one in (first, second, third)] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert [one.tail_copy for one in (first, second, third)] == [None, (2, 3), (2, 4)]
    assert [table.pool.count(block) for block in range(6)] == [1, 1, 1, 1, 1, 0]  # nobody writes to a shared block
    first.prefix.filled = 9
    for one in requests:
        table.attach(one)
    assert [table.pool.count(block) for block in range(6)] == [4, 4, 1, 1, 1, 0]
    table.check(requests)


def test_a_prompt_that_ends_with_its_block_needs_no_copy():
    table, requests = table_of(), [running(sample, prompt=9) for sample in range(2)]
    first, second = place(table, *requests)
    assert [one.blocks for one in (first, second)] == [[0, 1, 2], [0, 1, 3]]
    assert [one.tail_copy for one in (first, second)] == [None, None]


def test_a_prompt_of_one_token_has_no_prefix():
    table, requests = table_of(), [running(sample, prompt=1) for sample in range(2)]
    first, second = place(table, *requests)
    assert [one.blocks for one in (first, second)] == [[0], [1]]
    assert (first.prefix, second.prefix) == (None, None)
    table.check(requests)


def attach(table, one):
    """The prefix is computed, and the request decodes behind it."""
    one.cached.prefix.filled = len(one.cached.prefix.tokens)
    table.take_copies()
    table.prefixes.note_filled(one.cached.prefix)
    table.attach(one)


def end(table, one, tokens=()):
    """The answer ends with these tokens, of which all but the last are in the cache."""
    if tokens:
        one.extend(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), 0)
    one.cached.filled = len(one) - 1
    table.close(one, keep=True)


def test_the_prefix_outlives_its_first_request_and_the_next_one_begins_in_a_copy_of_its_tail():
    table, requests = table_of(), [running(sample) for sample in range(2)]
    place(table, requests[0])
    attach(table, requests[0])
    table.close(requests[0])
    table.check([])
    assert table.pool.free == 16  # three keep the prefix
    (second,) = place(table, requests[1])
    assert (second.blocks, table.take_copies(), requests[1].cached_tokens) == ([0, 1, 3], [(2, 3)], 9)
    assert second.prefix.is_complete
    table.check(requests[1:])


def test_the_next_turn_begins_with_the_blocks_of_the_last_and_goes_on_in_a_copy_of_the_one_in_which_it_ended():
    # 10 + 4 tokens, 13 in the cache: blocks 0 to 2, and one position of block 3
    table, one = table_of(), running(0)
    place(table, one)
    attach(table, one)
    table.grow(one)
    one.extend(np.array([5, 6, 7], np.int32), np.zeros(3, np.float32), 0)
    table.grow(one)
    end(table, one, [8])
    assert table.pool.free == 16
    turn = running(1, prompt=[*range(10), 5, 6, 7, 8, 1, 2, 3], new=5)
    (cached,) = place(table, turn)
    assert cached.blocks == [0, 1, 2, 4, 5]  # positions 0 to 18
    assert table.take_copies() == [(3, 4)]
    assert (turn.cached_tokens, cached.prefix.filled) == (13, 13)
    table.check([turn])
    fork = running(2, prompt=[*range(9), 0, 0, 0, 0])  # shares two whole blocks
    (other,) = place(table, fork)
    assert (other.blocks[:2], fork.cached_tokens, other.prefix.copy) == ([0, 1], 8, None)
    table.check([turn, fork])


def test_a_full_cache_goes_on_in_the_kept_block_itself():
    table, one, other = table_of(8), running(0), running(0, draw=1, answered=7)
    place(table, one, other)  # blocks 0 to 2, and the other five
    attach(table, one)
    end(table, one, [5])  # 10 positions
    turn = running(1, prompt=[*range(10), 5], new=1)
    (cached,) = place(table, turn)
    assert (cached.blocks, table.take_copies(), turn.cached_tokens) == ([0, 1, 2], [], 10)
    table.check([other, turn])


def test_a_member_that_comes_late_leaves_the_answer_that_is_kept_in_the_tail_and_costs_no_further_block():
    table, requests = table_of(8), [running(sample, prompt=6, new=3) for sample in range(3)]
    place(table, *requests[:2])  # blocks 0 1 and 2
    for one in requests[:2]:
        attach(table, one)
    table.open(requests[2])
    end(table, requests[0], [5, 6])  # position 6 is in block 1, which the prefix has again
    (third,) = place(table, requests[2])
    assert (third.blocks, third.prefix.tail, table.take_copies()) == ([0, 3], 3, [(1, 3)])
    assert table.pool.count(1) == 0  # kept, and free
    table.check(requests[1:])
    turn = running(0, prompt=[*range(6), 5, 6, 9], new=2)
    place(table, turn)
    assert (turn.cached_tokens, table.take_copies()) == (7, [(1, 4)])
    table.check([*requests[1:], turn])


def test_what_holds_several_versions_is_not_kept():
    table, one = table_of(), running(0)
    place(table, one)
    attach(table, one)
    table.clear(1, [one])  # rollout.kv_policy='keep': the request goes on in its blocks
    end(table, one, [5, 6])
    turn = running(1, prompt=[*range(10), 5, 6, 7])
    place(table, turn)
    assert turn.cached_tokens == 0
    table.check([turn])


def test_an_unfinished_answer_gets_blocks_for_what_it_has():
    # 10 + 7 tokens, 16 of them in the cache, and 3 more: positions 0 to 18
    table = table_of()
    (one,) = place(table, running(0, answered=7))
    assert one.blocks == [0, 1, 2, 3, 4]
    # near the limit: of 10 + 8 tokens the last needs no position
    (other,) = place(table, running(0, draw=1, answered=7, new=8))
    assert len(other.blocks) == 5  # 17 positions, not 19


def test_a_request_grows_by_what_one_dispatch_needs():
    table, one = table_of(), running(0)
    place(table, one)
    one.cached.prefix.filled = 9
    table.attach(one)
    assert table.grow(one)
    assert one.cached.blocks == [0, 1, 2]
    one.extend(np.ones(3, np.int32), np.zeros(3, np.float32), 0)
    assert table.grow(one)  # positions 12 to 14
    assert one.cached.blocks == [0, 1, 2, 3]
    table.check([one])


def test_a_waiting_request_is_placed_at_the_cost_of_prefixes_without_a_request_alone():
    table, first, second, third = table_of(8), running(0), running(0, draw=1), running(0, draw=2)
    place(table, first, second)
    table.open(third)
    assert not table.place(third, at_any_cost=False)
    table.release(second)  # it waits now: its prefix, blocks 3 to 5, is kept for it
    assert not table.place(third, at_any_cost=False)
    table.close(second)
    assert table.place(third, at_any_cost=False)
    assert third.cached.blocks == [3, 4, 5]
    table.check([first, third])


def test_the_only_request_is_placed_at_the_cost_of_all_other_prefixes_and_keeps_its_own():
    table, first, second = table_of(8), running(0), running(0, draw=1, prompt=16, new=16)
    place(table, first)
    first.cached.prefix.filled = 9
    table.release(first)
    (long,) = place(table, second)  # blocks 3 to 6 with the prefix, and 7
    long.prefix.filled = 15
    table.release(second)
    table.open(third := running(1, draw=1, prompt=16, answered=15, new=16))  # 31 positions: all blocks
    assert not table.place(third, at_any_cost=False)
    assert table.place(third, at_any_cost=True)
    assert (third.cached.prefix, third.cached.blocks) == (long.prefix, [3, 4, 5, 6, 7, 2, 1, 0])
    table.check([third])


def test_nothing_is_found_under_another_version():
    table, requests = table_of(), [running(sample) for sample in range(2)]
    (first,) = place(table, requests[0])
    first.prefix.filled = 9
    table.attach(requests[0])
    table.clear(1, requests[:1])
    (second,) = place(table, requests[1])
    assert second.prefix is not first.prefix
    assert not set(second.blocks) & set(first.blocks)  # the first keeps its cache
    table.check(requests)
    table.close(requests[0])
    table.close(requests[1])
    table.check([])


def test_a_cache_that_can_not_hold_one_sequence_is_refused():
    with pytest.raises(CacheBudgetError, match=r'^rollout.cache_tokens=28 .* rollout.context_tokens=32; .* to 32 or'):
        table_of(7)
    table_of(8)


@pytest.mark.parametrize('break_it', ['lose', 'share'])
def test_a_check_finds_a_lost_block_and_one_that_two_write_to(break_it):
    table, requests = table_of(), [running(sample) for sample in range(2)]
    first, second = place(table, *requests)
    table.check(requests)
    if break_it == 'lose':
        table.pool.allocate(1)
    else:
        table.pool.share(first.own[:1])
        second.own[:1] = first.own[:1]
    with pytest.raises(AssertionError):
        table.check(requests)
