"""A train step on the GPU: finite, the CPU's to rounding, in place, without a warning about donation."""

import warnings

import jax
import numpy as np
import pytest

from areal_jax.learning.learner import SpmdLearner
from areal_jax.models.attention.backends import choose_implementation, local_device
from areal_jax.models.decoder import Decoder
from areal_jax.sharding.rules import make_mesh
from benchmarks.gpu_parts.shapes import TINY
from tests.learning.examples import learner_settings, make_optimizer, random_groups

pytestmark = pytest.mark.gpu
ROWS = {'row_tokens': 256, 'row_loss_tokens': 128, 'rows_per_microbatch': 2}


@pytest.fixture(scope='module')
def params():
    return jax.device_get(Decoder(TINY).init(seed=0, scale=2.0))


@pytest.fixture(scope='module')
def groups():
    return random_groups(3, 12, vocabulary=TINY.vocab_size)


def make_learner(params, devices=None, optimizer='adamw', layers='stacked', learning_rate=1e-2, **settings):
    return SpmdLearner(
        Decoder(TINY, layers=layers, remat='dots'),
        params,
        make_mesh(devices=devices or jax.local_devices()[:1]),
        optimizer=make_optimizer(optimizer, clip_norm=1.0),
        learning_rate=learning_rate,
        settings=learner_settings(**ROWS, **settings),
    )


def test_a_step_in_float32_is_that_of_the_cpu(params, groups, device):
    found = []
    with jax.default_matmul_precision('highest'):
        for devices in (None, jax.devices('cpu')[:1]):
            learner = make_learner(params, devices, 'sgd', attention='blocked')
            metrics = learner.update(groups, version=2)
            found.append((metrics, learner.save()['params']))
    (ours, weights), (theirs, expected) = found
    for name in ('loss/value', 'update/grad_norm'):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, err_msg=name)
    for leaf, reference, before in zip(*map(jax.tree.leaves, (weights, expected, params)), strict=True):
        moved = np.abs(reference - before).max()
        assert np.abs(leaf - reference).max() <= max(2e-3 * moved, 1e-6)


@pytest.mark.parametrize(('optimizer', 'accumulate'), [('adamw', 'dispatch'), ('adamw8bit', 'scan')])
def test_a_step_in_bfloat16_is_finite_and_in_place(params, groups, optimizer, accumulate, device):
    learner = make_learner(params, None, optimizer, dtype='bfloat16', accumulate=accumulate, publish_dtype='bfloat16')
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='.*onat.*')  # 'Some donated buffers were not usable'
        learner.warm_up()
        before = jax.tree.leaves(learner.state.params)
        metrics = learner.update(groups, version=2)
    assert metrics['update/optimizer_steps'] == 1
    assert np.isfinite(metrics['loss/value'])
    assert all(leaf.is_deleted() for leaf in before)
    learner.require_finite('the weights', 'nothing')


def test_the_backend_of_a_run_is_the_best_that_the_device_has(params, device):
    learner = make_learner(params, dtype='bfloat16')
    platform, capability = local_device()
    best = choose_implementation(
        'auto', platform=platform, capability=capability, tokens=ROWS['row_tokens'], dtype='bfloat16',
        head_dim=TINY.head_dim,
    )  # fmt: skip
    assert (learner.attention, learner.passed_over) == (best, ())
