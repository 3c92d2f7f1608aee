"""What a learner may be built with beside the mesh: epochs, a reference, dtypes, adapters, forms and optimizers."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import Lora
from areal_jax.sharding.rules import make_mesh
from tests.learning import examples
from tests.learning.examples import make_optimizer, random_groups

_CONFIG = ModelConfig(
    vocab_size=32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=24, rope_theta=100.0
)
_PARAMS = Decoder(_CONFIG).init(seed=2, scale=2.0)
_ONE_LAYER = dataclasses.replace(_CONFIG, n_layers=1)  # half to compile, where layers do not matter
_GROUPS = random_groups(5, 4)
_SGD = make_optimizer('sgd', clip_norm=0)
_ADAM = make_optimizer('adamw', warmup_steps=3)


def _slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def make_learner(
    *, optimizer=_SGD, rate=0.1, layers='list', remat='none', lora=None, mesh=None, config=_ONE_LAYER, **settings
):
    decoder = Decoder(config, layers=layers, remat=remat, lora=lora)
    given = _PARAMS | {'layers': {str(i): _PARAMS['layers'][str(i)] for i in range(config.n_layers)}}
    return examples.make_learner(
        make_mesh(**(mesh or {})), decoder=decoder, params=decoder.complete(given, 7), optimizer=optimizer,
        learning_rate=rate, **settings,
    )  # fmt: skip


def _leaves(tree):
    return {
        jax.tree_util.keystr(p, simple=True, separator='/'): x for p, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def _assert_same(a, b):
    found, expected = _leaves(a), _leaves(b)
    assert found.keys() == expected.keys()
    for name, leaf in found.items():
        assert leaf.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


def _distance(a, b):
    return max(
        float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


# Epochs.


def test_epochs_are_optimizer_steps_around_the_weights_before_the_update():
    learner = make_learner(epochs=3, n_minibatches=2, rate=1.0)
    metrics = learner.update(_GROUPS, 2)
    assert metrics['update/optimizer_steps'] == 6
    assert metrics['loss/clip_fraction'] > 0  # the centre stays, the policy moves away from it
    # data metrics are of the batch, not of its repetitions
    once = make_learner().update(_GROUPS, 2)
    for name in ('update/trained_tokens', 'mismatch/n', 'reward/mean', 'train/row_tokens'):
        np.testing.assert_allclose(metrics[name], once[name], err_msg=name)
    np.testing.assert_allclose(metrics['loss/behavior_weight_mean'], once['loss/behavior_weight_mean'], rtol=1e-5)


def test_two_epochs_of_one_batch_are_two_steps_with_a_kept_centre():
    # lr 0 in effect for the second epoch's centre: with 'behavior' the centre does not depend on weights, so two epochs
    # are two updates of one epoch
    twice = make_learner(epochs=2, proximal='behavior')
    twice.update(_GROUPS, 2)
    again = make_learner(proximal='behavior')
    again.update(_GROUPS, 2)
    again.update(_GROUPS, 2)
    _assert_same(twice.save()['params'], again.save()['params'])


# Reference model.


def test_the_reference_is_the_weights_at_the_start():
    learner = make_learner(kl_coefficient=0.5, rate=0.5)
    first = learner.update(_GROUPS, 2)
    assert abs(first['loss/reference_kl']) < 1e-6  # nothing has moved yet
    second = learner.update(_GROUPS, 3)
    assert second['loss/reference_kl'] > 1e-3


@pytest.mark.slow
def test_a_coefficient_keeps_the_policy_near_the_reference():
    kept, free = (
        make_learner(kl_coefficient=c, rate=0.01) for c in (1.0, 1e-9)
    )  # steeper, SGD overshoots the reference
    for version in range(2, 8):
        near, far = (learner.update(_GROUPS, version)['loss/reference_kl'] for learner in (kept, free))
    assert near < 0.35 * far


# Dtypes.


@pytest.mark.parametrize(('dtype', 'scale'), [pytest.param('bfloat16', 1.0, marks=pytest.mark.slow), ('float16', 64.0)])
@pytest.mark.parametrize('accumulate', [_slow('dispatch'), 'scan'])
def test_narrow_passes_stay_near_float32_and_masters_stay_float32(dtype, scale, accumulate):
    settings = {'accumulate': accumulate, 'max_microbatches': 2}
    exact, narrow = (
        make_learner(rate=1.0, **settings),
        make_learner(rate=1.0, dtype=dtype, loss_scale=scale, **settings),
    )
    before = jax.device_get(exact.publish(2))
    expected, found = exact.update(_GROUPS, 2), narrow.update(_GROUPS, 2)
    assert found['loss/value'] == pytest.approx(expected['loss/value'], abs=0.03)
    assert found['update/grad_norm'] == pytest.approx(expected['update/grad_norm'], rel=0.05)
    weights, exact_weights = narrow.save()['params'], exact.save()['params']
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {np.dtype('float32')}
    step = _distance(exact_weights, before)
    assert 0 < _distance(weights, exact_weights) < 0.1 * step


def test_engines_get_the_dtype_asked_for():
    learner = make_learner(publish_dtype='bfloat16')
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(learner.publish(0))} == {'bfloat16'}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(learner.save()['params'])} == {'float32'}


def test_a_loss_scale_is_divided_out():
    one, scaled = make_learner(), make_learner(loss_scale=8.0)  # a power of two: exact
    assert one.update(_GROUPS, 2)['loss/value'] == scaled.update(_GROUPS, 2)['loss/value']
    assert _distance(one.save()['params'], scaled.save()['params']) < 1e-6


# Forms of layers, rematerialisation.


@pytest.mark.parametrize(
    'form', [_slow({'layers': 'stacked'}), {'layers': 'stacked', 'remat': 'attention'}, _slow({'remat': 'full'})]
)
def test_form_and_remat_change_nothing(form):
    expected, found = make_learner(config=_CONFIG), make_learner(config=_CONFIG, **form)
    one, other = expected.update(_GROUPS, 2), found.update(_GROUPS, 2)
    assert other['loss/value'] == pytest.approx(one['loss/value'], rel=1e-5)
    assert _distance(found.publish(3), expected.publish(3)) < 1e-5


# Adapters.


def test_only_adapters_are_trained_and_engines_get_them_merged():
    lora = Lora(rank=4, alpha=8.0, targets=('query', 'value', 'down'))
    learner = make_learner(lora=lora, optimizer=_ADAM, rate=0.01, config=_CONFIG)
    _assert_same(jax.device_get(learner.publish(0)), jax.device_get(_PARAMS))  # B = 0
    learner.update(_GROUPS, 2)
    saved = learner.save()
    frozen = {n: x for n, x in _leaves(saved['params']).items() if 'lora' not in n}
    _assert_same(frozen, _leaves(jax.device_get(_PARAMS)))
    moments = [name for name in saved['optimizer'] if '/mu/' in name]
    assert len(moments) == 2 * 3 * 2  # layers, targets, A and B
    published = _leaves(learner.publish(3))
    assert published.keys() == _leaves(_PARAMS).keys()
    changed = {n for n, x in published.items() if not np.array_equal(x, _leaves(_PARAMS)[n])}
    assert changed == {
        f'layers/{i}/{n}/weight' for i in (0, 1) for n in ('attention/query', 'attention/value', 'mlp/down')
    }


@pytest.mark.parametrize('layers', [_slow('list'), 'stacked'])
def test_an_adapter_restores_to_the_bit(layers):
    lora = Lora(rank=2, alpha=4.0, targets=('query', 'gate'))
    kind = {'lora': lora, 'optimizer': _ADAM, 'dtype': 'bfloat16', 'layers': layers, 'config': _CONFIG}
    learner, other = make_learner(**kind), make_learner(**kind)
    learner.update(_GROUPS, 2)
    other.restore(learner.save())
    learner.update(_GROUPS, 3)
    other.update(_GROUPS, 3)
    _assert_same(other.save(), learner.save())


# Checkpoints between meshes and forms.


@pytest.mark.parametrize('optimizer', ['adamw', *(_slow(name) for name in ('adamw8bit', 'adafactor', 'lion'))])
def test_a_checkpoint_is_the_same_on_another_mesh_and_in_the_other_form(optimizer):
    make = lambda **kind: make_learner(
        optimizer=make_optimizer(optimizer, warmup_steps=3), rate=0.01, rows_per_microbatch=8, config=_CONFIG, **kind
    )
    saver = make(layers='stacked')
    saver.update(_GROUPS, 2)
    saved = start = saver.save()
    three_axes = {'mesh': {'fsdp': 2, 'tensor': 2, 'data': 2}, 'strategy': 'fsdp_tensor'}
    # from each to the next; an update compiles on one device only
    for kind in ({'mesh': {'fsdp': 8}}, three_axes | {'layers': 'stacked'}, three_axes, {'layers': 'stacked'}):
        restored = make(**kind)
        restored.restore(saved)
        saved = restored.save()
        _assert_same(saved, start)  # bit-equal: weights, moments, the step of the schedule
    rate = restored.update(_GROUPS, 3)['update/learning_rate']
    assert rate == pytest.approx(0.01 * 2 / 3)  # the second of three steps of warm-up


# Rows.


@pytest.mark.parametrize('smaller', [{'tail_buckets': 1}, {'row_buckets': (40, 256)}])
def test_smaller_rows_change_nothing_but_the_places_computed(smaller):
    settings = {'row_tokens': 512, 'row_loss_tokens': 256, 'rows_per_microbatch': 2, 'attention': 'dense'}
    whole, cut = make_learner(**settings), make_learner(**settings, **smaller)
    one, other = whole.update(_GROUPS, 2), cut.update(_GROUPS, 2)
    assert one['update/optimizer_steps'] == 1  # finite: NaN equals NaN below
    for name, value in one.items():
        if not name.startswith('train/'):
            np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert other['train/packing_utilization'] == pytest.approx(2 * one['train/packing_utilization'])
    assert _distance(cut.save()['params'], whole.save()['params']) < 1e-5


@pytest.mark.parametrize('fill', ['algorithm_1', 'padded'])
def test_what_is_trained_does_not_depend_on_the_fill(fill):
    one, other = make_learner(packing='ordinary'), make_learner(packing='ordinary', fill=fill)
    assert other.update(_GROUPS, 2)['loss/value'] == pytest.approx(one.update(_GROUPS, 2)['loss/value'], rel=1e-5)
    assert _distance(other.save()['params'], one.save()['params']) < 1e-5


# What cannot be.


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'dtype': 'int8'}, "learner.dtype='int8' is not known; use one of float32, bfloat16, float16"),
        ({'epochs': 0}, 'learner.epochs=0 must be at least 1'),
        ({'kl_coefficient': -1.0}, r'loss.kl_coefficient=-1.0 must not be negative'),
        (
            {'mesh': {'context': 3}},
            r'learner.row_tokens .*=40 must be a multiple of 6, twice context=3 of cluster.learner',
        ),
        ({'mesh': {'context': 5}}, r'learner.row_loss_tokens .*=24 must be a multiple of context=5 of cluster.learner'),
        ({'mesh': {'tensor': 2}, 'strategy': 'fsdp'}, 'tensor=2 of cluster.learner idle'),
        (
            {'mesh': {'tensor': 8}, 'strategy': 'tensor'},
            r'tensor=8 of cluster.learner does not divide the 4 query heads',
        ),
        ({'attention': 'splash'}, "attention 'splash' does not run on 'cpu'"),
    ],
)
def test_impossible_settings_name_the_field(settings, message):
    with pytest.raises(ValueError, match=message):
        make_learner(**settings).warm_up()
