from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.learning.packing import (
    count_tokens,
    denominator_weights,
    empty_batch,
    next_token_form,
    pack,
    split_minibatches,
)
from areal_jax.types import NOT_GENERATED, PackedBatch, TrajectoryGroup
from tests.learning.examples import group, random_groups, segment, trajectory


def _pack(groups, **settings):
    shape = {'mode': 'shared_prompt', 'row_tokens': 32, 'row_loss_tokens': 16, 'rows_per_microbatch': 1}
    advantages = [np.arange(len(g.trajectories), dtype=np.float32) + 10 * i for i, g in enumerate(groups)]
    return pack(groups, advantages, **(shape | settings))


def test_every_array_is_shifted_alike():
    # prompt 1 2; generated 3 (v0) 4 (v0), tool 5 6, generated 7 (v2): targets 3 4 7, predicted from 2, 3 and 6
    spans = [segment([3, 4], 0, [-0.3, -0.4]), segment([5, 6], NOT_GENERATED), segment([7], 2, [-0.7])]
    form = next_token_form(trajectory([1, 2], spans))
    np.testing.assert_array_equal(form.inputs, [1, 2, 3, 4, 5, 6])  # 7 is predicted and never read
    np.testing.assert_array_equal(form.inputs[form.sources], [2, 3, 6])
    np.testing.assert_array_equal(form.targets, [3, 4, 7])
    np.testing.assert_allclose(form.behavior_logprobs, [-0.3, -0.4, -0.7])
    np.testing.assert_array_equal(form.policy_versions, [0, 0, 2])


def test_trailing_environment_tokens_are_not_read():
    form = next_token_form(trajectory([1], [segment([2], 0), segment([3, 4], NOT_GENERATED)]))
    np.testing.assert_array_equal(form.inputs, [1])
    np.testing.assert_array_equal(form.targets, [2])


def test_generated_first_token_has_no_source():
    with pytest.raises(ValueError, match='draw 0: the prompt is empty'):
        next_token_form(trajectory([], [segment([2], 0)]))


def test_shared_prompt_row_by_hand():
    # prompt 1 2 once, then the answers 3 4 (reads 3), 5 (reads nothing), 6 7 8 (reads 6 7)
    (batch,), report = _pack([group([1, 2], [[3, 4], [5], [6, 7, 8]])], row_tokens=8, row_loss_tokens=7)
    row = batch.microbatch(0).microbatch(0)
    np.testing.assert_array_equal(row.tokens, [1, 2, 3, 6, 7, 0, 0, 0])
    np.testing.assert_array_equal(row.positions, [0, 1, 2, 2, 3, 0, 0, 0])
    np.testing.assert_array_equal(row.segment_ids, [1, 1, 2, 4, 4, 0, 0, 0])
    np.testing.assert_array_equal(row.parent_ids, [1, 1, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(row.sources, [1, 2, 1, 1, 3, 4, 0])
    np.testing.assert_array_equal(row.targets, [3, 4, 5, 6, 7, 8, 0])
    np.testing.assert_array_equal(row.loss_mask, [1, 1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(row.trajectory_ids, [0, 0, 1, 2, 2, 2, -1])
    np.testing.assert_array_equal(row.advantages, [0, 0, 1, 2, 2, 2, 0])
    # unshared: 3 + 2 + 4 = 9 tokens to read, here 5
    assert (report.tokens, report.saved_tokens, report.rows, report.microbatches) == (5, 4, 1, 1)
    assert report.metrics()['train/packing_utilization'] == 5 / 8
    assert report.metrics()['train/loss_utilization'] == 6 / 7


def test_ordinary_row_by_hand():
    (batch,), report = _pack([group([1, 2], [[3, 4], [5]])], mode='ordinary', row_tokens=6, row_loss_tokens=4)
    row = batch.microbatch(0).microbatch(0)
    np.testing.assert_array_equal(row.tokens, [1, 2, 3, 1, 2, 0])
    np.testing.assert_array_equal(row.positions, [0, 1, 2, 0, 1, 0])
    np.testing.assert_array_equal(row.segment_ids, [1, 1, 1, 2, 2, 0])
    np.testing.assert_array_equal(row.parent_ids, row.segment_ids)
    np.testing.assert_array_equal(row.sources, [1, 2, 4, 0])
    np.testing.assert_array_equal(row.targets, [3, 4, 5, 0])
    assert report.saved_tokens == 0


def test_group_too_large_for_a_row_repeats_its_prompt():
    # beside the prompt of 2, eight places: answers reading 3 tokens go two to a row, so 2 rows for 4 answers
    (batch,), report = _pack([group([1, 2], [[3, 4, 5, 6]] * 4)], row_tokens=10, row_loss_tokens=12)
    np.testing.assert_array_equal(batch.tokens[:, 0, :2], [[1, 2], [1, 2]])
    np.testing.assert_array_equal((batch.segment_ids > 0).sum(-1), [[8], [8]])
    assert report.saved_tokens == 4 * 5 - 16


def test_row_loss_tokens_split_a_group_too():
    (batch,), _ = _pack([group([1, 2], [[3, 4]] * 4)], row_tokens=32, row_loss_tokens=5)  # 2 answers of 2 in 5
    np.testing.assert_array_equal(batch.loss_mask.sum(-1), [[4], [4]])


def test_microbatches_are_filled_up_with_empty_rows():
    groups = [group([1, 2], [[3, 4, 5]], draw=i) for i in range(5)]
    (batch,), report = _pack(groups, row_tokens=4, rows_per_microbatch=2)  # five rows of one group each
    assert batch.tokens.shape == (3, 2, 4)
    assert not batch.segment_ids[2, 1].any()
    assert (report.rows, report.microbatches, report.capacity_tokens) == (5, 3, 24)
    (rounded,), _ = _pack(groups, row_tokens=4, rows_per_microbatch=2, round_microbatches=True)
    assert len(rounded.tokens) == 4
    np.testing.assert_array_equal(rounded.tokens[:3], batch.tokens)
    np.testing.assert_array_equal(rounded.trajectory_ids[3], -1)


@pytest.mark.parametrize('mode', ['shared_prompt', 'ordinary'])
def test_nothing_to_train_is_no_batch(mode):
    assert _pack([], mode=mode)[0] == []
    untrained = TrajectoryGroup(0, (trajectory([1], [segment([2], NOT_GENERATED)]),))
    batches, report = _pack([untrained], mode=mode)
    assert batches == []
    assert set(report.metrics().values()) == {0.0}


def test_tokens_over_age_leave_the_loss_and_stay_in_the_denominator():
    mixed = TrajectoryGroup(0, (trajectory([1], [segment([2, 3], 4), segment([5], 6)]),))
    (batch,), _ = _pack([mixed], oldest_version=6, row_loss_tokens=4)
    np.testing.assert_array_equal(batch.loss_mask[0, 0], [False, False, True, False])
    assert denominator_weights(batch, 'token_mean')[1] == 3
    assert _pack([mixed], oldest_version=7)[0] == []


def test_denominators_of_both_aggregations():
    # sequences of 1 and 3 tokens with losses [[2], [1, 1, 1]]: token mean 5/4, sequence mean (2 + 1)/2
    (batch,), _ = _pack([group([1], [[2], [3, 4, 5]])], row_loss_tokens=6)
    losses = np.array([2, 1, 1, 1, 99, 99], np.float32)
    for aggregation, expected in (('token_mean', 1.25), ('sequence_mean', 1.5)):
        weights, denominator = denominator_weights(batch, aggregation)
        np.testing.assert_allclose((losses * weights[0, 0]).sum() / denominator, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"loss.aggregation='sum' is unknown"):
        denominator_weights(batch, 'sum')


def test_padding_has_no_denominator():
    assert denominator_weights(empty_batch(1, 1, 4, 4), 'token_mean')[1] == 0
    assert denominator_weights(empty_batch(1, 1, 4, 4), 'sequence_mean')[1] == 0


@pytest.mark.parametrize(
    ('row_tokens', 'row_loss_tokens', 'message'),
    [
        (4, 9, r'draw 7, sample 1: 6 tokens of trajectory need 5 places of a row, but learner.row_tokens=4; raise'),
        (9, 3, r'draw 7, sample 1: .* need 4 places of a row, but learner.row_loss_tokens=3; raise .* to at least 4'),
    ],
)
def test_trajectory_longer_than_a_row_is_named(row_tokens, row_loss_tokens, message):
    groups = [group([1, 2], [[3], [3, 4, 5, 6]], draw=7)]
    with pytest.raises(ValueError, match=message):
        _pack(groups, row_tokens=row_tokens, row_loss_tokens=row_loss_tokens)


def test_minibatches_are_balanced_and_do_not_depend_on_rows():
    # 9 7 4 3 1 over two: 9 | 7, 4 to the second (11), 3 to the first (12), 1 to the second (12)
    assert split_minibatches([1, 9, 4, 7, 3], 2) == [[1, 4], [0, 2, 3]]
    assert split_minibatches([5, 0, 5], 4) == [[0], [2]]  # never empty, the group without loss tokens left out
    groups = random_groups(0, 7)
    wide, _ = _pack(groups, n_minibatches=3, row_tokens=64, row_loss_tokens=40)
    narrow, _ = _pack(groups, n_minibatches=3, mode='ordinary')
    assert len(wide) == 3
    for a, b in zip(wide, narrow, strict=True):
        assert set(a.trajectory_ids.ravel()) - {-1} == set(b.trajectory_ids.ravel()) - {-1}


def _read_back(batch: PackedBatch) -> dict[int, list[tuple]]:
    """Per trajectory, for each loss token: everything it can see, its own fields; by a plain loop."""
    found: dict[int, list[tuple]] = {}
    for m, r, n in zip(*np.nonzero(batch.trajectory_ids >= 0), strict=True):
        row = batch.microbatch(m).microbatch(r)
        q = row.sources[n]
        sees = np.isin(row.segment_ids, [row.segment_ids[q], row.parent_ids[q]]) & (np.arange(len(row.tokens)) <= q)
        np.testing.assert_array_equal(row.positions[sees], np.arange(sees.sum()))
        fields = (row.targets[n], row.behavior_logprobs[n], row.policy_versions[n], row.advantages[n])
        found.setdefault(int(row.trajectory_ids[n]), []).append((tuple(row.tokens[sees]), *fields))
    return found


@given(
    seed=st.integers(0, 50),
    mode=st.sampled_from(['shared_prompt', 'ordinary']),
    rows_per_microbatch=st.integers(1, 3),
    n_minibatches=st.integers(1, 3),
)
@settings(max_examples=30, deadline=None)
def test_every_loss_token_sees_its_own_trajectory_and_nothing_else(seed, mode, rows_per_microbatch, n_minibatches):
    groups = random_groups(seed, 4)
    batches, report = _pack(groups, mode=mode, rows_per_microbatch=rows_per_microbatch, n_minibatches=n_minibatches)
    found = {}
    for batch in batches:
        found |= _read_back(batch)
    trajectories = [(10 * g + i, t) for g, members in enumerate(groups) for i, t in enumerate(members.trajectories)]
    assert sorted(found) == list(range(len(trajectories)))
    for index, (advantage, t) in enumerate(trajectories):
        expected = [
            (tuple(t.tokens[:p]), t.tokens[p], t.behavior_logprobs[p], t.policy_versions[p], advantage)
            for p in np.flatnonzero(t.loss_mask)
        ]
        assert found[index] == expected
    assert report.loss_tokens == sum(int(t.loss_mask.sum()) for _, t in trajectories)


@pytest.mark.parametrize('mode', ['shared_prompt', 'ordinary'])
def test_count_is_what_packing_reads_where_no_group_is_split(mode):
    groups = [group([1, 2, 3], [[4, 5], [6], [7, 8, 9]], draw=i) for i in range(3)]
    _, report = _pack(groups, mode=mode, row_tokens=64)
    assert count_tokens(groups, mode) == report.tokens
    assert count_tokens([], mode) == 0


def test_microbatch_views_have_no_leading_axis():
    batch = empty_batch(2, 3, 5, 4)
    assert {getattr(batch.microbatch(0), f.name).shape[0] for f in dataclasses.fields(batch)} == {3}


def test_unknown_mode_is_named():
    with pytest.raises(ValueError, match=r"learner.packing='padded' is unknown; use one of shared_prompt, ordinary"):
        _pack([], mode='padded')
