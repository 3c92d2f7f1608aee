"""Which places hold recurrent states, and which snapshots a prompt finds. Blocks have 4 tokens, a dispatch 3 steps."""

import dataclasses

import numpy as np
import pytest

from areal_jax.rollout.blocks import extend_digests, root_digest
from areal_jax.rollout.cache_table import CacheTable
from areal_jax.rollout.state_pool import NoStates, StatePool, StateSizes, build_states, size_states
from areal_jax.rollout.window_blocks import WindowSizes
from tests.rollout.test_cache_table import attach, end, place, running


@dataclasses.dataclass(eq=False)
class Holder:
    state: int | None = None


def pool_of(places=4):
    return StatePool(StateSizes(places), 4)


def named(tokens, version=0):
    """The arguments by which the pool knows these tokens."""
    tokens = np.array(tokens, np.int32)
    return version, extend_digests([root_digest('')], tokens, 4), tokens


def snap(pool, tokens, version=0):
    """Makes a snapshot behind the tokens; returns its place."""
    holder = Holder()
    pool.allocate(holder)
    at = holder.state
    pool.keep(holder, *named(tokens, version))
    return at


def test_the_lowest_free_place_is_given_and_comes_back():
    pool, holders = pool_of(3), [Holder(), Holder(), Holder()]
    for one in holders:
        pool.allocate(one)
    assert [one.state for one in holders] == [0, 1, 2]
    with pytest.raises(RuntimeError, match='all 3 states of recurrent layers are needed'):
        pool.allocate(Holder())
    pool.check(holders, [])
    for one in holders[:2]:
        pool.release(one)
    assert (pool.free, [one.state for one in holders]) == (2, [None, None, 2])
    pool.release(holders[0])  # it has none
    pool.check(holders[2:], [])


def test_the_longest_snapshot_of_the_beginning_of_a_prompt_is_found():
    pool = pool_of(9)
    for length in (3, 4, 6, 13):
        snap(pool, range(length))
    snap(pool, [0, 1, 2, 3, 4, 9, 9])
    find = lambda tokens, version=0: pool.longest(*named(tokens, version))
    assert [find(range(length)) for length in range(15)] == [0, 0, 0, 3, 4, 4, *[6] * 7, 13, 13]
    assert [find([0, 1, 2, 3, 4, 9]), find([0, 1, 2, 3, 4, 9, 9]), find([0, 1, 9, 3])] == [4, 7, 0]
    assert find(range(14), version=1) == 0
    pool.check([], [])


def test_the_snapshot_that_was_not_used_for_longest_is_evicted_then_the_oldest_spared_state():
    pool, spared, late = pool_of(5), [Holder(), Holder()], [Holder() for _ in range(5)]
    for one in spared:
        pool.allocate(one)
    pool.spare(spared[1])
    pool.spare(spared[0])
    first, second, third = (snap(pool, tokens) for tokens in ([1], [2], [3]))
    snap(pool, [1])  # is there already: used again, and one is kept
    pool.check([], spared)
    taken = []
    for one in late:
        pool.allocate(one)
        taken.append(one.state)
    assert taken == [second, third, first, 1, 0]
    assert [pool.covers(one) for one in spared] == [False, False]
    pool.check(late, spared)


def test_the_same_tokens_twice_keep_one_snapshot():
    pool = pool_of(4)
    snap(pool, range(6))
    snap(pool, range(6))
    snap(pool, range(6), version=1)
    assert (pool.free, pool.snapshots) == (2, 2)
    pool.check([], [])


def test_a_prefix_that_is_needed_again_keeps_its_state():
    pool, prefix, other = pool_of(2), Holder(), Holder()
    pool.allocate(prefix)
    pool.spare(prefix)
    pool.need(prefix)
    pool.allocate(other)
    with pytest.raises(RuntimeError, match='all 2 states'):
        pool.allocate(Holder())
    pool.check([prefix, other], [])


def test_a_branch_is_a_copy_and_its_source_may_be_given_away_before_the_copies_run():
    pool, holders = pool_of(3), [Holder() for _ in range(3)]
    one, two = snap(pool, range(6)), snap(pool, range(9))
    pool.branch(holders[0], *named(range(6)))
    pool.branch(holders[1], *named(range(6)))  # takes the place of the other snapshot, which was used less
    pool.branch(holders[2], *named(range(6)))  # takes the last place: the snapshot's own
    assert [holder.state for holder in holders] == [2, two, one]
    assert pool.take_copies() == [(one, 2), (one, two)]
    assert pool.take_copies() == []
    pool.check(holders, [])


def test_a_branch_of_nothing_copies_nothing_and_one_that_is_dropped_has_no_copy():
    pool, holder, other = pool_of(3), Holder(), Holder()
    snap(pool, range(6))
    pool.branch(holder, *named([]))
    assert pool.take_copies() == []
    for finish in (pool.release, lambda one: pool.keep(one, *named(range(8)))):
        pool.branch(other, *named(range(6)))
        finish(other)  # the copy has not run, so that the place is worth nothing
        assert (pool.take_copies(), pool.free, pool.snapshots) == ([], 1, 1)
    pool.branch(other, *named(range(6)))
    pool.spare(other)
    late = [Holder(), Holder()]  # they take the snapshot's place, and then that of its copy
    for one in late:
        pool.allocate(one)
    assert (other.state, pool.take_copies()) == (None, [])
    pool.check([holder, *late], [other])


def test_all_snapshots_are_forgotten_at_once():
    pool = pool_of(3)
    snap(pool, range(6))
    snap(pool, range(8))
    pool.forget()
    assert (pool.free, pool.longest(*named(range(9)))) == (3, 0)
    pool.check([], [])


@pytest.mark.parametrize('fault', ['lost', 'twice', 'without', 'not spared'])
def test_a_check_finds_a_lost_place_and_one_of_two_holders(fault):
    pool, holders, spared = pool_of(4), [Holder(), Holder()], Holder()
    for one in (*holders, spared):
        pool.allocate(one)
    pool.spare(spared)
    snap(pool, [1])
    pool.check(holders, [spared])
    if fault == 'lost':
        holders[0].state = None
    elif fault == 'twice':
        holders[0].state = holders[1].state
    elif fault == 'without':
        pool.release(holders[0])
    else:
        pool.need(spared)
    with pytest.raises(AssertionError):
        pool.check(holders, [spared])


def test_places_are_two_of_each_slot_and_the_snapshots_by_default_half_as_many_as_slots():
    assert [size_states(8, snapshots).places for snapshots in (0, 3, None)] == [16, 19, 20]
    assert size_states(1, None) == StateSizes(3)
    assert StateSizes(3).padding == 3
    assert isinstance(build_states(None, 4), NoStates)


# In the table of an engine.


def table_of(places=9, blocks=24, windows=None):
    return CacheTable(blocks, 4, context_tokens=32, steps=3, version=0, windows=windows, states=StateSizes(places))


def begin(table, *requests):
    place(table, *requests)
    for one in requests:
        attach(table, one)


def found(table, tokens, draw=7):
    """How much of the prompt the table has, with the request in a slot."""
    one = running(0, prompt=list(tokens), draw=draw, new=5)
    (cached,) = place(table, one)
    return one.cached_tokens, cached.prefix.copy, table.states.take_copies(), one


def test_every_member_of_a_group_has_a_copy_of_the_state_of_its_prompt():
    table, requests = table_of(), [running(sample) for sample in range(4)]
    first, *others = place(table, *requests)
    at = first.prefix.state
    assert [one.state_copy for one in (first, *others)] == [(at, one.state) for one in (first, *others)]
    assert len({at, first.state, *(one.state for one in others)}) == 5
    assert table.states.take_copies() == []  # it begins with zeros
    assert first.has_tail  # also the one that goes on in the block of the prefix itself
    for one in requests:
        attach(table, one)
    table.check(requests)
    for one in requests:
        end(table, one, [one.request.sample, 5])
    table.check([])
    assert (table.states.free, table.states.snapshots) == (4, 5)  # four answers and the prompt


@pytest.mark.parametrize('of_prefix', [True, False])
def test_a_check_of_the_table_finds_a_request_without_its_states(of_prefix):
    table, one = table_of(), running(0)
    (cached,) = place(table, one)
    table.check([one])
    table.states.release(cached.prefix if of_prefix else cached)
    with pytest.raises(AssertionError):
        table.check([one])


def test_a_prompt_of_one_token_has_one_place():
    table, one = table_of(), running(0, prompt=1)
    (cached,) = place(table, one)
    assert (cached.state, cached.state_copy, table.states.free) == (0, None, 8)
    cached.is_attached = True
    end(table, one, [5, 6])
    assert found(table, [0, 5, 6])[0] == 2


def test_the_next_turn_begins_where_the_answer_has_ended_inside_a_block():
    table, one = table_of(), running(0)
    begin(table, one)
    end(table, one, [5, 6])  # 11 positions: the last two blocks hold 8 to 10
    cached_tokens, block, states, turn = found(table, [*range(10), 5, 6, 7])
    assert (cached_tokens, block) == (11, (2, turn.cached.blocks[2]))
    assert states == [(1, turn.cached.prefix.state)]
    table.check([turn])


def end_four(table, one):
    """The answer has five tokens: 14 positions are in the cache."""
    begin(table, one)
    one.extend(np.array([5, 6, 7, 8], np.int32), np.zeros(4, np.float32), 0)
    table.grow(one)
    end(table, one, [4])


def evict(table, number):
    """Others take so many places, and give them back."""
    others = [Holder() for _ in range(number)]
    for one in others:
        table.states.allocate(one)
    for one in others:
        table.states.release(one)


def test_a_prompt_is_found_at_the_end_of_an_earlier_one_in_the_middle_of_a_whole_block():
    table = table_of()
    end_four(table, running(0))  # block 2 is whole, and holds the last token of the prefix first
    evict(table, 8)  # the answer's snapshot is older than that of its prompt
    assert table.states.snapshots == 1
    cached_tokens, block, states, turn = found(table, [*range(10), 5, 6, 7, 8, 4, 1])
    assert (cached_tokens, block) == (9, (2, turn.cached.blocks[2]))
    assert turn.cached.blocks[:2] == [0, 1]
    assert [target for _, target in states] == [turn.cached.prefix.state]
    table.check([turn])


def test_nothing_is_found_behind_the_last_snapshot():
    table = table_of()
    end_four(table, running(0))
    fork = [*range(10), 5, 6, 50, 51, 52]  # three whole blocks, and the last state before is that of the prompt
    assert found(table, fork)[0] == 9
    table = table_of()
    end_four(table, running(0))
    evict(table, 9)
    assert found(table, fork)[0] == 0  # blocks without a state are of no use


def test_a_prompt_that_ended_with_its_block_is_found_without_a_copy_of_blocks():
    table, one = table_of(), running(0, prompt=9)
    begin(table, one)
    end(table, one, [5])
    cached_tokens, block, states, turn = found(table, [*range(8), 60, 61])
    assert (cached_tokens, block) == (8, None)
    assert [target for _, target in states] == [turn.cached.prefix.state]


def test_a_prefix_whose_state_was_evicted_is_computed_anew():
    table, requests = table_of(places=5), [running(sample) for sample in range(2)]
    begin(table, requests[0])
    table.open(requests[1])
    prefix = requests[0].cached.prefix
    table.close(requests[0])
    evict(table, 4)
    assert prefix.state is not None
    evict(table, 5)
    assert prefix.state is None
    table.check([])
    assert table.place(requests[1], at_any_cost=False)
    assert requests[1].cached.prefix is not prefix
    assert requests[1].cached_tokens == 0
    table.check(requests[1:])


def test_a_partial_prefix_goes_on_with_its_state_after_it_waited():
    table, one = table_of(), running(0)
    (cached,) = place(table, one)
    cached.prefix.filled, at = 4, cached.prefix.state
    table.retract(one)
    table.check([])
    assert table.place(one, at_any_cost=False)
    assert (one.cached.prefix, one.cached.prefix.state) == (cached.prefix, at)
    table.check([one])
    table.close(one)
    assert table.states.free == 9  # a state of a part of a prompt is no snapshot
    table.check([])


def test_what_is_of_several_versions_or_past_its_end_leaves_no_snapshot():
    for case in ('versions', 'past the end'):
        table, one = table_of(), running(0)
        begin(table, one)
        if case == 'versions':
            table.clear(1, [one])
        one.cached.filled = len(one) - 1
        prompt = 0 if case == 'versions' else 1
        table.close(one, keep=True, past_end=case == 'past the end')
        assert (table.states.snapshots, table.states.free) == (prompt, 9 - prompt)
        table.check([])


def test_a_new_version_frees_every_state_but_those_of_requests_that_go_on():
    table, requests = table_of(), [running(sample, draw=sample) for sample in range(2)]
    begin(table, requests[0])
    end(table, requests[0], [5, 6])
    begin(table, requests[1])
    at = requests[1].cached.state
    table.clear(1, requests[1:])
    table.check(requests[1:])
    assert (table.states.free, table.states.snapshots, requests[1].cached.state) == (8, 0, at)
    assert requests[1].cached.prefix.state is None
    assert found(table, [*range(10), 5, 6, 7])[0] == 0


def find_beside_windows(lengths, prompt, lost):
    """How much of a prompt is found after prompts of these lengths, if blocks have lost their parts.

    A window of 6 tokens sees blocks 3 and 4 from position 19 on, 2 and 3 from 16, 1 and 2 from 9.
    """
    table = table_of(places=20, windows=WindowSizes(6, 24))
    for index, length in enumerate(lengths):
        one = running(index, prompt=SAID[:length], draw=index)
        place(table, one)
        prefix = one.cached.prefix
        table.hold(prefix, prefix.filled, len(prefix.tokens))
        attach(table, one)
        table.hold(one.cached, len(prefix.tokens), len(prefix.tokens))
        table.hold_steps(one)
        end(table, one, [1, 2])
        table.check([])
    match = table.pool.index.find(0, *named(prompt[:-1])[1:])
    for index in lost:
        table.windows.discard([*match.blocks, match.tail][index])
    cached_tokens, *_, one = found(table, prompt)
    table.check([one])
    return match.length, cached_tokens


SAID = list(range(100, 118))


@pytest.mark.parametrize(
    ('lost', 'cached_tokens'),
    [((), 19), ((0, 1, 2), 19), ((4,), 16), ((4, 1), 16), ((4, 2), 0), ((3,), 9), ((3, 0), 9), ((3, 1), 0)],
)
def test_a_state_is_found_where_the_window_is_whole(lost, cached_tokens):
    # states at 9, 16 and 19
    assert find_beside_windows((10, 17, 18), [*SAID, 1, 2, 50, 51], lost) == (19, cached_tokens)


@pytest.mark.parametrize(('lost', 'cached_tokens'), [((), 9), ((3,), 9), ((0,), 9), ((1,), 0), ((2,), 0)])
def test_a_window_that_is_whole_at_the_end_may_be_gone_at_the_last_state(lost, cached_tokens):
    assert find_beside_windows((10, 18), [*SAID[:16], 50, 51, 52], lost) == (16, cached_tokens)
