"""An arm is a run of main_train: same prompts, same noise, same arithmetic, so the same weights to rounding."""

import json

import numpy as np
import pytest

from areal_jax.studies.arms.arm import Arm
from areal_jax.studies.arms.arm_training import ArmsProgram, train_arms
from areal_jax.telemetry.metrics import read_metrics
from tests.app.small import SmallRun
from tests.studies.arms.small import arm_config, largest_difference

# Adam divides a gradient by its size: below eps that size is rounding, which differs between any two programs
COMMON = {'rollout__ignore_eos': True, 'rollout__max_new_tokens': 4, 'model__n_layers': 1, 'optimizer__eps': 1e-4}
DECOUPLED = {'staleness__schedule': 'fixed(1)', 'learner__n_minibatches': 2}
CASES = {
    'decoupled': DECOUPLED,
    'plain': {**DECOUPLED, 'loss__proximal': 'behavior', 'loss__entropy_coefficient': 0.03},
    'a-3po': {**DECOUPLED, 'loss__proximal': 'loglinear', 'loss__behavior_weight_cap': 1.5},
    'weighted': {'staleness__schedule': 'fixed(2)', 'loss__clip_epsilon': 1.0, 'loss__clip_epsilon_high': 1e9},
    'epochs': {**DECOUPLED, 'learner__epochs': 2, 'loss__advantage': 'rloo', 'loss__denominator': 'all'},
    'vcpo': {'staleness__schedule': 'fixed(1)', 'loss__objective': 'vcpo', 'optimizer__brake': 'ess'},
    'oapl every 3 updates': {'staleness__schedule': 'every(3)', 'loss__objective': 'oapl'},
    'brake by lag': {**DECOUPLED, 'optimizer__brake': 'lag', 'optimizer__brake_lag': 2.0},
    'projection': {**DECOUPLED, 'optimizer__brake': 'projection'},
    'two symbols': {**DECOUPLED, 'model__family': 'plain', 'model__outputs': 'symbols'},
    'one token': {
        **{'staleness__schedule': 'fixed(1)', 'task__length': 1, 'rollout__max_new_tokens': 1},
        'learner__filter_equal_rewards': False,
    },
    'every group': {
        **{'staleness__schedule': 'fixed(0)', 'learner__filter_equal_rewards': False, 'rollout__temperature': 0.7},
        **{'loss__advantage': 'group_mean', 'loss__aggregation': 'sequence_mean'},
    },
}


def compare(tmp_path, fields, steps):
    """(run, largest difference of the weights by version, metrics of the arm)."""
    fields = {**COMMON, **fields, 'run__steps': steps}
    run = SmallRun(tmp_path / 'run', **fields).train()
    program = ArmsProgram([Arm('arm', arm_config(**fields))], updates_per_call=1)
    differences, lines, version = {}, [], 0
    while not program.finished:
        made = program.advance()[0]
        version += len(made)
        lines += made
        differences[version] = largest_difference(run.weights[version], program.params(0))
    return run, differences, lines


def require_equal(run, lines):
    for theirs, ours in zip(read_metrics(run.workdir / 'metrics.jsonl'), lines, strict=True):
        shared = {name for name in theirs if name in ours and not name.startswith('mismatch/')}
        shared.remove('tokens/generated')  # a run counts what was decoded since its last update
        assert shared >= {'reward/mean', 'reward/std', 'loss/approx_kl', 'loss/clip_fraction', 'update/optimizer_steps'}
        for name in shared:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
        assert ours['mismatch/n'] == theirs['mismatch/n']


@pytest.mark.whole
@pytest.mark.parametrize(
    'case', [pytest.param(name, marks=pytest.mark.slow if name != 'decoupled' else ()) for name in CASES]
)
def test_weights_of_an_arm_are_those_of_the_run_for_every_loss(tmp_path, case):
    run, differences, lines = compare(tmp_path, CASES[case], steps=3 if case == 'decoupled' else 4)
    if case == 'decoupled':  # whose first call trains nothing
        assert differences[0] == 0
    assert differences[1] <= 1e-6
    require_equal(run, lines)


@pytest.mark.slow
def test_an_arm_comes_to_the_conclusions_of_the_run(tmp_path):
    """Rounding may change one token of thousands; the curve of rewards stays."""
    fields = {**COMMON, **DECOUPLED, 'rollout__group_size': 8, 'learner__groups_per_update': 8, 'run__steps': 40}
    fields |= {'loss__entropy_coefficient': 0.03, 'rollout__max_running_groups': 8}
    run = SmallRun(tmp_path / 'run', **fields).train()
    [result] = train_arms([Arm('arm', arm_config(**fields))])
    reward = lambda lines: np.array([line['reward/mean'] for line in lines])
    theirs, ours = reward(read_metrics(run.workdir / 'metrics.jsonl')), reward(result.lines)
    assert ours[-10:].mean() > ours[:5].mean() + 0.1  # it learns
    assert np.abs(theirs - ours).mean() < 0.02


@pytest.mark.whole
def test_one_program_leaves_a_directory_for_each_arm(tmp_path):
    schedules = {'lag0': 'fixed(0)', 'lag2': 'fixed(2)', 'every2': 'every(2)'}
    arms = [Arm(name, arm_config(run__steps=3, staleness__schedule=of)) for name, of in schedules.items()]
    seen = []
    results = train_arms(arms, tmp_path, updates_per_call=2, announce=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (2, 3), (3, 3)]
    for arm, result, ages in zip(arms, results, ([0, 0, 0], [0, 1, 2], [0, 1, 0]), strict=True):
        lines = read_metrics(tmp_path / arm.name / 'metrics.jsonl')
        assert [line['staleness/token_age_mean'] for line in lines] == ages
        assert [line['step'] for line in lines] == [1, 2, 3]
        assert (
            json.loads((tmp_path / arm.name / 'config.json').read_text())['staleness']['schedule']
            == arm.config.staleness.schedule
        )
        assert len(result.weights_sha256) == 64
