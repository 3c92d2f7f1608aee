"""Distillation on sampled tokens and over the vocabulary: gradients are those of the divergence; other shapes teach."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.learning.objective.objective import FORWARD_KL, REVERSE_KL
from areal_jax.learning.objective.objectives import SampledDistillation, VocabularyDistillation
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from tests.learning import examples
from tests.learning.examples import random_groups, tiny_decoder
from tests.learning.objective.tokens import make_tokens
from tests.models.test_decoder import hidden_of

_MASK = jnp.array([[True, True, True, False]])


def loss_of(policy, behavior, teacher, cap=None):
    arrays = (jnp.asarray([x], jnp.float32) for x in (policy, behavior, teacher))
    policy, behavior, teacher = arrays
    objective = SampledDistillation(cap)

    def loss(policy):
        tokens = make_tokens(
            policy, behavior, jnp.ones((1, 4)), _MASK, jnp.float32(3), token_weights=jnp.ones((1, 4)),
            known={'teacher': teacher},
        )  # fmt: skip
        return objective.loss(tokens)

    (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(policy)
    return gradient[0], {name: float(value) for name, value in metrics.items()}


def test_gradient_and_metrics_by_hand_with_nan_where_nothing_is_trained():
    policy, behavior, teacher = [-1.0, -2.0, -0.5, np.nan], [-1.0, -2.5, -0.1, np.inf], [-0.4, -3.0, -0.5, np.nan]
    # A: 0.6, -1, 0;  w: 1, e^0.5, e^-0.4;  the gradient is -w A / 3
    weights, advantages = np.exp([0, 0.5, -0.4]), np.array([0.6, -1.0, 0.0])
    gradient, metrics = loss_of(policy, behavior, teacher)
    np.testing.assert_allclose(gradient, [*(-weights * advantages / 3), 0], rtol=1e-6)
    measured = SampledDistillation().metrics(metrics | {'entropy_sum': 6.0})
    assert measured['loss/teacher_kl'] == pytest.approx((weights * (np.exp(advantages) - 1 - advantages)).mean())
    assert measured['loss/behavior_weight_max'] == pytest.approx(np.exp(0.5))
    assert measured['loss/entropy'] == 2.0
    capped, _ = loss_of(policy, behavior, teacher, cap=1.2)
    np.testing.assert_allclose(capped, [-0.6 / 3, 1.2 / 3, 0, 0], atol=1e-7)


def test_over_all_tokens_the_gradient_is_that_of_the_divergence():
    rng = np.random.default_rng(0)
    logits, of_teacher, of_behavior = rng.normal(size=(3, 7))
    teacher, behavior = (x - np.log(np.exp(x).sum()) for x in (of_teacher, of_behavior))

    def sampled(z):  # the expectation over tokens of the policy that acted, each as one loss token
        policy = jax.nn.log_softmax(z)
        tokens = make_tokens(
            policy[None], jnp.asarray(behavior)[None], jnp.ones((1, 7)), jnp.ones((1, 7), bool), jnp.float32(1),
            token_weights=jnp.exp(jnp.asarray(behavior))[None], known={'teacher': jnp.asarray(teacher)[None]},
        )  # fmt: skip
        return SampledDistillation().loss(tokens)[0]

    def divergence(z):
        policy = jax.nn.log_softmax(z)
        return jnp.sum(jnp.exp(policy) * (policy - teacher))

    z = jnp.asarray(logits, jnp.float32)
    np.testing.assert_allclose(jax.grad(sampled)(z), jax.grad(divergence)(z), atol=1e-6)


_STUDENT = tiny_decoder(n_layers=1)
_LARGER = Decoder(  # three layers, another width, no grouped queries
    ModelConfig(vocab_size=11, d_model=24, n_layers=3, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32, rope_theta=1e3)
)
_PARAMS = _STUDENT.init(seed=2, scale=2.0)
_GROUPS = random_groups(5, 5)


_OBJECTIVES = [SampledDistillation(2.0), VocabularyDistillation('reverse'), VocabularyDistillation('forward')]


def make_learner(teacher, objective=_OBJECTIVES[0], student=_STUDENT, **settings):
    params = _PARAMS if student is _STUDENT else student.init(seed=2)
    parts = {'teacher': teacher}
    return examples.make_learner(decoder=student, params=params, parts=parts, objective=objective, **settings)


@pytest.mark.parametrize('objective', _OBJECTIVES[:2], ids=['sampled', 'reverse'])
def test_a_student_that_is_its_teacher_learns_nothing(objective):
    learner = make_learner((_STUDENT, _PARAMS), objective)
    metrics = learner.update(_GROUPS, 2)
    assert metrics['loss/teacher_kl'] == pytest.approx(0, abs=1e-8)
    assert metrics['loss/value'] == pytest.approx(0, abs=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), learner.save()['params'], _PARAMS)


def test_a_teacher_of_another_architecture_reads_the_same_rows():
    teacher = (_LARGER, _LARGER.init(seed=4, scale=2.0))
    packed = make_learner(teacher)
    one_by_one = make_learner(teacher, packing='ordinary', fill='padded')
    programs = packed.warm_up()
    first, other = packed.update(_GROUPS, 2), one_by_one.update(_GROUPS, 2)
    assert packed.warm_up() == programs  # nothing was compiled by the update
    for name in ('loss/value', 'loss/teacher_kl'):
        assert first[name] == pytest.approx(other[name], rel=1e-4)
    for a, b, start in zip(
        *(jax.tree.leaves(tree) for tree in (packed.save()['params'], one_by_one.save()['params'], _PARAMS)),
        strict=True,
    ):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(a - start) + 1e-6


def dense(objective, teacher, teacher_params):
    """The mean divergence of the generated tokens from whole logits, each trajectory in a row of its own."""
    trajectories = [t for group in _GROUPS for t in group.trajectories]
    pad = lambda values: np.pad(values, (0, 32 - len(values)))
    tokens = np.stack([pad(t.tokens) for t in trajectories])
    mask = np.stack([pad(t.loss_mask) for t in trajectories])

    def logprobs(decoder, params):
        one = lambda row: decoder.logits(params, hidden_of(decoder, params, row))
        return jax.nn.log_softmax(jax.vmap(one)(jnp.asarray(tokens)) / _TEMPERATURE)[:, :-1]

    def loss(params):
        log_p, log_q = logprobs(_STUDENT, params), logprobs(teacher, teacher_params)
        log_p, log_q = (log_q, log_p) if objective.divergence == 'forward' else (log_p, log_q)
        divergence = (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)
        return jnp.sum(divergence * mask[:, 1:]) / mask.sum()

    return loss


_TEMPERATURE = 0.7


def test_over_the_vocabulary_the_loss_is_the_mean_of_the_divergence_that_was_chosen():
    found = {REVERSE_KL: jnp.array([[1.0, 2.0, 6.0, np.nan]]), FORWARD_KL: jnp.array([[4.0, 0.0, 2.0, np.nan]])}
    policy, behavior = jnp.array([[-1.0, -2.0, -3.0, 0.0]]), jnp.array([[-2.0, -1.0, -9.0, 0.0]])
    tokens = make_tokens(policy, behavior, jnp.ones((1, 4)), _MASK, jnp.float32(3), token_weights=jnp.ones((1, 4)))
    tokens = dataclasses.replace(tokens, statistics=found)
    for objective, expected in zip(_OBJECTIVES[1:], (3.0, 2.0), strict=True):  # whatever the ratios are
        loss, metrics = objective.loss(tokens)
        assert float(loss) == expected
        measured = objective.metrics({name: float(x) for name, x in metrics.items()} | {'entropy_sum': 6.0})
        assert (measured['loss/teacher_kl'], measured['loss/teacher_forward_kl']) == (3.0, 2.0)
    with pytest.raises(ConfigError, match=r"loss\.divergence='jeffreys' is not known"):
        VocabularyDistillation('jeffreys')


@pytest.mark.parametrize(
    'objective', [_OBJECTIVES[1], pytest.param(_OBJECTIVES[2], marks=pytest.mark.slow)], ids=['reverse', 'forward']
)
def test_a_step_over_the_vocabulary_is_the_gradient_of_the_divergence(objective):
    params = _LARGER.init(seed=4, scale=2.0)
    learner = make_learner((_LARGER, params), objective, temperature=_TEMPERATURE)
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)
        plain = jax.jit(jax.value_and_grad(dense(objective, _LARGER, wide(params))))
        value, gradient = jax.device_get(plain(wide(_PARAMS)))
    programs = learner.warm_up()
    metrics, found = learner.update(_GROUPS, 2), learner.save()['params']
    assert learner.warm_up() == programs  # nothing was compiled by the update
    np.testing.assert_allclose(metrics['loss/value'], value, rtol=1e-5)
    for after, before, expected in zip(*map(jax.tree.leaves, (found, _PARAMS, gradient)), strict=True):
        assert np.linalg.norm((before - after) / 0.1 - expected) <= 1e-4 * np.linalg.norm(expected) + 1e-6


def test_an_objective_without_its_teacher_is_refused():
    with pytest.raises(ConfigError, match=r'the objective reads a teacher: set loss\.teacher'):
        make_learner(None)


def test_a_teacher_over_other_tokens_is_refused():
    few = Decoder(dataclasses.replace(_STUDENT.config, output_size=5, tie_embeddings=False))
    with pytest.raises(ConfigError, match=r'loss\.teacher predicts one of 11 tokens, and the model .* one of 5'):
        make_learner((_LARGER, _LARGER.init(seed=4)), VocabularyDistillation(), student=few)
