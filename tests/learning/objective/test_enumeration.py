"""Expectations over every answer there is: estimators of a gradient against the gradient itself."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.policy_loss import behavior_weight
from tests.learning.objective.tokens import loss_of

# a bandit of three arms: the first pays 1, the baseline is 1/2
_POLICY, _BEHAVIOR = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.4, 0.4])
_ADVANTAGES = np.array([0.5, -0.5, -0.5])
_EXACT = [0.25, -0.15, -0.10]  # p (A - sum p A)
_REINFORCE = {'ratio': 'none', 'surrogate': 'reinforce', 'correction': 'none'}
_DELIGHT = {'ratio': 'none', 'surrogate': 'delight', 'correction': 'none'}
_RATIO = {'ratio_denominator': 'behavior', 'surrogate': 'is_pg', 'correction': 'none'}


def ascent(behavior, **choices):
    """Minus the expected gradient of the loss by the logits of the policy: each arm counts as often as it is drawn."""
    log_behavior = jnp.asarray(np.log(behavior), jnp.float32)[None]
    weights, mask = jnp.asarray(behavior, jnp.float32)[None], jnp.ones((1, 3), bool)
    starts = jnp.arange(3)[None]  # each arm is an answer

    def loss(logits):
        policy = jax.nn.log_softmax(logits)[None]
        advantages = jnp.asarray(_ADVANTAGES, jnp.float32)[None]
        return loss_of(
            policy, jax.lax.stop_gradient(policy), log_behavior, advantages, mask, 1.0, weights, starts=starts,
            **choices,
        )[0]  # fmt: skip

    return -np.asarray(jax.grad(loss)(jnp.asarray(np.log(_POLICY), jnp.float32)))


@pytest.mark.parametrize(
    ('behavior', 'choices', 'expected'),
    [
        (_POLICY, _REINFORCE, _EXACT),
        (_POLICY, _DELIGHT, [0.115216, -0.071822, -0.043394]),
        (_BEHAVIOR, _REINFORCE, [0.25, -0.11, -0.14]),
        (_BEHAVIOR, _RATIO, _EXACT),
        (_BEHAVIOR, _RATIO | {'ratio': 'sequence'}, _EXACT),
        (_BEHAVIOR, _RATIO | {'ratio': 'geometric'}, _EXACT),  # answers of one token
        (_BEHAVIOR, {**_REINFORCE, 'correction': 'truncate'}, _EXACT),
        (_BEHAVIOR, {'clip_epsilon': 0.9}, _EXACT),  # decoupled, theta = prox
        (_BEHAVIOR, {**_REINFORCE, 'correction': 'truncate', 'behavior_weight_cap': 1.0}, [0.175, -0.105, -0.07]),
    ],
    ids=['pg', 'dg', 'uncorrected', 'is', 'sequence', 'geometric', 'is weight', 'decoupled', 'truncated'],
)  # fmt: skip
def test_a_bandit_of_three_arms(behavior, choices, expected):
    if choices == _REINFORCE and behavior is _BEHAVIOR:  # the arms are drawn by others, and nothing corrects it
        drawn = _BEHAVIOR * _ADVANTAGES
        np.testing.assert_allclose(drawn - _POLICY * drawn.sum(), expected, atol=1e-6)
    np.testing.assert_allclose(ascent(behavior, **choices), expected, atol=1e-6)


def test_weights_of_the_bandit():
    weights = np.asarray(
        behavior_weight(PolicyChoices(correction='truncate'), np.log(_POLICY) - np.log(_BEHAVIOR), lambda x: x)
    )
    np.testing.assert_allclose((_BEHAVIOR * weights**2).sum() - 1, 0.575, rtol=1e-6)  # chi squared
    np.testing.assert_allclose(1 / (_BEHAVIOR * weights**2).sum(), 0.634921, rtol=1e-5)


# Answers of three tokens over an alphabet of three; logits [place, token].
_LENGTH, _ALPHABET = 3, 3
_ANSWERS = np.array(list(itertools.product(range(_ALPHABET), repeat=_LENGTH)))  # [27, 3]
_RNG = np.random.default_rng(4)
_LOGITS, _FIRST, _REST = _RNG.normal(size=(3, _LENGTH, _ALPHABET))
_REWARDS = _RNG.normal(size=len(_ANSWERS))


def _logprobs(logits):
    return jax.nn.log_softmax(logits)[jnp.arange(_LENGTH), _ANSWERS]


def _mixed_behavior():
    """The first token is sampled with the weights of one version, the others with those of the next."""
    return np.concatenate([_logprobs(jnp.asarray(_FIRST))[:, :1], _logprobs(jnp.asarray(_REST))[:, 1:]], axis=1)


def test_the_product_of_weights_is_one_on_average_if_each_token_has_its_own_version():
    policy = np.asarray(_logprobs(jnp.asarray(_LOGITS)))
    choices = PolicyChoices(correction='truncate', correction_level='sequence')
    over_answer = lambda x: np.broadcast_to(x.sum(1, keepdims=True), x.shape)
    mixed, last = _mixed_behavior(), np.asarray(_logprobs(jnp.asarray(_REST)))
    drawn = np.exp(mixed.sum(1))
    mean = lambda behavior: (drawn * behavior_weight(choices, policy - behavior, over_answer)[:, 0]).sum()
    np.testing.assert_allclose(mean(mixed), 1, rtol=1e-6)
    assert abs(mean(last) - 1) > 0.05


@pytest.mark.parametrize(
    'choices',
    [
        {'ratio': 'sequence', 'ratio_denominator': 'behavior', 'surrogate': 'is_pg', 'correction': 'none'},
        {'ratio': 'none', 'surrogate': 'reinforce', 'correction': 'truncate', 'correction_level': 'sequence'},
    ],
    ids=['ratio', 'weight'],
)
def test_weights_of_whole_answers_give_the_gradient_of_the_expected_reward(choices):
    behavior = jnp.asarray(_mixed_behavior(), jnp.float32)
    # a ratio stands in the loss of each of the tokens, and each of those reaches the whole answer
    share = 1 / _LENGTH if choices['ratio'] == 'sequence' else 1.0
    drawn = share * jnp.exp(behavior.sum(1, keepdims=True)) * jnp.ones((1, _LENGTH))
    rewards = jnp.asarray(_REWARDS, jnp.float32)[:, None] * jnp.ones((1, _LENGTH))

    def loss(logits):
        policy, mask = _logprobs(logits), jnp.ones(behavior.shape, bool)
        return loss_of(policy, jax.lax.stop_gradient(policy), behavior, rewards, mask, 1.0, drawn, **choices)[0]

    expected = jax.grad(lambda logits: (jnp.exp(_logprobs(logits).sum(1)) * _REWARDS).sum())(jnp.asarray(_LOGITS))
    np.testing.assert_allclose(-jax.grad(loss)(jnp.asarray(_LOGITS)), expected, atol=1e-6)
