"""Adapters change nothing until they are trained, and nothing more than their merged weights say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import TARGETS, Lora, attach_adapters, is_adapter, merge_adapters, stack_layers

CONFIG = ModelConfig(
    vocab_size=29, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=40, rope_theta=100.0,
    qkv_bias=True,
)  # fmt: skip
LORA = Lora(rank=3, alpha=6.0, targets=TARGETS)
TOKENS = np.array([3, 1, 4, 15, 9, 2], np.int32)


def logits(decoder, params, compiled=True):
    def attend(q, k, v, entry, window):  # every token sees itself and the one before
        before = jnp.concatenate([v[:1], v[:-1]])
        weight = jax.nn.sigmoid(jnp.sum(q.reshape(len(q), 2, -1, 8) * k[:, :, None], axis=(2, 3)))[..., None]
        return jnp.repeat(weight * v + (1 - weight) * before, 2, axis=1), entry

    run = lambda p: decoder.logits(p, decoder.hidden(p, TOKENS, jnp.arange(len(TOKENS)), attend)[0])
    return (jax.jit(run) if compiled else run)(params)


def paths(tree):
    return [jax.tree_util.keystr(p, simple=True, separator='/') for p, _ in jax.tree_util.tree_leaves_with_path(tree)]


def trained(params, seed=0):
    """Adapters that are not 0."""
    rng = np.random.default_rng(seed)

    def leaf(path, value):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        return jnp.asarray(rng.normal(size=value.shape) * 0.2, value.dtype) if is_adapter(name) else value

    return jax.tree_util.tree_map_with_path(leaf, params)


def test_one_projection_by_hand():
    # x = (1, 2); x W = (1, 2); x A = 1 + 2 = 3, times B = (3, 0) alpha/r = 4/1: (12, 0).  Together (13, 2).
    projection = {'weight': jnp.eye(2), 'lora_a': jnp.ones((2, 1)), 'lora_b': jnp.array([[1.0, 0.0]])}
    merged = merge_adapters({'query': projection}, Lora(rank=1, alpha=4.0, targets=TARGETS))
    np.testing.assert_allclose(jnp.array([1.0, 2.0]) @ merged['query']['weight'], [13, 2])
    assert list(merged['query']) == ['weight']


def test_fresh_adapters_change_no_bit():
    base = Decoder(CONFIG).init(7)
    with_adapters = Decoder(CONFIG, lora=LORA)
    fresh = with_adapters.init(8)
    attached = attach_adapters(base, fresh)
    assert jax.tree.structure(attached) == jax.tree.structure(with_adapters.abstract())
    np.testing.assert_array_equal(
        attached['layers']['1']['mlp']['up']['lora_a'], fresh['layers']['1']['mlp']['up']['lora_a']
    )
    np.testing.assert_array_equal(attached['embedding'], base['embedding'])
    plain = logits(Decoder(CONFIG), base, compiled=False)
    np.testing.assert_array_equal(logits(with_adapters, attached, compiled=False), plain)
    # compiled, a product may start its sum from what is added to it, and rounds otherwise
    np.testing.assert_allclose(logits(with_adapters, attached), plain, atol=1e-6 * np.abs(plain).max())


@pytest.mark.parametrize('layers', ['list', 'stacked'])
def test_merged_weights_compute_what_the_attached_ones_do(layers):
    plain, with_adapters = Decoder(CONFIG, layers=layers), Decoder(CONFIG, layers=layers, lora=LORA)
    attached = trained(with_adapters.init(7))
    merged = merge_adapters(attached, LORA)
    assert jax.tree.structure(merged) == jax.tree.structure(plain.abstract())
    expected = logits(with_adapters, attached)
    assert np.abs(expected - logits(plain, plain.init(7))).max() > 0.1  # the adapters do something
    np.testing.assert_allclose(logits(plain, merged), expected, atol=2e-6 * np.abs(expected).max())


def test_either_form_merges_to_the_same():
    attached = trained(Decoder(CONFIG, lora=LORA).init(7))
    of_list = stack_layers(merge_adapters(attached, LORA))
    of_stacked = merge_adapters(stack_layers(attached), LORA)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), of_stacked, of_list)


def test_merging_bfloat16_weights_rounds_once():
    # 1 + 2^-8 rounds to 1 (ties to even); 2^-8 + 2^-8 of two adapters' ranks, summed first, is 2^-7: seen
    small = jnp.full((1, 2), 2.0**-8, jnp.bfloat16)
    tree = {'weight': jnp.ones((1, 1), jnp.bfloat16), 'lora_a': small, 'lora_b': jnp.ones((2, 1), jnp.bfloat16)}
    merged = merge_adapters(tree, Lora(rank=2, alpha=2.0, targets=TARGETS))['weight']
    assert merged.dtype == jnp.bfloat16
    assert float(merged[0, 0]) == 1 + 2**-7


@pytest.mark.parametrize('layers', ['list', 'stacked'])
def test_only_targets_get_adapters(layers):
    lora = Lora(rank=3, alpha=6.0, targets=('value', 'down'))
    found = {path for path in paths(Decoder(CONFIG, layers=layers, lora=lora).abstract()) if is_adapter(path)}
    prefixes = ['layers/0/', 'layers/1/'] if layers == 'list' else ['layers/']
    assert found == {
        f'{prefix}{projection}/{leaf}'
        for prefix in prefixes
        for projection in ('attention/value', 'mlp/down')
        for leaf in ('lora_a', 'lora_b')
    }
    every = Decoder(CONFIG, layers=layers, lora=LORA).abstract()
    assert {path.split('/')[-2] for path in paths(every) if is_adapter(path)} == set(TARGETS)


def test_adapters_are_told_by_their_last_name():
    assert is_adapter('layers/0/attention/query/lora_a')
    assert is_adapter('layers/mlp/up/lora_b')
    assert not is_adapter('layers/0/attention/query/weight')
    assert not is_adapter('lora_a/weight')


def test_gradients_reach_both_matrices():
    decoder = Decoder(CONFIG, lora=LORA)
    gradient = jax.grad(lambda p: jnp.sum(jnp.sin(logits(decoder, p))))
    fresh = decoder.init(7)
    at_start, later = gradient(fresh), gradient(trained(fresh))
    for path, leaf in jax.tree_util.tree_leaves_with_path(at_start):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        if name.endswith('lora_a'):
            np.testing.assert_array_equal(leaf, 0.0)  # behind B = 0
        if name.endswith('lora_b'):
            assert (np.abs(leaf) > 0).any(), name
    for name, leaf in zip(paths(later), jax.tree.leaves(later), strict=True):
        assert (np.abs(leaf) > 0).any(), name


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'rank': 0}, r'lora.rank=0 must be at least 1'),
        ({'alpha': float('nan')}, r'lora.alpha=nan must be above 0 and finite'),
        ({'targets': ()}, r'lora.targets=\(\) must name some of query, key'),
        ({'targets': ('query', 'head')}, r"lora.targets=\('query', 'head'\) must name some of query, key"),
    ],
)
def test_adapters_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Lora(**{'rank': 2, 'alpha': 4.0, 'targets': TARGETS} | change)
