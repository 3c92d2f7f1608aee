"""Frictions of arms are those of single runs, and an arm without any does not see those of the others."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from areal_jax.control.frictions import Frictions
from areal_jax.studies.arms.answer_generation import (
    Answers,
    count_faults,
    disturb_answers,
    disturb_right,
    draw_faults,
    take,
)
from tests.studies.arms.small import Compiled, are_equal, make_arm, of_arm
from tests.studies.arms.test_single_run import compare, require_equal

PROMPTS = np.arange(24).reshape(3, 2, 4)  # U, B, P
EVERY = {'friction__reward_share': 0.3, 'friction__unrewarded_share': 0.3, 'learner__filter_equal_rewards': False}
ACTORS = {
    'constant': {'friction__actor_token': 1},
    'logprobs': {'friction__actor_nats': 0.5},
    'temperature': {'friction__actor_temperature': 0.5},
}


def faults_of(update=1, **fields):
    [faults] = draw_faults([Frictions(seed=7, **fields)], [PROMPTS], 5, 3)
    return take(faults, update)


def answers():
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(size=(2, 5, 3)).astype(np.float32)
    return Answers(rng.integers(2, 9, (2, 5, 3)), logprobs)


def test_the_draws_are_those_of_the_groups_of_a_run():
    frictions = Frictions(seed=7, actor='logprobs', actor_share=0.5, reward_share=0.5, unrewarded_share=0.5)
    [faults] = draw_faults([frictions], [PROMPTS], 5, 3)
    for draw in range(6):
        update, group = divmod(draw, 2)
        hit, (redrawn, place) = frictions.hits_actor(draw, 5), frictions.redraws_reward(draw, 5)
        np.testing.assert_array_equal(faults.hit[update, group], hit)
        np.testing.assert_array_equal(faults.redrawn[update, group], redrawn)
        np.testing.assert_array_equal(faults.place[update, group], place.astype(np.float32))
        assert faults.pays[update, group] != frictions.never_pays(PROMPTS[update, group])
        for sample in range(5):
            expected = frictions.noise(draw, sample, 3) if hit[sample] else np.zeros(3)
            np.testing.assert_array_equal(faults.noise[update, group, sample], expected.astype(np.float32))
    assert faults.scale is None
    assert not faults.replaced.any()


def test_a_share_of_1_is_every_answer():
    before = answers()
    constant = disturb_answers(faults_of(actor_share=1.0, actor_token=1), before)
    assert (np.asarray(constant.tokens) == 1).all()
    assert not np.asarray(constant.behavior_logprobs).any()
    noisy = disturb_answers(faults_of(actor='logprobs', actor_share=1.0), before)
    np.testing.assert_array_equal(noisy.tokens, before.tokens)
    assert (np.asarray(noisy.behavior_logprobs) != before.behavior_logprobs).all()
    assert np.asarray(noisy.behavior_logprobs).max() <= 0
    hot = faults_of(actor='temperature', actor_share=1.0, actor_temperature=4.0)
    assert (np.asarray(hot.scale) == 0.25).all()
    right = np.array([[0, 1, 2, 3, 1], [1, 1, 1, 1, 1]])
    redrawn = faults_of(reward_share=1.0)
    np.testing.assert_allclose(disturb_right(redrawn, right), 3 * np.asarray(redrawn.place), rtol=1e-6)
    assert not np.asarray(disturb_right(faults_of(unrewarded_share=1.0), right)).any()


def test_counts_are_of_the_batch():
    right = np.array([[0, 1, 2, 3, 1], [1, 1, 1, 1, 1]])
    faults = faults_of(actor_share=0.5, unrewarded_share=0.5)
    counts = {name: int(value) for name, value in count_faults(faults, right).items()}
    free = ~np.asarray(faults.hit) & np.asarray(faults.pays)[:, None]
    assert counts == {
        'friction_actor': faults.hit.sum(), 'friction_reward': 0,
        'friction_unrewarded': 5 * (~np.asarray(faults.pays)).sum(),
        'friction_policy_right': right[free].sum(), 'friction_policy_count': free.sum(),
    }  # fmt: skip
    assert draw_faults([None, None], [PROMPTS] * 2, 5, 3) is None
    assert count_faults(None, right) == {}


def test_shares_of_0_beside_other_arms_leave_the_weights_as_they_are():
    """Bit for bit whatever the others' shares are; a program without frictions is another one, equal to rounding."""
    plain = make_arm('plain', learner__filter_equal_rewards=False)
    disturbed = make_arm('disturbed', friction__actor_share=1.0, friction__actor_token=1, **EVERY)
    less = make_arm('less', friction__actor_share=0.1, friction__actor_token=1, **EVERY)
    _, alone = Compiled(plain, make_arm('second', run__seed=1)).run()
    (sums, beside), (_, again) = Compiled(plain, disturbed).run(), Compiled(plain, less).run()
    assert are_equal(of_arm(beside.params, 0), of_arm(again.params, 0))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), of_arm(beside.params, 0), of_arm(alone.params, 0)
    )
    assert sums['friction_actor'][0].sum() == sums['friction_reward'][0].sum() == 0
    assert not are_equal(of_arm(beside.params, 1), of_arm(alone.params, 0))


@pytest.mark.slow
@pytest.mark.parametrize('actor', ACTORS)
def test_an_arm_with_frictions_is_the_run_with_them(tmp_path, actor):
    fields = {**EVERY, 'friction__actor': actor, 'friction__actor_share': 0.4, **ACTORS[actor]}
    run, differences, lines = compare(tmp_path, {**fields, 'staleness__schedule': 'fixed(1)'}, steps=3)
    assert differences[1] <= 1e-6
    require_equal(run, lines)
    assert sum(line['friction/actor'] for line in lines) > 0
