"""The mismatch of tokens by the turn of their row, and which tokens move the weights."""

import dataclasses

import numpy as np
import pytest

from areal_jax.learning.diagnostics.data_metrics import mismatch_metrics, useful_metrics
from areal_jax.types import PackedBatch


def batch(positions, trajectories, versions=None):
    """Loss token n is predicted at positions[n] of its trajectory; the row has the tokens in their order."""
    shape = (1, 1, len(positions))
    fields = {
        field.name: np.zeros(shape, np.int32)
        for field in dataclasses.fields(PackedBatch)
        if field.name not in ('behavior_logprobs', 'policy_versions', 'trajectory_ids', 'columns')
    }
    return PackedBatch(
        **fields
        | {
            'positions': np.array(positions, np.int32).reshape(shape),
            'sources': np.arange(len(positions), dtype=np.int32).reshape(shape),
        },
        behavior_logprobs=np.zeros(shape, np.float32),
        policy_versions=np.array(versions or [3] * len(positions), np.int32).reshape(shape),
        trajectory_ids=np.array(trajectories, np.int32).reshape(shape),
    )


def test_tokens_behind_those_of_the_environment_are_of_the_next_turn():
    # of trajectory 0 two tokens, three of the environment, one, one of the environment, one; and so on
    positions, trajectories = [4, 5, 9, 11, 2, 8, 9, 7, 0], [0, 0, 0, 0, 1, 1, 1, 2, -1]
    packed = batch(positions, trajectories, versions=[3, 3, 3, 3, 3, 3, 2, 3, 0])
    learned = -np.array([1, 1, 2, 3, 1, 4, 9, 7, 9], np.float32).reshape(1, 1, -1)
    found = mismatch_metrics([packed], [learned], 3)
    assert found['mismatch/n'] == 7
    turns = {name.removeprefix('mismatch/turn/'): value for name, value in found.items() if '/turn/' in name}
    assert turns.pop('1/mean_abs') == pytest.approx((1 + 1 + 1 + 7) / 4)
    assert turns == {'1/n': 4, '2/n': 2, '2/mean_abs': 3, '3/n': 1, '3/mean_abs': 3}


def test_rows_of_one_turn_have_no_metric_of_turns():
    found = mismatch_metrics([batch([3, 4, 3], [0, 0, 1])], [np.zeros((1, 1, 3), np.float32)], 3)
    assert not [name for name in found if '/turn/' in name]


def test_turns_beyond_the_eighth_are_counted_with_it():
    found = mismatch_metrics([batch(range(0, 20, 2), [0] * 10)], [np.ones((1, 1, 10), np.float32)], 3)
    assert (found['mismatch/turn/8/n'], found['mismatch/turn/7/n']) == (3, 1)


def test_useful_tokens_are_trained_with_an_advantage_in_an_applied_step():
    # of four tokens one is masked and one has no advantage; the second batch was left out for a gradient of NaN
    packed = dataclasses.replace(
        batch([3, 4, 5, 6], [0, 0, 1, 1]),
        advantages=np.array([0.5, -2.0, 0.0, 1.0], np.float32).reshape(1, 1, -1),
        loss_mask=np.array([True, True, True, False]).reshape(1, 1, -1),
    )
    assert useful_metrics([packed, packed], [True, False]) == {'update/useful_tokens': 2.0}
    assert useful_metrics([], []) == {'update/useful_tokens': 0.0}
