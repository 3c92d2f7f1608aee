"""benchmarks/arms.py: its arms go into one program, and do the work of the config."""

import pytest

from areal_jax.errors import UserError
from areal_jax.studies.arms.arm import Arm, require_one_program
from benchmarks import arms


@pytest.mark.parametrize('minibatches', [1, 4])
def test_the_arms_go_into_one_program_and_differ(minibatches):
    fields = arms.make_arms(64, 20, minibatches=minibatches, small=False)
    made = [Arm(name, arms.arm_config(own)) for name, own in fields.items()]
    require_one_program(made)
    assert len(made) == 64
    assert {arm.config.loss.proximal for arm in made[:8]} == set(arms.CENTRES)  # of those that run by themselves
    assert len({arm.config.staleness.schedule for arm in made[:8]}) == len(arms.LAGS)
    assert made[0].config.rollout.group_size == 8  # of configs/tiny_cpu.py


def test_options_that_leave_nothing_to_compare_are_named():
    assert arms.read_options(['--arms=8', '--runs=8']).turns == 5
    with pytest.raises(UserError, match='--runs=9 are some of the arms, so at most --arms=8'):
        arms.read_options(['--arms=8', '--runs=9'])
    with pytest.raises(UserError, match='--turns=0 must be at least 1'):
        arms.read_options(['--turns=0'])
