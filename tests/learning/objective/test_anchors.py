"""Published numbers and arithmetic by hand: losses, aggregations, advantages, penalties, gates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.objectives import OBJECTIVES
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.diagnostics.measurement import merge_metrics
from areal_jax.learning.objective.advantages import make_estimator, overlong_share, shape_rewards, whiten
from areal_jax.learning.objective.counting import token_weights
from areal_jax.learning.objective.policy_loss import finalize_policy_metrics, keep_second_moment, loglinear_logprobs
from tests.learning.examples import group
from tests.learning.objective.anchor_set import BEHAVIOR, POLICY, PROXIMAL, RATIO, gradient, per_token
from tests.learning.objective.combinations import batch_of, draw_case
from tests.learning.objective.tokens import group_advantages_of, loss_of

_PPO = {'correction': 'none'}
_GSPO = {'ratio': 'geometric', 'correction': 'none'}
_IS_PG = {'ratio': 'none', 'surrogate': 'reinforce'}
_CISPO = {'surrogate': 'cispo', 'correction': 'none'}
_OAPL = OBJECTIVES['oapl'].choices
_CENTRED = ('group_mean', 'rloo')
_AGES = np.array([0, 1, 3])
_LOGLINEAR = np.float32(BEHAVIOR + _AGES / (_AGES + 1) * (POLICY - BEHAVIOR))  # -0.5 -1.25 -0.645901


@pytest.mark.parametrize(
    ('choices', 'tokens', 'mean'),
    [
        (_PPO, [-0.5, 1, -2.4], -0.633333),
        (_PPO | {'clip_epsilon_high': 0.28}, [-0.5, 1, -2.56], -0.686667),
        ({}, [-0.303265, 1.648721, -1.964954], -0.206499),
        ({'behavior_weight_cap': 0.8}, [-0.303265, 0.8, -1.92], -0.474422),
        ({'behavior_weight_cap': 0.8, 'correction_level': 'sequence'}, [-0.4, 0.8, -1.92], -0.506667),
        (_PPO | {'ratio_denominator': 'behavior'}, [-0.303265, 1.648721, -2.4], -0.351515),
        (_IS_PG, [0.513473, -1.648721, 1.460292], 0.108348),
        (_CISPO, [1.354518, -1, 1.426884], 0.593800),
        (_GSPO, [-0.908560, 0.908560, -1.817121], -0.605707),
        ({'ratio': 'geometric_token', 'correction': 'none'}, [-0.908560, 0.908560, -1.817121], -0.605707),
        (_GSPO | {'correction': 'truncate', 'correction_level': 'sequence'}, None, -0.495911),
        (
            _GSPO | {'correction': 'truncate', 'correction_level': 'sequence', 'behavior_weight_cap': 0.8},
            None, -0.484565,
        ),
        (_PPO | {'surrogate': 'sapo'}, [-1.510163, 1.904762, -4.979675], -1.528358),
        (_PPO | {'surrogate': 'quadratic', 'quadratic_weight': 0.1}, [1.717170, -1, 1.197290], 0.638153),
        (
            _CISPO | {'ratio_denominator': 'behavior', 'clip_epsilon': 1.0, 'clip_epsilon_high': 4.0},
            [0.513473, -1.648721, 1.460292], 0.108348,
        ),
        ({'surrogate': 'cispo'}, [0.821557, -1.648721, 1.168234], 0.113690),
        ({'surrogate': 'cispo', 'behavior_weight_cap': 0.8}, [0.821557, -0.8, 1.141507], 0.387688),
        ({'correction': 'mask', 'correction_low': 0.7, 'correction_high': 1.5}, [0, 0, -1.964954], -0.654985),
    ],
)  # fmt: skip
def test_three_tokens(choices, tokens, mean):
    found = per_token(**choices)
    np.testing.assert_allclose(found.mean(), mean, atol=2e-6)
    if tokens:
        np.testing.assert_allclose(found, tokens, atol=2e-6)


def test_three_tokens_around_a_centre_between_behavior_and_policy():
    np.testing.assert_allclose(np.exp(POLICY - _LOGLINEAR), [0.303265, 1.284025, 1.052708], atol=2e-6)
    found = per_token(proximal=_LOGLINEAR)
    np.testing.assert_allclose(found, [-0.303265, 1.648721, -2.456192], atol=2e-6)
    np.testing.assert_allclose(found.mean(), -0.370245, atol=2e-6)


def test_a_weight_of_at_most_one():
    # -min(r, 1) A log theta, r over the policy that acted: 0.5 * 1.693147, -1, 2 * 0.594535
    found = per_token(behavior=PROXIMAL, **_IS_PG, behavior_weight_cap=1.0)
    np.testing.assert_allclose(found, [0.846574, -1, 1.189070], atol=2e-6)


def test_a_geometric_ratio_is_of_each_answer():
    rows = [jnp.asarray(x, jnp.float32) for x in ([POLICY] * 2, [PROXIMAL, PROXIMAL - 1], [BEHAVIOR] * 2)]
    advantages, mask = jnp.array([[1.0, -1.0, 2.0]] * 2), jnp.ones((2, 3), bool)
    # the second answer has s = 0.908560 e = 2.469723: tokens -1.2, 2.469723, -2.4
    np.testing.assert_allclose(loss_of(*rows, advantages, mask, 6.0, **_GSPO)[0], -0.491233, atol=2e-6)
    side_by_side = [x.reshape(1, 6) for x in (*rows, advantages, mask)]
    starts = jnp.array([[0, 0, 0, 3, 3, 3]])
    np.testing.assert_allclose(loss_of(*side_by_side, 6.0, starts=starts, **_GSPO)[0], -0.491233, atol=2e-6)


def test_weights_of_three_tokens():
    arrays = (jnp.asarray(x) for x in (POLICY, PROXIMAL, BEHAVIOR, np.array([1.0, -1.0, 2.0])))
    _, metrics = loss_of(*arrays, jnp.ones(3, bool), 3.0)
    final = finalize_policy_metrics(merge_metrics([metrics | {'entropy_sum': np.float32(0)}]))
    np.testing.assert_allclose(final['loss/effective_sample_size'], 0.838495, atol=2e-6)
    np.testing.assert_allclose(final['loss/behavior_weight_max'], 1.648721, atol=2e-6)
    assert final['loss/clip_fraction'] == pytest.approx(1 / 3)


def test_dual_clip():
    policy = PROXIMAL + np.log([0.5, 1.0, 10.0])
    given = {'policy': policy, 'advantages': [1, -1, -4], 'surrogate': 'dual_clip'} | _PPO
    np.testing.assert_allclose(per_token(**given, dual_clip=3.0), [-0.5, 1, 12], rtol=1e-6)
    np.testing.assert_allclose(per_token(**given, dual_clip=1e6), [-0.5, 1, 40], rtol=1e-6)
    third = np.array([-1.0, -1.0, -3.0])
    found = per_token(third + np.log([0.5, 1.0, 10.0]), third, advantages=[1, -1, -4], **_CISPO)
    np.testing.assert_allclose(found.sum(), -2.993074, atol=5e-6)


def test_icepop():
    behavior = [-0.5, -3.5, -0.8]  # prox / behavior = 0.606531, 12.182494, 0.818731: the second is outside [0.5, 5]
    found = per_token(PROXIMAL, behavior=behavior, correction='mask', correction_low=0.5, correction_high=5.0)
    np.testing.assert_allclose(found, [-0.606531, 0, -1.637462], atol=2e-6)
    np.testing.assert_allclose(found.mean(), -0.747997, atol=2e-6)


def test_sapo():
    found = per_token(
        PROXIMAL + np.array([-0.5, 0.2, -0.1]), advantages=[1, -1, 0.5], surrogate='sapo', sapo_positive=1.0,
        sapo_negative=2.0, **_PPO,
    )  # fmt: skip
    np.testing.assert_allclose(found, [-1.611530, 1.217855, -0.952455], atol=2e-6)


def test_a_shift_of_probability():
    dppo = {'surrogate': 'is_pg', 'gate': 'probability_shift', 'gate_threshold': 0.2} | _PPO
    # shifts 0.3729 and -0.2325 lead further away, 0.0387 is near; -e^0.1 is what remains
    found = per_token([-0.3, -2.0, -0.9], advantages=[1, -1, 1], **dppo)
    np.testing.assert_allclose(found, [0, 0, -1.105171], atol=2e-6)
    assert (gradient([-2.0, -0.3, -1.0], advantages=[1, -1, 1], **dppo) != 0).all()  # these lead back


def test_what_a_stale_token_is_compared_with():
    mismatch, staleness, step = 1.3, 1.1, 1.05
    behavior = np.zeros(1)
    proximal = behavior + np.log(mismatch * staleness)
    given = {'policy': proximal + np.log(step), 'proximal': proximal, 'behavior': behavior, 'advantages': [1]}
    np.testing.assert_allclose(per_token(**given), -mismatch * staleness * step, rtol=1e-6)  # 1.05 is inside
    np.testing.assert_allclose(per_token(**given, ratio_denominator='behavior', **_PPO), -1.2, rtol=1e-6)  # 1.5015


# Aggregation.


@pytest.mark.parametrize(
    ('aggregation', 'constant', 'prompts', 'expected'),
    [
        ('token_mean', 1, (0, 1), 1.25), ('sequence_mean', 1, (0, 1), 1.5), ('sequence_sum', 1, (0, 1), 2.5),
        ('constant', 4, (0, 1), 0.625), ('token_sum', 1, (0, 1), 5),
        ('prompt_mean', 1, (0, 0), 1.25), ('prompt_mean', 1, (0, 1), 1.5),
    ],
)  # fmt: skip
def test_answers_of_one_and_three_tokens(aggregation, constant, prompts, expected):
    losses, ids = np.array([2.0, 1.0, 1.0, 1.0]), np.array([[0, 1, 1, 1]])
    batch = _batch(ids)
    weights, denominator = token_weights(batch, aggregation, constant, np.array(prompts))
    assert (weights * losses).sum() / denominator == pytest.approx(expected)


def _batch(ids, **fields):
    tokens = draw_case(0)[1]
    cut = {name: np.zeros(ids.shape) for name in ('behavior', 'advantages', 'versions')}
    return batch_of(type(tokens)(**vars(tokens) | cut | {'ids': ids, 'mask': ids >= 0} | fields))


# Rewards and advantages.


def test_overlong_answers():
    lengths = np.array([50.0, 80.0, 90.0, 100.0, 110.0])
    np.testing.assert_allclose(overlong_share(lengths, longest=100, buffer=20), [0, 0, 0.5, 1, 1])
    answers = group([1], [[2] * 4, [2] * 9], [1.0, 1.0])
    choices = PolicyChoices(
        overlong_tokens=4, longest_answer=10, overlong_penalty=0.4, reward_bias=0.5, reward_scale=10, reward_clip=3.0
    )
    # 9 of 10 tokens: 1 - 0.4 * 3/4 = 0.7, minus 0.5, times 10 = 2; the short one has 5, clipped at 3
    np.testing.assert_allclose(shape_rewards(answers, choices), [3.0, 2.0])


@pytest.mark.parametrize(
    ('advantage', 'rewards', 'expected', 'tolerance'),
    [
        ('sample', [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5], 1e-5),
        ('population', [1, 0, 0, 0], [1.7320, -0.5773, -0.5773, -0.5773], 5e-4),
        ('sample', [1, 0, 0, 1], [0.86602, -0.86602, -0.86602, 0.86602], 1e-5),
        ('population', [1, 0, 0, 1], [1, -1, -1, 1], 3e-4),
        ('group_mean', [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25], 1e-7),
        ('rloo', [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3], 1e-6),
        ('max_rl', [1, 0, 0, 0], [3, -1, -1, -1], 1e-6),
        ('max_rl', [1, 1, 0, 0], [1, 1, -1, -1], 1e-6),
        ('length_baseline', [1, 0, 0, 1], [0.625, -0.375, -0.375, 0.625], 1e-6),  # (1 + 2) / 8 tokens
        ('optimal_value', [1, 0, 0, 0], [0.642626, -0.357374, -0.357374, -0.357374], 1e-6),
    ],
)
def test_advantages_of_four_answers(advantage, rewards, expected, tolerance):
    answers = group([1], [[2], [2] * 2, [2] * 3, [2] * 2], rewards)
    named = {'sample': 'group', 'population': 'group'}.get(advantage, advantage)
    choices = {'deviation': advantage} if named != advantage else {}
    np.testing.assert_allclose(group_advantages_of(answers, named, **choices), expected, atol=tolerance)


def test_the_soft_maximum_of_a_group():
    answers = group([1], [[2]] * 4, [1.0, 0.0, 0.0, 0.0])
    for beta, value in ((0.1, 0.861384), (1.0, 0.357374), (10.0, 0.259530)):
        found = group_advantages_of(answers, 'optimal_value', oapl_value_beta=beta)
        np.testing.assert_allclose(found, [1 - value, -value, -value, -value], atol=2e-6)


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_the_tokens():
    groups = [group([1], [[2], [2] * 3, [2] * 2], [1.0, 0.0, 0.5]), group([1], [[2] * 4, [2]], [0.0, 3.0])]
    plain = np.concatenate(make_estimator(PolicyChoices(advantage='group_mean'))(groups, None))
    found = whiten(plain.astype(np.float64), np.array([1, 3, 2, 4, 1.0]))
    of_token = [np.repeat(x, [1, 3, 2, 4, 1]) for x in (plain, found)]
    # 0.5 - 3 * 0.5 - 4 * 1.5 + 1.5 = -5.5 over 11 tokens: centred groups are not centred over their tokens
    np.testing.assert_allclose(of_token[0].mean(), -0.5, rtol=1e-6)
    np.testing.assert_allclose(of_token[1].mean(), 0, atol=1e-6)
    np.testing.assert_allclose(of_token[1].var(ddof=1), 1, rtol=1e-6)
    # equal sizes: the factor between leave-one-out and the group's mean cancels
    pair = [group([1], [[2], [2] * 3], [1.0, 0.0]), group([1], [[2] * 2, [2]], [0.0, 3.0])]
    centred = (np.concatenate(make_estimator(PolicyChoices(advantage=a))(pair, None)) for a in _CENTRED)
    both = [whiten(values.astype(np.float64), np.array([1, 3, 2, 1.0])) for values in centred]
    np.testing.assert_allclose(both[0], both[1], rtol=1e-5)


# Penalties and centres.


def test_a_point_between_behavior_and_policy():
    ages = np.arange(5)
    found = loglinear_logprobs(jnp.full(5, -2.0), jnp.full(5, -1.0), 7 - ages, np.int32(7))
    np.testing.assert_allclose(found, [-1, -1.5, -1.6667, -1.75, -1.8], atol=5e-5)
    # k = e^0.5: clipped at ages 0 and 1, where the gradient is 0; later the whole k
    centre = loglinear_logprobs(jnp.full(3, -0.5), jnp.full(3, -1.0), 7 - ages[:3], np.int32(7))
    given = {'policy': [-0.5] * 3, 'proximal': centre, 'behavior': [-1.0] * 3, 'advantages': [1.0] * 3}
    np.testing.assert_allclose(per_token(**given), [-1.2, -1.540831, -1.648721], atol=2e-6)
    np.testing.assert_allclose(gradient(**given), [0, 0, -1.648721], atol=2e-6)


# Gates.


@pytest.mark.parametrize('shape', [(1, 1, 4), (2, 1, 2), (4, 1, 1), (1, 2, 2)])
@pytest.mark.parametrize('order', [(0, 3, 1, 2), (0, 1, 2, 3), (3, 2, 1, 0)])
def test_the_second_moment_is_of_the_whole_minibatch(shape, order):
    # squares 0.01 0.01 0.09 0.36: mean 0.1175; without the last 0.03667 < 0.04. Micro-batches of two would keep two
    shifts = np.float32(np.sqrt([0.01, 0.01, 0.09, 0.36]))[list(order)].reshape(shape)
    batch = _batch(np.arange(4)[None])
    fields = {name: array.reshape(shape) for name, array in batch.fields().items()}
    gate = keep_second_moment(type(batch)(**fields), shifts, 0.04)
    np.testing.assert_array_equal(gate.ravel(), np.array([1, 1, 1, 0])[list(order)])


def test_a_second_moment_must_be_below_its_threshold():
    batch = _batch(np.arange(2)[None])
    shifts = np.float32([[[0.5, 0.5]]])  # mean square 0.25 exactly: both go together
    assert keep_second_moment(batch, shifts, 0.25).sum() == 0
    assert keep_second_moment(batch, shifts, 0.2501).sum() == 2


@pytest.mark.parametrize(
    ('advantage', 'probability', 'weight', 'loss', 'slope'),
    [
        (-0.5, 0.01, 1 / 11, -0.209326, 0.0454545), (0.5, 0.01, 10 / 11, 2.093259, -0.454545),
        (1, 0.5, 2 / 3, 0.462098, -2 / 3), (-1, 0.5, 1 / 3, -0.231049, 1 / 3), (0.7, 1.0, 0.5, 0, -0.35),
    ],
)  # fmt: skip
def test_delight(advantage, probability, weight, loss, slope):
    given = {'policy': np.log([probability]), 'advantages': [advantage], 'ratio': 'none', 'surrogate': 'delight'}
    given |= {'proximal': [0.0], 'behavior': [-3.0], 'correction': 'none'}
    np.testing.assert_allclose(per_token(**given), loss, atol=2e-6)
    np.testing.assert_allclose(gradient(**given), slope, atol=2e-6)
    np.testing.assert_allclose(gradient(**given) / -advantage, weight, rtol=1e-5)


def test_regression_on_the_optimal_advantage():
    deltas, advantages, lengths = [0.4, -0.2, 0.0, 0.2], [0.642626, *[-0.357374] * 3], [1, 2, 3, 2]
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)[None]
    each = lambda values, n=1: jnp.asarray(np.repeat(np.divide(values, n), lengths), jnp.float32)[None]
    oapl = {**_OAPL, 'oapl_beta': 0.5}
    mask = jnp.ones((1, 8), bool)
    weights, denominator = token_weights(_batch(np.repeat(np.arange(4), lengths)[None]), _OAPL['aggregation'])

    def loss(policy):
        zeros = jnp.zeros((1, 8))
        return loss_of(policy, zeros, zeros, each(advantages), mask, denominator, weights[0], starts=starts, **oapl)[0]

    value, slope = jax.value_and_grad(loss)(each(deltas, lengths))
    np.testing.assert_allclose(value, 0.149767, atol=1e-6)
    np.testing.assert_allclose(slope, each([-0.110656, 0.064344, 0.089344, 0.114344]), atol=1e-6)
    at_behavior = jax.grad(loss)(jnp.zeros((1, 8)))
    np.testing.assert_allclose(at_behavior, each([-0.160656, *[0.089344] * 3]), atol=1e-6)


def test_the_anchors_have_the_ratios_they_say():
    np.testing.assert_allclose(np.exp(PROXIMAL - BEHAVIOR), [0.606531, 1.648721, 0.818731], atol=1e-6)
    np.testing.assert_allclose(np.exp(POLICY - BEHAVIOR), [0.303265, 1.648721, 1.228096], atol=1e-6)
    np.testing.assert_allclose(RATIO.prod() ** (1 / 3), 0.908560, atol=1e-6)
