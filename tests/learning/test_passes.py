"""How the programs of one optimizer step follow each other: which run, and when the host waits for a device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.passes import Passes
from areal_jax.learning.row_layout import RowLayout
from tests.learning.examples import make_learner, random_groups

WIDE: dict[str, Any] = {'row_tokens': 400, 'row_loss_tokens': 300}  # all of the groups below in one micro-batch


def pretend(monkeypatch: pytest.MonkeyPatch, *, on_accelerator: bool) -> None:
    step = Passes.step

    def step_there(passes, *args, **settings):
        passes.on_accelerator = on_accelerator
        return step(passes, *args, **settings)

    monkeypatch.setattr(Passes, 'step', step_there)


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

    def place_noted(layout, rows):
        events.append('place')
        return place(layout, rows)

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
    [('float32', ['gradients', 'apply_only']), ('bfloat16', ['cast', 'gradients', 'apply_only'])],
)
def test_the_only_micro_batch_of_a_step_is_its_gradient(monkeypatch, dtype, programs):
    events = note_step(make_learner(dtype=dtype, **WIDE), monkeypatch, on_accelerator=True)
    ran = [one for one in events if one not in ('place', 'read')]
    assert ran[: len(programs)] == programs


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
