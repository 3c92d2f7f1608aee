"""DPO by hand: loss, gradient and metrics of two tiny pairs in float64; what an update learns wherever pairs lie."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.config.loss import CriticSection
from areal_jax.learning.objective.counting import find_starts, token_weights
from areal_jax.learning.objective.objective import POLICY, REFERENCE, VALUES
from areal_jax.learning.objective.objectives import DirectPreference, RewardModel
from areal_jax.learning.optimizer import add_critic_optimizer
from areal_jax.learning.packing import empty_batch
from areal_jax.learning.weights import CRITIC, VALUE_HEAD, NonFiniteError
from tests.diagonal import diagonal
from tests.learning import examples
from tests.learning.examples import group, make_optimizer, tiny_decoder
from tests.learning.objective.tokens import make_tokens

_BETA = 0.5
# one row: the first pair has answers of 2 and 3 tokens, the second of 1 and 1, then padding
_IDS = np.array([[0, 0, 1, 1, 1, 2, 3, -1]])
_SIGNS = np.array([[1, 1, -1, -1, -1, 1, -1, 0]], np.float32)
_POLICY = np.array([[-1.0, -0.5, -2.0, -0.3, -1.2, -0.7, -0.1, np.nan]], np.float32)
_REFERENCE = np.array([[-1.5, -0.4, -1.0, -0.9, -1.3, -0.2, -0.6, np.inf]], np.float32)
# β Δ: 0.5 ((0.5 - 0.1) - (-1.0 + 0.6 + 0.1)) = 0.35 and 0.5 (-0.5 - 0.5) = -0.5
_MARGINS = np.array([0.35, -0.5])


def make_batch():
    batch = empty_batch(1, 1, 16, 8)
    batch.trajectory_ids[0], batch.advantages[0], batch.loss_mask[0] = _IDS, _SIGNS, _IDS >= 0
    return batch


def tokens_of(policy):
    objective, batch = DirectPreference(_BETA), make_batch()
    weights, denominator = token_weights(batch, objective.aggregation)
    (starts,) = objective.prepare(batch, None)['pair_starts']
    known = {'reference': jnp.asarray(_REFERENCE), 'pair_starts': jnp.asarray(starts)}
    return make_tokens(
        policy, jnp.zeros((1, 8)), jnp.asarray(_SIGNS), jnp.asarray(_IDS >= 0), jnp.float32(denominator),
        token_weights=jnp.asarray(weights[0]), starts=jnp.asarray(find_starts(_IDS)), known=known,
    )  # fmt: skip


def test_loss_and_gradient_are_those_of_equation_7():
    objective = DirectPreference(_BETA)
    (loss, metrics), gradient = jax.value_and_grad(lambda p: objective.loss(tokens_of(p)), has_aux=True)(
        jnp.asarray(_POLICY)
    )
    np.testing.assert_allclose(loss, np.log1p(np.exp(-_MARGINS)).mean(), rtol=1e-6)
    # d/dℓ of a pair: -β σ(-βΔ) at each token of the chosen answer, the opposite at the rejected one; mean of 2 pairs
    pull = _BETA / (1 + np.exp(_MARGINS)) / 2
    expected = [*[-pull[0]] * 2, *[pull[0]] * 3, -pull[1], pull[1], 0]
    np.testing.assert_allclose(gradient[0], expected, rtol=1e-6)
    measured = objective.metrics({name: float(value) for name, value in metrics.items()} | {'entropy_sum': 14.0})
    assert measured == pytest.approx(
        {
            'loss/margin': _MARGINS.mean(),
            'loss/pair_accuracy': 0.5,
            'loss/chosen_reward': _BETA * (0.4 - 0.5) / 2,
            'loss/rejected_reward': _BETA * (-0.3 + 0.5) / 2,
            'loss/entropy': 2.0,
        }
    )


def passed(policy, reference):
    return {POLICY: policy[None], REFERENCE: reference[None]}


def test_held_out_pairs_are_measured_from_the_same_sums():
    measured = DirectPreference(_BETA).measure_held_out(make_batch(), passed(_POLICY, _REFERENCE))
    expected = {'preference_loss': np.log1p(np.exp(-_MARGINS)).mean(), 'margin': _MARGINS.mean(), 'pairs': 2}
    assert measured == pytest.approx({**expected, 'pair_accuracy': 0.5}, rel=1e-6)
    equal = DirectPreference(_BETA).measure_held_out(make_batch(), passed(_POLICY, _POLICY))
    assert equal == pytest.approx({'preference_loss': np.log(2), 'margin': 0, 'pair_accuracy': 0.5, 'pairs': 2})
    with pytest.raises(NonFiniteError, match='held-out preference loss is nan: lower'):
        DirectPreference(_BETA).measure_held_out(make_batch(), passed(np.full_like(_POLICY, np.nan), _REFERENCE))


def test_a_reward_model_compares_the_values_before_the_last_tokens():
    """Values of other tokens, and of padding, do not count: the scores are 2 and -1, then 0.5 and 0.25."""
    values = np.array([[9.0, 2.0, 8.0, 7.0, -1.0, 0.5, 0.25, np.nan]], np.float32)
    objective, batch = RewardModel(), make_batch()
    known = {name: jnp.asarray(array[0]) for name, array in objective.prepare(batch, None).items()}
    tokens = dataclasses.replace(tokens_of(jnp.asarray(_POLICY)), known=known)
    score = lambda v: objective.loss(dataclasses.replace(tokens, values=v))
    (loss, metrics), gradient = jax.value_and_grad(score, has_aux=True)(jnp.asarray(values))
    margins = np.array([3.0, 0.25])
    np.testing.assert_allclose(loss, np.log1p(np.exp(-margins)).mean(), rtol=1e-6)
    pull = 1 / (1 + np.exp(margins)) / 2
    np.testing.assert_allclose(gradient[0], [0, -pull[0], 0, 0, pull[0], -pull[1], pull[1], 0], rtol=1e-6)
    assert objective.metrics({name: float(value) for name, value in metrics.items()}) == pytest.approx(
        {
            'loss/margin': margins.mean(),
            'loss/pair_accuracy': 1.0,
            'loss/chosen_reward': 1.25,
            'loss/rejected_reward': -0.375,
        }
    )
    measured = objective.measure_held_out(batch, {VALUES: values[None]})
    assert measured['margin'] == pytest.approx(margins.mean())
    assert measured['preference_loss'] == pytest.approx(float(loss))


def test_a_group_that_is_no_pair_and_a_beta_of_zero_are_refused():
    with pytest.raises(ValueError, match='a group of 3 answers is no pair'):
        DirectPreference(_BETA).advantages([group([1], [[2]] * 3)])
    with pytest.raises(ConfigError, match=r'loss\.dpo_beta=0\.0 must be'):
        DirectPreference(0.0)


# An update: pairs of uneven lengths.

_DECODER = tiny_decoder(n_layers=1)
_PARAMS, _OTHER = _DECODER.init(seed=2, scale=2.0), _DECODER.init(seed=3, scale=2.0)
_PAIRS = [
    group([1 + i % 3, 2, 3][: 1 + i % 3], [[4 + i, 5, 6][: 1 + i % 3], [7, 8 - i, 9, 1][: 2 + i % 2]], draw=i)
    for i in range(5)
]


_HEAD = {'weight': np.linspace(-0.3, 0.4, 16, dtype=np.float32), 'bias': np.array(0.1, np.float32)}
OBJECTIVES = {'dpo': DirectPreference(_BETA), 'reward model': RewardModel()}


def make_learner(objective='dpo', reference=_OTHER, **settings):
    chosen, parts = OBJECTIVES[objective], {'reference': reference}
    sgd = make_optimizer('sgd', clip_norm=0)
    if chosen.scores_answers:
        settings['critic'] = CriticSection(trunk_gradient=1.0)
        parts, sgd = {'critic': {VALUE_HEAD: _HEAD}}, add_critic_optimizer(sgd, 0.1)
    settings = {'row_tokens': 32, 'packing': 'ordinary', 'objective': chosen} | settings
    return examples.make_learner(params=_PARAMS, optimizer=sgd, parts=parts, **settings)


@functools.cache
def one_pair_in_a_row(objective):
    learner = make_learner(objective, fill='padded')
    return learner.update(_PAIRS, 0), learner.save()['params'], learner.evaluate(_PAIRS)


PLACES = {
    'several': {},
    'shared prompts': {'packing': 'shared_prompt', 'rows_per_microbatch': 2},
    'scan': {'accumulate': 'scan', 'max_microbatches': 8, 'row_tokens': 16, 'row_loss_tokens': 12},
}


@pytest.mark.parametrize(('objective', 'place'), diagonal(OBJECTIVES, PLACES))
def test_what_is_learned_does_not_depend_on_where_pairs_lie(objective, place):
    settings = PLACES[place]
    metrics, params, measured = one_pair_in_a_row(objective)
    learner = make_learner(objective, **settings)
    found = learner.update(_PAIRS, 0)
    for name in ('loss/value', 'loss/margin', 'loss/pair_accuracy', 'loss/chosen_reward'):
        assert found[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-7), name
    start = _PARAMS | ({CRITIC: {VALUE_HEAD: _HEAD}} if CRITIC in params else {})
    moved = jax.tree.map(lambda a, b: np.linalg.norm(a - b), params, start)
    apart = jax.tree.map(lambda a, b: np.linalg.norm(a - b), params, learner.save()['params'])
    for distance, difference in zip(jax.tree.leaves(moved), jax.tree.leaves(apart), strict=True):
        assert difference <= 1e-4 * distance + 1e-7
    assert learner.evaluate(_PAIRS) == pytest.approx(measured, rel=1e-4)


@pytest.mark.parametrize('objective', OBJECTIVES)
def test_the_loss_of_an_update_is_that_of_the_measure_before_it(objective):
    learner = make_learner(objective)
    before = learner.evaluate(_PAIRS)
    assert learner.update(_PAIRS, 0)['loss/value'] == pytest.approx(before['preference_loss'], rel=1e-5)
    assert learner.evaluate(_PAIRS)['preference_loss'] < before['preference_loss']


def test_the_reference_is_the_start_unless_another_is_given_and_stays_when_weights_are_restored():
    learner = make_learner(reference=None)
    assert learner.evaluate(_PAIRS)['margin'] == 0
    learner.update(_PAIRS, 0)
    moved, saved = learner.evaluate(_PAIRS), learner.save()
    assert moved['margin'] != 0
    resumed = make_learner(reference=None)
    resumed.restore(saved)
    assert resumed.evaluate(_PAIRS) == moved
    assert make_learner(reference=_PARAMS).evaluate(_PAIRS)['margin'] == 0
    assert make_learner(reference=_OTHER).evaluate(_PAIRS)['margin'] != 0
