from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.learning.objective.counting import token_weights
from areal_jax.learning.packed_rows import (
    BatchError,
    CostCoefficients,
    RowShape,
    smaller_rows,
    tail_bucket,
    tail_buckets,
    trim,
)
from areal_jax.learning.packing import (
    FILLS,
    count_tokens,
    empty_batch,
    next_token_form,
    pack,
    split_minibatches,
)
from areal_jax.types import NOT_GENERATED, PackedBatch, TrajectoryGroup
from tests.learning.examples import fork_rows, group, random_groups, segment, trajectory

_WAYS = [(m, f) for m in ('shared_prompt', 'ordinary') for f in FILLS if (m, f) != ('shared_prompt', 'padded')]
_COST = CostCoefficients(per_token=1.0, per_pair=0.5)


def _pack(groups, **settings):
    shape = {'mode': 'shared_prompt', 'fill': 'first_fit', 'row_tokens': 32, 'row_loss_tokens': 16}
    shape |= {'rows_per_microbatch': 1, 'n_minibatches': 1}
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


def test_no_row_has_more_trajectories_than_attention_takes():
    # 7 answers of 3 inputs each fit one row of 32 tokens; at most 3 a row make 3 + 3 + 1
    (whole,), _ = _pack([group([1, 2], [[3, 4]] * 7)], mode='ordinary')
    (cut,), _ = _pack([group([1, 2], [[3, 4]] * 7)], mode='ordinary', row_trajectories=3)
    segments = lambda batch: sorted(batch.segment_ids.max(axis=(1, 2)).tolist())
    assert (segments(whole), segments(cut)) == ([7], [1, 3, 3])
    assert cut.loss_mask.sum() == whole.loss_mask.sum() == 14


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
    assert token_weights(batch, 'token_mean')[1] == 3
    assert _pack([mixed], oldest_version=7)[0] == []


def test_denominators_of_both_aggregations():
    # sequences of 1 and 3 tokens with losses [[2], [1, 1, 1]]: token mean 5/4, sequence mean (2 + 1)/2
    (batch,), _ = _pack([group([1], [[2], [3, 4, 5]])], row_loss_tokens=6)
    losses = np.array([2, 1, 1, 1, 99, 99], np.float32)
    for aggregation, expected in (('token_mean', 1.25), ('sequence_mean', 1.5)):
        weights, denominator = token_weights(batch, aggregation)
        np.testing.assert_allclose((losses * weights[0, 0]).sum() / denominator, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"loss.aggregation='sum' is unknown"):
        token_weights(batch, 'sum')


def test_padding_has_no_denominator():
    assert token_weights(empty_batch(1, 1, 4, 4), 'token_mean')[1] == 0
    assert token_weights(empty_batch(1, 1, 4, 4), 'sequence_mean')[1] == 0


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
    way=st.sampled_from(_WAYS),
    rows_per_shard=st.integers(1, 2),
    data_shards=st.integers(1, 3),
    n_minibatches=st.integers(1, 3),
    forks=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_loss_token_sees_its_own_trajectory_and_nothing_else(
    seed, way, rows_per_shard, data_shards, n_minibatches, forks
):
    groups, (mode, fill) = random_groups(seed, 4), way
    groups = [fork_rows(group, seed) for group in groups] if forks else groups
    rows = {'rows_per_microbatch': rows_per_shard * data_shards, 'data_shards': data_shards}
    buckets = (RowShape(16, 8), RowShape(32, 16))
    batches, report = _pack(
        groups, mode=mode, fill=fill, cost=_COST, n_minibatches=n_minibatches, buckets=buckets, **rows
    )
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
    places = [int((b.trajectory_ids >= 0).sum()) for b in batches]
    assert sum(places) == sum(map(len, found.values()))  # and each stands once
    assert report.loss_tokens == sum(int(t.loss_mask.sum()) for _, t in trajectories)


@pytest.mark.parametrize('mode', ['shared_prompt', 'ordinary'])
def test_count_is_what_packing_reads_where_no_group_is_split(mode):
    groups = [group([1, 2, 3], [[4, 5], [6], [7, 8, 9]], draw=i) for i in range(3)]
    groups.append(fork_rows(groups[0], seed=0))
    _, report = _pack(groups, mode=mode, row_tokens=64)
    assert count_tokens(groups, mode) == report.tokens
    assert count_tokens([], mode) == 0


def test_microbatch_views_have_no_leading_axis():
    batch = empty_batch(2, 3, 5, 4)
    assert {array.shape[0] for array in batch.microbatch(0).fields().values()} == {3}


def test_unknown_mode_is_named():
    with pytest.raises(ValueError, match=r"learner.packing='padded' is unknown; use one of shared_prompt, ordinary"):
        _pack([], mode='padded')


def test_unknown_fill_is_named():
    with pytest.raises(ValueError, match=r"learner.fill='best' is unknown; use one of first_fit, algorithm_1, padded"):
        _pack([], fill='best')
    with pytest.raises(ValueError, match=r"learner.fill='padded' .* set learner.packing='ordinary'"):
        _pack([], fill='padded')


def _reading(*lengths: int) -> list[TrajectoryGroup]:
    """Groups of one trajectory, each in need of so many places: a prompt of 1, and the last token is not read."""
    return [group([1], [range(2, 2 + n)], draw=i) for i, n in enumerate(lengths)]


def _rows_of(batch: PackedBatch) -> list[list[int]]:
    """Trajectories of each row, in the order in which they stand; [] = an empty row."""
    rows = batch.trajectory_ids.reshape(-1, batch.trajectory_ids.shape[-1])
    return [list(dict.fromkeys(int(i) for i in row if i >= 0)) for row in rows]


def test_fills_by_hand():
    # rows of 13 places: lengths 6 6 5 1 are 6 6 1 | 5 by first fit, 6 6 | 5 1 by Algorithm 1, one each when padded
    shape = {'mode': 'ordinary', 'row_tokens': 13, 'row_loss_tokens': 13}
    (batch,), _ = _pack(_reading(6, 6, 5, 1), **shape)
    assert _rows_of(batch) == [[0, 1, 3], [2]]
    (batch,), _ = _pack(_reading(6, 6, 5, 1), fill='algorithm_1', **shape)
    assert _rows_of(batch) == [[0, 1], [2, 3]]
    (batch,), report = _pack(_reading(5, 6, 1, 6), fill='padded', rows_per_microbatch=2, **shape)
    assert _rows_of(batch) == [[0], [1], [2], [3]]  # in the order given
    assert (report.rows, report.tokens, report.capacity_tokens) == (4, 18, 52)


def test_rows_are_shared_out_by_tokens_and_pairs():
    # one trajectory to a row, two shards of two rows; n (n + 1) / 2 pairs at 1/2: 12 + 39, 9 + 22.5, 8 + 18, 7 + 14
    shape = {'mode': 'ordinary', 'row_tokens': 12, 'row_loss_tokens': 12, 'rows_per_microbatch': 4, 'data_shards': 2}
    (batch,), report = _pack(_reading(7, 12, 8, 9), cost=_COST, **shape)
    assert _rows_of(batch) == [[1], [0], [3], [2]]  # 51 | 31.5, 26 to the second, 21 to the first: 72 and 57.5
    assert (report.mean_shard_cost, report.max_shard_cost) == (64.75, 72)
    assert report.metrics()['train/shard_balance'] == 64.75 / 72


def test_shared_prompts_are_counted_once_in_pairs():
    groups = random_groups(3, 5)
    for mode in ('shared_prompt', 'ordinary'):
        batches, report = _pack(groups, mode=mode, cost=CostCoefficients(per_token=0.0, per_pair=1.0))
        visible = 0
        for row in (b.microbatch(m).microbatch(0) for b in batches for m in range(len(b.tokens))):
            q, k = row.segment_ids[:, None], row.segment_ids[None]
            visible += np.tril((q > 0) & ((q == k) | (row.parent_ids[:, None] == k))).sum()
        assert report.mean_shard_cost == visible


def test_three_trajectories_over_eight_shards():
    shape = {'mode': 'ordinary', 'row_tokens': 6, 'row_loss_tokens': 6, 'rows_per_microbatch': 8, 'data_shards': 8}
    (batch,), report = _pack(_reading(6, 5, 4), **shape)
    assert _rows_of(batch) == [[0], [1], [2], [], [], [], [], []]
    assert not batch.loss_mask[0, 3:].any()
    assert (report.rows, report.microbatches, report.metrics()['train/shard_balance']) == (3, 1, 15 / 8 / 6)
    with pytest.raises(ValueError, match=r'rows_per_microbatch=6 must be a multiple of the 4 data shards'):
        _pack(_reading(6), mode='ordinary', rows_per_microbatch=6, data_shards=4)


def test_smaller_rows_have_their_share_of_loss_tokens():
    assert smaller_rows(RowShape(336, 256), (168, 240)) == ((168, 128), (240, 184))
    assert smaller_rows(RowShape(100, 100), (97,)) == ((97, 100),)
    assert smaller_rows(RowShape(336, 256), ()) == ()


def test_tail_buckets_are_halves_and_never_tiny():
    assert tail_buckets(16_384, 8192, 3) == ((4096, 2048), (8192, 4096), (16_384, 8192))
    assert tail_buckets(1000, 100, 2) == ((512, 64), (1000, 100))  # multiples of 64 that hold a half
    assert tail_buckets(512, 512, 4) == ((256, 256), (512, 512))
    assert tail_buckets(300, 100, 3) == ((300, 100),)
    assert tail_buckets(512, 64, 3) == ((256, 64), (512, 64))
    assert tail_buckets(16_384, 8192, 1) == ((16_384, 8192),)


def test_light_rows_end_up_in_the_last_microbatch_and_are_cut():
    # rows of 12, two to a micro-batch: 12, 12 | 11 1, 10 | 4 alone, cut to half the places
    shape = {'mode': 'ordinary', 'row_tokens': 12, 'row_loss_tokens': 12, 'rows_per_microbatch': 2}
    (batch,), whole = _pack(_reading(4, 11, 1, 12, 10, 12), **shape)
    assert _rows_of(batch) == [[3], [5], [1, 2], [4], [0], []]
    buckets = (RowShape(6, 6), RowShape(12, 12))
    fields = batch.fields()
    microbatches = [{name: x[m] for name, x in fields.items()} for m in range(3)]
    assert [tail_bucket(m, buckets) for m in microbatches] == [(12, 12), (12, 12), (6, 6)]
    _, trimmed = _pack(_reading(4, 11, 1, 12, 10, 12), buckets=buckets, **shape)
    assert (whole.capacity_tokens, trimmed.capacity_tokens, trimmed.capacity_loss_tokens) == (72, 60, 60)


def test_a_few_full_rows_are_spread_over_a_short_last_microbatch():
    # rows of 12, four to a micro-batch: 12 12 12 11 and 6 6 beyond, which two rows of 6 hold
    shape = {'mode': 'ordinary', 'row_tokens': 12, 'row_loss_tokens': 12, 'rows_per_microbatch': 4}
    buckets = (RowShape(6, 6), RowShape(12, 12))
    groups = _reading(12, 6, 12, 11, 6, 12)
    (batch,), report = _pack(groups, **shape)
    assert _rows_of(batch) == [[0], [2], [5], [1, 4], [3], [], [], []]
    (batch,), spread = _pack(groups, buckets=buckets, **shape)
    assert _rows_of(batch) == [[0], [2], [5], [3], [1], [4], [], []]
    assert (report.capacity_tokens, spread.capacity_tokens) == (96, 4 * 12 + 4 * 6)


def test_rows_that_are_micro_batches_are_filled_for_the_fewest_places():
    # 4 4 3 | 3 in rows of 12 are cut to 12 and 7; two rows of 7 hold 4 3 each
    shape = {'mode': 'ordinary', 'row_tokens': 12, 'row_loss_tokens': 12}
    buckets = (RowShape(7, 7), RowShape(12, 12))
    groups = _reading(4, 4, 3, 3)
    (batch,), _ = _pack(groups, **shape)
    assert _rows_of(batch) == [[0, 1, 2], [3]]
    (batch,), fitted = _pack(groups, buckets=buckets, **shape)
    assert _rows_of(batch) == [[0, 2], [1, 3]]
    assert fitted.capacity_tokens == 14
    # rows of one shape stay as first fit has them, though 6 2 2 | 5 3 2 would be one fewer
    shape = {'mode': 'ordinary', 'row_tokens': 10, 'row_loss_tokens': 10}
    (batch,), _ = _pack(_reading(6, 5, 3, 2, 2, 2), buckets=[RowShape(10, 10)], **shape)
    assert _rows_of(batch) == [[0, 2], [1, 3, 4], [5]]


def test_what_is_trimmed_is_padding():
    (batch,), _ = _pack([group([1, 2], [[3, 4], [5], [6, 7, 8]])])
    fields = batch.fields() | {'extra': batch.advantages}
    column = np.arange(12).reshape(1, 1, 6, 2)
    shape = tail_buckets(5, 6, 1)[0]
    trimmed = trim(fields, shape)
    assert {name: x.shape for name, x in trimmed.items()} == {
        name: (1, 1, 5 if name in ('tokens', 'positions', 'segment_ids', 'parent_ids') else 6) for name in fields
    }
    cut = trim(fields | {'column': np.pad(column, ((0, 0), (0, 0), (0, 3), (0, 0)))}, shape)['column']
    np.testing.assert_array_equal(cut, column)  # the place of a token, not its entry
    same = PackedBatch(**{name: x for name, x in trimmed.items() if name != 'extra'})
    assert _read_back(same) == _read_back(batch)
    for short in ((4, 6), (5, 5)):
        with pytest.raises(ValueError, match=r'holds a row of 5 tokens and 6 loss tokens'):
            trim(fields, tail_buckets(*short, 1)[0])


def test_empty_rows_fit_the_smallest_bucket():
    batch = empty_batch(2, 3, 1024, 512)
    fields = batch.fields()
    assert tail_bucket(fields, tail_buckets(1024, 512, 3)) == (256, 128)


def test_a_group_without_loss_tokens_changes_nothing():
    untrained = TrajectoryGroup(5, (trajectory([1, 2, 3], [segment([2], NOT_GENERATED)], draw=5),))
    alone, _ = _pack([group([1], [[2, 3], [4]])])
    beside, _ = _pack([group([1], [[2, 3], [4]]), untrained])
    for name, array in alone[0].fields().items():
        np.testing.assert_array_equal(array, beside[0].fields()[name])


def test_advantages_of_zero_are_packed_like_any_other():
    (batch,), report = pack(
        [group([1], [[2, 3], [4]])], [np.zeros(2)], mode='ordinary', fill='first_fit', row_tokens=8, row_loss_tokens=8,
        rows_per_microbatch=1, n_minibatches=1,
    )  # fmt: skip
    assert token_weights(batch, 'token_mean')[1] == 3
    assert not batch.advantages.any()
    assert all(np.isfinite(v) for v in report.metrics().values())


def test_an_advantage_that_is_not_finite_is_named():
    groups = [group([1], [[2], [3]], draw=4)]
    with pytest.raises(ValueError, match=r'draw 4, sample 1: advantage is nan, .* rewards must be finite'):
        pack(
            groups, [np.array([0, np.nan])], mode='ordinary', fill='first_fit', row_tokens=8, row_loss_tokens=8,
            rows_per_microbatch=1, n_minibatches=1,
        )  # fmt: skip


@pytest.mark.parametrize(
    ('wrong', 'sentence'),
    [
        (segment([11], 0), 'draw 0, sample 1: token 11 lies outside the vocabulary of 11'),
        (segment([3, -1], NOT_GENERATED), 'token -1 lies outside the vocabulary'),  # read, not only predicted
        (segment([3], 0, [-np.inf]), 'sample 1: a behavior log-prob is -inf; the engine must report finite ones'),
        (segment([3], 0, [np.nan]), 'a behavior log-prob is nan'),
        (segment([3], 0, [0.5]), 'a behavior log-prob is 0.5'),
        (segment([3, 4], 0, [-0.5]), '4 behavior log-probs for 5 tokens'),
    ],
)
def test_what_no_kernel_would_notice_is_refused(wrong, sentence):
    # without the check another row of the embedding is read, or one token weighs e^20 times the others
    sound = segment([3], 0, [1e-7])  # a rounding above 0 is none of the engine's business
    answers = [trajectory([1, 2], [segment([10], 0), sound]), trajectory([1, 2], [sound, wrong], sample=1)]
    _pack([TrajectoryGroup(0, (answers[0],))], vocab_size=11)
    with pytest.raises(BatchError, match=re.escape(sentence)):
        _pack([TrajectoryGroup(0, tuple(answers))], vocab_size=11)


def test_rows_of_a_group_share_only_the_prompt_that_they_begin_with():
    rows = [trajectory(p, [segment([3, 4], 0)], sample=i) for i, p in enumerate(([1, 2], [1, 5], [1, 2], [1, 5]))]
    group = TrajectoryGroup(0, tuple(rows))
    (batch,), report = _pack([group], mode='shared_prompt', row_tokens=16)
    assert batch.tokens[0, 0].tolist()[:8] == [1, 2, 3, 3, 1, 5, 3, 3]
    assert report.tokens == count_tokens([group], 'shared_prompt') == 8


def test_a_group_without_trajectories_counts_nothing():
    assert count_tokens([TrajectoryGroup(0, ())], 'shared_prompt') == 0


def test_a_prompt_that_fills_its_row_leaves_room_for_answers_of_one_token():
    (batch,), _ = _pack([group([1, 2, 3, 4], [[5], [6]])], row_tokens=4, row_loss_tokens=1)
    assert _rows_of(batch) == [[0], [1]]


@given(seed=st.integers(0, 50), mode=st.sampled_from(['shared_prompt', 'ordinary']))
@settings(max_examples=20, deadline=None)
def test_what_is_trained_does_not_depend_on_how_rows_are_filled(seed, mode):
    groups = random_groups(seed, 5)
    found = []
    for fill in (f for m, f in _WAYS if m == mode):
        batches, _ = _pack(groups, mode=mode, fill=fill, n_minibatches=2, rows_per_microbatch=2, data_shards=2)
        found.append([_read_back(batch) for batch in batches])
    assert all(other == found[0] for other in found[1:])


@pytest.mark.parametrize(('mode', 'fill'), _WAYS)
def test_a_group_that_is_kept_together_lies_in_one_row(mode, fill):
    groups = random_groups(3, 9, group_size=2)
    (batch,), _ = _pack(
        groups, mode=mode, fill=fill, row_tokens=48, row_loss_tokens=40, rows_per_microbatch=2, keeps_groups=True
    )
    places = {}
    for m, r in np.ndindex(batch.loss_mask.shape[:2]):
        ids = batch.trajectory_ids[m, r][batch.loss_mask[m, r]]
        for trajectory_id in dict.fromkeys(ids.tolist()):
            places.setdefault(trajectory_id // 2, []).append((m, r))
    assert len(places) == 9
    assert all(len(rows) == 2 and rows[0] == rows[1] for rows in places.values())
    assert batch.loss_mask.sum() == sum(t.loss_mask.sum() for g in groups for t in g.trajectories)


def test_a_group_that_fits_no_row_is_refused_with_the_field():
    # 2 prompts of 3 and 2 answers of 4, the last token of each never read: 12 places
    with pytest.raises(BatchError, match=r'2 answers .* need 12 places of it, but learner\.row_tokens=11: raise'):
        _pack([group([1, 2, 3], [[4] * 4] * 2)], mode='ordinary', row_tokens=11, keeps_groups=True)
    _pack([group([1, 2, 3], [[4] * 4] * 2)], mode='shared_prompt', row_tokens=11, keeps_groups=True)


def test_attention_with_few_segments_gets_whole_groups():
    (batch,), _ = _pack([group([1], [[2, 3]] * 2)] * 4, mode='ordinary', row_trajectories=3, keeps_groups=True)
    assert sorted(batch.segment_ids.max(axis=(1, 2)).tolist()) == [2, 2, 2, 2]
