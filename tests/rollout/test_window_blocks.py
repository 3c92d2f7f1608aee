"""Which parts of blocks the layers with a window have. Blocks have 4 tokens, the window 6, a dispatch 3 steps."""

import numpy as np
import pytest

from areal_jax.rollout.cache_table import CacheTable
from areal_jax.rollout.window_blocks import Need, WindowPool, WindowSizes, size_windows
from tests.rollout.test_cache_table import attach, end, place, running


def pool_of(parts=5, blocks=12):
    return WindowPool(WindowSizes(6, parts), blocks, 4)


def has(pool, blocks):
    return [block for block in blocks if pool.place(block) < 5]


def test_a_sequence_holds_the_blocks_that_its_next_tokens_see_and_write():
    # position p sees p - 5 to p: at 9 from 4 on, which is in the second block; three tokens are written up to 11
    pool, need, blocks = pool_of(), Need(), [7, 3, 9, 1]
    pool.hold(need, blocks, 0, 9)
    assert (need.first, need.blocks) == (0, [7, 3, 9])
    pool.hold(need, blocks, 9, 12)
    assert (need.first, need.blocks, pool.needed) == (1, [3, 9], 2)
    pool.hold(need, blocks, 14, 14)  # sees from 9 on, and the block of position 13 stays for what comes
    assert (need.first, need.blocks) == (2, [9, 1])
    pool.check([need])
    pool.release(need)
    assert pool.needed == 0
    pool.check([])


def test_parts_that_were_gone_past_are_taken_first_then_ends():
    pool, first, second = pool_of(parts=4), Need(), Need()
    pool.hold(first, [0, 1], 0, 8)
    pool.release(first)  # an end
    pool.hold(second, [2, 3, 4], 0, 8)
    pool.hold(second, [2, 3, 4], 8, 12)  # sees from 3 on: keeps all three, so the oldest end gives its part
    assert has(pool, range(5)) == [1, 2, 3, 4]
    pool.hold(second, [2, 3, 4, 5], 12, 15)  # sees from 7 on: block 2 was gone past, and gives its part
    assert has(pool, range(6)) == [1, 3, 4, 5]
    third = Need()
    with pytest.raises(RuntimeError, match='all 4 parts'):
        pool.hold(third, [8, 9, 10], 0, 12)


def test_a_beginning_that_prompts_share_keeps_the_parts_of_its_end():
    pool, need, blocks = pool_of(), Need(), [0, 1, 2, 3, 4, 5]
    pool.hold(need, blocks, 0, 8)
    pool.mark_end(blocks, 8)
    for start in (8, 12, 16, 20):
        pool.hold(need, blocks, start, start + 4)
    assert has(pool, blocks) == [0, 1, 3, 4, 5]  # a token at 8 sees from 3 on
    assert [pool.longest(blocks[:count]) for count in (2, 3)] == [2, 2]


def test_the_longest_beginning_ends_where_the_last_window_is_whole():
    pool, need, blocks = pool_of(), Need(), [0, 1, 2, 3, 4]
    pool.hold(need, blocks, 0, 20)
    pool.release(need)
    assert [pool.longest(blocks[:count]) for count in range(6)] == [0, 1, 2, 3, 4, 5]
    pool.discard(2)  # a token at 4 n sees from 4 n - 5 on: the blocks n - 2 and n - 1
    assert [pool.longest(blocks[:count]) for count in range(6)] == [0, 1, 2, 2, 2, 5]
    assert [length for length in range(21) if not pool.covers(blocks, length)] == [*range(9, 17)]


def test_a_part_that_is_to_be_seen_must_be_there():
    pool, need = pool_of(), Need()
    with pytest.raises(RuntimeError, match=r'blocks \[0, 1\] are to be seen'):
        pool.hold(need, [0, 1, 2], 8, 9)


# In the table of an engine.


def table_of(parts=10, blocks=16):
    return CacheTable(blocks, 4, context_tokens=32, steps=3, version=0, windows=WindowSizes(6, parts))


def compute(table, one):
    """The prefix in pieces of 4 tokens, then the request is attached."""
    prefix = one.cached.prefix
    for start in range(prefix.filled, len(prefix.tokens), 4):
        prefix.filled = min(start + 4, len(prefix.tokens))
        table.hold(prefix, start, prefix.filled)
        table.settle(prefix)
    table.hold(one.cached, len(prefix.tokens), len(prefix.tokens))
    attach(table, one)


def test_a_group_shares_parts_and_the_block_in_which_the_prompt_ends_is_copied():
    table, requests = table_of(), [running(sample) for sample in range(3)]
    first, *others = place(table, *requests)
    for one in requests:
        compute(table, one)
    # 9 positions in blocks 0, 1, 2: the next token sees from 4 on, so block 1 is shared and block 2 copied for each
    assert [one.need.blocks for one in (first, *others)] == [[1, 2], [1, 3], [1, 4]]
    assert table.windows.needed == 4
    copies = table.windows.pair([one.tail_copy for one in others])
    assert copies == [(table.windows.place(2), table.windows.place(block)) for block in (3, 4)]
    table.check(requests)


def test_the_next_turn_needs_the_parts_of_the_last_window_and_begins_anew_without_them():
    said = list(range(100, 118))
    # block n holds 4 n to 4 n + 3: a token at 19 sees from 14 on, one at 16 from 11 on, one at 12 from 7 on
    for lost, found in ((2, 19), (4, 16), (3, 12)):
        table, request = table_of(), running(0, prompt=said)
        place(table, request)
        compute(table, request)
        table.hold_steps(request)
        blocks = request.cached.blocks
        end(table, request, [1, 2])
        table.windows.discard(blocks[lost])
        turn = running(0, prompt=[*said, 1, 2, 50, 51], draw=1)
        place(table, turn)
        assert turn.cached_tokens == found
        table.check([turn])


def test_a_prefix_that_waits_without_its_parts_is_computed_again_and_found_with_the_new_ones():
    table, requests = table_of(), [running(sample, prompt=18) for sample in range(2)]
    for one in requests:
        table.open(one)
    table.place(requests[0], at_any_cost=False)
    compute(table, requests[0])
    prefix = requests[0].cached.prefix
    requests[0].extend(np.ones(1, np.int32), np.zeros(1, np.float32), 0)
    table.close(requests[0], keep=True)
    others, need = list(range(6, 16)), Need()
    table.windows.hold(need, others, 0, 40)  # other sequences take all ten parts
    table.windows.release(need)
    for block in others:
        table.windows.discard(block)
    table.place(requests[1], at_any_cost=False)
    assert requests[1].cached.prefix is not prefix
    assert requests[1].cached_tokens == 0
    compute(table, requests[1])
    found = table.pool.index.find(0, requests[1].prompt_digests, requests[1].request.prompt_tokens[:-1])
    assert found.blocks[-1] == requests[1].cached.blocks[3]  # the name has gone to the block that has a part
    assert table.windows.longest(found.blocks) == 4
    table.check([requests[1]])


def test_sixteen_thousand_tokens_hold_two_windows_at_most_and_the_pool_a_seventh():
    sizes = size_windows(1024, slots=8, cache_blocks=2048, block_tokens=64, steps=8, piece_tokens=256)
    # a row sees 1,023 and writes 8 positions, in at most 1 + ceil(1030 / 64) = 18 blocks; two for copies and pieces;
    # 4 blocks for a piece of prefill, and half as many windows of 17 blocks as there are slots
    assert sizes.blocks == 8 * (18 + 2) + 4 + 4 * 17 == 232
    assert (sizes.blocks + 2) / 2049 < 0.12
    table = CacheTable(256, 64, context_tokens=2**14, steps=8, version=0, windows=sizes)
    request = running(0, prompt=8193, new=8191)
    place(table, request)
    prefix, most = request.cached.prefix, 0
    while prefix.filled < len(prefix.tokens):
        stop = min(prefix.filled + 256, len(prefix.tokens))
        table.hold(prefix, prefix.filled, stop)
        prefix.filled, most = stop, max(most, table.windows.needed)
        table.settle(prefix)
    compute(table, request)
    while len(request) < request.limit:
        table.grow(request)
        table.hold_steps(request)
        most = max(most, table.windows.needed)
        steps = min(8, request.limit - len(request))
        request.extend(np.ones(steps, np.int32), np.zeros(steps, np.float32), 0)
        request.cached.filled = len(request) - 1
    assert most == 20  # 1,023 + 256 positions from a multiple of 64 on
    assert table.windows.needed <= 18
    table.check([request])


def test_no_pool_is_made_where_it_would_be_larger():
    sizes = {'slots': 2, 'block_tokens': 4, 'steps': 3, 'piece_tokens': 8}
    assert size_windows(6, cache_blocks=15, **sizes) is None
    assert size_windows(6, cache_blocks=16, **sizes) == WindowSizes(6, 15)
    assert size_windows(None, cache_blocks=1000, **sizes) is None
