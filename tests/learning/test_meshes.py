"""Whatever the mesh, the strategy and the form of the layers: the same loss, gradients and weights."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import Experts
from areal_jax.sharding.rules import make_mesh
from tests.learning import examples
from tests.learning.examples import make_optimizer, random_groups

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


EXPERTS = dataclasses.replace(CONFIG, family='qwen3_moe', experts=Experts(8, 2, 24))
EXPERT_PARAMS = Decoder(EXPERTS).init(seed=2, scale=2.0)
_EXPERT_MESHES = {
    'fsdp=2 x context=2 x tensor=2': _MESHES['fsdp=2 x context=2 x tensor=2'],
    'expert=4 x fsdp=2': {'expert': 4, 'fsdp': 2},
    'expert=2 x tensor=2 x data=2': {'expert': 2, 'tensor': 2, 'data': 2, 'strategy': 'tensor'},
    'expert=2 x context=2 x fsdp=2': {'expert': 2, 'context': 2, 'fsdp': 2},
    'expert=4 x fsdp=2 by all-to-all': {'expert': 4, 'fsdp': 2, 'changes': {'expert_parallel': 'all_to_all'}},
}


def make_learner(
    *, optimizer=SGD, config=CONFIG, params=PARAMS, layers='list', lora=None, strategy='fsdp', changes=None, **mesh
):
    decoder = Decoder(config, layers=layers, lora=lora)
    return examples.make_learner(
        make_mesh(**mesh), decoder=decoder, params=decoder.complete(params, 0), optimizer=optimizer,
        learning_rate=_ADAM_RATE if optimizer is ADAM else _RATE,
        strategy=strategy, rows_per_microbatch=8, **(changes or {}),
    )  # fmt: skip


def update_once(learner, groups=GROUPS):
    metrics = learner.update(groups, version=2)
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

_EXPERT_FAST = {'expert=4 x fsdp=2': 'list'}
_EXPERT_CASES = [
    pytest.param(mesh, layers, id=f'{name} {layers}', marks=() if name in _EXPERT_FAST else pytest.mark.slow)
    for name, mesh in _EXPERT_MESHES.items()
    for layers in [_EXPERT_FAST.get(name, 'stacked')]
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


def make_expert_learner(**changes):
    return make_learner(config=EXPERTS, params=EXPERT_PARAMS, **changes)


def assert_equal_steps(expected, found):
    """Loss and weights of two first updates, the latter relative to the step of each leaf, which is its gradient."""
    (expected, weights), (metrics, found) = expected, found
    for name in ('loss/value', 'update/grad_norm', 'mismatch/mean_abs'):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, err_msg=name)
    for path, after in jax.tree_util.tree_leaves_with_path(weights):
        before, other = (functools.reduce(lambda tree, key: tree[key.key], path, t) for t in (EXPERT_PARAMS, found))
        step = np.linalg.norm(np.asarray(after) - np.asarray(before))
        assert np.linalg.norm(np.asarray(after) - np.asarray(other)) <= 1e-4 * step + 1e-9, path
        assert step > 0


@pytest.fixture(scope='module')
def experts_alone():
    return update_once(make_expert_learner())


@pytest.mark.parametrize(('mesh', 'layers'), _EXPERT_CASES)
def test_a_mesh_changes_nothing_of_experts(experts_alone, mesh, layers):
    learner = make_expert_learner(layers=layers, **mesh)
    gate = jax.tree.leaves(learner.state.params['layers'])  # of all leaves, those of experts alone have three axes
    cut = {leaf.shape[-3] // leaf.sharding.shard_shape(leaf.shape)[-3] for leaf in gate if _is_of_experts(leaf)}
    assert cut == {mesh.get('expert', 1)}
    assert_equal_steps(experts_alone, update_once(learner))


def _is_of_experts(leaf):
    return leaf.shape[-3:] in ((8, 32, 24), (8, 24, 32))


def with_routes(groups, seed=3):
    """The groups with a record of random distinct experts for each token but the last, which nothing is fed to."""
    rng, column = np.random.default_rng(seed), EXPERTS.routes
    draw = lambda n: np.argsort(rng.random((n, EXPERTS.n_layers, 8)))[..., :2].astype(column.dtype)
    for group in groups:
        prompt = draw(len(group.trajectories[0].prompt.tokens))
        trajectories = [
            dataclasses.replace(
                t,
                segments=tuple(
                    dataclasses.replace(
                        s,
                        columns={column.name: draw(len(s.tokens))},
                        context={column.name: prompt} if number == 0 else {},
                    )
                    for number, s in enumerate(t.segments)
                ),
            )
            for t in group.trajectories
        ]
        yield dataclasses.replace(group, trajectories=tuple(trajectories))


@pytest.mark.parametrize(
    'mesh',
    [
        pytest.param(_EXPERT_MESHES['expert=4 x fsdp=2'], id='expert=4 x fsdp=2', marks=pytest.mark.slow),
        pytest.param(_EXPERT_MESHES['expert=2 x context=2 x fsdp=2'], id='expert=2 x context=2 x fsdp=2'),
    ],
)
def test_recorded_routes_are_followed_on_a_mesh_too(experts_alone, mesh):
    changes = {'records_routes': True, 'routes': 'replay'}
    groups = [*with_routes(GROUPS)]
    expected, found = (update_once(make_expert_learner(changes=changes, **kind), groups) for kind in ({}, mesh))
    assert_equal_steps(expected, found)
    assert expected[0]['routes/sets_changed'] == found[0]['routes/sets_changed'] > 0.5
    assert abs(expected[0]['mismatch/mean_abs'] - experts_alone[0]['mismatch/mean_abs']) > 1e-3  # other experts


def test_what_a_mesh_with_experts_saves_goes_on_on_one_device():
    many, one = (make_expert_learner(optimizer=ADAM, **mesh) for mesh in (_EXPERT_MESHES['expert=4 x fsdp=2'], {}))
    many.update(GROUPS, version=2)
    saved = many.save()
    one.restore(saved)
    jax.tree.map(np.testing.assert_array_equal, one.save(), saved)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one.publish(3)), jax.device_get(many.publish(3)))
    for learner in (many, one):
        learner.update(GROUPS, version=3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2 * _ADAM_RATE),
        *(jax.device_get(learner.save()['params']) for learner in (many, one)),
    )


@pytest.mark.parametrize(
    ('config', 'expert', 'message'),
    [
        (CONFIG, 2, 'expert=2 of cluster.learner shares out the experts of a layer, and this model has none'),
        (EXPERTS, 3, 'expert=3 of cluster.learner does not divide the 8 experts of the model; use a divisor'),
    ],
)
def test_an_axis_without_experts_to_cut_is_refused(config, expert, message):
    with pytest.raises(ConfigError, match=message):
        make_learner(config=config, params=Decoder(config).init(0), expert=expert)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', _MESHES.values(), ids=_MESHES.keys())
def test_adamw_weights_agree_to_two_learning_rates(mesh):
    (_, expected), (_, found) = (update_once(make_learner(optimizer=ADAM, **kind)) for kind in ({}, mesh))
    # where a gradient is 0 but for rounding, Adam's step is +- the learning rate
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2 * _ADAM_RATE), found, expected)
    equal = jax.tree.leaves(jax.tree.map(lambda a, b: np.ravel(np.abs(a - b) < 1e-4), found, expected))
    assert np.concatenate(equal).mean() > 0.98
