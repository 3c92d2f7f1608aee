"""Whatever the mesh, the strategy and the form of the layers: the same loss, gradients and weights."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from areal_jax.learning.learner import SpmdLearner
from areal_jax.models.decoder import Decoder
from areal_jax.models.shape import Experts, ModelConfig
from areal_jax.sharding.mesh import make_mesh
from tests.learning.examples import learner_settings, make_optimizer, random_groups

CONFIG = ModelConfig(
    vocab_size=32, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, rope_theta=100.0,
    tie_embeddings=False, qkv_bias=True, output_bias=True, qk_norm=True, family='qwen3',
)  # fmt: skip
PARAMS = Decoder(CONFIG).init(seed=2, scale=2.0)
GROUPS = random_groups(5, 5)
_RATE = 10.0  # of SGD: the step of a weight, its gradient, is then far above the rounding of the weight
_ADAM_RATE = 0.01
SGD, ADAM = make_optimizer('sgd', clip_norm=0), make_optimizer('adamw')
_MESHES = {
    'fsdp=8': {'fsdp': 8},
    'fsdp=4 x tensor=2': {'fsdp': 4, 'tensor': 2, 'strategy': 'fsdp_tensor'},
    'context=2 x fsdp=4': {'fsdp': 4, 'context': 2},
    'context=4 x data=2': {'data': 2, 'context': 4},
    'tensor=4, more than key heads': {'data': 2, 'tensor': 4, 'strategy': 'tensor'},
    'fsdp=2 x context=2 x tensor=2': {'fsdp': 2, 'context': 2, 'tensor': 2, 'strategy': 'fsdp_tensor'},
}


def make_learner(
    *, optimizer=SGD, config=CONFIG, params=PARAMS, layers='list', lora=None, strategy='fsdp', changes=None, **mesh
):
    decoder = Decoder(config, layers=layers, lora=lora)
    rows = {'row_tokens': 40, 'row_loss_tokens': 24, 'rows_per_microbatch': 8}
    settings = learner_settings(strategy=strategy, **rows, **(changes or {}))
    rate = _ADAM_RATE if optimizer is ADAM else _RATE
    params = decoder.complete(params, 0)
    return SpmdLearner(decoder, params, make_mesh(**mesh), optimizer=optimizer, learning_rate=rate, settings=settings)


def update_once(learner):
    metrics = learner.update(GROUPS, version=2)
    return metrics, learner.save()['params']


@pytest.fixture(scope='module')
def alone():
    return update_once(make_learner())


# all kinds of cuts at once; layers in a list, and data=2 x fsdp=4, are also shown by test_learner.py
_FAST = {'fsdp=2 x context=2 x tensor=2': 'stacked'}
_CASES = [
    pytest.param(mesh, layers, id=f'{name} {layers}', marks=() if _FAST.get(name) == layers else pytest.mark.slow)
    for name, mesh in _MESHES.items()
    for layers in ('list', 'stacked')
]


@pytest.mark.parametrize(('mesh', 'layers'), _CASES)
def test_a_mesh_changes_nothing(alone, mesh, layers):
    expected, weights = alone
    metrics, found = update_once(make_learner(layers=layers, **mesh))
    for name in ('loss/value', 'update/grad_norm', 'loss/entropy', 'loss/approx_kl', 'mismatch/mean_abs'):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, err_msg=name)
    steps = jax.tree.map(lambda after, before: np.asarray(after) - np.asarray(before), found, PARAMS)
    expected_steps = jax.tree.map(lambda after, before: np.asarray(after) - np.asarray(before), weights, PARAMS)
    for path, step in jax.tree_util.tree_leaves_with_path(steps):
        (other,) = (s for p, s in jax.tree_util.tree_leaves_with_path(expected_steps) if p == path)
        # SGD without clipping: the step is the gradient
        assert np.linalg.norm(step - other) <= 1e-5 * np.linalg.norm(other) + 1e-9, jax.tree_util.keystr(path)
        assert np.linalg.norm(other) > 0


def test_a_mesh_changes_nothing_of_experts():
    config = dataclasses.replace(CONFIG, family='qwen3_moe', experts=Experts(8, 2, 24))
    params = Decoder(config).init(seed=2, scale=2.0)
    learners = [
        make_learner(config=config, params=params, layers=layers, **mesh)
        for layers, mesh in (('list', {}), ('stacked', _MESHES['fsdp=2 x context=2 x tensor=2']))
    ]
    (expected, weights), (metrics, found) = map(update_once, learners)
    for name in ('loss/value', 'update/grad_norm', 'mismatch/mean_abs'):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, err_msg=name)
    for path, after in jax.tree_util.tree_leaves_with_path(weights):
        before, other = (functools.reduce(lambda tree, key: tree[key.key], path, tree) for tree in (params, found))
        step = np.linalg.norm(np.asarray(after) - np.asarray(before))
        assert np.linalg.norm(np.asarray(after) - np.asarray(other)) <= 1e-4 * step + 1e-9, path
        assert step > 0


@pytest.mark.slow
@pytest.mark.parametrize('mesh', _MESHES.values(), ids=_MESHES.keys())
def test_adamw_weights_agree_to_two_learning_rates(mesh):
    (_, expected), (_, found) = (update_once(make_learner(optimizer=ADAM, **kind)) for kind in ({}, mesh))
    # where a gradient is 0 but for rounding, Adam's step is +- the learning rate
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2 * _ADAM_RATE), found, expected)
    equal = jax.tree.leaves(jax.tree.map(lambda a, b: np.ravel(np.abs(a - b) < 1e-4), found, expected))
    assert np.concatenate(equal).mean() > 0.98
