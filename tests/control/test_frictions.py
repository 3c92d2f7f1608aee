"""Frictions as pure functions: what they depend on, how often they come, and what each does to an answer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from areal_jax.columns import SAMPLING_LOGPROBS
from areal_jax.control.frictions import Frictions, disturb_answer, disturb_rewards, undisturbed_rewards
from areal_jax.types import NOT_GENERATED, Prompt, Segment, Trajectory, TrajectoryGroup

BOTH = Frictions(seed=3, actor_share=0.25, reward_share=0.4)


def prompt(draw: int, *tokens: int) -> Prompt:
    return Prompt(draw, np.array(tokens or (draw,), np.int32), '', {})


def group(draw: int, rewards, *tokens: int) -> TrajectoryGroup:
    of = prompt(draw, *tokens)
    segment = Segment(np.array([1, 2], np.int32), np.array([-0.5, -1.0], np.float32), 0)
    made = [Trajectory(of, i, (segment,), r, 'length', 'engine/0', 0.0, 0.0) for i, r in enumerate(rewards)]
    return TrajectoryGroup(draw, tuple(made))


def answer() -> list[Segment]:
    drawn = {SAMPLING_LOGPROBS.name: np.array([-0.1, -0.2, -0.3], np.float32)}
    return [
        Segment(np.array([5, 6, 7], np.int32), np.array([-1.0, -2.0, -0.01], np.float32), 4, drawn),
        Segment(np.array([9], np.int32), np.zeros(1, np.float32), NOT_GENERATED),
        Segment(np.array([8], np.int32), np.array([-3.0], np.float32), 5),
    ]


def test_an_answer_of_a_group_of_any_size_has_the_same_draws():
    for draw in (0, 1, 2**31):
        hits, (redrawn, places) = BOTH.hits_actor(draw, 9), BOTH.redraws_reward(draw, 9)
        for sample in range(9):
            assert BOTH.is_hit(draw, sample) == hits[sample]
            fewer, where = BOTH.redraws_reward(draw, sample + 1)
            assert (fewer[sample], where[sample]) == (redrawn[sample], places[sample])
    other = dataclasses.replace(BOTH, seed=4)
    assert any((BOTH.hits_actor(draw, 9) != other.hits_actor(draw, 9)).any() for draw in range(9))


def test_shares_are_shares_and_frictions_are_independent():
    actor = np.concatenate([BOTH.hits_actor(draw, 10) for draw in range(2000)])
    reward, places = (np.concatenate(x) for x in zip(*[BOTH.redraws_reward(d, 10) for d in range(2000)], strict=True))
    error = 4 * 0.5 / 20000**0.5
    assert abs(actor.mean() - 0.25) < error
    assert abs(reward.mean() - 0.4) < error
    assert abs((actor & reward).mean() - 0.1) < error
    assert abs(places.mean() - 0.5) < error
    assert abs(places.var() - 1 / 12) < error
    noise = np.concatenate(
        [dataclasses.replace(BOTH, actor_nats=2.0).noise(d, s, 5) for d in range(400) for s in (0, 9)]
    )
    assert abs(noise.mean()) < 4 * 2 / 4000**0.5
    assert noise.std() == pytest.approx(2.0, rel=0.1)
    pays_not = [Frictions(seed=1, unrewarded_share=0.3).never_pays(np.array([7, d])) for d in range(20000)]
    assert abs(np.mean(pays_not) - 0.3) < error


def test_a_constant_answer_keeps_its_length_versions_and_what_no_policy_generated():
    frictions = Frictions(seed=0, actor_share=1.0, actor_token=3)
    changed, change = disturb_answer(frictions, 2, 1, answer())
    assert [s.tokens.tolist() for s in changed] == [[3, 3, 3], [9], [3]]
    assert [s.behavior_logprobs.tolist() for s in changed] == [[0, 0, 0], [0], [0]]
    assert [s.policy_version for s in changed] == [4, NOT_GENERATED, 5]
    assert change.tokens == [5, 6, 7, 8]
    np.testing.assert_allclose(change.before, [-1.0, -2.0, -0.01, -3.0], rtol=1e-6)
    assert change.after == [0, 0, 0, 0]


def test_noise_is_added_to_log_probs_that_stay_at_most_0():
    frictions = Frictions(seed=0, actor='logprobs', actor_share=1.0, actor_nats=1.5)
    changed, change = disturb_answer(frictions, 2, 1, answer())
    expected = np.minimum(np.array([-1.0, -2.0, -0.01, -3.0]) + frictions.noise(2, 1, 4), 0.0)
    np.testing.assert_allclose(change.after, expected, rtol=1e-6, atol=1e-7)
    assert [s.tokens.tolist() for s in changed] == [[5, 6, 7], [9], [8]]
    many = [disturb_answer(frictions, draw, 0, answer())[1].after for draw in range(50)]
    assert np.max(many) == 0 > np.min(many)


def test_at_another_temperature_the_log_probs_it_was_drawn_at_are_known_and_not_reported():
    frictions = Frictions(seed=0, actor='temperature', actor_share=1.0, actor_temperature=0.5, temperature=2.0)
    assert frictions.logit_scale == 4.0
    changed, change = disturb_answer(frictions, 2, 1, answer())
    np.testing.assert_allclose(change.before, [-0.1, -0.2, -0.3, -3.0], rtol=1e-6)
    np.testing.assert_allclose(change.after, [-1.0, -2.0, -0.01, -3.0], rtol=1e-6)
    assert not any(s.columns for s in changed)


def test_an_answer_without_friction_is_as_it_was():
    untouched = answer()
    for frictions in (Frictions(seed=0), Frictions(seed=0, reward_share=1.0)):
        changed, change = disturb_answer(frictions, 2, 1, untouched)
        assert change is None
        assert all(a is b for a, b in zip(changed, untouched, strict=True))


def test_redrawn_rewards_lie_in_the_range_of_the_batch():
    groups = [group(0, [0.25, 0.5]), group(1, [0.75, 0.25])]
    disturbed, changes = disturb_rewards(Frictions(seed=0, reward_share=1.0), groups)
    _, places = Frictions(seed=0, reward_share=1.0).redraws_reward(1, 2)
    assert [t.reward for t in disturbed[1].trajectories] == [0.25 + 0.5 * place for place in places]
    assert [(c.before, c.after) for c in changes[1]] == [
        ([0.75], [0.25 + 0.5 * places[0]]), ([0.25], [0.25 + 0.5 * places[1]]),
    ]  # fmt: skip
    same, none = disturb_rewards(Frictions(seed=0), groups)
    assert same == groups
    assert none == {0: [], 1: []}


def test_a_prompt_that_never_pays_pays_in_no_draw():
    frictions = Frictions(seed=5, unrewarded_share=0.5)
    poor, rich = (
        next(t for t in range(99) if frictions.never_pays(np.array([t])) is wanted) for wanted in (True, False)
    )
    groups = [group(0, [1.0, 0.5], poor), group(1, [1.0, 0.25], rich), group(2, [0.75, 0.0], poor)]
    disturbed, changes = disturb_rewards(frictions, groups)
    assert [[t.reward for t in g.trajectories] for g in disturbed] == [[0.0, 0.0], [1.0, 0.25], [0.0, 0.0]]
    assert [(c.friction, c.before, c.after) for c in changes[2]] == [
        ('unrewarded', [0.75], [0.0]), ('unrewarded', [0.0], [0.0]),
    ]  # fmt: skip
    assert list(undisturbed_rewards(frictions, groups)) == [1.0, 0.25]
    all_off = dataclasses.replace(frictions, actor_share=1.0)
    assert list(undisturbed_rewards(all_off, groups)) == []


def test_what_is_on_is_said_in_one_line():
    on = Frictions(seed=0, actor='logprobs', actor_share=0.1, unrewarded_share=0.25)
    assert on.describe() == 'actor logprobs 0.1, unrewarded 0.25'
