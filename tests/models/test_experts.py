"""Routers and layers of experts, also over meshes: the formula in float64, recorded routes, and what padding and
company may not do."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.config.fields import ConfigError
from areal_jax.models.decoder import Decoder
from areal_jax.models.expert_products import mix_blocks
from areal_jax.models.experts import Routing, choose_experts, make_mix
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import Experts
from areal_jax.models.weights import Lora
from areal_jax.sharding.rules import TOKEN_AXES, make_mesh
from tests.models.test_expert_products import NAMES, Case, make_inputs

EXPERTS = Experts(6, 2, 12)
CONFIG = ModelConfig(
    vocab_size=17, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=24, rope_theta=100.0,
    family='qwen3_moe', qk_norm=True, tie_embeddings=False, experts=EXPERTS,
)  # fmt: skip
DECODER = Decoder(CONFIG)
PARAMS = DECODER.init(3, scale=2.0)
TOKENS = jnp.arange(11) % 17


def attend(q, k, v, entry, window):
    """Each token sees itself alone."""
    return jnp.repeat(v, q.shape[1] // v.shape[1], axis=1), entry


@functools.partial(jax.jit, static_argnames='decoder')  # operation by operation takes a hundred programs
def run(params, tokens=TOKENS, decoder=DECODER, **routing):
    states, _, routed = decoder.hidden_and_routes(
        params, tokens, jnp.arange(len(tokens)), attend, routing=Routing(**routing)
    )
    return states, routed


def choose_plainly(logits, experts, recorded=None):
    """The formula of the module in float64, row by row."""
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    ids = np.argsort(-scores, axis=-1, kind='stable')[:, : experts.per_token] if recorded is None else recorded
    weights = np.take_along_axis(scores, ids, -1)
    return ids, weights / weights.sum(-1, keepdims=True) if experts.normalised else weights


@pytest.mark.parametrize('normalised', [True, False])
def test_a_choice_is_the_formula(normalised):
    experts = dataclasses.replace(EXPERTS, per_token=3, normalised=normalised)
    logits = np.random.default_rng(0).normal(0, 2, (40, 6))
    choice = choose_experts(jnp.float32(logits), experts)
    ids, weights = choose_plainly(logits, experts)
    np.testing.assert_array_equal(choice.experts, ids)
    np.testing.assert_allclose(choice.weights, weights, rtol=1e-6)
    np.testing.assert_array_equal(choice.routed.loads, np.bincount(ids.ravel(), minlength=6))
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(choice.routed.scores, scores.sum(0), rtol=1e-5)


def test_equal_scores_go_to_the_lower_number():
    np.testing.assert_array_equal(choose_experts(jnp.zeros((1, 6)), EXPERTS).experts, [[0, 1]])


def test_recorded_routes_replace_the_choice_and_not_the_scores():
    logits = np.random.default_rng(1).normal(0, 2, (3, 6))
    recorded = np.array([[5, 0], [6, 6], [2, 3]])  # the second token has none
    choice = choose_experts(jnp.float32(logits), EXPERTS, recorded=jnp.asarray(recorded))
    live, _ = choose_plainly(logits, EXPERTS)
    expected = np.array([recorded[0], live[1], recorded[2]])
    np.testing.assert_array_equal(choice.experts, expected)
    np.testing.assert_allclose(choice.weights, choose_plainly(logits, EXPERTS, expected)[1], rtol=1e-6)
    np.testing.assert_array_equal(choice.routed.live, live)


def test_the_router_has_a_gradient_where_recorded_and_live_experts_differ():
    logits = np.random.default_rng(2).normal(0, 1, (1, 6))
    recorded = np.argsort(logits, axis=-1)[:, :2]  # the two that the router likes least
    value = lambda x: choose_experts(x, EXPERTS, recorded=jnp.asarray(recorded)).weights[0, 0]
    slope = np.asarray(jax.grad(value)(jnp.float32(logits)))
    step = 1e-5
    for expert in range(6):
        moved = [logits + sign * step * np.eye(6)[expert] for sign in (1, -1)]
        high, low = (choose_plainly(one, EXPERTS, recorded)[1][0, 0] for one in moved)
        assert abs(slope[0, expert] - (high - low) / (2 * step)) < 1e-6
    assert np.abs(slope).max() > 1e-2


def test_padding_touches_no_expert_and_changes_nothing():
    """Products of 11 and of 16 rows round alike on some processors only."""
    states, _ = run(PARAMS)
    valid = jnp.arange(16) < 11
    found, routed = run(PARAMS, jnp.concatenate([TOKENS, jnp.full(5, 13)]), valid=valid)
    other, _ = run(PARAMS, jnp.concatenate([TOKENS, jnp.arange(5)]), valid=valid)
    np.testing.assert_array_equal(found[:11], other[:11])
    np.testing.assert_allclose(found[:11], states, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(routed.loads.sum(-1), [22.0, 22.0])


def test_a_token_does_not_depend_on_its_company():
    states, _ = run(PARAMS)
    alone, _ = run(PARAMS, TOKENS[4:5])
    np.testing.assert_allclose(alone[0], states[4], rtol=1e-5, atol=1e-6)


def test_an_expert_that_nobody_reached_has_a_gradient_of_zero():
    recorded = jnp.broadcast_to(jnp.array([1, 4]), (2, 11, 2))
    slopes = jax.grad(lambda p: run(p, recorded=recorded)[0].sum())(PARAMS)
    for layer in slopes['layers'].values():
        for leaf in layer['mlp']['experts'].values():
            reached = np.abs(np.asarray(leaf)).max((1, 2)) > 0
            np.testing.assert_array_equal(reached, [False, True, False, False, True, False])
        assert np.abs(layer['mlp']['router']['weight']).max() > 0


def test_the_order_of_experts_changes_rounding_alone():
    order = np.array([3, 0, 5, 1, 4, 2])
    mixed = jax.tree.map(lambda leaf: leaf, PARAMS)
    for layer in mixed['layers'].values():
        layer['mlp'] = {
            'router': {'weight': layer['mlp']['router']['weight'][:, order]},
            'experts': {name: leaf[order] for name, leaf in layer['mlp']['experts'].items()},
        }
    np.testing.assert_allclose(run(mixed)[0], run(PARAMS)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(order[np.asarray(run(mixed)[1].live)], run(PARAMS)[1].live)


@pytest.mark.parametrize(
    'changes',
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({'layers': 'stacked'}, {'remat': 'full'})),
        {'layers': 'stacked', 'remat': 'dots'},
    ],
)
def test_forms_of_the_decoder_route_alike(changes):
    decoder = Decoder(CONFIG, **changes)
    params = decoder.init(3, scale=2.0)
    expected, routed = run(PARAMS)
    states, found = run(params, decoder=decoder)
    np.testing.assert_allclose(states, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.live, routed.live)
    direction = jax.random.normal(jax.random.key(0), states.shape)  # the last norm fixes the sum of squares
    loss = lambda d: lambda p: (run(p, decoder=d)[0] * direction).sum()
    one, other = jax.grad(loss(DECODER))(PARAMS), jax.grad(loss(decoder))(params)
    np.testing.assert_allclose(
        np.ravel(other['embedding']), np.ravel(one['embedding']), rtol=1e-4, atol=1e-5 * np.abs(one['embedding']).max()
    )


def test_routes_of_a_pass_can_be_replayed():
    states, routed = run(PARAMS)
    again, _ = run(PARAMS, recorded=routed.live)
    np.testing.assert_array_equal(again, states)
    foreign, _ = run(PARAMS, recorded=(routed.live + 1) % 6)
    assert np.abs(foreign - states).max() > 0.1


def test_what_experts_cannot_do_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"lora\.targets=\('query', 'up'\) names 'up', and experts have no adapters"):
        Decoder(CONFIG, lora=Lora(2, 4.0, ('query', 'up')))
    with pytest.raises(ConfigError, match=r'a token cannot reach 7 of 6 experts'):
        dataclasses.replace(EXPERTS, per_token=7)
    with pytest.raises(ConfigError, match=r"family='llama' has none, and experts=.* does not fit it"):
        dataclasses.replace(CONFIG, family='llama')
    with pytest.raises(ConfigError, match=r'dense layers \(2,\) must be layers, 0 to 1'):
        dataclasses.replace(CONFIG, experts=dataclasses.replace(EXPERTS, dense_layers=(2,)))


# Experts over a mesh.


CASE = Case(8, 3, 24, 20, 48, none=0.2)
INPUTS = make_inputs(CASE)
_MESHES = [
    ({'expert': 4, 'fsdp': 2}, TOKEN_AXES),
    ({'expert': 2, 'tensor': 2, 'data': 2}, TOKEN_AXES),
    ({'expert': 2, 'context': 2, 'fsdp': 2}, TOKEN_AXES),
    ({'expert': 3, 'fsdp': 2}, TOKEN_AXES),  # 3 does not divide 8 experts: every device has all
    ({'expert': 2}, ()),  # of an engine
    ({'expert': 2, 'tensor': 2}, ()),
]


def differentiate(mix, x, experts, weights, gate, up, down, dy):
    """y and its gradients."""

    @jax.jit
    def run(x, weights, *matrices):
        y, pull = jax.vjp(lambda x, weights, *rest: mix(x, experts, weights, *rest), x, weights, *matrices)
        return y, *pull(dy)

    return jax.device_get(run(x, weights, gate, up, down))


@pytest.fixture(scope='module')
def expected():
    return differentiate(mix_blocks, *INPUTS)


def _name(value):
    return ','.join(f'{axis}={size}' for axis, size in value.items()) if isinstance(value, dict) else ' '.join(value)


@pytest.mark.parametrize(('axes', 'token_axes'), _MESHES, ids=_name)
def test_a_mesh_computes_the_same_output_and_gradients(expected, axes, token_axes):
    found = differentiate(make_mix(jax.devices()[0], make_mesh(**axes), token_axes), *INPUTS)
    for name, value, wanted in zip(NAMES, found, expected, strict=True):
        assert np.linalg.norm(value - wanted) <= 2e-6 * np.linalg.norm(wanted), name


def test_an_expert_or_a_token_without_a_choice_has_no_gradient():
    *inputs, dy = make_inputs(Case(8, 2, 24, 20, 64, 'few', 0.3))  # experts of odd number have no token
    found = differentiate(make_mix(jax.devices()[0], make_mesh(expert=4, fsdp=2), TOKEN_AXES), *inputs, dy)
    y, dx, _, d_gate, d_up, d_down = found
    for leaf in (d_gate, d_up, d_down):
        assert not leaf[1::2].any()
        assert leaf[::2].any()
    idle = (inputs[1] == 8).all(axis=1)
    assert idle.any()
    assert not y[idle].any()
    assert not dx[idle].any()


def test_tokens_are_exchanged_and_experts_stay_where_they_are():
    mesh = make_mesh(expert=4, data=2)
    at = lambda *axes: NamedSharding(mesh, P(*axes))
    by_token, by_expert = at(TOKEN_AXES), at('expert')
    mix = jax.jit(
        make_mix(jax.devices()[0], mesh, TOKEN_AXES),
        in_shardings=(by_token,) * 3 + (by_expert,) * 3,
        out_shardings=by_token,
    )
    text = mix.lower(*INPUTS[:-1]).compile().as_text()
    exchanged = re.findall(r'= (\w+\[[\d,]*\])\S* (all-gather|reduce-scatter|all-reduce|all-to-all)(?:-start)?\(', text)
    # 48 tokens of width 24 with 3 choices, over 2 groups of 4 devices: each gathers 24 and has the sums for 6
    assert sorted(exchanged) == [
        ('f32[24,24]', 'all-gather'), ('f32[24,3]', 'all-gather'), ('f32[6,24]', 'reduce-scatter'),
        ('s32[24,3]', 'all-gather'),
    ]  # fmt: skip
