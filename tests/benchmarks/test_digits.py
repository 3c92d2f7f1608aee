"""The bandit of the digits: its gradient by hand, its ring, and a few updates of every method."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.errors import UserError
from areal_jax.learning.objective.policy_loss import policy_loss
from benchmarks import digits
from benchmarks.digits import METHODS, Digits

KEY = jax.random.key(0)


def toy() -> Digits:
    """Ten images that name themselves: pixel k of digit k is on."""
    images, labels = jnp.tile(jnp.eye(10), (4, 1)), jnp.tile(jnp.arange(10), 4)
    return Digits(images, labels, images[:10], labels[:10])


def gradients(method: str, policy, behavior, rewards):
    """d loss / d log-prob of the action, [n]."""

    def loss(chosen):
        logprobs = jnp.stack([chosen, jnp.full_like(chosen, -1.0)], axis=1)
        tokens = digits.make_tokens(logprobs, jnp.zeros(len(chosen), jnp.int32), behavior, rewards)
        return policy_loss(METHODS[method], tokens, tokens.policy_logprobs)[0]

    return np.asarray(jax.grad(loss)(policy))


def test_the_gradients_are_those_of_the_formulas():
    policy, behavior = jnp.array([-0.2, -1.5, -3.0]), jnp.array([-1.0, -0.5, -2.0])
    rewards = jnp.array([1.0, 0.0, 1.0])
    advantages = np.asarray(rewards - rewards.mean())
    weights = {
        'reinforce': 1.0,
        'importance weights': np.exp(np.asarray(policy - behavior)),
        'dg': 1 / (1 + np.exp(advantages * np.asarray(policy))),  # the sigmoid of advantage times surprisal
    }
    for method, weight in weights.items():
        np.testing.assert_allclose(gradients(method, policy, behavior, rewards), -weight * advantages / 3, rtol=1e-5)


def test_a_batch_is_drawn_with_the_weights_of_so_many_updates_before():
    first = digits.initial_weights(KEY, 10)
    ring = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], 3, axis=0), first)
    state, history = digits.State(first, digits.optax.adam(digits.RATE).init(first), ring), [first]
    for index in range(5):
        state, _ = digits.update(METHODS['reinforce'], toy(), 2, KEY, state, jnp.int32(index))
        history.append(state.weights)
    oldest = jax.tree.map(lambda leaf: leaf[5 % 3], state.ring)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), oldest, history[3])))


@pytest.mark.parametrize(
    'method', [name if name in ('dg', 'ppo') else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_every_method_learns_from_fresh_actions(method):
    errors, rewards = digits.train(METHODS[method], toy(), 0, 400, 2, KEY)
    assert errors[-1] < 0.5
    assert rewards[-1] > rewards[0]


def test_rows_are_over_the_seeds():
    curves = [{'method': 'dg', 'seed': seed, 'test_error': [0.5, last]} for seed, last in enumerate((0.03, 0.01, 0.02))]
    row = {'method': 'dg', 'test_error': [0.03, 0.01, 0.02], 'median': 0.02, 'most': 0.03, 'least': 0.01}
    assert digits.summarise(curves) == [row]


def test_without_scikit_learn_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(digits.sys.modules, 'sklearn', None)
    with pytest.raises(UserError, match=r'^the digits come with scikit-learn, which cannot be imported .*\[dev\]'):
        digits.load_digits()
