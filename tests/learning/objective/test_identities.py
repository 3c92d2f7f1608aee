"""What must be equal whatever the numbers: methods at equal policies, at their limits, and against one another."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.objectives import OBJECTIVES
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.diagnostics.measurement import merge_metrics
from areal_jax.learning.objective.counting import token_weights
from areal_jax.learning.objective.objective import REFERENCE
from areal_jax.learning.objective.objectives import PolicyObjective
from areal_jax.learning.objective.policy_loss import finalize_policy_metrics, keep_second_moment, prepared_names
from tests.learning.examples import group
from tests.learning.objective.anchor_set import ADVANTAGES, BEHAVIOR, POLICY, PROXIMAL, gradient, per_token
from tests.learning.objective.combinations import batch_of, draw_case
from tests.learning.objective.tokens import group_advantages_of, loss_of, make_tokens

METHODS = [name for name, kind in OBJECTIVES.items() if kind.generates]
_NO_CORRECTION = {'correction': 'none'}
_BYPASS = {'ratio_denominator': 'behavior', 'correction': 'none'}
_IS_PG = {'ratio': 'none', 'surrogate': 'reinforce'}
_GSPO = {'ratio': 'geometric', 'correction': 'none'}
_WIDE = {'clip_epsilon': 0.999, 'clip_epsilon_high': 1e6}
_RNG = np.random.default_rng(0)
_REWARDS = _RNG.normal(size=5)


def _loss_fields(method):
    return {name: value for name, value in OBJECTIVES[method].choices.items() if name != 'kl_coefficient'}


def _ones(choices):
    return {name: np.ones(3, np.float32) for name in prepared_names(PolicyChoices(**choices))}


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


# At equal policies (1, 12, 14 of the list of identities).


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('advantage', [1.5, -2.0])
def test_at_equal_policies_a_gradient_is_minus_the_advantage(method, advantage):
    choices = _loss_fields(method)
    found = gradient(POLICY, POLICY, POLICY, [advantage] * 3, prepared=_ones(choices), **choices)
    share = np.ones(3)
    if method == 'dg':
        share = _sigmoid(-advantage * POLICY)
    elif method == 'oapl':  # 2 b, and the answer's square stands at each of its three tokens
        share = np.full(3, 3 * 2 * 1e-3)
    np.testing.assert_allclose(found, -advantage * share, rtol=1e-5)


@pytest.mark.parametrize('method', METHODS)
def test_at_equal_policies_weights_are_one_and_nothing_is_clipped(method):
    choices = _loss_fields(method)
    arrays = [jnp.asarray(x)[None] for x in (POLICY, POLICY, POLICY, ADVANTAGES)]
    prepared = {name: value[None] for name, value in _ones(choices).items()}
    _, metrics = loss_of(*arrays, jnp.ones((1, 3), bool), 3.0, prepared=prepared, **choices)
    final = finalize_policy_metrics(merge_metrics([metrics | {'entropy_sum': np.float32(0)}]))
    assert final['loss/behavior_weight_mean'] == final['loss/effective_sample_size'] == 1
    assert final['loss/clip_fraction'] == final['loss/approx_kl'] == 0


@pytest.mark.parametrize('method', METHODS)
def test_what_is_masked_changes_nothing(method):
    choices, mask = _loss_fields(method), jnp.array([[True, False, True, False]])

    def value_and_slope(other):
        arrays = [jnp.asarray([[x[0], other, x[1], -other]]) for x in (POLICY, PROXIMAL, BEHAVIOR, ADVANTAGES)]
        prepared = {name: jnp.ones((1, 4)) for name in _ones(choices)}
        loss = lambda p: loss_of(p, *arrays[1:], mask, 2.0, prepared=prepared, **choices)
        return jax.value_and_grad(loss, has_aux=True)(arrays[0])

    expected = value_and_slope(0.25)
    assert np.abs(expected[1]).max() > 0
    for other in (7.0, np.nan, np.inf):
        jax.tree.map(np.testing.assert_array_equal, value_and_slope(other), expected)


# Corrections, centres, bounds (2 to 7, 15).


def test_off_policy_the_first_gradient_is_that_of_importance_weights():
    found = gradient(PROXIMAL)  # theta = prox
    np.testing.assert_allclose(found, -np.exp(PROXIMAL - BEHAVIOR) * ADVANTAGES, rtol=1e-5)
    np.testing.assert_allclose(found, gradient(PROXIMAL, **_IS_PG), rtol=1e-6)


@pytest.mark.parametrize('centre', [PROXIMAL, BEHAVIOR, POLICY, PROXIMAL - 2])
def test_where_nothing_clips_the_centre_does_not_matter(centre):
    expected = gradient(**_BYPASS, surrogate='is_pg')
    np.testing.assert_allclose(gradient(proximal=centre, **_WIDE), expected, rtol=1e-5)
    np.testing.assert_allclose(gradient(proximal=centre, surrogate='is_pg'), expected, rtol=1e-5)


def test_around_the_behavior_policy_decoupled_ppo_is_ppo():
    decoupled, bypass = per_token(proximal=BEHAVIOR), per_token(**_BYPASS)
    np.testing.assert_array_equal(decoupled, bypass)
    np.testing.assert_array_equal(gradient(proximal=BEHAVIOR), gradient(**_BYPASS))


@pytest.mark.parametrize('level', ['token', 'sequence', 'geometric'])
def test_open_bounds_are_plain_importance_weights(level):
    plain = gradient(correction_level=level)
    assert np.ptp(plain / -ADVANTAGES) > 0.1
    for choices in ({'behavior_weight_cap': 1e9}, {'correction': 'mask', 'correction_low': 0, 'correction_high': 1e9}):
        np.testing.assert_array_equal(gradient(correction_level=level, **choices), plain)


def test_icepop_is_a_masked_weight_of_a_token():
    choices = _loss_fields('icepop')
    assert PolicyChoices(**choices).correction_level == 'token'
    inside = np.exp(PROXIMAL - BEHAVIOR) >= 0.5
    np.testing.assert_array_equal(gradient(**choices) != 0, inside & (gradient() != 0))


def test_cispo_without_bounds_is_importance_weighted():
    cispo = {'surrogate': 'cispo'} | _BYPASS
    np.testing.assert_allclose(gradient(**cispo, **_WIDE), gradient(**_BYPASS, surrogate='is_pg'), rtol=1e-6)
    np.testing.assert_allclose(gradient(**cispo, **_WIDE), gradient(**_IS_PG), rtol=1e-6)
    beyond = {'policy': PROXIMAL + 1, 'advantages': [1.0] * 3} | _NO_CORRECTION
    np.testing.assert_allclose(gradient(surrogate='cispo', **beyond), -1.2, rtol=1e-6)
    np.testing.assert_array_equal(gradient(surrogate='clip', **beyond), 0)


def test_both_forms_of_gspo_have_one_gradient_where_the_advantage_is_the_answers():
    for advantage in (1.0, -2.0):
        each = {'advantages': [advantage] * 3, **_WIDE, 'correction': 'none'}
        whole, token = (gradient(ratio=unit, **each) for unit in ('geometric', 'geometric_token'))
        np.testing.assert_allclose(token, whole, rtol=1e-5)
        np.testing.assert_allclose(whole, -advantage * 0.75 ** (1 / 3), rtol=1e-5)
    assert not np.allclose(gradient(**_GSPO | _WIDE), gradient(**_GSPO | _WIDE | {'ratio': 'geometric_token'}))


def test_the_geometric_ratio_of_one_token_is_its_ratio():
    for t in range(3):
        one = {'policy': POLICY[t : t + 1], 'proximal': [-1], 'behavior': [-1], 'advantages': [1]} | _NO_CORRECTION
        values = [per_token(ratio=unit, **one)[0] for unit in ('token', 'sequence', 'geometric', 'geometric_token')]
        np.testing.assert_allclose(values, values[0], rtol=1e-6)


def test_dual_clip_acts_on_bad_answers_only_and_only_above_its_bound():
    far = {'policy': PROXIMAL + np.log([0.5, 2.0, 9.0])} | _NO_CORRECTION
    dual = {'surrogate': 'dual_clip'}
    for advantages in (np.abs(ADVANTAGES), -np.abs(ADVANTAGES)):
        bound = 1e9 if advantages[0] < 0 else 1.5
        expected = gradient(advantages=advantages, **far)
        np.testing.assert_array_equal(gradient(advantages=advantages, **far, **dual, dual_clip=bound), expected)
    assert gradient(advantages=[-1] * 3, **far, **dual, dual_clip=3.0)[2] == 0


def test_an_infinite_second_moment_masks_nothing():
    _, tokens = draw_case(3)
    batch = batch_of(tokens)
    np.testing.assert_array_equal(keep_second_moment(batch, tokens.policy[None], np.inf), batch.loss_mask)
    assert 0 < keep_second_moment(batch, tokens.policy[None], 40.0).sum() < batch.loss_mask.sum()


@pytest.mark.parametrize('age', [0, 1, 2, 3])
def test_between_behavior_and_policy_the_window_widens_with_age(age):
    # w r = k whatever the age; the gradient is -k A inside [(1-e)^(age+1), (1+e)^(age+1)]
    low, high = 0.8 ** (age + 1), 1.2 ** (age + 1)
    for k, a, inside in (
        (high * 0.999, 1, True), (high * 1.001, 1, False), (low * 0.9, 1, True),
        (low * 1.001, -1, True), (low * 0.999, -1, False), (high * 1.1, -1, True),
    ):  # fmt: skip
        policy, behavior = np.log([k]) - 1, np.array([-1.0])
        centre = behavior + age / (age + 1) * (policy - behavior)
        found = gradient(policy, centre, behavior, [a])
        np.testing.assert_allclose(found, -k * a if inside else 0, rtol=1e-5)
        if age == 0:
            np.testing.assert_array_equal(found, gradient(policy, centre, behavior, [a], **_BYPASS))


# Advantages (8, 16, 17).


def _advantages(name, rewards, **choices):
    return group_advantages_of(group([1], [[2]] * len(rewards), list(rewards)), name, **choices)


def test_leave_one_out_is_a_multiple_of_the_groups_mean():
    np.testing.assert_allclose(_advantages('rloo', _REWARDS), 5 / 4 * _advantages('group_mean', _REWARDS), rtol=1e-6)


@pytest.mark.parametrize('name', ['group', 'group_mean', 'rloo', 'length_baseline'])
@pytest.mark.parametrize('deviation', ['population', 'sample'])
def test_contrasts_sum_to_zero_and_forget_a_shift(name, deviation):
    found = _advantages(name, _REWARDS, deviation=deviation)
    np.testing.assert_allclose(found.sum(), 0, atol=1e-5)
    np.testing.assert_allclose(_advantages(name, _REWARDS + 9, deviation=deviation), found, atol=1e-5)
    if name == 'group':
        np.testing.assert_allclose(_advantages(name, 7 * _REWARDS + 9, deviation=deviation), found, rtol=1e-3)
    np.testing.assert_array_equal(_advantages(name, [0.3] * 5, deviation=deviation), 0)


def test_answers_of_one_length_have_the_groups_mean_as_their_baseline():
    np.testing.assert_allclose(_advantages('length_baseline', _REWARDS), _advantages('group_mean', _REWARDS), rtol=1e-6)


def test_limits_of_the_soft_maximum():
    found = lambda beta: _advantages('optimal_value', _REWARDS, oapl_value_beta=beta)
    np.testing.assert_allclose(found(1e5), _REWARDS - _REWARDS.mean(), atol=1e-4)
    np.testing.assert_allclose(found(1e-4), _REWARDS - _REWARDS.max(), atol=1e-3)
    assert found(1.0).mean() < 0  # Jensen


def test_the_regression_is_a_quadratic_around_the_policy_gradient():
    # (b D - A)^2 = A^2 + 2 b (-A D + b/2 D^2), of the whole answer
    beta, a = 0.3, 0.7
    oapl = {'ratio': 'sequence', 'surrogate': 'oapl', 'oapl_beta': beta} | _BYPASS
    delta = float((POLICY - BEHAVIOR).sum())
    found = per_token(advantages=[a] * 3, **oapl | {'ratio': 'sequence'})
    np.testing.assert_allclose(found, a**2 + 2 * beta * (-a * delta + beta / 2 * delta**2), rtol=1e-5)
    quadratic = {'ratio': 'sequence', 'surrogate': 'quadratic', 'quadratic_weight': beta} | _BYPASS
    slope = gradient(advantages=[a] * 3, **quadratic)  # -A + 3 b D: the square stands at each of three tokens
    np.testing.assert_allclose(slope, -a + 3 * beta * delta, rtol=1e-4)
    np.testing.assert_allclose(gradient(advantages=[a] * 3, **oapl) / 3, 2 * beta * (-a + beta * delta), rtol=1e-4)


def test_at_behavior_the_regression_is_a_small_policy_gradient():
    group_mean = _RNG.normal(size=3)
    found = gradient(BEHAVIOR, advantages=[group_mean[0]] * 3, **_loss_fields('oapl')) / 3
    reinforce = gradient(BEHAVIOR, advantages=[group_mean[0]] * 3, **_IS_PG, **_NO_CORRECTION)
    np.testing.assert_allclose(found, 2 * 1e-3 * reinforce, rtol=1e-5)


# Delight (10) and lengths (20).


def test_delight_of_success_and_failure_sum_to_one():
    dg = {'ratio': 'none', 'surrogate': 'delight'} | _NO_CORRECTION
    weight = lambda a, eta=1.0: gradient(advantages=[a] * 3, delight_temperature=eta, **dg) / -a
    np.testing.assert_allclose(weight(0.8) + weight(-0.8), 1, rtol=1e-6)
    np.testing.assert_allclose(weight(0.8), 1 / (1 + np.exp(POLICY) ** 0.8), rtol=1e-5)
    np.testing.assert_allclose(weight(0.8, eta=1e6), 0.5, rtol=1e-5)
    assert (weight(-0.5) <= np.exp(POLICY) ** 0.25).all()
    hard = weight(0.8, eta=1e-6)
    np.testing.assert_allclose(hard, 1, rtol=1e-6)
    additive = gradient(advantages=[0.8] * 3, delight_gate='additive', delight_mix=0.25, **dg) / -0.8
    np.testing.assert_allclose(additive, _sigmoid(0.75 * 0.8 - 0.25 * POLICY), rtol=1e-5)


def test_answers_of_one_length_weigh_the_same_in_sums_and_means():
    # LUSPO = T GSPO where all lengths are T
    _, tokens = draw_case(0)
    ids = np.repeat(np.arange(8), 3).reshape(2, 12)
    cut = lambda x: jnp.asarray(x[:, :12], jnp.float32)
    batch = batch_of(type(tokens)(**vars(tokens) | {'ids': ids, 'mask': ids >= 0} | {
        name: np.asarray(cut(getattr(tokens, name))) for name in ('behavior', 'advantages', 'versions')
    }))  # fmt: skip
    found = {}
    for aggregation in ('sequence_sum', 'sequence_mean'):
        weights, denominator = token_weights(batch, aggregation)
        arrays = (cut(tokens.policy), cut(tokens.proximal), cut(tokens.behavior), cut(tokens.advantages))
        starts = jnp.asarray(np.arange(12) // 3 * 3)[None].repeat(2, 0)
        found[aggregation] = float(
            loss_of(*arrays, jnp.ones((2, 12), bool), denominator, jnp.asarray(weights[0]), starts=starts, **_GSPO)[0]
        )
    np.testing.assert_allclose(found['sequence_sum'], 3 * found['sequence_mean'], rtol=1e-6)


# Coefficients: -w g A is the gradient.

_INSIDE, _LOW, _HIGH = 1.1, 0.5, 1.9  # q


def _sapo(q, tau):
    s = _sigmoid(tau * (q - 1))
    return 4 * q * s * (1 - s)


@pytest.mark.parametrize(
    ('choices', 'g'),
    [
        # at q = inside, below, above: for A = 1, then for A = -1
        ({'surrogate': 'clip', 'clip_epsilon': 0.3}, ((_INSIDE, _LOW, 0), (_INSIDE, 0, _HIGH))),
        ({'surrogate': 'clip', 'clip_epsilon': 0.6, 'clip_epsilon_high': 0.05}, ((0, _LOW, 0), (_INSIDE, _LOW, _HIGH))),
        ({'surrogate': 'dual_clip', 'clip_epsilon': 0.3, 'dual_clip': 1.5}, ((_INSIDE, _LOW, 0), (_INSIDE, 0, 0))),
        ({'surrogate': 'cispo', 'clip_epsilon': 0.3}, ((_INSIDE, 0.7, 1.3),) * 2),
        ({'surrogate': 'is_pg'}, ((_INSIDE, _LOW, _HIGH),) * 2),
        ({'surrogate': 'reinforce'}, ((1, 1, 1),) * 2),
        ({'surrogate': 'topr'}, ((1, 1, 1), (1, _LOW, 1))),
        (
            {'surrogate': 'sapo', 'sapo_positive': 1.0, 'sapo_negative': 1.3},
            tuple(tuple(_sapo(q, tau) for q in (_INSIDE, _LOW, _HIGH)) for tau in (1.0, 1.3)),
        ),
        (
            {'surrogate': 'quadratic', 'quadratic_weight': 0.4},
            tuple(tuple(1 - 0.4 / a * np.log(q) for q in (_INSIDE, _LOW, _HIGH)) for a in (1, -1)),
        ),
        (
            {'surrogate': 'oapl', 'oapl_beta': 0.4},
            tuple(tuple(0.8 * (1 - 0.4 / a * np.log(q)) for q in (_INSIDE, _LOW, _HIGH)) for a in (1, -1)),
        ),
    ],
    ids=lambda value: value['surrogate'] if isinstance(value, dict) else '',
)  # fmt: skip
@pytest.mark.parametrize('ratio', ['token', 'sequence', 'geometric', 'geometric_token'])
def test_coefficients_inside_and_beyond_each_bound(choices, g, ratio):
    # six answers of one token: three ratios, each with both advantages
    policy, advantages = np.log([[_INSIDE], [_LOW], [_HIGH]] * 2) - 1, np.repeat([[1.0], [-1.0]], 3, axis=0)
    rest = {'proximal': np.full((6, 1), -1.0), 'behavior': np.full((6, 1), -1.7), 'advantages': advantages}
    for correction, w in (('none', 1.0), ('truncate', np.exp(0.7))):
        found = gradient(policy, **rest, ratio=ratio, correction=correction, **choices)
        np.testing.assert_allclose(found, -w * np.reshape(g, (6, 1)) * advantages, rtol=2e-5)


@pytest.mark.parametrize('surrogate', ['clip', 'dual_clip', 'cispo', 'is_pg', 'sapo', 'topr', 'quadratic'])
@pytest.mark.parametrize('ratio', ['token', 'sequence', 'geometric', 'geometric_token'])
def test_the_coefficient_of_a_ratio_of_one_is_one(surrogate, ratio):
    found = gradient(PROXIMAL, behavior=PROXIMAL, advantages=[1.5] * 3, surrogate=surrogate, ratio=ratio)
    # an answer of three tokens whose product is one ratio has it at each of them
    whole = ratio == 'sequence' and surrogate not in ('cispo', 'topr', 'quadratic')
    np.testing.assert_allclose(found, -1.5 * (3 if whole else 1), rtol=1e-6)


# The divergence from a reference (11).


def test_estimates_of_a_divergence_agree_over_all_tokens():
    p, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    found = {}
    for estimator in ('k1', 'k2', 'k3'):
        objective = PolicyObjective(PolicyChoices(kl_coefficient=1.0, kl_estimator=estimator))
        found[estimator] = _expected_penalty(objective, p, reference)
    np.testing.assert_allclose([found['k1'], found['k3'], found['k2']], [0.223805, 0.223805, 0.265479], atol=2e-6)


def _expected_penalty(objective, p, reference):
    logs = [jnp.asarray(np.log(x), jnp.float32)[None] for x in (p, reference)]
    tokens = make_tokens(logs[0], logs[0], jnp.zeros((1, 3)), jnp.ones((1, 3), bool), 1.0)
    weights = jnp.asarray(p, jnp.float32)[None]
    known = {'proximal': logs[0], REFERENCE: logs[1]}
    return float(objective.loss(dataclasses.replace(tokens, token_weights=weights, known=known))[0])
