"""What an update of one block changes, computes, publishes and saves."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from areal_jax.app.parts.compilations import CompilationCounter
from areal_jax.config.fields import ConfigError
from areal_jax.learning.objective.objectives import Likelihood
from areal_jax.models.decoder import Decoder
from areal_jax.sharding.rules import make_mesh, path_name
from tests.diagonal import diagonal
from tests.learning.block_examples import (
    GROUPS,
    assert_bit_equal,
    leaves_of,
    make_block_learner,
    make_whole_learner,
    weights_of,
)
from tests.learning.examples import tiny_decoder


def test_an_update_changes_the_leaves_of_its_block_and_no_bit_of_the_others():
    learner = make_block_learner()
    before = weights_of(learner)
    changed = []
    for version in range(2, 5):
        metrics = learner.update(GROUPS, version)
        after = weights_of(learner)
        block = learner.blocks.block_of(version)
        assert metrics['update/block'] == block
        assert {path for path in after if not np.array_equal(before[path], after[path])} == learner.paths[block]
        changed.append(block)
        before = after
    assert sorted(changed) == [0, 1, 2]  # a round: all leaves, each once


@pytest.mark.parametrize('accumulate', ['dispatch', pytest.param('scan', marks=pytest.mark.slow)])
def test_the_step_of_a_block_is_that_of_all_leaves_with_the_others_left_out(accumulate):
    """SGD without clipping: weight - rate * gradient, so equal steps are equal gradients."""
    sgd = {'optimizer': 'sgd', 'clip_norm': 0, 'accumulate': accumulate}
    whole = make_whole_learner(**sgd)
    whole.update(GROUPS, 2)
    expected = weights_of(whole)
    for first in range(3):  # the first block that is trained, so that all start from the same weights
        learner = make_block_learner(**sgd)
        version = next(v for v in range(2, 5) if learner.blocks.block_of(v) == first)
        learner.update(GROUPS, version)
        found = weights_of(learner)
        for path in learner.paths[first]:
            # other fusions round otherwise: 1e-6 of steps that are about 0.05
            np.testing.assert_allclose(found[path], expected[path], rtol=1e-5, atol=1e-6, err_msg=path)


def count_products(learner, name, block):
    """Matrix products in the program `name` of a block, as they are in its jaxpr; attention has some of its own."""
    part = next(part for part in learner.parts if part.block == block)
    args = next(args for programs, declared, args in part.declared_programs(exports=False) if declared == name)
    jaxpr = getattr(part.programs.definitions, name)().trace(*args).jaxpr
    return sum(equation.primitive.name == 'dot_general' for equation in _equations(jaxpr.jaxpr))


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inside in jaxprs_in_params(equation.params):
            yield from _equations(inside)


@pytest.mark.parametrize(
    'remat', ['dots', *(pytest.param(remat, marks=pytest.mark.slow) for remat in ('none', 'full'))]
)
def test_layers_below_the_block_have_no_backward_pass(remat):
    """With the last layer as the block, each layer below adds the products of a forward pass, and no others."""

    def of_last_layer(n_layers):
        decoder = Decoder(tiny_decoder(n_layers).config, remat=remat)
        learner = make_block_learner(
            decoder=decoder, params=decoder.init(seed=2), blocks=n_layers + 1, objective=Likelihood()
        )
        forward = count_products(learner, 'logprobs', n_layers)
        return forward, count_products(learner, 'accumulate', n_layers), count_products(learner, 'accumulate', 1)

    forward_2, last_2, first_2 = of_last_layer(2)
    forward_4, last_4, first_4 = of_last_layer(4)
    assert last_4 - last_2 == forward_4 - forward_2
    assert first_4 - first_2 > forward_4 - forward_2  # the first layer needs the gradient through all above it


def test_no_activations_of_the_layers_below_are_saved():
    """XLA's own count: three more layers below the block take no more temporary memory, above it they do."""

    def temporary_bytes(n_layers, block):
        decoder = tiny_decoder(n_layers)
        shape = {'rows_per_microbatch': 8, 'row_tokens': 128, 'row_loss_tokens': 64}
        learner = make_block_learner(decoder=decoder, params=decoder.init(seed=2), blocks=n_layers + 1, **shape)
        part = learner.parts[block]
        args = next(args for _, name, args in part.declared_programs(exports=False) if name == 'accumulate')
        return part.programs.compile('accumulate', *args).memory_analysis().temp_size_in_bytes

    activation = 8 * 128 * 16 * 4  # bytes of the residual stream
    assert temporary_bytes(5, 5) - temporary_bytes(2, 2) < activation
    assert temporary_bytes(5, 1) - temporary_bytes(2, 1) > 3 * activation


def test_a_publication_has_the_leaves_that_did_not_change_as_the_same_arrays():
    learner = make_block_learner()
    published = [leaves_by_identity(learner.publish(2))]
    for version in (2, 3, 4):
        learner.update(GROUPS, version)
        published.append(leaves_by_identity(learner.publish(version + 1)))
        new = {path for path, leaf in published[-1].items() if leaf is not published[-2][path]}
        assert new == learner.paths[learner.blocks.block_of(version)]
        assert_bit_equal({path: np.asarray(leaf) for path, leaf in published[-1].items()}, weights_of(learner))
    # what was published stays as it was: a later update has buffers of its own
    assert not np.array_equal(published[0]['embedding'], published[3]['embedding'])


def leaves_by_identity(tree):
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize(('updates', 'stop', 'state'), diagonal([(1, 3), (2, 4), (2, 5)], ('host', 'drop')))
def test_a_resumed_learner_makes_the_updates_of_the_uninterrupted_one(state, updates, stop):
    """Bit for bit, in the middle of a turn, at its end, and at the end of a round."""
    settings = {'block_state': state, 'block_updates': updates, 'block_order': 'shuffled'}
    learner = make_block_learner(**settings)
    for version in range(2, 9):
        if version == stop:
            saved = learner.save()
        learner.update(GROUPS, version)
    resumed = make_block_learner(**settings)
    resumed.restore(saved)
    for version in range(stop, 9):
        resumed.update(GROUPS, version)
    a, b = learner.save(), resumed.save()
    assert_bit_equal(leaves_of(a['params']), leaves_of(b['params']))
    assert_bit_equal(dict(a['optimizer']), dict(b['optimizer']))


def test_moments_are_kept_on_the_host_or_begin_again():
    """One block of two is trained, then the other, then the first again: Adam's count of its steps is 2, or 1."""
    counts = {}
    for state in ('host', 'drop'):
        learner = make_block_learner(blocks=2, block_state=state)
        for version in (2, 3, 4):
            learner.update(GROUPS, version)
        saved = learner.save()['optimizer']
        counts[state] = {path: int(leaf) for path, leaf in saved.items() if leaf.ndim == 0}
    assert counts['host'] == {'step': 3, 'blocks/0/transform/0/step': 2, 'blocks/1/transform/0/step': 1}
    assert counts['drop'] == {'step': 3, 'blocks/0/transform/0/step': 1}


def test_gradients_and_moments_of_one_block_are_on_the_devices():
    learner = make_block_learner()
    learner.update(GROUPS, 2)
    block = learner.paths[2]
    assert leaves_of(learner.programs.run('zeros', learner.state.params)).keys() == block
    size = sum(leaf.nbytes for path, leaf in weights_of(learner).items() if path in block)
    moments = sum(leaf.nbytes for leaf in jax.tree.leaves(learner.state.optimizer['transform']))
    assert moments == 2 * size + 4  # and the count of steps


@pytest.mark.parametrize('accumulate', ['dispatch', pytest.param('scan', marks=pytest.mark.slow)])
def test_every_program_of_every_block_is_compiled_by_warm_up(accumulate):
    settings = {'accumulate': accumulate, 'objective': Likelihood(), 'rows_per_microbatch': 8}
    learner = make_block_learner(blocks=2, **settings)
    of_whole = make_whole_learner(**settings).warm_up()
    assert learner.warm_up() == 2 * of_whole  # one of each kind a block
    learner.publish(2)
    with CompilationCounter() as compilations:
        for version in range(2, 5):
            learner.update(GROUPS, version)
            learner.publish(version + 1)
            learner.evaluate(GROUPS)
    assert compilations.count == 0


def test_an_epoch_of_minibatches_trains_one_block():
    learner = make_block_learner(n_minibatches=2, epochs=2)
    before = weights_of(learner)
    metrics = learner.update(GROUPS, 3)
    assert metrics['update/optimizer_steps'] == 4
    after = weights_of(learner)
    assert {path for path in after if not np.array_equal(before[path], after[path])} == learner.paths[0]


@pytest.mark.slow
def test_blocks_on_a_mesh_are_those_of_one_device():
    settings = {'optimizer': 'sgd', 'clip_norm': 0, 'rows_per_microbatch': 4}
    one, four = make_block_learner(**settings), make_block_learner(mesh=make_mesh(2, 2), **settings)
    for version in (2, 3):
        one.update(GROUPS, version)
        four.update(GROUPS, version)
        published = leaves_of(four.publish(version + 1))
    for path, leaf in weights_of(one).items():
        np.testing.assert_allclose(published[path], leaf, atol=1e-5, err_msg=path)


def test_a_block_can_be_replaced_whether_it_is_trained_or_not():
    learner = make_block_learner()
    learner.publish(2)
    learner.update(GROUPS, 2)
    for block in (2, 0):  # the trained one and another
        values = {path: leaf + 1 for path, leaf in learner.read_block(block).items()}
        learner.replace_block(block, values)
        assert_bit_equal(learner.read_block(block), values)
    published = leaves_of(learner.publish(3))
    assert_bit_equal(published, weights_of(learner))
    learner.update(GROUPS, 3)
    with pytest.raises(ValueError, match=r'block 1 has 9 leaves, and 2 others were given'):
        learner.replace_block(1, learner.read_block(0))


def test_more_blocks_than_the_model_has_are_refused():
    with pytest.raises(ConfigError, match=r'optimizer\.blocks=5 needs 4 layers beside'):
        make_block_learner(blocks=5)


def test_a_checkpoint_of_another_number_of_blocks_is_refused():
    learner = make_block_learner()
    saved = learner.save()
    of_four = {path.replace('blocks/0/', 'blocks/3/'): leaf for path, leaf in saved['optimizer'].items()}
    with pytest.raises(ValueError, match=r'saved moments are of block 3, and optimizer\.blocks=3'):
        learner.restore(saved | {'optimizer': of_four})
    of_all = {path.replace('blocks/0/', ''): leaf for path, leaf in saved['optimizer'].items()}
    with pytest.raises(ValueError, match="differ from the learner's"):
        learner.restore(saved | {'optimizer': of_all})
    assert_bit_equal(leaves_of(learner.save()['params']), leaves_of(saved['params']))  # it is as it was
