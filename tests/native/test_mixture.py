"""Experts in C++ against their formula in float64, and that a number depends on its own token alone, bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models import native_layers
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import Experts
from tests.native import needs_kernels

pytestmark = needs_kernels
HEAD = 8
CHUNK_TOKENS = 960  # of the kernel


class Case(NamedTuple):
    experts: int
    choices: int
    d: int
    width: int
    tokens: int
    normalised: bool = True


CASES = [
    Case(8, 2, 16, 20, 1),  # the width is no multiple of a vector
    Case(8, 3, 24, 12, 7, normalised=False),
    Case(16, 1, 40, 260, 50),  # several panels deep
    Case(128, 8, 160, 136, 33),  # few rows of an expert, which read its matrices as they lie
    Case(8, 8, 640, 8, CHUNK_TOKENS + 2),  # more numbers than are summed at once, and more tokens than a chunk has
]


class Layer(NamedTuple):
    """A layer whose attention gives zeros: what is left of it are its experts."""

    config: ModelConfig
    params: dict

    def prepared(self):
        return Decoder(self.config, tokens='native_columns').prepare(self.params)['layers']['0']

    def run(self, x, valid=None, wanted=None):
        """(x behind the layer [T, d], what the router chose [T, k])."""
        rotation = (np.zeros((len(x), HEAD // 2), np.float32),) * 2
        attend = lambda q, k, v: (jnp.zeros_like(q), None)
        wanted = np.int32(len(x) if wanted is None else wanted)
        run = jax.jit(lambda layer, x: native_layers.run_layer(self.config, layer, x, rotation, attend, wanted, valid))
        out, _, live = run(self.prepared(), x.T)
        return np.asarray(out).T, np.asarray(live)


def make_layer(case, seed=0):
    """(the layer, tokens [T, d])."""
    config = ModelConfig(
        vocab_size=8, d_model=case.d, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=HEAD, d_ff=8, rope_theta=1e4,
        family='mixtral', experts=Experts(case.experts, case.choices, case.width, case.normalised),
    )  # fmt: skip
    params = Decoder(config).init(seed)
    rng = np.random.default_rng(seed)
    draw = lambda leaf: (rng.normal(size=leaf.shape) / np.sqrt(leaf.shape[-2])).astype(np.float32)
    layer = params['layers']['0']
    layer['mlp'] = jax.tree.map(draw, layer['mlp'])
    layer['mlp_norm'] = rng.uniform(0.5, 2.0, case.d).astype(np.float32)
    return Layer(config, params), rng.normal(size=(case.tokens, case.d)).astype(np.float32)


def compute(layer, x):
    """The formula, one choice after the other, in float64."""
    weights, experts = layer.params['layers']['0'], layer.config.experts
    x = x.astype(np.float64)
    normal = x / np.sqrt((x**2).mean(-1, keepdims=True) + layer.config.rms_eps) * weights['mlp_norm']
    logits = normal @ np.float64(weights['mlp']['router']['weight'])
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    live = np.argsort(-scores, axis=-1, kind='stable')[:, : experts.per_token]
    taken = np.take_along_axis(scores, live, -1)
    if experts.normalised:
        taken /= taken.sum(-1, keepdims=True)
    gate, up, down = (np.float64(weights['mlp']['experts'][name]) for name in ('gate', 'up', 'down'))
    y = np.zeros_like(x)
    for e in range(experts.count):
        t, j = np.nonzero(live == e)
        h, u = normal[t] @ gate[e], normal[t] @ up[e]
        y[t] += taken[t, j, None] * ((h / (1 + np.exp(-h)) * u) @ down[e])
    return x + y, live


def assert_same_bits(found, expected):
    np.testing.assert_array_equal(np.asarray(found).view(np.int32), np.asarray(expected).view(np.int32))


@pytest.mark.parametrize('case', CASES, ids=str)
def test_experts_are_those_of_the_formula(case):
    layer, x = make_layer(case)
    found, live = layer.run(x)
    expected, chosen = compute(layer, x)
    np.testing.assert_array_equal(live, chosen)
    np.testing.assert_allclose(found, expected, atol=4e-6 * np.abs(expected).max(), rtol=0)


def test_equal_scores_go_to_the_lower_number():
    layer, x = make_layer(Case(16, 3, 16, 8, 40))
    router = np.array(layer.params['layers']['0']['mlp']['router']['weight'])
    router[:, 2::4] = router[:, [5]]  # 2, 6, 10 and 14 are equal, and often the best
    layer.params['layers']['0']['mlp']['router']['weight'] = jnp.asarray(router * 2)
    _, live = layer.run(x)
    np.testing.assert_array_equal(live, compute(layer, x)[1])
    assert any(row.tolist() == [2, 5, 6] for row in live)
    layer.params['layers']['0']['mlp']['router']['weight'] = jnp.zeros_like(router)
    np.testing.assert_array_equal(layer.run(x)[1], np.tile(np.arange(3), (40, 1)))


@pytest.mark.parametrize('case', [Case(8, 3, 136, 136, CHUNK_TOKENS + 100), Case(128, 8, 40, 24, 60)], ids=str)
def test_a_token_has_the_same_bits_in_any_company(case):
    """By itself, among few and among many: its expert then has 1 row, some, and more than are summed at once."""
    layer, x = make_layer(case)
    everyone, live = layer.run(x)
    for part in (slice(5, 6), slice(2, 9), slice(11, 52), slice(case.tokens // 8, case.tokens)):
        alone, chosen = layer.run(x[part])
        assert_same_bits(alone, everyone[part])
        np.testing.assert_array_equal(chosen, live[part])


def test_tokens_that_do_not_count_reach_no_expert_and_change_nothing():
    case = Case(16, 2, 24, 20, 50)
    layer, x = make_layer(case)
    everyone, live = layer.run(x)
    valid = np.random.default_rng(1).random(case.tokens) < 0.2
    reached = np.unique(live[valid])
    assert 0 < len(reached) < case.experts
    experts = layer.params['layers']['0']['mlp']['experts']
    unused = np.setdiff1d(np.arange(case.experts), reached)
    for name, leaf in experts.items():
        experts[name] = jnp.asarray(leaf).at[unused].set(np.nan)
    found, chosen = layer.run(x, valid)
    assert_same_bits(found, np.where(valid[:, None], everyone, x))
    np.testing.assert_array_equal(chosen, live)  # the router says what it would have chosen


@pytest.mark.parametrize('wanted', [0, 3, CHUNK_TOKENS, CHUNK_TOKENS + 1])
def test_tokens_behind_the_wanted_ones_are_left_out(wanted):
    layer, x = make_layer(Case(8, 2, 16, 8, CHUNK_TOKENS + 20))
    everyone, live = layer.run(x)
    found, chosen = layer.run(x, wanted=wanted)
    assert_same_bits(found[:wanted], everyone[:wanted])
    np.testing.assert_array_equal(chosen[:wanted], live[:wanted])
    assert not chosen[wanted:].any()


@pytest.mark.parametrize('name', ['router', 'experts'])
def test_a_nan_shows_in_the_tokens_that_meet_it(name):
    layer, x = make_layer(Case(8, 2, 16, 8, 40))
    _, live = layer.run(x)
    mlp = layer.params['layers']['0']['mlp']
    mlp[name] = jax.tree.map(lambda leaf: jnp.asarray(leaf).at[3].set(np.nan), mlp[name])
    found, chosen = layer.run(x)
    assert chosen.min() >= 0
    assert chosen.max() < 8
    assert all(len(set(row)) == 2 for row in chosen.tolist())
    np.testing.assert_array_equal(np.isnan(found).all(1), np.ones(40, bool) if name == 'router' else (live == 3).any(1))
