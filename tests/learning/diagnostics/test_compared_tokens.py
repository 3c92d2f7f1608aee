"""What the steps made of tokens: by age, against a direct count, and of the answers that a run keeps."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.learning.diagnostics.compared_tokens import metrics_by_age
from areal_jax.learning.diagnostics.measurement import fate_metrics, inside_metrics
from areal_jax.learning.packing import pack
from areal_jax.learning.passes import KnownTokens, StepResult
from areal_jax.telemetry import names
from tests.learning.examples import (
    group,
    learner_settings,
    make_learner,
    random_groups,
    segment,
    trajectory,
)

_FATES = (names.TRAINED_BY_AGE, names.FILTERED_BY_AGE, names.MASKED_BY_AGE, names.UNUSED_BY_AGE)


@pytest.mark.parametrize(
    'proximal',
    ['recompute', pytest.param('loglinear', marks=pytest.mark.slow), pytest.param('behavior', marks=pytest.mark.slow)],
)
def test_the_ranges_of_ages_add_up_to_the_metrics_of_the_loss(proximal):
    settings = {'n_minibatches': 2, 'epochs': 2, 'proximal': proximal, 'behavior_weight_cap': 2.0}
    learner = make_learner(learning_rate=0.5, **settings)
    metrics = learner.update(random_groups(5, 5), version=4)  # ages 2, 3, 4
    rows = {
        age: {key: metrics[f'by_age/{age}/{key}'] for key in ('tokens', 'clip_fraction', 'kl')} for age in ('2', '3-4')
    }
    assert {name.split('/')[1] for name in metrics if name.startswith('by_age/')} == set(rows)
    tokens = sum(row['tokens'] for row in rows.values())
    assert tokens == 2 * metrics['update/trained_tokens']  # both epochs
    for name, whole in (('clip_fraction', 'loss/clip_fraction'), ('kl', 'loss/approx_kl')):
        mean = sum(row['tokens'] * row[name] for row in rows.values()) / tokens
        np.testing.assert_allclose(mean, metrics[whole], rtol=2e-5, err_msg=name)
    assert metrics['loss/clip_fraction'] > 0.01
    assert metrics[names.STEPS_INSIDE_MAX] == 3  # four steps: 0, 1, 2, 3 before a token's own
    assert 1 < metrics[names.STEPS_INSIDE_MEAN] < 2


def test_an_effective_sample_size_by_hand():
    # weights e^0 and e^1 of age 0, e^-1 of age 1: (1 + e)² / (2 (1 + e²)), and 1
    one = group([1], [[2, 3], [4]], version=7)
    (batch,), _ = pack(
        [one], [np.ones(2, np.float32)], mode='ordinary', fill='first_fit', row_tokens=8, row_loss_tokens=8,
        rows_per_microbatch=1, n_minibatches=1,
    )  # fmt: skip
    places = np.argwhere(batch.loss_mask)
    batch.policy_versions[tuple(places[2])] = 6
    logprobs = batch.behavior_logprobs.copy()
    for place, more in zip(places, (0.0, 1.0, -1.0), strict=True):
        logprobs[tuple(place)] += more
    result = StepResult({'skip_count': np.float32(0)}, [], logprobs)
    found = metrics_by_age(learner_settings(), [batch], [result], [KnownTokens()], 7)
    e = np.e
    assert found['by_age/0/tokens'] == 2
    np.testing.assert_allclose(found['by_age/0/effective_sample_size'], (1 + e) ** 2 / (2 * (1 + e**2)), rtol=1e-6)
    np.testing.assert_allclose(found['by_age/1/effective_sample_size'], 1.0)
    capped = metrics_by_age(learner_settings(behavior_weight_cap=2.0), [batch], [result], [KnownTokens()], 7)
    np.testing.assert_allclose(capped['by_age/0/effective_sample_size'], (1 + 2) ** 2 / (2 * (1 + 2**2)), rtol=1e-6)
    np.testing.assert_allclose(found['by_age/1/kl'], np.expm1(-1) + 1, rtol=1e-6)
    assert found['by_age/0/clip_fraction'] == 0  # one step: policy and proximal are the same weights


def _packed(groups, oldest=None):
    ones = [np.ones(len(g.trajectories), np.float32) for g in groups]
    return pack(
        groups, ones, mode='ordinary', fill='first_fit', row_tokens=32, row_loss_tokens=32, rows_per_microbatch=1,
        n_minibatches=2, oldest_version=oldest,
    )[0]  # fmt: skip


def test_fates_by_hand():
    # at version 5: draw 0 has 5 tokens of age 0 and 2 of age 3; draw 1 has 4 of age 1; draw 2, filtered, 2 of age 2
    first = group([1], [[2, 3, 4], [5, 6]], draw=0, version=5)
    old = trajectory([1], [segment([7, 8], 2)], draw=0, sample=2)
    first = type(first)(0, (*first.trajectories, old))
    second = group([1], [[2, 3], [4, 5]], draw=1, version=4)
    equal = group([1], [[2], [3]], [1.0, 1.0], draw=2, version=3)
    everything, kept = [first, second, equal], [first, second]
    tell = lambda batches, applied: [fate_metrics(everything, kept, batches, applied, 5)[name] for name in _FATES]
    assert tell(_packed(kept), [True, True]) == [[5, 4, 0, 2], [0, 0, 2], [], []]
    assert tell(_packed(kept, oldest=4), [True, True]) == [[5, 4], [0, 0, 2], [0, 0, 0, 2], []]
    # the second minibatch, the smaller group, was skipped; then nothing is left to train
    assert tell(_packed(kept, oldest=4), [True, False]) == [[5], [0, 0, 2], [0, 0, 0, 2], [0, 4]]
    assert tell(_packed(kept, oldest=6), []) == [[], [0, 0, 2], [5, 4, 0, 2], []]
    assert [fate_metrics([], [], [], [], 5)[name] for name in _FATES] == [[], [], [], []]


def test_steps_inside_an_update():
    first, second = _packed([group([1], [[2, 3], [4, 5]], draw=0), group([1], [[2], [3]], draw=1)])  # 4 and 2 tokens
    found = inside_metrics([first, second], [True] * 4)
    assert found[names.STEPS_INSIDE_MEAN] == (4 * 0 + 2 * 1 + 4 * 2 + 2 * 3) / 12
    assert found[names.STEPS_INSIDE_MAX] == 3
    assert inside_metrics([first, second], [False, True])[names.STEPS_INSIDE_MAX] == 0  # a skipped step changes nothing
    assert inside_metrics([], []) == {}


def test_tokens_of_an_update_are_those_of_its_weights_and_of_its_loss():
    groups = random_groups(5, 5)  # versions 0 to 2
    groups.append(group([1], [[2, 3], [4]], [1.0, 1.0], draw=99, version=4))  # equal rewards: filtered
    learner = make_learner(learning_rate=0.5, n_minibatches=1, behavior_weight_cap=2.0)
    learner.publish(4)
    scored = {
        (g.draw, t.sample): learner.score(4, t.prompt.tokens, t.answer_tokens) for g in groups for t in g.trajectories
    }
    learner.update(groups, version=4)
    draws = [groups[3].draw, 99, groups[0].draw, 1234]
    third, filtered, first, unknown = learner.read_tokens(draws)
    assert filtered == unknown == []
    for one, arrays in ((groups[3], third), (groups[0], first)):
        assert len(arrays) == len(one.trajectories)
        for answer, of in zip(one.trajectories, arrays, strict=True):
            mask = answer.loss_mask
            behavior = answer.behavior_logprobs[mask]
            expected = scored[one.draw, answer.sample][mask[len(answer.prompt.tokens) :]]
            np.testing.assert_allclose(of['policy_logprobs'], expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(of['proximal_logprobs'], of['policy_logprobs'])  # the only step
            np.testing.assert_array_equal(of['ratio'], 1.0)
            weight = np.exp(of['proximal_logprobs'].astype(np.float64) - behavior)
            np.testing.assert_allclose(of['weight'], np.minimum(weight, 2.0), rtol=1e-5)
            assert of['loss_mask'].all()
            assert not of['clip'].any()
            assert not of['closed'].any()
            assert len(set(of['advantages'].tolist())) == 1


def test_a_later_step_has_a_ratio_and_its_clip():
    groups = random_groups(5, 5)
    learner = make_learner(learning_rate=0.5, n_minibatches=2, epochs=2)
    metrics = learner.update(groups, version=4)
    found = learner.read_tokens([g.draw for g in groups])
    ratio, clip, advantage = (
        np.concatenate([t[name] for g in found for t in g]) for name in ('ratio', 'clip', 'advantages')
    )
    assert len(ratio) == metrics['update/trained_tokens']  # each token once, of its last step
    assert abs(ratio - 1).max() > 0.3
    assert (clip == 1).any()
    assert (clip == -1).any()
    np.testing.assert_array_equal(clip == 1, (advantage > 0) & (ratio > 1.2))
    np.testing.assert_array_equal(clip == -1, (advantage < 0) & (ratio < 0.8))


def test_tokens_that_are_too_old_are_masked_and_keep_their_policy():
    groups = random_groups(5, 5)
    learner = make_learner(learning_rate=0.5, max_token_age=2, over_age='mask')
    learner.update(groups, version=4)
    for one, arrays in zip(groups, learner.read_tokens([g.draw for g in groups]), strict=True):
        for answer, of in zip(one.trajectories, arrays, strict=True):
            if of:  # a minibatch of masked tokens alone is not packed
                versions = answer.policy_versions[answer.loss_mask]
                np.testing.assert_array_equal(of['loss_mask'], versions >= 2)
                assert (of['policy_logprobs'] < 0).all()
                assert (of['weight'][versions < 2] == 0).all()


def test_tokens_are_gone_with_the_publication():
    learner = make_learner(learning_rate=0.5)
    learner.update(random_groups(5, 2), version=4)
    learner.publish(5)
    with pytest.raises(AssertionError):
        learner.read_tokens([0])
