"""The policy loss and its parts: proximal log-probs, corrections, penalties, the loss of a critic, by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.learning.diagnostics.measurement import merge_metrics
from areal_jax.learning.objective.objective import RETURNS, VALUES
from areal_jax.learning.objective.policy_loss import (
    finalize_critic_metrics,
    finalize_policy_metrics,
    kl_penalty,
    loglinear_logprobs,
    proximal_logprobs,
    recomputed_logprobs,
    value_loss,
)
from areal_jax.learning.objective.ratios import masked_sum
from tests.learning.objective.tokens import loss_of, make_tokens


@pytest.fixture(autouse=True)
def _no_rank_promotion():
    with jax.numpy_rank_promotion('raise'):
        yield


def _log(*probabilities: float) -> jax.Array:
    return jnp.log(jnp.array([probabilities], jnp.float32))


def _full(mask_of: jax.Array) -> jax.Array:
    return jnp.ones(mask_of.shape, bool)


# three tokens: log prox -1, policy ratio r = .5 1 1.5, behavior weight w = e^(-1 - log mu) = .606531 1.648721 .818731
_PROXIMAL = jnp.full(3, -1.0)
_POLICY = _PROXIMAL + jnp.log(jnp.array([0.5, 1.0, 1.5]))
_BEHAVIOR = jnp.array([-0.5, -1.5, -0.8])
_ADVANTAGES = jnp.array([1.0, -1.0, 2.0])


@pytest.mark.parametrize(
    ('proximal', 'behavior', 'settings', 'per_token'),
    [
        # PPO: -(.5 * 1), -(1 * -1), -(1.2 * 2): the last is clipped at 1.2, or at 1.28
        (_PROXIMAL, _PROXIMAL, {}, [-0.5, 1.0, -2.4]),
        (_PROXIMAL, _PROXIMAL, {'clip_epsilon_high': 0.28}, [-0.5, 1.0, -2.56]),
        # decoupled: each times its w: -.5 * .606531, 1 * 1.648721, -2.4 * .818731
        (_PROXIMAL, _BEHAVIOR, {}, [-0.303265, 1.648721, -1.964954]),
        # capped at .8: w = .606531, .8, .8
        (_PROXIMAL, _BEHAVIOR, {'behavior_weight_cap': 0.8}, [-0.303265, 0.8, -1.92]),
        # around the behavior policy: ratio k = r w = .303265, 1.648721, 1.228096 -> 1.2, no weight
        (_BEHAVIOR, _BEHAVIOR, {}, [-0.303265, 1.648721, -2.4]),
    ],
    ids=['ppo', 'ppo high .28', 'decoupled', 'capped .8', 'behavior'],
)
@pytest.mark.parametrize('transform', [lambda f: f, jax.jit], ids=['eager', 'jit'])
def test_three_tokens_by_hand(transform, proximal, behavior, settings, per_token):
    loss = transform(lambda *a: loss_of(*a, clip_epsilon=0.2, **settings)[0])
    for denominator in (3.0, 5.0):  # the denominator is the caller's: other micro-batches count too
        value = loss(_POLICY, proximal, behavior, _ADVANTAGES, _full(_POLICY), jnp.float32(denominator))
        np.testing.assert_allclose(value, sum(per_token) / denominator, rtol=2e-6)
    for t, expected in enumerate(per_token):
        only = jnp.arange(3) == t
        value = loss(_POLICY, proximal, behavior, _ADVANTAGES, only, jnp.float32(1))
        np.testing.assert_allclose(value, expected, rtol=2e-6)


def test_two_tokens_with_metrics_by_hand():
    # token 0: r = .6/.4 = 1.5 clipped to 1.2, w = .4/.5 =  .8, A = +1:  .8 * 1.2 =  .96
    # token 1: r = .3/.6 =  .5 clipped to  .8, w = .6/.4 = 1.5, A = -1: 1.5 * -.8 = -1.20
    # loss = -(.96 - 1.20) / 2 = .12
    arguments = (_log(0.6, 0.3), _log(0.4, 0.6), _log(0.5, 0.4), jnp.array([[1.0, -1.0]]))
    loss, metrics = loss_of(*arguments, jnp.ones((1, 2), bool), jnp.float32(2))
    np.testing.assert_allclose(loss, 0.12, rtol=1e-5)
    final = finalize_policy_metrics(merge_metrics([metrics | {'entropy_sum': np.float32(3)}]))
    assert final['loss/clip_fraction'] == 1.0
    np.testing.assert_allclose(final['loss/behavior_weight_mean'], (0.8 + 1.5) / 2, rtol=1e-5)
    np.testing.assert_allclose(final['loss/behavior_weight_max'], 1.5, rtol=1e-5)
    # (.8 + 1.5)^2 / (2 (.64 + 2.25)) = 5.29 / 5.78
    np.testing.assert_allclose(final['loss/effective_sample_size'], 5.29 / 5.78, rtol=1e-5)
    # k = .6/.5 = 1.2 and .3/.4 = .75: k - 1 - log k
    np.testing.assert_allclose(final['loss/approx_kl'], (0.2 - np.log(1.2) - 0.25 - np.log(0.75)) / 2, rtol=1e-4)
    assert final['loss/entropy'] == 1.5


def test_masked_token_is_absent_even_if_its_logprobs_are_infinite():
    mask, infinite = jnp.array([[True, False]]), _log(0.4, 0.0)
    advantages = jnp.array([[1.0, jnp.nan]])

    def loss(policy):
        return loss_of(policy, infinite, infinite, advantages, mask, jnp.float32(1))

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(_log(0.4, 0.5))
    np.testing.assert_allclose(value, -1.0, rtol=1e-5)  # r = w = A = 1, one token
    np.testing.assert_allclose(gradient, [[-1.0, 0.0]], rtol=1e-5)
    assert {name: float(x) for name, x in metrics.items() if name != 'kl_sum'} == {
        'token_count': 1.0, 'clip_count': 0.0, 'weight_sum': 1.0, 'weight_sq_sum': 1.0, 'weight_max': 1.0,
    }  # fmt: skip


def test_infinite_policy_logprob_of_a_masked_token_has_gradient_zero():
    mask = jnp.array([[True, False]])
    ones = jnp.ones((1, 2))
    gradient = jax.grad(lambda p: loss_of(p, _log(0.4, 0.1), _log(0.4, 0.1), ones, mask, 1.0)[0])(_log(0.4, 0.0))
    np.testing.assert_allclose(gradient, [[-1.0, 0.0]], rtol=1e-5)


def test_only_the_policy_is_differentiated():
    mask, count = jnp.ones((1, 2), bool), jnp.float32(2)
    gradients = jax.grad(lambda *a: loss_of(*a, mask, count)[0], argnums=(1, 2, 3))(
        _log(0.45, 0.5), _log(0.4, 0.6), _log(0.5, 0.4), jnp.array([[1.0, -1.0]])
    )
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0.0)


def _gradient(policy, proximal, behavior, advantages, **settings):
    return jax.grad(lambda p: loss_of(p, proximal, behavior, advantages, _full(p), 1.0, **settings)[0])(policy)


def test_at_equal_policies_the_gradient_is_minus_the_advantage():
    np.testing.assert_array_equal(_gradient(_PROXIMAL, _PROXIMAL, _PROXIMAL, _ADVANTAGES), -_ADVANTAGES)


def test_behavior_weight_scales_the_gradient():
    # theta = prox != mu: gradient -w A with w = .606531 1.648721 .818731, A = 1 -1 2
    gradient = _gradient(_PROXIMAL, _PROXIMAL, _BEHAVIOR, _ADVANTAGES)
    np.testing.assert_allclose(gradient, [-0.606531, 1.648721, -1.637462], rtol=1e-5)
    capped = _gradient(_PROXIMAL, _PROXIMAL, _BEHAVIOR, _ADVANTAGES, behavior_weight_cap=0.8)
    np.testing.assert_allclose(capped, [-0.606531, 0.8, -1.6], rtol=1e-5)


def test_where_nothing_clips_the_centre_does_not_matter():
    # w r = pi/mu whatever the proximal policy is
    losses = [
        loss_of(
            _POLICY, centre, _BEHAVIOR, _ADVANTAGES, _full(_POLICY), 3.0, clip_epsilon=0.999, clip_epsilon_high=1e3
        )[0]
        for centre in (_PROXIMAL, _BEHAVIOR, _POLICY)
    ]
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-6)


@pytest.mark.parametrize(
    ('ratio', 'advantage', 'expected'),
    [
        # inside, and on either edge exactly, the gradient of -r A with respect to log pi is -r A
        (1.25, 1.0, -1.25), (0.75, -1.0, 0.75), (1.0, 1.0, -1.0),
        # beyond the edge that the advantage pushes against: none
        (1.26, 1.0, 0.0), (0.74, -1.0, 0.0),
        # beyond the other edge: the way back is open
        (0.5, 1.0, -0.5), (1.5, -1.0, 1.5),
        (1.5, 0.0, 0.0),
    ],
)  # fmt: skip
def test_gradient_at_and_beyond_the_edges(ratio, advantage, expected):
    # log-probs whose difference has the exponential `ratio` exactly: e^x rounds back for these
    policy = jnp.log(jnp.float32(ratio))[None]
    assert float(jnp.exp(policy)[0]) == np.float32(ratio)
    gradient = _gradient(policy, jnp.zeros(1), jnp.zeros(1), jnp.array([advantage]), clip_epsilon=0.25)
    np.testing.assert_allclose(gradient, [expected], rtol=1e-6)


def test_zero_width_region_still_has_its_first_gradient():
    # r = 1 is both edges: jnp.minimum and jnp.clip would halve the gradient twice here
    gradient = _gradient(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2), jnp.array([1.0, -1.0]), clip_epsilon=0.0)
    np.testing.assert_array_equal(gradient, [-1.0, 1.0])


def test_absurd_ratios_stay_finite():
    policy, behavior = jnp.array([-1e4, 0.0]), jnp.array([0.0, -1e4])
    (loss, _), gradient = jax.value_and_grad(
        lambda p: loss_of(p, policy, behavior, jnp.ones(2), _full(policy), 1.0), has_aux=True
    )(policy)
    np.testing.assert_allclose(loss, -np.exp(20.0), rtol=1e-5)  # w = e^-20 and e^20, r = 1
    assert np.isfinite(gradient).all()


def test_empty_mask_is_zero():
    nothing = jnp.zeros(3, bool)
    (loss, metrics), gradient = jax.value_and_grad(
        lambda p: loss_of(p, _PROXIMAL, _BEHAVIOR, _ADVANTAGES, nothing, 4.0), has_aux=True
    )(_POLICY)
    assert loss == 0
    np.testing.assert_array_equal(gradient, 0)
    assert all(m == 0 for m in metrics.values())


def test_changed_values_at_masked_positions_change_nothing():
    mask = jnp.array([True, False, True])
    changed = [jnp.where(mask, x, 7.0) for x in (_POLICY, _PROXIMAL, _BEHAVIOR, _ADVANTAGES)]
    before = loss_of(_POLICY, _PROXIMAL, _BEHAVIOR, _ADVANTAGES, mask, 2.0)
    after = loss_of(*changed, mask, 2.0)
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_sums_of_microbatches_are_those_of_the_whole():
    whole, whole_metrics = loss_of(_POLICY, _PROXIMAL, _BEHAVIOR, _ADVANTAGES, _full(_POLICY), 3.0)
    parts = [
        loss_of(*(x[s] for x in (_POLICY, _PROXIMAL, _BEHAVIOR, _ADVANTAGES)), _full(_POLICY)[s], 3.0)
        for s in (slice(0, 1), slice(1, 3))
    ]
    np.testing.assert_allclose(sum(loss for loss, _ in parts), whole, rtol=1e-6)
    merged, expected = merge_metrics([m for _, m in parts]), merge_metrics([whole_metrics])
    assert merged.keys() == expected.keys()
    np.testing.assert_allclose(list(merged.values()), list(expected.values()), rtol=1e-6)


def test_token_weights_make_the_sequence_mean():
    # sequences of 1 and 3 tokens, r = w = 1: token losses -A = [2, 1, 1, 1]; weights 1, 1/3 each over 2: (2 + 1)/2
    zeros, weights = jnp.zeros(4), jnp.array([1.0, 1 / 3, 1 / 3, 1 / 3])
    loss, _ = loss_of(zeros, zeros, zeros, -jnp.array([2.0, 1.0, 1.0, 1.0]), _full(zeros), jnp.float32(2), weights)
    np.testing.assert_allclose(loss, 1.5, rtol=1e-6)


def test_entropy_bonus_is_a_masked_mean():
    entropy = jnp.array([1.0, 3.0, jnp.nan])
    zeros, mask = jnp.zeros(3), jnp.array([True, True, False])
    assert make_tokens(zeros, zeros, zeros, mask, 4.0).mean(entropy) == 1.0
    assert masked_sum(entropy, jnp.array([True, True, False]), jnp.array([2.0, 1.0, 1.0])) == 5.0


@pytest.mark.parametrize(
    ('estimator', 'policy', 'reference', 'values', 'gradient'),
    [
        # l = -1, 14, 29: no exp is taken, so that nothing is bounded
        ('k1', [-1, -1, -1], [0, -15, -30], [-1, 14, 29], [1, 1, 1]),
        ('k2', [-1, -1, -1], [0, -15, -30], [0.5, 98, 420.5], [-1, 14, 29]),
        # e^1 - 1 - 1 = .718282; e^-14 - 1 + 14 = 13; e^-20 - 1 + 29 = 28; gradient 1 - e^-l: -1.718282, 1, 1
        ('k3', [-1, -1, -1], [0, -15, -30], [0.718282, 13, 28], [-1.718282, 0.999999, 1]),
        # l = 1, 0, -1: e^-1 = .367879, 0, e - 2
        ('k3', [0, -1, -2], [-1, -1, -1], [0.367879, 0, 0.718282], [0.632121, 0, -1.718282]),
        # l = -30: e^20 - 1 - 30, of which the last term alone has a gradient
        ('k3', [-30, 0, 0], [0, 0, 0], [485165164.4, 0, 0], [1, 0, 0]),
    ],
)
@pytest.mark.parametrize('transform', [lambda f: f, jax.jit], ids=['eager', 'jit'])
def test_kl_estimates_by_hand(transform, estimator, policy, reference, values, gradient):
    policy, reference = jnp.array(policy, jnp.float32), jnp.array(reference, jnp.float32)
    weights = jnp.array([1.0, 2.0, 0.5])
    penalty = lambda p: kl_penalty(p, reference, _full(p), 4.0, weights, estimator=estimator)
    (found, metrics), slope = transform(jax.value_and_grad(penalty, has_aux=True))(policy)
    np.testing.assert_allclose(found, np.dot(values, weights) / 4, rtol=2e-6)
    np.testing.assert_allclose(metrics['reference_kl_sum'], sum(values), rtol=2e-6)
    np.testing.assert_allclose(slope, np.multiply(gradient, weights) / 4, rtol=2e-6, atol=1e-7)


def test_the_unbiased_divergence_by_hand():
    # q = 1.2, l = log 1.5: k3 = 1/1.5 - 1 + log 1.5 = .072132, times q; its gradient q (1 - 1/1.5) + q k3 = q l
    policy, reference = jnp.array([-1.0]), jnp.array([-1.0 - np.log(1.5)])
    behavior = policy - np.log(1.2)

    def penalty(policy, behavior):
        return kl_penalty(policy, reference, _full(policy), 1.0, estimator='unbiased', behavior_logprobs=behavior)[0]

    value, slopes = jax.value_and_grad(penalty, argnums=(0, 1))(policy, behavior)
    np.testing.assert_allclose(value, 1.2 * 0.072132, atol=2e-6)
    np.testing.assert_allclose(slopes[0], 0.486558, atol=1e-6)
    np.testing.assert_array_equal(slopes[1], 0)


def test_the_unbiased_divergence_has_its_gradient_whoever_drew_the_token():
    rng = np.random.default_rng(0)
    logits, behavior, reference = rng.normal(size=(3, 7))
    behavior, reference = jax.nn.log_softmax(behavior), jax.nn.log_softmax(reference)

    def expected(logits):  # over the tokens of the behavior policy
        policy, weights = jax.nn.log_softmax(logits), jnp.exp(behavior)
        form = {'estimator': 'unbiased', 'behavior_logprobs': behavior}
        return kl_penalty(policy, reference, _full(policy), 1.0, weights, **form)[0]

    def divergence(logits):
        policy = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(policy) * (policy - reference))

    np.testing.assert_allclose(expected(logits), divergence(logits), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(expected)(logits), jax.grad(divergence)(logits), atol=1e-6)


@pytest.mark.parametrize('estimator', ['k1', 'k2', 'k3', 'unbiased'])
@pytest.mark.parametrize('other', [np.nan, np.inf, -np.inf])
def test_kl_does_not_read_masked_places(estimator, other):
    mask = jnp.array([True, False, True])
    policy, reference, weights = (jnp.array([a, other, b]) for a, b in ((-1.0, -2.0), (-1.5, -1.0), (1.0, 1.0)))

    def penalty(policy, reference, mask):
        form = {'estimator': estimator, 'behavior_logprobs': reference}
        return kl_penalty(policy, reference, mask, 2.0, weights[: len(mask)], **form)

    found = jax.value_and_grad(penalty, has_aux=True)(policy, reference, mask)
    kept = policy[mask], reference[mask], jnp.ones(2, bool)
    expected, slope = jax.value_and_grad(penalty, has_aux=True)(policy.at[1].set(0), reference.at[1].set(0), mask)
    jax.tree.map(np.testing.assert_array_equal, found, (expected, slope))
    np.testing.assert_array_equal(slope[1], 0)
    weights = jnp.ones(2)
    np.testing.assert_allclose(found[0][0], penalty(*kept)[0], rtol=1e-6)


def test_kl_of_nothing_and_of_equals_is_zero():
    zero = jnp.zeros(3)
    for mask, reference in ((jnp.zeros(3, bool), zero - 5), (jnp.ones(3, bool), zero)):
        (penalty, metrics), slope = jax.value_and_grad(lambda p: kl_penalty(p, reference, mask, 1.0), has_aux=True)(
            zero
        )
        assert penalty == metrics['reference_kl_sum'] == 0
        np.testing.assert_array_equal(slope, 0)


def test_k3_is_as_exact_near_equality():
    # l = 1e-4: l^2/2 - l^3/6 = 4.99983e-9, where e^-l - 1 + l in float32 would give 0 or 6e-8
    penalty, _ = kl_penalty(jnp.array([1e-4]), jnp.zeros(1), jnp.ones(1, bool), 1.0)
    np.testing.assert_allclose(penalty, 4.99983e-9, rtol=1e-2)


def test_the_reference_is_not_differentiated():
    slope = jax.grad(lambda r: kl_penalty(_POLICY, r, _full(r), 1.0)[0])(_BEHAVIOR)
    np.testing.assert_array_equal(slope, 0)


def test_kl_metric_is_per_token():
    _, metrics = kl_penalty(jnp.array([0.0, -1.0, -2.0]), jnp.full(3, -1.0), jnp.ones(3, bool), 7.0, estimator='k3')
    loss_metrics = loss_of(_POLICY, _PROXIMAL, _BEHAVIOR, _ADVANTAGES, _full(_POLICY), 3.0)[1]
    merged = merge_metrics([loss_metrics | metrics | {'entropy_sum': np.float32(3)}])
    np.testing.assert_allclose(finalize_policy_metrics(merged)['loss/reference_kl'], 0.36205, rtol=1e-4)


def test_unknown_kl_estimator_is_named():
    with pytest.raises(ValueError, match=r"loss.kl_estimator='k4' is unknown; use one of k1, k2, k3"):
        kl_penalty(_POLICY, _POLICY, _full(_POLICY), 1.0, estimator='k4')


def test_gradient_agrees_with_finite_differences():
    jax.test_util.check_grads(
        lambda p: loss_of(p, _PROXIMAL, _BEHAVIOR, _ADVANTAGES, _full(p), 3.0)[0],
        (_POLICY,), order=1, modes=['rev'], rtol=1e-2,
    )  # fmt: skip


def test_no_microbatch_no_metrics():
    assert merge_metrics([]) == {}
    assert finalize_policy_metrics({}) == {}


_PROXIMAL_POLICY = jnp.array([-2.0, -2.0, -2.0, -2.0])
_PROXIMAL_BEHAVIOR = jnp.array([-1.0, -1.0, -1.0, -1.0])
_VERSIONS = jnp.array([7, 6, 5, 3])
_RECOMPUTED = jnp.array([-5.0, -5.0, -5.0, -5.0])


def _proximal(kind: str, first: bool) -> jax.Array:
    return _centre(kind, _PROXIMAL_POLICY, first)


def _centre(kind, policy, first):
    known = recomputed_logprobs(policy, _RECOMPUTED, jnp.bool_(first))
    return proximal_logprobs(kind, policy, _PROXIMAL_BEHAVIOR, _VERSIONS, jnp.int32(7), known)


def test_loglinear_from_behavior_towards_policy():
    # weights before the update are version 7: e = 0 1 2 4, alpha = 0 1/2 2/3 4/5, log prox = -1 - alpha
    np.testing.assert_allclose(_proximal('loglinear', True), [-1.0, -1.5, -5 / 3, -1.8], rtol=1e-6)


def test_loglinear_of_a_current_token_is_the_behavior_policy_exactly():
    behavior = jnp.array([-0.1234567])
    np.testing.assert_array_equal(
        loglinear_logprobs(jnp.array([-9.0]), behavior, jnp.array([4]), jnp.int32(4)), behavior
    )


def test_loglinear_of_a_very_old_token_is_the_policy():
    value = loglinear_logprobs(_PROXIMAL_POLICY[:1], _PROXIMAL_BEHAVIOR[:1], jnp.array([0]), jnp.int32(10**6))
    np.testing.assert_allclose(value, _PROXIMAL_POLICY[:1], rtol=1e-5)


def test_recompute_takes_the_pass_that_sees_the_weights_before_the_update():
    np.testing.assert_array_equal(_proximal('recompute', True), _PROXIMAL_POLICY)
    np.testing.assert_array_equal(_proximal('recompute', False), _RECOMPUTED)


def test_behavior_is_plain_ppo():
    np.testing.assert_array_equal(_proximal('behavior', True), _PROXIMAL_BEHAVIOR)


@pytest.mark.parametrize('kind', ['recompute', 'loglinear', 'behavior'])
def test_no_gradient_flows_through_the_centre(kind):
    gradient = jax.grad(lambda p: _centre(kind, p, True).sum())(_PROXIMAL_POLICY)
    np.testing.assert_array_equal(gradient, 0)


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match=r"loss.proximal='ema' is unknown; use one of recompute, loglinear, behavior"):
        _proximal('ema', True)


def value_loss_of(values, before, returns, mask=None, clip=0.5):
    values = jnp.asarray(values, jnp.float32)
    mask = jnp.ones(values.shape, bool) if mask is None else jnp.asarray(mask, bool)
    known = {VALUES: jnp.asarray(before, jnp.float32), RETURNS: jnp.asarray(returns, jnp.float32)}
    zeros = jnp.zeros(values.shape)
    tokens = make_tokens(zeros, zeros, zeros, mask, mask.sum(), token_weights=jnp.ones(values.shape), known=known)

    def loss(values):
        return value_loss(dataclasses.replace(tokens, values=values), clip)

    return loss(values), jax.grad(lambda v: loss(v)[0])(values)


@pytest.mark.parametrize(
    ('value', 'before', 'returned', 'loss', 'gradient'),
    [
        (1.2, 0.5, 1.0, 0.02, 0.2),  # at the edge 1.0 the error is 0: the larger one counts
        (1.2, 0.5, 2.0, 0.5, 0.0),  # beyond the edge, towards the return
        (1.0, 0.5, 2.0, 0.5, -1.0),  # on the edge it is not clipped
        (0.4, 0.5, 2.0, 1.28, -1.6),
        (-0.2, 0.5, 2.0, 2.42, -2.2),  # away from the return
    ],
)
def test_a_value_beyond_the_edge_is_trained_where_its_error_is_the_larger_one(value, before, returned, loss, gradient):
    (found, _), slope = value_loss_of([value], [before], [returned])
    np.testing.assert_allclose([found, slope[0]], [loss, gradient], rtol=1e-5)
    if before != value:
        (plain, _), slope = value_loss_of([value], [before], [returned], clip=0)
        np.testing.assert_allclose([plain, slope[0]], [(value - returned) ** 2 / 2, value - returned], rtol=1e-5)


def test_masked_tokens_do_not_count_whatever_they_hold():
    (found, metrics), slope = value_loss_of([1.0, np.nan], [0.9, np.inf], [0.0, np.nan], mask=[True, False])
    np.testing.assert_allclose([found, *slope], [0.5, 1.0, 0.0], rtol=1e-6)
    assert all(np.isfinite(value) for value in metrics.values())


def test_explained_variance_is_1_for_exact_values_and_0_for_their_mean():
    def explained(before, returns):
        (_, metrics), _ = value_loss_of(before, before, returns)
        return finalize_critic_metrics({'token_count': len(returns), **{k: float(v) for k, v in metrics.items()}})

    assert explained([1.0, 2.0], [1.0, 2.0])['critic/explained_variance'] == 1.0
    assert abs(explained([1.5, 1.5], [1.0, 2.0])['critic/explained_variance']) < 1e-6
    assert explained([0.0, 3.0], [1.0, 2.0])['critic/explained_variance'] < 0
    assert 'critic/explained_variance' not in explained([0.3, 0.3], [1.0, 1.0])
    assert finalize_critic_metrics({'token_count': 3.0}) == {}
