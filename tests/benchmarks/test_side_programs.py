"""What the benchmark of generation measures of single programs."""

import numpy as np

from benchmarks.side_programs import plan, temporary_bytes
from tests.rollout.decode.examples import backend, build, weights


def test_long_prompts_go_in_packed_pieces_of_the_largest_bucket():
    one = backend()  # rows of at most 24 tokens
    tokens = np.arange(3 * 23).reshape(3, 23) % 32
    spans = [[piece.span for piece in pieces] for pieces in plan(one, tokens[:, :11])]
    assert spans == [[(0, 11), (0, 11)], [(0, 11)]]
    spans = [[piece.span for piece in pieces] for pieces in plan(one, tokens)]
    assert spans == [[(0, 23)]] * 3


def test_the_temporary_memory_is_that_of_the_largest_prefill():
    one, small = backend(), build(prefill_buckets=(8,))
    assert 0 < temporary_bytes(small, small.prepare(weights())) < temporary_bytes(one, one.prepare(weights()))
