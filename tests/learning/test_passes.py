"""How the programs of one optimizer step follow each other."""

from __future__ import annotations

import jax

from areal_jax.learning.learner import SpmdLearner
from tests.learning.examples import make_learner, random_groups


def test_on_a_cpu_a_micro_batch_is_queued_when_the_one_before_has_ended(monkeypatch):
    """XLA allocates the temporary memory of a program as it is queued."""
    learner: SpmdLearner = make_learner()
    done: list[object] = []
    run, wait = learner.programs.run, jax.block_until_ready

    def run_noted(name, *args):
        made = run(name, *args)
        if name == 'accumulate':
            done.append(made[1])  # its metrics
        return made

    def wait_noted(value):
        if done and value is done[-1]:
            done.append('waited')
        return wait(value)

    monkeypatch.setattr(learner.programs, 'run', run_noted)
    monkeypatch.setattr(jax, 'block_until_ready', wait_noted)
    learner.update(random_groups(5, 5), version=2)
    assert len(done) >= 5
    assert [one == 'waited' for one in done] == [i % 2 == 1 for i in range(len(done))]
