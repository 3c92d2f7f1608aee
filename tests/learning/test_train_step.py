from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.learning.forward import forward
from areal_jax.learning.objective.counting import token_weights
from areal_jax.learning.objective.objectives import Likelihood
from areal_jax.learning.packing.packing import pack
from areal_jax.learning.train_step import training_rows
from areal_jax.models.decoder import Decoder
from tests.learning.examples import random_groups, tiny_decoder
from tests.learning.objective.tokens import loss_of

_DECODER = tiny_decoder(n_layers=1)
_TEMPERATURE = 0.7
_GROUPS = random_groups(3, 3)
_ADVANTAGES = [np.random.default_rng(9).normal(size=len(g.trajectories)).astype(np.float32) for g in _GROUPS]
_TRAJECTORIES = [t for g in _GROUPS for t in g.trajectories]


@pytest.fixture(scope='module')
def params():
    return _DECODER.init(seed=1, scale=2.0)


def _attend_causally(q, k, v, cache, window):
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum('qhd,khd->hqk', q, k) / jnp.sqrt(q.shape[-1])
    distance = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
    causal = (distance >= 0) & (distance < (window or len(q)))
    return jnp.einsum('hqk,khd->qhd', jax.nn.softmax(jnp.where(causal, scores, -1e30)), v), cache


def _unpacked_loss(params):
    """One trajectory at a time, padded at its end where causal attention cannot see; logits [trajectory, T, V]."""
    length = max(len(t.tokens) for t in _TRAJECTORIES)

    def padded(arrays):
        return np.stack([np.pad(a, (0, length - len(a))) for a in arrays])

    tokens, mask = padded([t.tokens for t in _TRAJECTORIES]), padded([t.loss_mask for t in _TRAJECTORIES])
    behavior = padded([t.behavior_logprobs for t in _TRAJECTORIES])[:, 1:]

    def logits_of(one):
        hidden, _ = _DECODER.hidden(params, one, jnp.arange(length), _attend_causally)
        return hidden @ _DECODER.head(params).T / _TEMPERATURE

    logits = jax.vmap(logits_of)(tokens)
    policy = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    advantages = np.concatenate(_ADVANTAGES)[:, None] * np.ones_like(behavior)
    loss, _ = loss_of(policy, behavior, behavior, advantages, mask[:, 1:], float(mask.sum()))
    return loss, (policy, logits)


@jax.jit
@functools.partial(jax.value_and_grad, has_aux=True)
def _microbatch_loss(params, rows, denominator):
    policy, entropy = forward(_DECODER, params, rows, _TEMPERATURE)
    behavior = rows['behavior_logprobs']
    loss, _ = loss_of(policy, behavior, behavior, rows['advantages'], rows['loss_mask'], denominator)
    return loss, (policy, entropy)


def _packed_loss_and_gradient(params, rows, denominator):
    parts = [
        _microbatch_loss(params, {name: array[m] for name, array in rows.items()}, denominator)
        for m in range(len(rows['tokens']))
    ]
    loss, gradient = jax.tree.map(lambda *p: sum(p), *[(loss, gradient) for (loss, _), gradient in parts])
    return (loss, np.stack([policy for (_, (policy, _)), _ in parts])), gradient


@pytest.fixture(scope='module')
def unpacked(params):
    return jax.jit(jax.value_and_grad(_unpacked_loss, has_aux=True))(params)


@pytest.mark.parametrize(
    ('mode', 'row_tokens', 'rows_per_microbatch'),
    [
        ('ordinary', 14, 1),  # at most one or two trajectories a row
        ('ordinary', 40, 2),
        ('shared_prompt', 24, 1),  # some groups are split over rows
        ('shared_prompt', 48, 3),
    ],
)
def test_packed_equals_one_trajectory_at_a_time(params, unpacked, mode, row_tokens, rows_per_microbatch):
    (batch,), _ = pack(
        _GROUPS,
        _ADVANTAGES,
        mode=mode,
        fill='first_fit',
        row_tokens=row_tokens,
        row_loss_tokens=24,
        rows_per_microbatch=rows_per_microbatch,
        n_minibatches=1,
    )
    (loss, (policy, _)), gradient = unpacked
    (packed, found), packed_gradient = _packed_loss_and_gradient(params, *training_rows(batch, Likelihood()))
    np.testing.assert_allclose(packed, loss, rtol=1e-5)
    for index, t in enumerate(_TRAJECTORIES):
        predicted = np.flatnonzero(t.loss_mask) - 1
        expected = np.asarray(policy)[index, predicted]
        np.testing.assert_allclose(found[batch.trajectory_ids == index], expected, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), packed_gradient, gradient)


@pytest.mark.parametrize('attention', ['dense', 'blocked'])
def test_a_model_with_a_window_sees_no_further_in_packed_rows(attention):
    # 3 positions: most answers no longer see the start of their prompt
    decoder = Decoder(dataclasses.replace(_DECODER.config, sliding_window=3))
    params = decoder.init(seed=1, scale=2.0)
    (batch,), _ = pack(
        _GROUPS, _ADVANTAGES, mode='shared_prompt', fill='first_fit',
        row_tokens=48, row_loss_tokens=24, rows_per_microbatch=3, n_minibatches=1,
    )  # fmt: skip
    rows, _ = training_rows(batch, Likelihood())
    run = jax.jit(functools.partial(forward, decoder, attention=attention), static_argnames='temperature')
    found = run(params, {name: array[0] for name, array in rows.items()}, temperature=1.0)[0]

    @jax.jit
    def logprobs_of(tokens):
        hidden, _ = decoder.hidden(params, tokens, jnp.arange(len(tokens)), _attend_causally)
        return jax.nn.log_softmax(hidden @ decoder.head(params).T)

    for index, t in enumerate(_TRAJECTORIES[:3]):
        predicted = np.flatnonzero(t.loss_mask)
        expected = logprobs_of(np.pad(t.tokens, (0, 32 - len(t.tokens))))[predicted - 1, t.tokens[predicted]]
        np.testing.assert_allclose(found[batch.trajectory_ids[0] == index], expected, atol=1e-5)


def test_last_token_of_an_answer_has_gradient(params):
    # raising the log-prob of the last token alone moves the weights: it is a target although it is never read
    (batch,), _ = pack(
        _GROUPS[:1], _ADVANTAGES[:1], mode='shared_prompt', fill='first_fit',
        row_tokens=64, row_loss_tokens=32, rows_per_microbatch=1, n_minibatches=1,
    )  # fmt: skip
    rows, _ = training_rows(batch, Likelihood())
    one = {name: array[0] for name, array in rows.items()}
    last = np.flatnonzero(batch.trajectory_ids[0, 0] == 0)[-1]
    assert one['targets'][0, last] == _TRAJECTORIES[0].tokens[-1]
    gradient = jax.jit(jax.grad(lambda p, r: forward(_DECODER, p, r, 1.0)[0][0, last]))(params, one)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient)) > 1e-3


def test_entropy_is_of_the_distribution_at_the_temperature(params, unpacked):
    (_, (_, logits)), _ = unpacked
    (batch,), _ = pack(
        _GROUPS, _ADVANTAGES, mode='shared_prompt', fill='first_fit',
        row_tokens=48, row_loss_tokens=24, rows_per_microbatch=3, n_minibatches=1,
    )  # fmt: skip
    rows, denominator = training_rows(batch, Likelihood())
    (_, (_, entropy)), _ = _microbatch_loss(params, {name: array[0] for name, array in rows.items()}, denominator)
    expected = jax.scipy.special.entr(jax.nn.softmax(logits)).sum(-1)[0, np.flatnonzero(_TRAJECTORIES[0].loss_mask) - 1]
    np.testing.assert_allclose(entropy[batch.trajectory_ids[0] == 0], expected, atol=1e-5)


def test_rows_carry_the_weights_of_their_aggregation():
    (batch,), _ = pack(
        _GROUPS, _ADVANTAGES, mode='ordinary', fill='first_fit',
        row_tokens=40, row_loss_tokens=24, rows_per_microbatch=1, n_minibatches=1,
    )  # fmt: skip
    rows, denominator = training_rows(batch, Likelihood('sequence_mean'))
    weights, expected = token_weights(batch, 'sequence_mean')
    np.testing.assert_array_equal(rows['token_weights'], weights)
    assert denominator == expected == len(_TRAJECTORIES)
    np.testing.assert_allclose(weights.sum(), len(_TRAJECTORIES), rtol=1e-5)  # every trajectory weighs 1
