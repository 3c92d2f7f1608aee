"""Distillation on sampled tokens: its gradient is that of the divergence, by hand; a teacher of another shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.ranges import ConfigError
from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.objective.distillation import SampledDistillation
from areal_jax.models.decoder import Decoder
from areal_jax.models.shape import ModelConfig
from areal_jax.sharding.mesh import make_mesh
from tests.learning.examples import learner_settings, make_optimizer, random_groups, tiny_decoder
from tests.learning.objective.tokens import make_tokens

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


def make_learner(teacher, **settings):
    settings = {'row_tokens': 40, 'row_loss_tokens': 24} | settings
    settings = learner_settings(**settings, objective=SampledDistillation(2.0))
    sgd = make_optimizer('sgd', clip_norm=0)
    return SpmdLearner(
        _STUDENT, _PARAMS, make_mesh(), optimizer=sgd, learning_rate=0.1, settings=settings, teacher=teacher
    )


def test_a_student_that_is_its_teacher_learns_nothing():
    learner = make_learner((_STUDENT, _PARAMS))
    assert learner.update(_GROUPS, 2)['loss/teacher_kl'] == pytest.approx(0, abs=1e-8)
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


def test_an_objective_without_its_teacher_is_refused():
    with pytest.raises(ConfigError, match=r'the objective reads a teacher: set loss\.teacher'):
        make_learner(None)
