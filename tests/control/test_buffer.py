import pickle

import numpy as np
import pytest

from areal_jax.control.buffer import TrajectoryBuffer
from areal_jax.types import NOT_GENERATED, Prompt, Segment, Trajectory, TrajectoryGroup


def group(draw, *versions):
    """One trajectory with two tokens of each version."""
    prompt = Prompt(draw, np.array([1], np.int32), 'toy', {})
    segments = tuple(Segment(np.array([1, 2], np.int32), np.zeros(2, np.float32), v) for v in versions)
    return TrajectoryGroup(draw, (Trajectory(prompt, 0, segments, 0.0, 'stop', 'engine/0', 0.0, 1.0),))


def test_lowest_draw_first_each_once():
    buffer = TrajectoryBuffer()
    for draw in [5, 1, 9, 3]:
        buffer.put(group(draw, 0))
    assert [g.draw for g in buffer.take(2)] == [1, 3]
    buffer.put(group(2, 0))
    assert [g.draw for g in buffer.take(3)] == [2, 5, 9]
    with pytest.raises(ValueError, match='1 groups asked for, 0 buffered'):
        buffer.take(1)


def test_a_draw_is_buffered_once():
    buffer = TrajectoryBuffer()
    buffer.put(group(1, 0))
    with pytest.raises(ValueError, match='draw 1 is in the buffer already'):
        buffer.put(group(1, 0))


def test_age_counts_from_the_oldest_token_and_not_from_environment_tokens():
    # at version 5: ages 5-3=2 and 5-4=1; environment tokens have no age
    aged = group(7, 3, NOT_GENERATED, 4)
    buffer = TrajectoryBuffer()
    buffer.put(aged)
    buffer.put(group(8, 4))
    assert buffer.drop_over_age(5, 2) == []
    (dropped,) = buffer.drop_over_age(5, 1)
    assert (dropped.draw, dropped.reason, dropped.detail) == (7, 'over_age', 'age 2 > 1')
    assert [g.draw for g in buffer.groups()] == [8]


def test_a_group_that_was_taken_is_not_dropped_and_one_that_was_dropped_is_not_taken():
    buffer = TrajectoryBuffer()
    for draw, version in enumerate([0, 4, 1, 5, 0]):
        buffer.put(group(draw, version))
    assert [g.draw for g in buffer.take(1)] == [0]
    assert [d.draw for d in buffer.drop_over_age(5, 3)] == [2, 4]  # ages 4 and 5, lowest draw first
    assert [g.draw for g in buffer.take(2)] == [1, 3]
    assert (len(buffer), buffer.groups(), buffer.drop_over_age(99, 0)) == (0, [], [])


def test_what_a_long_run_leaves_behind_is_cleared_away():
    buffer = TrajectoryBuffer()
    for draw in range(1000):  # nothing is ever dropped
        buffer.put(group(draw, draw))
        buffer.take(1)
    assert len(pickle.dumps(buffer)) < 2000  # bytes; 6 for an entry of a group that was taken
    buffer.put(group(1000, 3))
    assert [d.draw for d in buffer.drop_over_age(9, 5)] == [1000]
