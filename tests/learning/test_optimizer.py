from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from areal_jax.learning.optimizer import DIRECTIONS
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import Lora
from areal_jax.sharding.rules import path_name
from tests.diagonal import diagonal
from tests.learning.examples import make_optimizer
from tests.models import family_examples

_PARAMS = {'a': jnp.array([3.0, 4.0]), 'b': jnp.array([[1.0]])}
_GRADIENTS = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([[4.0]])}  # norm 5


def _step(optimizer, gradients=_GRADIENTS, rate=0.1, state=None):
    state = optimizer.init(_PARAMS) if state is None else state
    return jax.jit(optimizer.apply)(_PARAMS, state, gradients, jnp.float32(rate))


def test_sgd_by_hand():
    params, state, metrics = _step(make_optimizer('sgd', clip_norm=0))
    np.testing.assert_allclose(params['a'], [3 - 0.1 * 3, 4], rtol=1e-6)
    assert int(state['step']) == 1
    assert float(metrics['grad_norm']) == 5.0


def test_clip_scales_to_the_norm_and_reports_the_norm_before():
    # norm 5 clipped to 1: a fifth of every gradient
    params, _, metrics = _step(make_optimizer('sgd', clip_norm=1.0))
    np.testing.assert_allclose(params['a'], [3 - 0.1 * 3 / 5, 4], rtol=1e-6)
    assert float(metrics['grad_norm']) == 5.0
    params, _, _ = _step(make_optimizer('sgd', clip_norm=6.0))
    np.testing.assert_allclose(params['a'], [3 - 0.1 * 3, 4], rtol=1e-6)


def test_adamw_is_that_of_optax():
    optimizer = make_optimizer('adamw', b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.1, clip_norm=0)
    reference = optax.adamw(0.1, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.1)
    params, state = _PARAMS, optimizer.init(_PARAMS)
    expected, expected_state = _PARAMS, reference.init(_PARAMS)
    for scale in (1.0, -0.5, 2.0):
        gradients = jax.tree.map(lambda g: g * scale, _GRADIENTS)
        params, state, _ = optimizer.apply(params, state, gradients, jnp.float32(0.1))
        updates, expected_state = reference.update(gradients, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, expected)


def test_warm_up_grows_linearly_and_counts_applied_steps():
    # 4 steps of warm-up at .8: .2 .4 .6 .8 .8; a skipped step does not advance it
    optimizer = make_optimizer('sgd', warmup_steps=4)
    state, rates = optimizer.init(_PARAMS), []
    infinite = jax.tree.map(lambda g: g * jnp.inf, _GRADIENTS)
    for gradients in (_GRADIENTS, infinite, _GRADIENTS, _GRADIENTS, _GRADIENTS, _GRADIENTS):
        _, state, metrics = _step(optimizer, gradients, 0.8, state)
        rates.append(float(metrics['learning_rate']))
    np.testing.assert_allclose(rates, [0.2, 0.4, 0.4, 0.6, 0.8, 0.8], rtol=1e-6)


@pytest.mark.parametrize(
    ('name', 'bad'), [*((name, np.nan) for name in DIRECTIONS), ('adamw', np.inf), ('adamw', 3e38)]
)
@pytest.mark.parametrize('selects', [False, True])
def test_non_finite_gradient_changes_no_bit(name, bad, selects):
    optimizer = dataclasses.replace(make_optimizer(name, weight_decay=0.1), selects=selects)
    _, state, _ = _step(optimizer)
    params, after, metrics = _step(optimizer, {'a': jnp.array([1.0, bad]), 'b': jnp.array([[1.0]])}, state=state)
    jax.tree.map(np.testing.assert_array_equal, (params, after), (_PARAMS, state))
    assert float(metrics['skip_count']) == 1.0
    assert float(_step(optimizer)[2]['skip_count']) == 0.0


@pytest.mark.parametrize('name', DIRECTIONS)
def test_a_step_that_selects_is_that_of_a_branch(name):
    branching = make_optimizer(name, weight_decay=0.1)
    selecting = dataclasses.replace(branching, selects=True)
    (params, state, _), (expected, of_branch, _) = _step(selecting), _step(branching)
    jax.tree.map(
        lambda new, old: np.testing.assert_allclose(new, old, rtol=1e-6), (params, state), (expected, of_branch)
    )
    given = _PARAMS, branching.init(_PARAMS), _GRADIENTS, jnp.float32(0.1)
    texts = [jax.jit(one.apply).lower(*given).as_text() for one in (branching, selecting)]
    assert ['stablehlo.case' in text for text in texts] == [True, False]


def counted(function):
    """(the compiled function, a list with an entry for each program that is made of it)"""
    traced = []

    def note(*args):
        traced.append(args)
        return function(*args)

    return jax.jit(note), traced


def test_values_of_the_learning_rate_share_a_program():
    optimizer = make_optimizer('sgd')
    step, traced = counted(optimizer.apply)
    for rate in (0.1, 0.2):
        step(_PARAMS, optimizer.init(_PARAMS), _GRADIENTS, jnp.float32(rate))
    assert len(traced) == 1


def _run(optimizer, params, gradients, rate=0.1):
    state = optimizer.init(params)
    step = jax.jit(optimizer.apply)
    for g in gradients:
        params, state, _ = step(params, state, g, jnp.float32(rate))
    return params, state


def test_lion_by_numpy():
    # decoupled weight decay .1, momentum b2 = .99 behind a direction that mixes with b1 = .9
    gradients = np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32)
    w, m = np.ones((3, 4)), np.zeros((3, 4))
    for g in gradients:
        w = w - 0.1 * (np.sign(0.9 * m + 0.1 * g) + 0.1 * w)
        m = 0.99 * m + 0.01 * g
    optimizer = make_optimizer('lion', b1=0.9, b2=0.99, weight_decay=0.1, clip_norm=0)
    params, _ = _run(optimizer, jnp.ones((3, 4)), gradients)
    np.testing.assert_allclose(params, w, rtol=1e-5)


def test_adafactor_by_numpy():
    # a matrix in row and column means, a small one whole; decay 1 - n^-.8, root mean square of a direction at most 1
    rng = np.random.default_rng(0)
    gradients = [{'w': rng.normal(size=(128, 130)) * n, 'b': rng.normal(size=(3, 4)) * n} for n in (1, 2, 0.5, 3)]
    w, b = np.ones((128, 130)), np.ones((3, 4))
    rows, columns, whole = np.zeros(128), np.zeros(130), np.zeros((3, 4))

    def clipped(direction):
        return direction / max(1, np.sqrt(np.mean(direction**2)))

    for n, g in enumerate(gradients, start=1):
        decay = 1 - n**-0.8
        rows = decay * rows + (1 - decay) * np.mean(g['w'] ** 2, axis=1)
        columns = decay * columns + (1 - decay) * np.mean(g['w'] ** 2, axis=0)
        whole = decay * whole + (1 - decay) * g['b'] ** 2
        w = w - 0.1 * clipped(g['w'] / np.sqrt(np.outer(rows, columns) / rows.mean()))
        b = b - 0.1 * clipped(g['b'] / np.sqrt(whole))
    params, _ = _run(
        make_optimizer('adafactor', clip_norm=0),
        {'w': jnp.ones((128, 130)), 'b': jnp.ones((3, 4))},
        jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradients),
    )
    np.testing.assert_allclose(params['w'], w, rtol=1e-4)
    np.testing.assert_allclose(params['b'], b, rtol=1e-4)


def test_adafactor_steps_stacked_layers_like_listed_ones():
    # the gradient of the second layer grows, so that its direction is clipped and the first one's is not
    rng = np.random.default_rng(0)
    layers = [np.stack([rng.normal(size=(4, 5)), n * rng.normal(size=(4, 5))]).astype(np.float32) for n in (1, 9, 40)]
    stacked = [{'layers': {'mlp': g}, 'head': g[0]} for g in layers]
    listed = [{'layers': {'0': {'mlp': g[0]}, '1': {'mlp': g[1]}}, 'head': g[0]} for g in layers]
    one, other = (
        _run(make_optimizer('adafactor', clip_norm=0), jax.tree.map(jnp.ones_like, gradients[0]), gradients)[0]
        for gradients in (stacked, listed)
    )
    for index in range(2):
        np.testing.assert_allclose(one['layers']['mlp'][index], other['layers'][str(index)]['mlp'], rtol=1e-6)
    np.testing.assert_allclose(one['head'], other['head'], rtol=1e-6)


@pytest.mark.parametrize(('name', 'moment_dtype'), [('adamw', 'bfloat16'), ('adamw8bit', 'float32')])
def test_fewer_bits_go_the_same_way(name, moment_dtype):
    # 20 steps of .1 against those of float32 moments: the way gone differs by 1% or 5% of its length
    params = {'w': jnp.zeros((4, 512))}
    gradients = [{'w': 0.3 + g} for g in np.random.default_rng(0).normal(size=(20, 4, 512)).astype(np.float32)]
    expected, _ = _run(make_optimizer('adamw'), params, gradients)
    found, _ = _run(make_optimizer(name, moment_dtype=moment_dtype), params, gradients)
    distance = np.linalg.norm(found['w'] - expected['w']) / np.linalg.norm(expected['w'])
    assert 1e-5 < distance < (0.01 if name == 'adamw' else 0.05)


@pytest.mark.parametrize(
    ('name', 'settings', 'bytes_per_parameter'),
    [
        ('adamw', {}, 8), ('adamw', {'moment_dtype': 'bfloat16'}, 4), ('lion', {}, 4), ('sgd', {}, 0),
        # two bytes of codes and two scales of 4 bytes for every 256 values: 2 + 8/256
        ('adamw8bit', {}, 2.03125),
        # 2048 + 4096 means of 4 bytes for 2048 * 4096 values, and two placeholders
        ('adafactor', {}, 4 * (1 / 4096 + 1 / 2048)),
    ],
)  # fmt: skip
def test_state_bytes_per_parameter(name, settings, bytes_per_parameter):
    state = jax.eval_shape(make_optimizer(name, **settings).init, jax.ShapeDtypeStruct((2048, 4096), jnp.float32))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    np.testing.assert_allclose(total / (2048 * 4096), bytes_per_parameter, rtol=1e-3, atol=2e-6)


_SHAPES = {
    'embed': (512, 256),
    'layers': {'up': (3, 128, 512), 'down': (3, 512, 128), 'norm': (3, 128)},
    'odd': (8, 100),
}
_SPECS = {
    'embed': ('tensor', 'fsdp'),
    'layers': {'up': (None, 'fsdp', 'tensor'), 'down': (None, ('fsdp', 'tensor')), 'norm': ()},
    'odd': (None, 'fsdp'),
}


def _sharded():
    mesh = jax.make_mesh((4, 2), ('fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 2)
    is_leaf = lambda x: isinstance(x, tuple)
    rng = np.random.default_rng(0)
    params, gradients = (
        jax.tree.map(lambda s: rng.normal(size=s).astype(np.float32), _SHAPES, is_leaf=is_leaf) for _ in range(2)
    )
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(*s)), _SPECS, is_leaf=is_leaf)
    return params, gradients, shardings, NamedSharding(mesh, PartitionSpec())


@pytest.mark.parametrize('name', DIRECTIONS)
def test_sharded_steps_are_those_of_one_device(name):
    params, gradients, shardings, replicated = _sharded()
    optimizer = make_optimizer(name, weight_decay=0.1)
    state_shardings = optimizer.shardings(params, shardings, replicated)
    expected, expected_state = _run(optimizer, params, [gradients] * 3)
    step = jax.jit(optimizer.apply, donate_argnums=(0, 1), out_shardings=(shardings, state_shardings, replicated))
    placed, g = jax.device_put((params, gradients), (shardings, shardings))
    state = jax.jit(optimizer.init, out_shardings=state_shardings)(placed)
    for _ in range(3):
        placed, state, _ = step(placed, state, g, jax.device_put(np.float32(0.1), replicated))
    for x, y, start in zip(*map(jax.tree.leaves, (placed, expected, params)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        assert np.abs(y - start).max() > 0.05  # it has moved
    for x, y in zip(*map(jax.tree.leaves, (state, expected_state)), strict=True):
        assert x.shape == y.shape
        # a sum in another order may turn one rounding of a code
        assert np.mean(np.asarray(x) != np.asarray(y)) < 1e-3 if x.dtype == jnp.int8 else np.allclose(x, y, rtol=1e-4)


def test_moments_lie_as_their_parameters():
    params, _, shardings, replicated = _sharded()
    for name, moments in (('adamw', 'mu'), ('adamw8bit', 'mu'), ('lion', 'mu')):
        state = make_optimizer(name).shardings(params, shardings, replicated)
        assert getattr(state['transform'][0], moments) == shardings
        assert state['step'] == replicated


def test_scales_lie_as_the_blocks_they_belong_to():
    # a last axis of 512 has 16 blocks of 32, cut as it is; one of 256, 128 or 100 a single block, on every device
    params, _, shardings, replicated = _sharded()
    scales = make_optimizer('adamw8bit').shardings(params, shardings, replicated)['transform'][0].nu_scale
    specs = jax.tree.map(lambda s: tuple(s.spec), scales)
    assert specs['embed'] == ('tensor', None)
    assert specs['layers']['up'] == (None, 'fsdp', 'tensor')
    assert specs['layers']['down'] == (None, ('fsdp', 'tensor'), None)
    assert specs['odd'] == (None, None)


def test_factored_moments_lie_as_the_axis_they_keep():
    params, _, shardings, replicated = _sharded()
    optimizer = make_optimizer('adafactor')
    state = optimizer.shardings(params, shardings, replicated)['transform'][0][0]
    shapes = jax.eval_shape(optimizer.init, params)['transform'][0][0]
    by_shape = {}
    for tree, leaves in ((state.v_row, shapes.v_row), (state.v_col, shapes.v_col), (state.v, shapes.v)):
        for place in ('up', 'down', 'norm'):
            by_shape[place, leaves['layers'][place].shape] = tuple(tree['layers'][place].spec)
    assert by_shape['up', (3, 128)] == (None, 'fsdp')
    assert by_shape['up', (3, 512)] == (None, 'tensor')
    assert by_shape['down', (3, 512)] == (None, ('fsdp', 'tensor'))
    assert by_shape['down', (3, 128)] == (None, None)
    assert by_shape['up', (1,)] == ()  # a placeholder
    assert by_shape['norm', (3, 128)] == ()  # not factored: as the parameter


@pytest.mark.parametrize('axis', [0, 1])
def test_eight_bits_need_no_values_of_other_devices(axis):
    # 4096 columns over 8 devices: two blocks of 256 on each; the norm is one number
    mesh = jax.make_mesh((8,), ('fsdp',), axis_types=(AxisType.Auto,))
    spec = PartitionSpec(*(None,) * axis, 'fsdp')
    sharding, replicated = NamedSharding(mesh, spec), NamedSharding(mesh, PartitionSpec())
    optimizer, weights = make_optimizer('adamw8bit'), jax.ShapeDtypeStruct((64, 4096), jnp.float32, sharding=sharding)
    state_shardings = optimizer.shardings(weights, sharding, replicated)
    place = lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s)
    state = jax.tree.map(place, jax.eval_shape(optimizer.init, weights), state_shardings)
    step = jax.jit(optimizer.apply, out_shardings=(sharding, state_shardings, replicated))
    text = step.lower(weights, state, weights, jax.ShapeDtypeStruct((), jnp.float32)).compile().as_text()
    for collective in ('all-gather', 'all-to-all', 'collective-permute'):
        assert collective not in text


@pytest.mark.parametrize(
    ('kind', 'factors'),
    # warm-up over 2 steps, total 6, final ratio .2: 1/4 1/2 3/4 1 of the way from 1 to .2 after step 2;
    # cosine: (1 + cos(pi/4)) / 2 = .853553 -> .2 + .8 * .853553
    [
        ('constant', [0.5, 1, 1, 1, 1, 1, 1]),
        ('linear', [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ('cosine', [0.5, 1, 0.882843, 0.6, 0.317157, 0.2, 0.2]),
    ],
)
def test_schedules_by_hand(kind, factors):
    optimizer = make_optimizer('sgd', warmup_steps=2, schedule=kind, total_steps=6, final_ratio=0.2)
    (step, traced), state, rates = counted(optimizer.apply), optimizer.init(_PARAMS), []
    for _ in factors:
        _, state, metrics = step(_PARAMS, state, _GRADIENTS, jnp.float32(2.0))
        rates.append(float(metrics['learning_rate']))
    np.testing.assert_allclose(rates, 2 * np.array(factors), rtol=1e-5)
    assert len(traced) == 1


def test_settings_that_cannot_work_are_named():
    with pytest.raises(
        ValueError, match=r"optimizer.name='adam' is not known; use one of adamw, adamw8bit, adafactor, l"
    ):
        make_optimizer('adam')


_DECAYED = {'query/weight', 'key/weight', 'value/weight', 'output/weight', 'gate/weight', 'up/weight', 'down/weight'}


@pytest.mark.parametrize(
    ('name', 'layers', 'tied'),
    diagonal(DIRECTIONS, [('list', True), ('stacked', False), ('list', False), ('stacked', True)]),
)
def test_only_matrices_decay_in_either_form(name, layers, tied):
    # zero gradients give zero directions, so that what is left of a step is the decay: 1 - .1 * .5 = .95
    config = ModelConfig(
        vocab_size=11, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=24, rope_theta=100.0,
        family='qwen3', qk_norm=True, qkv_bias=True, tie_embeddings=tied,
    )  # fmt: skip
    decoder = Decoder(config, layers=layers, lora=Lora(2, 4.0, ('up',)))
    params = jax.tree.map(lambda x: jnp.ones(x.shape), decoder.abstract())
    stepped, _ = _run(
        make_optimizer(name, weight_decay=0.5, decay='matrices'), params, [jax.tree.map(jnp.zeros_like, params)]
    )
    decayed = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(stepped):
        assert np.ptp(leaf) == 0
        np.testing.assert_allclose(np.ravel(leaf)[0], 0.95 if leaf.ravel()[0] != 1 else 1.0, rtol=1e-6)
        if leaf.ravel()[0] != 1:
            decayed.add('/'.join(path_name(path).split('/')[-2:]))
    assert decayed == _DECAYED | {'up/lora_a', 'up/lora_b'} | (set() if tied else {'head'})


@pytest.mark.parametrize('layers', ['list', 'stacked'])
@pytest.mark.parametrize(('name', 'module'), [('qwen3_5', '/delta/'), ('deepseek_v3', '/attention/')])
def test_of_delta_nets_and_latent_attention_matrices_alone_decay(name, module, layers):
    decoder = Decoder(family_examples.CONFIGS[name], layers=layers)
    params = jax.tree.map(lambda x: jnp.ones(x.shape), decoder.abstract())
    stepped, _ = _run(
        make_optimizer('adamw', weight_decay=0.5, decay='matrices'), params, [jax.tree.map(jnp.zeros_like, params)]
    )
    leaves = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(stepped)]
    decayed = {path for path, leaf in leaves if module in path and np.all(leaf != 1)}
    assert decayed == {
        path for path, _ in leaves if module in path and path.endswith(('/weight', '/key_up', '/value_up'))
    }
