"""How the programs of one optimizer step follow each other: which run, and when the host waits for a device."""

from __future__ import annotations

import jax
import pytest

from areal_jax.learning.learner import SpmdLearner
from tests.learning.examples import make_learner, random_groups

WIDE = {'row_tokens': 400, 'row_loss_tokens': 300}  # all of the groups below in one micro-batch


def note_step(learner: SpmdLearner, monkeypatch: pytest.MonkeyPatch, queued: int) -> list[str]:
    """What an update does, in order: 'place', the names of programs, 'wait N' for micro-batch N, 'read'."""
    events: list[str] = []
    metrics: list[object] = []
    passes = learner._passes
    monkeypatch.setattr(passes, '_queued', queued)
    run, place, wait, get = learner.programs.run, passes._layout.place, jax.block_until_ready, jax.device_get

    def run_noted(name, *args):
        events.append(name)
        made = run(name, *args)
        if name == 'gradients':
            metrics.append(made[1])
        return made

    def place_noted(rows):
        events.append('place')
        return place(rows)

    def wait_noted(value):
        events.extend(f'wait {number}' for number, one in enumerate(metrics) if one is value)
        return wait(value)

    def get_noted(value):
        events.append('read')
        return get(value)

    monkeypatch.setattr(learner.programs, 'run', run_noted)
    monkeypatch.setattr(passes._layout, 'place', place_noted)
    monkeypatch.setattr(jax, 'block_until_ready', wait_noted)
    monkeypatch.setattr(jax, 'device_get', get_noted)
    learner.update(random_groups(5, 5), version=2)
    return events


def test_on_a_cpu_a_micro_batch_is_queued_when_the_one_before_has_ended(monkeypatch):
    """XLA allocates the temporary memory of a program as it is queued."""
    events = note_step(make_learner(), monkeypatch, queued=0)
    first = events.index('gradients')
    step = events[first - 1 : events.index('apply')]
    micro_batches = step.count('gradients')
    assert micro_batches >= 4
    later = [each for n in range(1, micro_batches) for each in ('place', f'wait {n - 1}', 'gradients', 'add')]
    assert step == ['place', 'gradients', *later]


def test_on_an_accelerator_a_micro_batch_is_placed_and_queued_while_another_runs(monkeypatch):
    events = note_step(make_learner(), monkeypatch, queued=1)
    first = events.index('gradients')
    step = events[first - 1 : events.index('apply')]
    assert step[:8] == ['place', 'gradients', 'place', 'gradients', 'add', 'place', 'wait 0', 'gradients']
    assert 'read' not in step


@pytest.mark.parametrize(
    ('dtype', 'programs'),
    [('float32', ['gradients', 'apply']), ('bfloat16', ['cast', 'gradients', 'apply_only'])],
)
def test_the_only_micro_batch_of_a_step_is_its_gradient(monkeypatch, dtype, programs):
    events = note_step(make_learner(dtype=dtype, **WIDE), monkeypatch, queued=1)
    ran = [one for one in events if one not in ('place', 'read')]
    assert ran[: len(programs)] == programs
