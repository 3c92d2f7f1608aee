"""A learner on another mesh: there and back keeps every bit, an update there is the update here."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.learning.learner import MovingLearner
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import Lora
from areal_jax.sharding.rules import make_mesh
from tests.learning.examples import learner_settings, make_optimizer, random_groups

CONFIG = ModelConfig(
    vocab_size=32, d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, rope_theta=100.0,
    tie_embeddings=False, qkv_bias=True, output_bias=True, qk_norm=True, family='qwen3',
)  # fmt: skip
PARAMS = Decoder(CONFIG).init(seed=2, scale=2.0)
FIRST, SECOND = random_groups(5, 5), random_groups(5, 6)
HERE, THERE = make_mesh(fsdp=2), make_mesh(fsdp=4)
ADAM = make_optimizer('adamw')


def make_learner(mesh=HERE, optimizer=ADAM, lora=None, layers='list', **settings):
    decoder = Decoder(CONFIG, lora=lora, layers=layers)
    settings = {'row_tokens': 40, 'row_loss_tokens': 24, 'rows_per_microbatch': 8, 'accumulate': 'dispatch'} | settings
    return MovingLearner(
        decoder, decoder.complete(PARAMS, 0), mesh, optimizer=optimizer, learning_rate=0.01,
        settings=learner_settings(**settings),
    )  # fmt: skip


def bits(learner):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf).tobytes()
        for path, leaf in jax.tree_util.tree_leaves_with_path((learner.save(), learner.publish(1)))
    }


def devices(learner):
    return {device.id for leaf in jax.tree.leaves(learner.state.weights_and_optimizer) for device in leaf.devices()}


@pytest.mark.parametrize(
    'options',
    [
        {'optimizer': make_optimizer('adamw8bit'), 'kl_coefficient': 0.1},  # quantized moments, and a reference
        pytest.param({'optimizer': make_optimizer('adamw', moment_dtype='bfloat16')}, marks=pytest.mark.slow),
        pytest.param({'lora': Lora(2, 4.0, ('query', 'value')), 'layers': 'stacked'}, marks=pytest.mark.slow),
        pytest.param({'accumulate': 'scan'}, marks=pytest.mark.slow),
    ],
)
def test_there_and_back_keeps_every_bit(options):
    learner = make_learner(**options)
    learner.update(FIRST, version=2)
    before, reference = bits(learner), jax.tree.map(np.asarray, learner.state.reference)
    assert devices(learner) == {0, 1}
    learner.move(THERE)
    assert devices(learner) == {0, 1, 2, 3}
    assert bits(learner) == before
    learner.move(HERE)
    assert devices(learner) == {0, 1}
    assert bits(learner) == before
    jax.tree.map(np.testing.assert_array_equal, learner.state.reference, reference)
    stayed = make_learner(**options)
    stayed.update(FIRST, version=2)
    for one in (learner, stayed):
        one.update(SECOND, version=3)
    assert bits(learner) == bits(stayed)


def test_an_update_on_another_mesh_is_the_update_here():
    moved, stayed = make_learner(), make_learner()
    for learner in (moved, stayed):
        learner.update(FIRST, version=2)
    moved.move(THERE)
    metrics = [learner.update(SECOND, version=3) for learner in (moved, stayed)]
    for name in ('loss/value', 'update/grad_norm'):
        np.testing.assert_allclose(metrics[0][name], metrics[1][name], rtol=1e-5, err_msg=name)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6),
        moved.publish(4), stayed.publish(4),
    )  # fmt: skip


def test_nothing_is_compiled_after_it_was_prepared():
    learner = make_learner()
    learner.prepare(THERE)
    learner.move(THERE)
    compiled = set(learner.programs.compiled)
    learner.update(FIRST, version=2)
    learner.publish(3)
    assert set(learner.programs.compiled) == compiled


def test_a_mesh_that_cannot_share_out_the_rows_is_refused_before_anything_moves():
    learner = make_learner(rows_per_microbatch=4)
    before = bits(learner)
    with pytest.raises(ConfigError, match=r'learner\.rows_per_microbatch=4 must be a multiple of the 8 devices'):
        learner.move(make_mesh(fsdp=8))
    assert devices(learner) == {0, 1}
    assert bits(learner) == before
