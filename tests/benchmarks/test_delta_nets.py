"""The sides of the comparison have as many operations, and rows with many answers as many tokens."""

import numpy as np
import pytest

from benchmarks.delta_nets import make_dense, make_hybrid, make_rows, operations


@pytest.mark.parametrize('small', [False, True])
def test_the_dense_model_has_the_operations_of_the_hybrid(small):
    tokens = 128 if small else 2048
    hybrid = make_hybrid(small=small)
    dense = make_dense(hybrid, tokens)
    assert dense.delta is None
    assert dense.d_ff > hybrid.d_ff
    assert operations(dense, tokens) == pytest.approx(operations(hybrid, tokens), rel=0.02)


def test_a_row_has_a_prompt_and_answers_behind_it():
    one, many = (make_rows(64, answers, 0) for answers in (1, 4))
    assert {name: values.shape for name, values in one.items()} == dict.fromkeys(one, (1, 128))
    assert np.bincount(many['segment_ids'][0]).tolist() == [0, 64, 16, 16, 16, 16]
    assert many['positions'][0, 64:].tolist() == [*range(64, 80)] * 4
    assert set(np.asarray(many['parent_ids'][0]).tolist()) == {1}
    np.testing.assert_array_equal(one['tokens'], many['tokens'])
