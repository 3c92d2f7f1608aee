"""What blocks hold, found by tokens, against a model that compares sequences. Blocks have 4 tokens."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.rollout.blocks import BlockIndex, extend_digests, root_digest

SIZE = 4


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
