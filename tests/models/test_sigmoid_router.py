"""Sigmoid routers: the choice by groups and corrections, weights without them, and the rule of the corrections."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.models.experts import choose_experts, correct_load
from areal_jax.models.layer_parts import Experts, SigmoidRouter
from tests.models.family_examples import CONFIGS

SCORES = np.array([[0.9, 0.1, 0.6, 0.5, 0.8, 0.05, 0.3, 0.2]])
LOGITS = jnp.float32(np.log(SCORES / (1 - SCORES)))
CORRECTION = jnp.zeros(8).at[3].set(0.2)
GROUPED = Experts(8, 3, 12, sigmoid=SigmoidRouter(4, 2, 2.5))
WHOLE = dataclasses.replace(GROUPED, sigmoid=SigmoidRouter(scale=2.5))


def choose(experts, correction=CORRECTION, **given):
    choice = choose_experts(LOGITS, experts, correction=correction, **given)
    return choice.experts[0].tolist(), choice.weights[0]


def test_the_best_groups_are_chosen_from_and_corrections_are_in_no_weight():
    # corrected scores of groups: 0.9 + 0.1, 0.6 + 0.7, 0.8 + 0.05, 0.3 + 0.2; the first two are kept
    ids, weights = choose(GROUPED)
    assert ids == [0, 3, 2]
    np.testing.assert_allclose(weights, np.array([0.9, 0.5, 0.6]) / 2.0 * 2.5, rtol=1e-6)
    ids, weights = choose(WHOLE)
    assert ids == [0, 4, 3]
    np.testing.assert_allclose(weights, np.array([0.9, 0.8, 0.5]) / 2.2 * 2.5, rtol=1e-6)
    assert choose(WHOLE, CORRECTION * 0)[0] == [0, 4, 2]


def test_experts_of_other_groups_are_left_out_if_all_corrected_scores_are_negative():
    ids, weights = choose(GROUPED, CORRECTION - 2)
    assert ids == [0, 3, 2]
    np.testing.assert_allclose(weights, np.array([0.9, 0.5, 0.6]) / 2.0 * 2.5, rtol=1e-6)


def test_weights_that_are_not_normalised_are_scores_times_the_scale():
    _, weights = choose(dataclasses.replace(GROUPED, normalised=False))
    np.testing.assert_allclose(weights, [2.25, 1.25, 1.5], rtol=1e-6)


def test_recorded_experts_are_followed_whatever_their_group_and_correction():
    recorded = jnp.array([[7, 5, 4]])
    ids, weights = choose(GROUPED, recorded=recorded)
    assert ids == [7, 5, 4]
    np.testing.assert_allclose(weights, np.array([0.2, 0.05, 0.8]) / 1.05 * 2.5, rtol=1e-5)
    value = lambda logits: choose_experts(logits, GROUPED, recorded=recorded, correction=CORRECTION).weights[0, 0]
    assert np.abs(jax.grad(value)(LOGITS)[0, [7, 5, 4]]).min() > 1e-3


def test_the_scores_of_a_token_that_balance_reads_sum_to_one():
    routed = choose_experts(LOGITS, GROUPED, correction=CORRECTION).routed
    np.testing.assert_allclose(routed.scores, SCORES[0] / SCORES.sum(), rtol=1e-6)


def test_a_correction_moves_by_the_rate_towards_the_mean_load():
    loads = np.array([[4, 0, 2, 2], [1, 1, 1, 1]], np.float32)
    before = np.array([[0.5, 0.0, 0.0, -1.0], [1.0, 2.0, 3.0, 4.0]], np.float32)
    found = correct_load(before, loads, 0.25)
    np.testing.assert_array_equal(found, before + np.array([[-0.25, 0.25, 0, 0], [0, 0, 0, 0]], np.float32))
    assert found.dtype == np.float32


@pytest.mark.parametrize(
    ('router', 'said'),
    [
        ((3, 1), '8 experts do not make 3 equal groups'),
        ((8, 4), 'groups of two or more'),
        ((4, 1), 'of which 1 have the 3 that a token reaches'),
        ((2, 3), 'a token cannot keep 3 of 2 groups'),
    ],
)
def test_groups_that_cannot_be_chosen_from_are_refused(router, said):
    with pytest.raises(ConfigError, match=said):
        Experts(8, 3, 12, sigmoid=SigmoidRouter(*router))


def test_a_family_has_its_kind_of_router():
    config = CONFIGS['glm4_moe']
    with pytest.raises(ConfigError, match=r"experts\.sigmoid=None does not fit family='glm4_moe'"):
        dataclasses.replace(config, experts=dataclasses.replace(config.experts, sigmoid=None))
