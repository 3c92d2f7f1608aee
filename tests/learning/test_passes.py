"""How the programs of one optimizer step follow each other: which run, and when the host waits for a device."""

from __future__ import annotations

import weakref
from typing import Any

import jax
import numpy as np
import pytest

from areal_jax.learning.blockwise import BlockLearner
from areal_jax.learning.learner import MovingLearner, SpmdLearner
from areal_jax.learning.programs import Programs
from areal_jax.learning.row_layout import RowLayout
from areal_jax.sharding.rules import make_mesh
from tests.learning.block_examples import GROUPS, make_block_learner
from tests.learning.examples import learner_settings, make_learner, make_optimizer, random_groups, tiny_decoder

WIDE: dict[str, Any] = {'row_tokens': 400, 'row_loss_tokens': 300}  # all of the groups below in one micro-batch


def moving_learner(**settings: Any) -> MovingLearner:
    decoder = tiny_decoder(n_layers=1)
    settings = {'row_tokens': 40, 'row_loss_tokens': 24, 'rows_per_microbatch': 2} | settings
    return MovingLearner(
        decoder, decoder.init(seed=2), make_mesh(), optimizer=make_optimizer('sgd'), learning_rate=0.1,
        settings=learner_settings(**settings),
    )  # fmt: skip


def pretend(monkeypatch: pytest.MonkeyPatch, *, on_accelerator: bool) -> None:
    monkeypatch.setattr(Programs, 'on_accelerator', on_accelerator)


def note_step(learner: SpmdLearner, monkeypatch: pytest.MonkeyPatch, *, on_accelerator: bool) -> list[str]:
    """What an update does, in order: 'place', the names of programs, 'wait N' for micro-batch N, 'read'."""
    events: list[str] = []
    metrics: list[object] = []
    pretend(monkeypatch, on_accelerator=on_accelerator)
    run, place, wait, get = learner.programs.run, RowLayout.place, jax.block_until_ready, jax.device_get

    def run_noted(name, *args):
        events.append(name)
        made = run(name, *args)
        if name in ('gradients', 'accumulate'):
            metrics.append(made[1])
        return made

    def place_noted(layout, *args):
        events.append('place')
        return place(layout, *args)

    def wait_noted(value):
        events.extend(f'wait {number}' for number, one in enumerate(metrics) if one is value)
        return wait(value)

    def get_noted(value):
        events.append('read')
        return get(value)

    monkeypatch.setattr(learner.programs, 'run', run_noted)
    monkeypatch.setattr(RowLayout, 'place', place_noted)
    monkeypatch.setattr(jax, 'block_until_ready', wait_noted)
    monkeypatch.setattr(jax, 'device_get', get_noted)
    learner.update(random_groups(5, 5), version=2)
    return events


def test_on_a_cpu_a_micro_batch_is_queued_when_the_one_before_has_ended(monkeypatch):
    """XLA allocates the temporary memory of a program as it is queued."""
    events = note_step(make_learner(), monkeypatch, on_accelerator=False)
    first = events.index('accumulate')
    step = events[first - 1 : events.index('apply')]
    micro_batches = step.count('accumulate')
    assert micro_batches >= 4
    later = [each for n in range(1, micro_batches) for each in ('place', f'wait {n - 1}', 'accumulate')]
    assert step == ['place', 'accumulate', *later]


def test_on_an_accelerator_a_micro_batch_is_placed_and_queued_while_another_runs(monkeypatch):
    events = note_step(make_learner(), monkeypatch, on_accelerator=True)
    first = events.index('gradients')
    step = events[first - 1 : events.index('apply')]
    assert step[:8] == ['place', 'gradients', 'place', 'gradients', 'add_first', 'place', 'wait 0', 'gradients']
    assert 'read' not in step


@pytest.mark.parametrize(
    ('dtype', 'programs'),
    [('float32', ['gradients', 'apply_only']), ('bfloat16', ['cast', 'gradients', 'apply_only_and_cast'])],
)
def test_the_only_micro_batch_of_a_step_is_its_gradient(monkeypatch, dtype, programs):
    events = note_step(make_learner(dtype=dtype, **WIDE), monkeypatch, on_accelerator=True)
    ran = [one for one in events if one not in ('place', 'read')]
    assert ran[: len(programs)] == programs


@pytest.mark.parametrize(
    ('shape', 'programs'),
    [
        (WIDE, ['gradients', 'apply_only_and_cast']),
        ({}, [*('gradients', 'gradients', 'add_first'), *('gradients', 'add') * 3, 'apply_and_cast']),
    ],
    ids=['one', 'five'],
)
def test_the_optimizer_makes_the_working_copy_of_the_next_step(monkeypatch, shape, programs):
    learner = make_learner(dtype='bfloat16', **shape)
    note_step(learner, monkeypatch, on_accelerator=True)
    learner.publish(3)
    events = note_step(learner, monkeypatch, on_accelerator=True)
    assert [one for one in events if one in {'cast', *programs}] == programs
    cast = learner.programs.run('cast', learner.state.params)
    jax.tree.map(np.testing.assert_array_equal, learner.state.working, cast)


def test_a_step_frees_the_working_copy_before_the_optimizer_makes_the_next(monkeypatch):
    learner = make_learner(dtype='bfloat16', **WIDE)
    pretend(monkeypatch, on_accelerator=True)
    run, held = learner.programs.run, []

    def keep(name, *args):
        if name == 'gradients':
            held.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(args[0]))
        if name == 'apply_only_and_cast':
            assert held
            assert not any(ref() is not None for ref in held)
        return run(name, *args)

    monkeypatch.setattr(learner.programs, 'run', keep)
    learner.update(random_groups(5, 5), version=2)
    assert learner.state.working is not None


def restore(learner: SpmdLearner) -> None:
    learner.restore(make_learner(dtype='bfloat16', **WIDE).save())


def move(learner: SpmdLearner) -> None:
    assert isinstance(learner, MovingLearner)
    learner.move(make_mesh(data=2))


def turn(learner: SpmdLearner) -> None:
    learner.update(GROUPS, version=3)


def replace(learner: SpmdLearner) -> None:
    assert isinstance(learner, BlockLearner)
    block = learner.blocks.block_of(2)
    learner.replace_block(block, {path: 0 * leaf for path, leaf in learner.read_block(block).items()})


@pytest.mark.parametrize(
    ('make', 'change'),
    [
        (make_learner, restore),
        (moving_learner, move),
        (make_block_learner, turn),
        (make_block_learner, replace),
    ],
)
def test_other_weights_need_another_working_copy(monkeypatch, make, change):
    pretend(monkeypatch, on_accelerator=True)
    learner = make(dtype='bfloat16')
    learner.update(GROUPS, version=2)
    before = learner.state.working
    assert before is not None
    change(learner)
    assert learner.state.working is not before
    [part] = (part for part in learner.parts if part.programs is learner.programs)
    working = part.passes.working(learner.state)
    jax.tree.map(np.testing.assert_array_equal, working, learner.programs.run('cast', learner.state.params))
    assert next(iter(jax.tree.leaves(working))).sharding.mesh == learner.programs.definitions.mesh


def test_on_a_cpu_no_working_copy_is_kept():
    learner = make_learner(dtype='bfloat16', **WIDE)
    learner.update(random_groups(5, 5), version=2)
    assert learner.state.working is None


def test_an_accelerator_compiles_what_its_updates_run(monkeypatch):
    pretend(monkeypatch, on_accelerator=True)
    learner = make_learner(dtype='bfloat16', **WIDE)
    learner.warm_up()
    declared = {*learner.programs.compiled}
    learner.update(random_groups(5, 5), version=2)
    learner.publish(3)
    assert declared >= {*learner.programs.compiled}


@pytest.mark.parametrize('on_accelerator', [False, True])
def test_only_on_a_cpu_does_the_optimizer_branch(monkeypatch, on_accelerator):
    """Of a branch XLA copies weights and moments on GPUs."""
    pretend(monkeypatch, on_accelerator=on_accelerator)
    [part] = make_learner(dtype='bfloat16', **WIDE).parts
    texts = [
        getattr(programs.definitions, name)().lower(*args).as_text()
        for programs, name, args in part.declared_programs(exports=False)
        if name.startswith('apply')
    ]
    assert len(texts) == (2 if on_accelerator else 1)
    assert all(('stablehlo.case' in text) != on_accelerator for text in texts)


@pytest.mark.parametrize('shape', [{}, WIDE], ids=['five', 'one'])
def test_an_accelerator_computes_the_step_of_a_cpu(monkeypatch, shape):
    after = []
    for on_accelerator in (False, True):
        learner = make_learner(loss_scale=8.0, **shape)
        pretend(monkeypatch, on_accelerator=on_accelerator)
        learner.update(random_groups(5, 5), version=2)
        after.append(jax.tree.leaves(learner.state.params))
    start = jax.tree.leaves(make_learner(**shape).state.params)
    for plain, other, before in zip(*after, start, strict=True):
        np.testing.assert_allclose(other, plain, rtol=1e-5, atol=1e-6)
        assert np.abs(plain - before).max() > 1e-4
