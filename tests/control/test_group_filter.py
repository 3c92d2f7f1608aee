"""Which finished groups are dropped: those that the filter inside the batch would leave out too."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.control.buffer import GroupFilter, NoSignalError, equal_rewards, success_rate
from areal_jax.control.episode import Episode, Row, RunningGroup
from areal_jax.learning.objective.counting import has_signal
from areal_jax.types import Prompt, Segment, TrajectoryGroup, Verdict


def finished(*verdicts: Verdict) -> TrajectoryGroup:
    """A group of one answer per verdict, after verification."""
    segment = Segment(np.array([1], np.int32), np.array([-1.0], np.float32), 0)
    episodes = [Episode(sample, 'stop', 'engine/0', [Row(segments=[segment])]) for sample in range(len(verdicts))]
    group = RunningGroup(Prompt(7, np.array([1], np.int32), 'toy', {}), 0.0, episodes)
    for episode, verdict in zip(episodes, verdicts, strict=True):
        group.record(episode, verdict, 1.0)
    return group.group()


CRASH = Verdict(0.0, 2, 'crash')


@pytest.mark.parametrize(
    ('verdicts', 'detail'),
    [
        ((Verdict(0.0), Verdict(1.0)), None),
        ((Verdict(0.0), Verdict(0.0)), '2 rewards of 0'),
        ((Verdict(0.25), Verdict(0.25), Verdict(0.25)), '3 rewards of 0.25'),
        ((Verdict(0.0), Verdict(1e-12)), None),  # equal to the bit, as in the batch
        ((Verdict(1.0), Verdict(0.0), CRASH), None),  # partial: decided by the answers that have a reward
        ((Verdict(1.0), Verdict(1.0), CRASH), '2 rewards of 1'),
        ((Verdict(1.0), CRASH), '1 rewards of 1'),  # one answer is left: its advantage would be 0
    ],
)
def test_a_group_is_judged_as_in_the_batch(verdicts: tuple[Verdict, ...], detail: str | None):
    group = finished(*verdicts)
    drop = GroupFilter(equal_rewards(), limit=9).judge(group)
    assert (drop and (drop.draw, drop.reason, drop.detail)) == (detail and (7, 'equal_rewards', detail))
    assert has_signal(group) == (drop is None)


@pytest.mark.parametrize(
    ('rewards', 'bounds', 'detail'),
    [
        ((0.0, 0.0, -1.0, 0.0), (0.05, 0.95), '0 of 4 rewards above 0'),
        ((1.0, 0.5, 1e-9, 2.0), (0.05, 0.95), '4 of 4 rewards above 0'),  # unequal rewards, and all of them successes
        ((1.0, 0.0, 0.0, 0.0), (0.05, 0.95), None),
        ((1.0, 0.0, 0.0, 0.0), (0.25, 0.5), None),  # the bounds are kept
        ((1.0, 1.0, 1.0, 0.0), (0.25, 0.5), '3 of 4 rewards above 0'),
        ((1.0, 0.0, 0.0, 0.0), (0.3, 1.0), '1 of 4 rewards above 0'),
    ],
)
def test_a_group_is_kept_where_its_share_of_successes_lies_between_the_bounds(rewards, bounds, detail):
    drop = GroupFilter(success_rate(*bounds), limit=9).judge(finished(*map(Verdict, rewards)))
    assert (drop and (drop.draw, drop.reason, drop.detail)) == (detail and (7, 'success_rate', detail))


def test_an_answer_that_could_not_be_verified_has_no_part_in_the_share():
    group_filter = GroupFilter(success_rate(0.4, 0.6), limit=9)
    assert group_filter.judge(finished(Verdict(1.0), Verdict(0.0), CRASH)) is None  # 1 of 2, not of 3


def test_only_drops_in_a_row_end_the_run_and_a_resumed_run_counts_on():
    same, different = finished(Verdict(0.0), Verdict(0.0)), finished(Verdict(0.0), Verdict(1.0))
    group_filter = GroupFilter(equal_rewards(), limit=3)

    def judge(group: TrajectoryGroup) -> None:
        if drop := group_filter.judge(group):
            group_filter.require_signal(drop)

    for group in (same, same, different, same):
        judge(group)
    assert group_filter.take_rate() == 3 / 4
    assert group_filter.take_rate() is None
    judge(same)
    state = group_filter.state()
    group_filter = GroupFilter(equal_rewards(), limit=3)
    group_filter.restore(state)
    with pytest.raises(NoSignalError, match=r'^3 groups in a row .* draw 7, with 2 rewards of 0: look at'):
        judge(same)
    assert group_filter.take_rate() == 1.0  # the judgement before the resume counts too
