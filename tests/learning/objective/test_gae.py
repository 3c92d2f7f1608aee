"""Generalized advantages of packed tokens: anchors by hand, and what passes from one token to another."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.learning.objective.gae import generalized_advantages

ANCHOR = [0.21712, 0.246, 0.3]  # γ = 0.9, λ = 0.8 of rewards [0, 0, 1] and values [0.5, 0.6, 0.7]


def of_tokens(values, last, mask=None, ids=None, *, rewards=0.0, behind=0.0, discount=0.9, decay=0.8):
    values = np.array(values, float)
    fill = lambda x: np.broadcast_to(np.asarray(x, float), values.shape)
    mask = np.ones(values.shape, bool) if mask is None else np.array(mask, bool)
    ids = np.zeros(values.shape, int) if ids is None else np.array(ids)
    return generalized_advantages(
        values, fill(rewards), fill(last), fill(behind), mask, ids, discount=discount, decay=decay
    )


def test_anchors_of_one_answer():
    np.testing.assert_allclose(of_tokens([0.5, 0.6, 0.7], 1.0), ANCHOR)
    np.testing.assert_allclose(of_tokens([0.5, 0.6, 0.7], 1.0, discount=1.0, decay=1.0), [0.5, 0.4, 0.3])
    np.testing.assert_allclose(of_tokens([0.0] * 3, 1.0, discount=1.0, decay=1.0), [1.0] * 3)


def test_a_token_that_is_not_trained_is_no_step_and_its_numbers_do_not_count():
    found = of_tokens([0.5, np.nan, 0.6, 0.7], 1.0, [1, 0, 1, 1], rewards=[0, np.inf, 0, 0])
    np.testing.assert_allclose(found, [ANCHOR[0], 0.0, *ANCHOR[1:]])


def test_the_reward_comes_with_the_last_trained_token():
    np.testing.assert_allclose(of_tokens([0.0, 0.0, 0.0], 1.0, [1, 1, 0]), [0.72, 1.0, 0.0])


def test_answers_beside_each_other_and_rows_are_alone():
    values = [[0.5, 0.6, 0.7, 0.2, 0.9], [0.1, 0.5, 0.6, 0.7, 0.0]]
    last = [[1.0, 1.0, 1.0, 3.0, 5.0], [2.0, 1.0, 1.0, 1.0, 9.0]]
    found = of_tokens(values, last, [[1] * 5, [1, 1, 1, 1, 0]], [[0, 0, 0, 1, 2], [3, 4, 4, 4, -1]])
    np.testing.assert_allclose(found, [[*ANCHOR, 2.8, 4.1], [1.9, *ANCHOR, 0.0]])


def test_the_value_behind_an_answer_is_that_of_what_would_follow():
    np.testing.assert_allclose(of_tokens([0.5], 0.0, behind=2.0), [0.9 * 2.0 - 0.5])


@pytest.mark.parametrize(('discount', 'decay'), [(0.95, 0.7), (1.0, 0.0), (1.0, 1.0)])
def test_many_answers_against_the_sum_of_the_definition(discount, decay):
    rng = np.random.default_rng(0)
    lengths = [3, 1, 5, 2]
    ids = np.repeat(np.arange(4), lengths)[None]
    values, rewards = rng.normal(size=ids.shape), rng.normal(size=ids.shape)
    last = rng.normal(size=4)[ids]
    found = of_tokens(values, last, ids=ids, rewards=rewards, discount=discount, decay=decay)
    for answer in range(4):
        at = ids[0] == answer
        v, r = values[0][at], rewards[0][at].copy()
        r[-1] += last[0][at][-1]
        delta = r + discount * np.append(v[1:], 0.0) - v
        wanted = [sum((discount * decay) ** k * delta[t + k] for k in range(len(v) - t)) for t in range(len(v))]
        np.testing.assert_allclose(found[0][at], wanted)
