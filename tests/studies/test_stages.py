"""The arms of the project's own study, in its quick form."""

import pytest

from areal_jax.studies.stages import CONTROLS, KNEE, LOCK_STEP, NATURAL, PILOT, RATE
from tests.studies.toy_study import read_study

RATES = {'plain': 0.003, 'decoupled': 0.003, 'weighted_pg': 0.001}


@pytest.fixture(scope='module')
def maker():
    return read_study('quick')[1]


def test_lock_step_has_every_lag_loss_rate_and_seed_in_one_program_a_lag_and_number_of_minibatches(maker):
    stage = maker.make(LOCK_STEP, RATES)
    assert len(stage.arms) == 3 * 3 * (2 + 1 + 1)
    assert not stage.runs
    assert len(stage.programs) == 6
    for program in stage.programs:
        assert len({(arm.config.staleness.schedule, arm.config.learner.n_minibatches) for arm in program.arms}) == 1
    rates = {(factors.method, arm.config.optimizer.learning_rate) for factors, arm in stage.arms.items()}
    assert sorted(rate for method, rate in rates if method == 'weighted_pg') == pytest.approx([0.001 / 3, 0.001, 0.003])


def test_seeds_of_the_stages_differ(maker):
    stages = [maker.make(name, RATES) for name in (KNEE, PILOT, LOCK_STEP)]
    first, second, third = ({factors.seed for factors in stage.arms} for stage in stages)
    assert len(first | second | third) == len(first) + len(second) + len(third)


def test_plain_and_decoupled_differ_in_the_centre_only_and_weighted_pg_does_not_clip(maker):
    stage = maker.make(PILOT, dict.fromkeys(RATES, 0.003))
    values = {
        factors.method: arm.values() for factors, arm in stage.arms.items() if (factors.lag, factors.seed) == (8, 100)
    }
    differ = lambda a, b: {path for path in values[a] if values[a][path] != values[b][path]}
    assert differ('plain', 'decoupled') == {'loss.proximal'}
    assert differ('decoupled', 'weighted_pg') == {
        'learner.n_minibatches',
        'loss.clip_epsilon',
        'loss.clip_epsilon_high',
    }


def test_natural_runs_have_every_eta_and_the_variants(maker):
    stage = maker.make(NATURAL, RATES)
    assert not stage.programs
    assert len(stage.runs) == 3 * 2 * 1 + 2 * 1
    policies = {factors.variant: arm.config.rollout.kv_policy for factors, arm in stage.arms.items()}
    assert {name: policy for name, policy in policies.items() if name} == {'wait': 'wait', 'keep': 'keep'}
    assert policies[''] == 'recompute'


def test_the_zero_rate_and_the_shuffled_rewards_are_controls(maker):
    stage = maker.make(CONTROLS, {})
    by_variant = {factors.variant: arm for factors, arm in stage.arms.items()}
    assert by_variant['zero_rate'].config.optimizer.learning_rate == 0
    assert by_variant['shuffled'].config.loss.advantage.endswith('shuffled_advantages')
    same = [arm.values() for factors, arm in stage.arms.items() if factors.variant in ('same_a', 'same_b')]
    assert len(same) == 4
    assert same.count(same[0]) == 2
    assert RATE in same[0]
