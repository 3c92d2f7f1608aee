"""What an update tells of single tokens: log-probs of the weights that took the gradient, and terms of the loss."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.learning.learner import SpmdLearner
from areal_jax.sharding.rules import make_mesh
from tests.learning.examples import group, learner_settings, make_optimizer, random_groups, tiny_decoder


def make_learner(**settings) -> SpmdLearner:
    decoder = tiny_decoder(n_layers=1)
    return SpmdLearner(
        decoder, decoder.init(seed=2, scale=2.0), make_mesh(), optimizer=make_optimizer('sgd', clip_norm=0),
        learning_rate=0.5, settings=learner_settings(row_tokens=40, row_loss_tokens=24, **settings),
    )  # fmt: skip


def test_tokens_of_an_update_are_those_of_its_weights_and_of_its_loss():
    groups = random_groups(5, 5)  # versions 0 to 2
    groups.append(group([1], [[2, 3], [4]], [1.0, 1.0], draw=99, version=4))  # equal rewards: filtered
    learner = make_learner(n_minibatches=1, behavior_weight_cap=2.0)
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
        for trajectory, of in zip(one.trajectories, arrays, strict=True):
            mask = trajectory.loss_mask
            behavior = trajectory.behavior_logprobs[mask]
            expected = scored[one.draw, trajectory.sample][mask[len(trajectory.prompt.tokens) :]]
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
    learner = make_learner(n_minibatches=2, epochs=2)
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
    learner = make_learner(max_token_age=2, over_age='mask')
    learner.update(groups, version=4)
    for one, arrays in zip(groups, learner.read_tokens([g.draw for g in groups]), strict=True):
        for trajectory, of in zip(one.trajectories, arrays, strict=True):
            if of:  # a minibatch of masked tokens alone is not packed
                versions = trajectory.policy_versions[trajectory.loss_mask]
                np.testing.assert_array_equal(of['loss_mask'], versions >= 2)
                assert (of['policy_logprobs'] < 0).all()
                assert (of['weight'][versions < 2] == 0).all()


def test_tokens_are_gone_with_the_publication():
    learner = make_learner()
    learner.update(random_groups(5, 2), version=4)
    learner.publish(5)
    with pytest.raises(AssertionError):
        learner.read_tokens([0])
