"""NaN and infinity in weights and optimizer state: named, counted, and never saved."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.learning.objective.objective import held_out_likelihood
from areal_jax.learning.weights import NonFiniteError, require_finite
from areal_jax.models.weights import TARGETS, Lora
from areal_jax.sharding.rules import make_mesh
from tests.learning.examples import group, make_learner, random_groups
from tests.learning.test_forms import make_learner as _formed
from tests.learning.test_learner import ADAM, PARAMS

_MESH = make_mesh()


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_values_are_counted_and_the_first_leaf_is_named(value):
    tree = {'b': {'w': jnp.zeros((3, 4)).at[1, 1:3].set(value)}, 'a': jnp.ones(5), 'step': jnp.int32(3)}
    with pytest.raises(NonFiniteError, match=r"^here: 2 of the 12 values of 'b/w' are NaN or infinite; do that$"):
        require_finite(tree, _MESH, 'here', 'do that')
    tree['c'] = tree['d'] = jnp.full(1, value)
    with pytest.raises(NonFiniteError, match=r"'b/w' are NaN or infinite, and 2 other leaves have such values too; do"):
        require_finite(tree, _MESH, 'here', 'do that')


def test_the_largest_numbers_of_narrow_dtypes_are_finite():
    largest = {name: jnp.full(2, jnp.finfo(name).max, name) for name in ('float16', 'bfloat16', 'float32')}
    require_finite(largest | {'codes': jnp.full(2, -128, jnp.int8)}, _MESH, '', '')


def test_a_shard_of_another_device_counts():
    mesh = make_mesh(fsdp=8)
    cut = jax.NamedSharding(mesh, jax.P('fsdp'))
    leaf = jax.device_put(jnp.zeros((16, 2)).at[15, 1].set(np.nan), cut)
    with pytest.raises(NonFiniteError, match=r"1 of the 32 values of 'w'"):
        require_finite({'w': leaf}, mesh, '', '')


@pytest.mark.parametrize(
    'make',
    [
        lambda: make_learner(params=_poisoned(PARAMS)),
        lambda: make_learner(params=_poisoned(PARAMS), mesh=make_mesh(fsdp=8), rows_per_microbatch=8),
        lambda: _formed(layers='stacked', lora=Lora(2, 4.0, TARGETS)),  # a frozen leaf, below
    ],
    ids=['list', 'fsdp=8', 'frozen'],
)
def test_a_learner_refuses_its_weights(make):
    learner = make()
    if learner.state.frozen:
        learner.state.frozen = _poisoned(learner.state.frozen)
    with pytest.raises(NonFiniteError, match=r"^model\.path='x': 1 of the \d+ values of 'embedding' are NaN"):
        learner.require_finite("model.path='x'", 'mend it')
    with pytest.raises(NonFiniteError, match=r'^the trained weights: .*; lower optimizer\.learning_rate$'):
        learner.save()


def _poisoned(params):
    return params | {'embedding': jnp.asarray(params['embedding']).at[2, 1].set(np.nan)}


def test_a_state_that_is_no_number_is_neither_saved_nor_restored():
    learner = make_learner(optimizer=ADAM)
    learner.update(random_groups(5, 2), version=2)
    saved = learner.save()
    path = next(name for name, leaf in saved['optimizer'].items() if leaf.ndim == 2)
    saved['optimizer'][path] = np.where(saved['optimizer'][path] == 0, 0, np.inf).astype(np.float32)
    with pytest.raises(NonFiniteError, match=rf"^the checkpoint: \d+ of the \d+ values of 'optimizer/{path}'"):
        learner.restore(saved)
    with pytest.raises(NonFiniteError, match=rf"^the trained weights: \d+ of the \d+ values of 'optimizer/{path}'"):
        learner.save()


def test_checks_compile_nothing_after_the_first():
    learner = make_learner(optimizer=ADAM)
    learner.require_finite('', '')
    learner.warm_up()
    with jax.log_compiles(), _Compilations() as compiled:
        learner.update([group([1, 2], [[3], [4, 5]])], version=0)
        learner.save()
    assert [name for name in compiled.names if 'lambda' in name] == []


class _Compilations:
    """The names of programs compiled inside the block."""

    def __enter__(self):
        import logging

        self.names: list[str] = []
        self._handler = logging.Handler()
        self._handler.emit = lambda record: self.names.append(record.getMessage())
        logging.getLogger('jax').addHandler(self._handler)
        return self

    def __exit__(self, *_):
        import logging

        logging.getLogger('jax').removeHandler(self._handler)


@pytest.mark.parametrize('value', [np.nan, -np.inf])
def test_a_likelihood_that_is_no_number_is_refused(value):
    assert held_out_likelihood(np.array([-1.0, -2.0], np.float32)) == {'nll': 1.5, 'tokens': 2.0}
    with pytest.raises(NonFiniteError, match=r"held-out likelihood is (nan|inf) nats a token: lower .*dtype='float32'"):
        held_out_likelihood(np.array([-1.0, value], np.float32))
