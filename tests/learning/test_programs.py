"""Programs are compiled before the first update: once each, for the arguments that updates bring."""

from __future__ import annotations

import collections
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.app.parts.compilations import CompilationCounter
from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.learner_state import describe_state, place_state
from areal_jax.learning.programs import CompiledPrograms
from areal_jax.learning.train_step import Programs
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import Lora
from areal_jax.sharding.rules import make_mesh
from tests.learning.examples import learner_settings, make_optimizer, random_groups, tiny_decoder

_GROUPS = random_groups(5, 5)
_KINDS = {
    'float32': {},
    'a mesh, a reference, bfloat16': {'mesh': (2, 4), 'dtype': 'bfloat16', 'kl_coefficient': 0.1},
    'scan': {'accumulate': 'scan'},
    'adapters, in float16': {'lora': Lora(2, 4.0, ('query', 'up')), 'dtype': 'float16'},
}


@pytest.fixture(autouse=True)
def _keeps_nothing(monkeypatch):
    """What other tests have compiled is compiled anew."""
    monkeypatch.setattr(CompiledPrograms, 'kept', collections.OrderedDict())


def make_learner(*, mesh=(1, 1), lora=None, optimizer='adamw', **more):
    shape = {'rows_per_microbatch': 8, 'row_tokens': 40, 'row_loss_tokens': 24}
    decoder = Decoder(tiny_decoder(n_layers=1).config, lora=lora)
    settings = learner_settings(**(shape | {name: value for name, value in more.items() if name != 'compile_ahead'}))
    return SpmdLearner(
        decoder,
        decoder.init(seed=2, scale=2.0),
        make_mesh(*mesh),
        optimizer=make_optimizer(optimizer, clip_norm=1.0),
        learning_rate=0.1,
        settings=settings,
        compile_ahead=more.get('compile_ahead', False),
    )


@pytest.mark.parametrize('kind', _KINDS)
def test_the_described_state_is_the_one_that_is_placed(kind):
    learner = make_learner(**_KINDS[kind])
    state, definitions = learner.state, learner.programs.definitions
    settings = definitions.settings
    described = describe_state(state.params, state.frozen, settings, definitions)
    placed = place_state(state.params, state.frozen, settings, learner.programs)
    form = lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding)
    assert jax.tree.map(form, vars(described)) == jax.tree.map(form, vars(placed))


@pytest.mark.parametrize('kind', _KINDS)
def test_programs_compiled_ahead_are_those_of_the_updates(kind):
    """Two updates and a publication bring no new program, and change the weights like those of another learner."""
    ahead, other = make_learner(compile_ahead=True, **_KINDS[kind]), make_learner(**_KINDS[kind])
    assert ahead.warm_up() == other.warm_up()
    with CompilationCounter() as compilations:
        for version in (2, 3):
            metrics, expected = ahead.update(_GROUPS, version), other.update(_GROUPS, version)
            np.testing.assert_equal(metrics, expected)
        jax.tree.map(np.testing.assert_array_equal, ahead.publish(4), other.publish(4))
    assert compilations.count == 0


class _SlowDefinitions:
    """One program, whose definition waits until the test lets it go on."""

    def __init__(self):
        self.begun, self.may_end, self.made = threading.Event(), threading.Event(), 0

    def double(self):
        self.made += 1
        self.begun.set()
        assert self.may_end.wait(60)
        return jax.jit(lambda x: 2 * x)


def test_a_thread_waits_for_the_program_that_another_one_compiles():
    definitions = _SlowDefinitions()
    programs, results = CompiledPrograms(definitions), []
    threads = [threading.Thread(target=lambda: results.append(programs.run('double', np.float32(3)))) for _ in range(2)]
    threads[0].start()
    assert definitions.begun.wait(60)
    threads[1].start()
    definitions.may_end.set()
    for thread in threads:
        thread.join(60)
    assert (results, definitions.made, len(programs.compiled)) == ([6, 6], 1, 1)


def names(programs):
    return {name for name, _ in programs}


def test_a_learner_traces_ahead_and_compiles_from_when_it_may():
    """Nothing is traced or compiled in the thread that waits for the programs."""
    learner = make_learner(compile_ahead=True)
    learner.wait_traced()
    assert 'accumulate' in names(learner.programs.traced)
    assert 'accumulate' not in names(learner.programs._programs)  # what places the state is there
    learner.begin_compiling()
    with CompilationCounter() as compilations:
        programs = learner.finish_compiling()
    assert programs == make_learner().warm_up()
    assert compilations.count == 0
    assert not learner.programs.traced


@pytest.mark.parametrize('kind', _KINDS)
def test_an_equal_learner_compiles_nothing(kind):
    learner = make_learner(**_KINDS[kind])
    declared = learner.warm_up()
    equal = make_learner(**_KINDS[kind])
    with CompilationCounter() as compilations:
        assert equal.warm_up() == declared
    assert compilations.count == 0
    programs = learner.programs.compiled
    assert all(programs[key] is program for key, program in equal.programs.compiled.items())


@pytest.mark.parametrize(
    'changed', [{'clip_epsilon': 0.3}, {'mesh': (1, 2)}, {'optimizer': 'lion'}, {'lora': Lora(1, 4.0, ('query',))}]
)
def test_another_learner_compiles_its_own(changed):
    learner, other = make_learner(), make_learner(**changed)
    learner.warm_up()
    other.warm_up()
    assert not {id(one) for one in learner.programs.compiled.values()} & {
        id(one) for one in other.programs.compiled.values()
    }


def test_settings_of_jax_reach_the_next_learner():
    learner = make_learner()
    learner.warm_up()
    before = jax.config.jax_default_matmul_precision
    jax.config.update('jax_default_matmul_precision', 'highest')
    try:
        other = make_learner()
        other.warm_up()
    finally:
        jax.config.update('jax_default_matmul_precision', before)
    key = next(key for key in learner.programs.compiled if key[0] == 'accumulate')
    assert learner.programs.compiled[key] is not other.programs.compiled[key]


def test_the_memory_of_programs_is_that_of_the_one_that_needs_most():
    programs = CompiledPrograms(_Sums())
    assert programs.temporary_bytes == 0
    programs.compile('short', {'tokens': np.zeros(1000, np.float32)})
    short = programs.temporary_bytes
    assert 4 * 1000**2 <= short < 4 * 1100**2  # the products of all pairs
    programs.compile('long', {'tokens': np.zeros(2000, np.float32)})
    assert programs.temporary_bytes == pytest.approx(4 * short, rel=0.1)


class _Sums:
    """Programs that hold the products of all pairs of their numbers."""

    def short(self):
        return jax.jit(lambda x: jnp.sort(x['tokens'][:, None] * x['tokens'][None]).sum())

    long = short


def test_the_oldest_programs_are_let_go(monkeypatch):
    monkeypatch.setattr('areal_jax.learning.programs.MOST_KEPT', 3)
    learner = make_learner()
    declared = learner.warm_up()
    assert (len(learner.programs.compiled), len(CompiledPrograms.kept)) == (declared, 3)


def test_a_learner_that_is_closed_compiles_nothing():
    learner = make_learner(compile_ahead=True)
    learner.wait_traced()
    learner.close()
    assert 'accumulate' not in names(learner.programs.compiled)


def test_warm_up_raises_what_the_thread_met_that_compiled_ahead(monkeypatch):
    threads = []

    def fail(self):
        threads.append(threading.current_thread().name)
        raise RuntimeError('no memory for the compiler')

    monkeypatch.setattr(Programs, 'accumulate', fail)
    learner = make_learner(compile_ahead=True)
    with pytest.raises(RuntimeError, match='no memory for the compiler'):
        learner.warm_up()
    assert threads == ['learner warm-up']
