"""Log-probs that a soak compares: of the version that a token says."""

import numpy as np
import pytest

from areal_jax.types import Segment
from tests.soak.scores import Scores

PROMPT, TOKENS = np.array([1, 2, 1], np.int32), np.array([2, 1, 1, 0, 2], np.int32)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_an_answer_of_two_versions_is_right_only_under_its_versions(dtype):
    scores = Scores(dtype)
    old, new = (scores.logprobs(version, PROMPT, TOKENS) for version in (3, 4))
    right = [Segment(TOKENS[:2], old[:2], 3), Segment(TOKENS[2:3], new[2:3], 4), Segment(TOKENS[3:], new[3:], 4)]
    assert scores.fault(PROMPT, right) == ''
    wrong = [*right[:2], Segment(TOKENS[3:], old[3:], 4)]
    assert 'of version 4 differ by' in scores.fault(PROMPT, wrong)
