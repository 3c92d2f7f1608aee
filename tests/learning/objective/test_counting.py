"""What an update counts: weights and denominators, and the mass that a cut softmax keeps."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.learning.objective.counting import UpdatePrice, denominator_scale, kept_mass_metrics, token_weights
from areal_jax.learning.packing import pack
from areal_jax.types import TrajectoryGroup
from tests.learning.examples import group, make_learner, random_groups, segment, trajectory
from tests.learning.test_learner import PARAMS, make_weights

AGGREGATIONS = ('token_mean', 'sequence_mean', 'sequence_sum', 'constant', 'prompt_mean', 'token_sum')
_KEPT = group([1, 2], [[3], [4, 5, 6]], [0.0, 1.0])
_EQUAL = [group([1, 2], [[3, 4], [5, 6]], [1.0, 1.0], draw=draw) for draw in (1, 2, 3)]  # 4 tokens each


def _change(learner, groups):
    before = learner.save()['params']
    metrics = learner.update(groups, version=2)
    return jax.tree.map(lambda a, b: a - b, learner.save()['params'], before), metrics


def _assert_close(a, b, scale=1.0):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y * scale, rtol=1e-4, atol=1e-5), a, b)
    assert max(jax.tree.leaves(jax.tree.map(lambda x: float(np.abs(x).max()), a))) > 0.1  # far above the tolerance


def test_scale_by_hand():
    # 4 tokens of 4 + 3 * 4; 2 sequences of 8
    groups = [_KEPT, *_EQUAL]
    assert denominator_scale(groups, [_KEPT], 'token_mean') == 4
    assert denominator_scale(groups, [_KEPT], 'sequence_mean') == 4
    assert denominator_scale(groups[:2], [_KEPT], 'token_mean') == 2
    assert denominator_scale(groups, groups, 'token_mean') == 1
    assert denominator_scale(_EQUAL, [], 'token_mean') == 1
    # a tool's tokens are no loss tokens, and a sequence of nothing else is none: 2 of 4 tokens, 1 of 3 sequences more
    tool = trajectory([1], [segment([7, 7], -1)], sample=1)
    mixed = TrajectoryGroup(9, (trajectory([1], [segment([2, 3], 0), segment([7], -1)]), tool))
    assert denominator_scale([_KEPT, mixed], [_KEPT], 'token_mean') == 1.5
    assert denominator_scale([_KEPT, mixed], [_KEPT], 'sequence_mean') == 1.5


@pytest.mark.parametrize('aggregation', ['token_mean', 'sequence_mean'])
def test_groups_left_out_weaken_the_update_only_where_they_are_counted(aggregation):
    # 1 of 4 equally long groups is kept: its mean counts whole, or for a quarter
    settings = {'aggregation': aggregation, 'learning_rate': 10.0}  # the step of a weight is far above its rounding
    groups = [_EQUAL[0], _KEPT, *_EQUAL[1:]]
    kept, kept_metrics = _change(make_learner(**settings), groups)
    whole, metrics = _change(make_learner(**settings, denominator='all'), groups)
    unfiltered, _ = _change(make_learner(**settings, filter_equal_rewards=False), groups)
    _assert_close(kept, whole, scale=4.0)
    _assert_close(whole, unfiltered)
    np.testing.assert_allclose(metrics['loss/value'], kept_metrics['loss/value'] / 4, rtol=1e-5)
    both, _ = _change(make_learner(**settings, filter_equal_rewards=False, denominator='all'), groups)
    jax.tree.map(np.testing.assert_array_equal, both, unfiltered)  # nothing is left out


def test_every_minibatch_is_divided_by_its_share_of_the_groups_left_out():
    # twice as many tokens in all: with SGD and a constant loss surface each step is half as long. Minibatches see
    # weights that moved, so the first order in the rate is compared
    groups = random_groups(5, 4)
    count = lambda g: sum(int(t.loss_mask.sum()) for t in g.trajectories)
    tokens = sum(map(count, groups))
    equal = group([1, 2], [[3] * (tokens // 2), [4] * (tokens - tokens // 2)], [1.0, 1.0], draw=9)
    settings = {'n_minibatches': 2, 'learning_rate': 1e-3, 'row_tokens': 64, 'row_loss_tokens': 64}
    kept, _ = _change(make_learner(**settings), [*groups, equal])
    whole, _ = _change(make_learner(denominator='all', **settings | {'learning_rate': 2e-3}), [*groups, equal])
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3 * np.abs(one).max() + 1e-7)


def test_nothing_kept_changes_nothing():
    learner = make_learner(denominator='all')
    assert learner.update(_EQUAL, version=0)['update/optimizer_steps'] == 0
    jax.tree.map(np.testing.assert_array_equal, learner.save()['params'], jax.device_get(PARAMS))


def test_masked_tokens_stay_in_the_denominator():
    # over age: 1 of the kept 4 tokens leaves the loss; still 4 of 8 tokens
    first, second = _KEPT.trajectories
    old = dataclasses.replace(first, segments=(segment([3], 0),))
    young = dataclasses.replace(second, segments=(segment([4, 5, 6], 2),))
    mixed = TrajectoryGroup(0, (old, young))
    settings = {'max_token_age': 1, 'over_age': 'mask', 'learning_rate': 10.0}
    kept, _ = _change(make_learner(**settings), [mixed, _EQUAL[0]])
    whole, _ = _change(make_learner(denominator='all', **settings), [mixed, _EQUAL[0]])
    _assert_close(kept, whole, scale=2.0)


def _cut(groups, *, gone: bool):
    """Every third answer ended at its limit; or is not there."""
    found = []
    for g in groups:
        rows = [dataclasses.replace(t, finish_reason='stop' if t.sample % 3 else 'length') for t in g.trajectories]
        found.append(dataclasses.replace(g, trajectories=tuple(t for t in rows if not gone or t.sample % 3)))
    return found


@pytest.mark.parametrize('aggregation', AGGREGATIONS)
@pytest.mark.parametrize('mode', ['ordinary', 'shared_prompt'])
def test_masked_answers_at_their_limit_weigh_as_much_as_answers_that_are_not_there(aggregation, mode):
    def weighed(groups, **masks):
        shapes = {'row_tokens': 64, 'row_loss_tokens': 48, 'rows_per_microbatch': 2, 'n_minibatches': 1}
        ones = [np.ones(len(g.trajectories), np.float32) for g in groups]
        ((batch,), _) = pack(groups, ones, mode=mode, fill='first_fit', **shapes, **masks)
        prompts = np.repeat(np.arange(len(groups)), [len(g.trajectories) for g in groups])
        weights, denominator = token_weights(batch, aggregation, 3, prompts)
        mask = batch.loss_mask
        found = zip(batch.targets[mask], batch.behavior_logprobs[mask], weights[mask] / denominator, strict=True)
        return sorted((int(t), float(b), float(w)) for t, b, w in found)

    groups = random_groups(3, 5)
    masked = weighed(_cut(groups, gone=False), masks_truncated=True)
    assert masked == weighed(_cut(groups, gone=True))
    assert masked != weighed(_cut(groups, gone=False))


def test_masked_answers_are_not_read_and_count_in_no_denominator():
    groups = random_groups(3, 5)
    cut, gone = _cut(groups, gone=False), _cut(groups, gone=True)
    for packing in ('ordinary', 'shared_prompt'):
        masking, plain = (UpdatePrice(packing, 2, False, masks) for masks in (True, False))
        assert masking.tokens(cut) == plain.tokens(gone) < plain.tokens(cut)
    read = UpdatePrice('ordinary', 1, False, True).read
    only_cut = dataclasses.replace(cut[0], trajectories=cut[0].trajectories[:1])
    assert read([only_cut]) == []
    for aggregation in AGGREGATIONS:
        assert denominator_scale(read(cut), read(cut[:2]), aggregation) == denominator_scale(
            gone, gone[:2], aggregation
        )


def _cut_segment(tokens, version, mass):
    """A segment whose tokens were drawn from the part of the softmax with these masses."""
    whole = segment(tokens, version)
    cut = whole.behavior_logprobs - np.log(mass).astype(np.float32)
    return dataclasses.replace(whole, columns={'sampling_logprobs': cut})


_MIXED = TrajectoryGroup(
    0,
    (
        trajectory([1], [_cut_segment([2, 3], 4, [0.9, 0.8]), segment([5], -1)], reward=0.0),
        trajectory([1], [_cut_segment([4], 2, [0.3]), _cut_segment([4], 5, [0.7])], reward=1.0, sample=1),
    ),
)


def test_kept_mass_by_hand():
    metrics = kept_mass_metrics([_MIXED], None)
    np.testing.assert_allclose(metrics['sampling/kept_mass_mean'], (0.9 + 0.8 + 0.3 + 0.7) / 4, rtol=1e-6)
    np.testing.assert_allclose(metrics['sampling/kept_mass_min'], 0.3, rtol=1e-6)
    young = kept_mass_metrics([_MIXED], 3)  # the token with .3 is of version 2: not trained
    np.testing.assert_allclose(young['sampling/kept_mass_mean'], (0.9 + 0.8 + 0.7) / 3, rtol=1e-6)
    assert kept_mass_metrics([group([1], [[2], [3]])], None) == {}
    assert kept_mass_metrics([], None) == {}
    assert kept_mass_metrics([_MIXED], 9) == {}  # nothing is trained


def test_a_cut_is_refused_by_default_and_changes_nothing():
    learner = make_learner()
    before = make_weights(learner)
    expected = r"loss\.truncated_sampling='refuse', but engine/0 drew draw 0, sample 0 .* rollout\.top_k=0"
    with pytest.raises(ConfigError, match=expected):
        learner.update([_MIXED], version=5)
    np.testing.assert_array_equal(make_weights(learner)['embedding'], before['embedding'])


def test_the_full_softmax_is_what_is_trained_and_compared():
    # the same behavior log-probs with and without a cut beside them: the same update, bit for bit
    whole = dataclasses.replace(
        _MIXED,
        trajectories=tuple(
            dataclasses.replace(t, segments=tuple(dataclasses.replace(s, columns={}) for s in t.segments))
            for t in _MIXED.trajectories
        ),
    )
    one, other = make_learner(truncated_sampling='full_softmax'), make_learner()
    metrics, expected = one.update([_MIXED], version=5), other.update([whole], version=5)
    np.testing.assert_allclose(metrics['sampling/kept_mass_mean'], 0.675, rtol=1e-6)
    kept = {'sampling/kept_mass_mean', 'sampling/kept_mass_min'}
    assert {name: value for name, value in metrics.items() if name not in kept} == expected
    np.testing.assert_array_equal(make_weights(one)['embedding'], make_weights(other)['embedding'])
