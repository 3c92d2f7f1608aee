"""Evaluations of a simulation: they take the time of engines, and jumps change nothing."""

from __future__ import annotations

import itertools

import pytest

from areal_jax import main_check_log
from areal_jax.config.fields import ConfigError
from areal_jax.errors import ExitCode
from tests.app.simulate.test_simulated_run import read_events, simulate, simulate_both_ways

BESIDE = {
    'run__steps': 6, 'evaluation__problems': 6, 'evaluation__samples': 1, 'evaluation__every': 2,
    'evaluation__every_problems': 5, 'evaluation__every_samples': 1, 'evaluation__slots': 4,
}  # fmt: skip


@pytest.fixture(scope='module')
def evaluated(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('evaluated')
    return workdir, simulate(workdir, **BESIDE).train()


def work(workdir, kind):
    return [event for event in read_events(workdir) if event['kind'] == 'run_done' and event['work'] == kind]


def test_evaluations_before_beside_and_after_are_in_the_log(evaluated):
    workdir, report = evaluated
    kinds = [(e['kind'], e.get('phase'), e.get('mode')) for e in read_events(workdir) if e['kind'].startswith('eval')]
    assert [kind for kind in kinds if kind[0] == 'evaluate'] == [
        ('evaluate', 'before', 'start'), ('evaluate', 'before', 'done'),
        ('evaluate', 'after', 'start'), ('evaluate', 'after', 'done'),
    ]  # fmt: skip
    assert kinds.count(('evaluation_done', None, None)) >= 1
    assert main_check_log.main([str(workdir)]) == ExitCode.FINISHED
    assert (
        '| Did it learn? | - | A simulation has no weights, and its rewards are drawn. |'
        in (workdir / 'report.md').read_text()
    )
    assert report['evaluation_curve']


def test_answers_beside_training_take_time_of_their_engines(tmp_path, evaluated):
    """Dispatches of an engine, of either kind, never overlap: under real prices an evaluation is not free."""
    workdir, _ = evaluated
    spans = sorted(
        (event['started'], event['time'], event['lane'])
        for kind in ('decode', 'prefill', 'evaluation_decode', 'evaluation_prefill')
        for event in work(workdir, kind)
    )
    for lane in {lane for *_, lane in spans}:
        own = [(start, end) for start, end, where in spans if where == lane]
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(own))
    seconds = [sum(event['seconds'] for event in work(workdir, kind)) for kind in ('evaluation_decode', 'decode')]
    assert 0 < seconds[0] < seconds[1]
    simulate(tmp_path, **BESIDE | {'evaluation__every': 0}).train()
    beside, alone = (
        next(event['time'] for event in read_events(at) if event['kind'] == 'publish' and event['version'] == 6)
        for at in (workdir, tmp_path)
    )
    assert beside > alone


@pytest.mark.parametrize(
    'fields',
    [
        pytest.param({}, marks=pytest.mark.slow),
        {'evaluation__every_dispatches': 2},
        {'simulation__turns': 'uniform(1, 3)'},
    ],
)
def test_joined_dispatches_change_no_event_but_their_own(tmp_path, fields):
    simulate_both_ways(tmp_path, **BESIDE, **fields)
    assert {event['time'] for event in read_events(tmp_path / 'True') if event['kind'] == 'evaluation_decode'} == {
        event['time'] for event in read_events(tmp_path / 'False') if event['kind'] == 'evaluation_decode'
    }


def test_engines_that_evaluate_alone_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r'evaluation.engines=1: engines that evaluate alone are not simulated'):
        simulate(tmp_path, **BESIDE, evaluation__engines=1)
