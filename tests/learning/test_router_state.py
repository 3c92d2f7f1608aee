"""Corrections of sigmoid routers in the learner: changed by their rule alone, saved and published."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config import default_config
from areal_jax.config.fields import ConfigError
from areal_jax.config.training import find_balance_problems
from areal_jax.learning import passes
from areal_jax.learning import weights as trees
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import Lora, is_router_state, leaf_at
from areal_jax.publication.manifest import by_path
from areal_jax.sharding.rules import make_mesh
from tests.learning import examples
from tests.learning.block_examples import make_block_learner
from tests.learning.examples import make_optimizer, random_groups
from tests.models.family_examples import CONFIGS, draw

CONFIG, RATE = CONFIGS['glm4_moe'], 0.125
PARAMS = draw(CONFIG)
GROUPS = random_groups(3, 3)
PATHS = ['layers/1/mlp/correction', 'layers/2/mlp/correction']


def make_learner(layers='list', *, name='glm4_moe', lora=None, mesh=None, **settings):
    decoder = Decoder(CONFIGS[name], layers=layers, lora=lora)
    return examples.make_learner(
        mesh, decoder=decoder, params=decoder.complete(draw(CONFIGS[name]), 0),
        **{'optimizer': make_optimizer('adamw', weight_decay=0.5, decay='all'), 'rows_per_microbatch': 1, **settings},
    )  # fmt: skip


def corrections(tree):
    return np.stack([np.asarray(leaf) for path, leaf in by_path(tree).items() if is_router_state(path)])


BEFORE = corrections(PARAMS)


def test_frozen_corrections_are_untouched_by_an_optimizer_that_decays_everything():
    learner = make_learner()
    learner.update(GROUPS, 2)
    np.testing.assert_array_equal(corrections(learner.save()['params']), BEFORE)
    held = {**by_path(learner.state.params), **by_path(learner.state.optimizer)}
    assert not any(is_router_state(path) for path in held)
    assert learner.parts[0].trains('layers/1/mlp/router/weight')
    of_critic = trees.choose_trained(adapters=False)
    assert not of_critic('critic/layers/1/mlp/correction')


@pytest.mark.parametrize(
    ('layers', 'how'),
    [
        ('list', {}),
        ('stacked', {'accumulate': 'scan', 'max_microbatches': 8}),
        ('list', {'name': 'deepseek_v3'}),
        pytest.param('list', {'name': 'glm4_moe_lite'}, marks=pytest.mark.slow),
        pytest.param('list', {'lora': Lora(2, 4.0, ('query',))}, marks=pytest.mark.slow),
        pytest.param(
            'stacked', {'mesh': make_mesh(fsdp=2, expert=2), 'rows_per_microbatch': 4}, marks=pytest.mark.slow
        ),
    ],
)
def test_the_rule_moves_them_by_the_loads_of_each_step(layers, how, monkeypatch):
    steps = []

    def correct(config, frozen, loads, rate):
        steps.append(loads)
        return trees.correct_routers(config, frozen, loads, rate)

    monkeypatch.setattr(passes, 'correct_routers', correct)
    learner = make_learner(layers, router_bias_rate=RATE, n_minibatches=2, **how)
    before = corrections(learner.save()['params'])
    metrics = learner.update(GROUPS, 2)
    expected = before
    for loads in steps:
        expected = expected + RATE * np.sign(loads.mean(-1, keepdims=True) - loads)
    assert len(steps) == 2 == metrics['update/optimizer_steps']
    assert np.abs(expected - before).max() > 0
    saved = learner.save()
    np.testing.assert_array_equal(corrections(saved['params']), expected)
    published = jax.device_get(learner.publish(3))
    np.testing.assert_array_equal(corrections(published), expected)
    other = make_learner(layers, router_bias_rate=RATE, n_minibatches=2, **how)
    other.restore(saved)
    for one in (learner, other):
        one.update(GROUPS, 3)
    jax.tree.map(np.testing.assert_array_equal, other.save(), learner.save())
    assert not np.array_equal(corrections(other.save()['params']), expected)


def test_a_skipped_step_moves_none():
    learner = make_learner(router_bias_rate=RATE)
    learner.state.params['final_norm'] = jnp.full_like(learner.state.params['final_norm'], jnp.nan)
    assert learner.update(GROUPS, 2)['update/skipped_steps'] == 1
    np.testing.assert_array_equal(corrections(learner.state.frozen), BEFORE)


def test_they_are_published_in_float32_next_to_narrower_weights():
    learner = make_learner(publish_dtype='bfloat16', dtype='bfloat16', router_bias_rate=RATE)
    learner.update(GROUPS, 2)
    published = learner.publish(3)
    assert {leaf_at(published, path).dtype for path in PATHS} == {jnp.dtype('float32')}
    assert leaf_at(published, 'layers/1/mlp/router/weight').dtype == jnp.bfloat16
    np.testing.assert_array_equal(corrections(published), corrections(learner.state.frozen))


def test_a_reference_keeps_its_own():
    learner = make_learner(router_bias_rate=RATE, kl_coefficient=0.1)
    assert learner.state.reference is not None
    learner.update(GROUPS, 2)
    np.testing.assert_array_equal(corrections(learner.state.reference_frozen), BEFORE)
    assert not np.array_equal(corrections(learner.state.frozen), BEFORE)


def test_models_without_such_routers_are_refused_the_rule():
    with pytest.raises(ConfigError, match=r'learner\.router_bias_rate=0\.125 needs a model with sigmoid routers'):
        examples.make_learner(router_bias_rate=RATE)


def test_blocks_whose_leaves_are_all_trained_are_refused():
    with pytest.raises(ConfigError, match=r'optimizer\.blocks=2 trains all leaves of a block, and the corrections'):
        make_block_learner(blocks=2, decoder=Decoder(CONFIG), params=PARAMS)


def test_a_rate_next_to_the_split_of_the_ratio_is_refused():
    config = default_config()
    config.learner.router_bias_rate = 0.01
    assert not list(find_balance_problems(config))
    config.diagnostics.ratio_sample = 0.5
    [said] = find_balance_problems(config)
    assert said.startswith(
        'diagnostics.ratio_sample=0.5 keeps the trained weights of earlier versions, and learner.rou'
    )
