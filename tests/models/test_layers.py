"""The two forms of a tree of weights hold the same bits, wherever the tree stands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areal_jax.models.weights import stack_layers, unstack_layers

N_LAYERS = 3


def listed(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    leaf = lambda *shape: rng.normal(size=shape).astype(dtype)
    layers = {str(i): {'norm': leaf(4), 'mlp': {'weight': leaf(4, 5)}} for i in range(N_LAYERS)}
    return {'embedding': leaf(7, 4), 'layers': layers}


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('dtype', [np.float32, jnp.bfloat16, np.int8])
@pytest.mark.parametrize('kind', ['numpy', 'jax', 'jit'])
def test_both_conversions_move_bits_and_nothing_else(kind, dtype):
    tree = listed(dtype=dtype)
    stack, unstack = stack_layers, lambda x: unstack_layers(x, N_LAYERS)
    if kind != 'numpy':
        tree = jax.tree.map(jnp.asarray, tree)
    if kind == 'jit':
        stack, unstack = jax.jit(stack), jax.jit(unstack)
    stacked = stack(tree)
    assert {type(leaf) for leaf in jax.tree.leaves(stacked)} == {type(leaf) for leaf in jax.tree.leaves(tree)}
    assert sorted(stacked['layers']) == ['mlp', 'norm']
    weight = stacked['layers']['mlp']['weight']
    assert weight.shape == (3, 4, 5)
    for i in range(N_LAYERS):
        np.testing.assert_array_equal(weight[i], tree['layers'][str(i)]['mlp']['weight'])
    np.testing.assert_array_equal(stacked['embedding'], tree['embedding'])
    assert_same(unstack(stacked), tree)
    assert_same(stack(unstack(stacked)), stacked)


def test_layers_are_stacked_by_number_not_by_name():
    # as strings '10' < '2'
    tree = {'layers': {str(i): {'bias': np.full(2, i)} for i in reversed(range(11))}}
    np.testing.assert_array_equal(stack_layers(tree)['layers']['bias'][:, 0], np.arange(11))


def test_moments_of_an_optimizer_convert_with_their_weights():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    weights = jax.tree.map(jnp.asarray, listed())
    _, of_list = jax.jit(optimizer.update)(listed(1), optimizer.init(weights), weights)
    stacked = stack_layers(weights)
    _, of_stacked = jax.jit(optimizer.update)(stack_layers(listed(1)), optimizer.init(stacked), stacked)
    adam = of_list[1][0]
    assert isinstance(adam, optax.ScaleByAdamState)
    assert adam.mu['layers']['2']['norm'].any()
    assert_same(unstack_layers(stack_layers(of_list), N_LAYERS), of_list)
    converted = stack_layers(of_list)
    assert jax.tree.structure(converted) == jax.tree.structure(of_stacked)
    # the norm that clips is summed in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), converted, of_stacked)


def test_placeholders_of_masked_leaves_stay():
    # as adapters beside frozen weights: moments for the matrices only
    optimizer = optax.masked(optax.adam(1e-3), lambda tree: jax.tree.map(lambda leaf: np.ndim(leaf) > 1, tree))
    state = optimizer.init(listed())
    assert state.inner_state[0].mu['layers']['0']['norm'] == optax.MaskedNode()
    stacked = stack_layers(state)
    assert stacked.inner_state[0].mu['layers']['norm'] == optax.MaskedNode()
    assert stacked.inner_state[0].mu['layers']['mlp']['weight'].shape == (3, 4, 5)
    assert_same(unstack_layers(stacked, N_LAYERS), state)


def test_a_leaf_without_the_axis_goes_to_every_layer():
    tree = {'layers': {'count': np.int32(7), 'row': np.zeros(1), 'weight': np.arange(6).reshape(3, 2)}}
    split = unstack_layers(tree, N_LAYERS)['layers']
    for i in range(N_LAYERS):
        assert split[str(i)]['count'] == 7
        assert split[str(i)]['row'].shape == (1,)
        np.testing.assert_array_equal(split[str(i)]['weight'], [2 * i, 2 * i + 1])


def test_layers_are_found_inside_other_containers():
    tree = [{'weights': listed()}, (listed(1), 'name'), None]
    [one, (two, name), nothing] = stack_layers(tree)
    assert_same(one, {'weights': stack_layers(listed())})
    assert_same(two, stack_layers(listed(1)))
    assert (name, nothing) == ('name', None)
