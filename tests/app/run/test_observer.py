"""Counts between two updates, and a run that evaluates while it trains."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest

from areal_jax.app.library import build_run
from areal_jax.app.run.observer import EngineCounts
from areal_jax.config.fields import ConfigError
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import read_metrics
from tests.app.small import SmallRun, equal, small_config
from tests.telemetry.logs import event_log

ENGINE = {'engine': 'engine/0'}


def events():
    decode = {**ENGINE, 'dispatch': 1, 'bucket': 2, 'steps': 4, 'version': 1}
    return event_log(
        (1, 'prefill', {**ENGINE, 'requests': ['a', 'b'], 'bucket': 64, 'tokens': 30}),
        (2, 'decode', {**decode, 'slots': ['a', 'b'], 'tokens': 8, 'positions': 40, 'positions_read': 50}),
        (3, 'interrupt', {**ENGINE, 'requests': ['a', 'b'], 'from_version': 0, 'to_version': 1}),
        (3, 'prefill', {**ENGINE, 'requests': ['a', 'b'], 'bucket': 64, 'tokens': 25, 'rebuilt': 20}),
        (4, 'preempt', {**ENGINE, 'request': 'b', 'tokens': 9}),
        (5, 'decode', {**decode, 'slots': ['a', None], 'tokens': 4, 'positions': 10, 'positions_read': 10}),
        (8, 'decode', {**decode, 'slots': ['a', 'b'], 'tokens': 8, 'positions': 30, 'positions_read': 40}),
    )


# 30 and 25 - 20 prompt tokens; pauses of a: 5 - 3, of b: 8 - 3, median 3.5; 100 positions read of 80
EXPECTED = {
    names.TOKENS_GENERATED: 20,
    names.TOKENS_PREFILLED: 35,
    names.TOKENS_REBUILT: 20,
    names.PREEMPTIONS: 1,
    names.POSITIONS_READ: 1.25,
    names.REQUEST_PAUSE_MEDIAN: 3.5,
    names.REQUEST_PAUSE_MAX: 5,
}


def test_the_metrics_are_those_of_the_events_since_the_last_call():
    counts = EngineCounts()
    for event in events():
        counts.apply(event)
    assert counts.generated == 20
    assert counts.take() == EXPECTED
    assert counts.take() == {
        names.TOKENS_GENERATED: 0,
        names.TOKENS_PREFILLED: 0,
        names.TOKENS_REBUILT: 0,
        names.PREEMPTIONS: 0,
    }


def test_a_resumed_run_counts_on_wherever_it_was_stopped():
    for stopped_at in range(len(events())):
        counts = EngineCounts()
        for index, event in enumerate(events()):
            if index == stopped_at:
                state = json.loads(json.dumps(counts.state()))
                counts = EngineCounts()
                counts.restore(state)
            counts.apply(event)
        assert counts.take() == EXPECTED


# A run that evaluates while it trains: real engines and learner, the weights to the bit, its rows in every output.


BESIDE = {'evaluation__problems': 4, 'evaluation__samples': 1, 'evaluation__every': 2, 'evaluation__slots': 6}
SCORED = {name: value for name, value in BESIDE.items() if name in ('evaluation__problems', 'evaluation__samples')}
OWN_DEVICES = {'cluster__learner': 'fsdp=2', 'cluster__engines': '2 x tensor=1', 'learner__rows_per_microbatch': 2}


def tokens_of(batches):
    """With versions and log-probs, to the bit."""
    trajectories = [t for groups in batches for g in groups for t in g.trajectories]
    arrays = ('tokens', 'policy_versions', 'behavior_logprobs')
    return [[getattr(t, name).tobytes() for name in arrays] for t in trajectories]


def lines_of(run):
    """Without what an evaluation adds; programs are compiled once a process, not once a run."""
    lines = read_metrics(run.workdir / 'metrics.jsonl')
    return [{n: v for n, v in line.items() if n != 'compilations' and 'evaluation/' not in n} for line in lines]


def rows_of(run):
    return json.loads((run.workdir / 'evaluations.json').read_text()).get('during', [])


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """Six updates under fixed(1), evaluated after the second and fourth; with plots."""
    shown = {'telemetry__plots': True, 'evaluation__every_dispatches': 2}  # done before the next one is due
    fields = BESIDE | shown | {'staleness__schedule': 'fixed(1)', 'run__steps': 6, 'evaluation__every_samples': 1}
    return SmallRun(tmp_path_factory.mktemp('beside'), **fields).train()


@pytest.mark.parametrize(
    'fields',
    [
        pytest.param({'staleness__schedule': 'uniform(0,2)'}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
        {'staleness__schedule': 'fixed(1)', 'cluster__engines': '3 x shared', 'checkpoint__every': 2},
        pytest.param({'staleness__schedule': 'fixed(1)', **OWN_DEVICES}, marks=pytest.mark.slow),
    ],
    ids=['uniform', 'natural', 'three engines, checkpoints', 'devices of their own'],
)
def test_training_is_the_same_to_the_bit(tmp_path, fields):
    fields = {'run__steps': 6, **fields}
    plain = SmallRun(tmp_path / 'plain', **fields, **SCORED).train()
    evaluated = SmallRun(tmp_path / 'evaluated', **fields, **BESIDE).train()
    assert [row['version'] for row in rows_of(evaluated)] == [2, 4]
    assert plain.weights.keys() == evaluated.weights.keys()
    assert all(equal(plain.weights[version], evaluated.weights[version]) for version in plain.weights)
    assert tokens_of(plain.batches) == tokens_of(evaluated.batches)
    if 'checkpoint__every' not in fields:  # a pause waits for a dispatch of the evaluation: it moves the times
        assert lines_of(plain) == lines_of(evaluated)
    assert evaluated.session.site.compilations.count == 0 or plain.session.site.compilations.count > 0


def test_a_row_is_what_an_evaluation_of_that_version_gives(run, tmp_path):
    """The first two updates of a run of two are those of a run of six, and its evaluation after them has the slots."""
    short = SmallRun(tmp_path, staleness__schedule='fixed(1)', run__steps=2, **SCORED).train()
    assert equal(short.weights[2], run.weights[2])
    after = json.loads((tmp_path / 'evaluations.json').read_text())['after']
    row = next(row for row in rows_of(run) if row['version'] == 2)
    assert (row['greedy'], row['sampled']) == (after['greedy'], after['sampled'])


def test_a_row_is_in_the_metrics_of_the_next_update(run):
    lines = read_metrics(run.workdir / 'metrics.jsonl')
    written = {line['evaluation/version']: line for line in lines if 'evaluation/version' in line}
    rows = {row['version']: row for row in rows_of(run)}
    assert set(written) <= set(rows) == {2, 4}
    assert written
    for version, line in written.items():
        assert line['step'] > version
        assert line['evaluation/greedy_accuracy'] == pytest.approx(sum(rows[version]['greedy']) / 4)
        assert line['evaluation/sampled_accuracy'] == pytest.approx(sum(map(sum, rows[version]['sampled'])) / 4)


def test_the_report_has_the_curve_its_cost_and_a_picture(run):
    report = run.report
    assert [row['version'] for row in report['evaluation_curve']] == [2, 4]
    for row in report['evaluation_curve']:
        assert row['greedy']['n'] == 4
        assert row['seconds'] > 0
        assert 0 < row['lane_share'] < 1
    assert 0 < report['evaluation_lane_share'] < 1
    # K and V of 2 layers, 1 head of 16, blocks of 8 positions in float32: 6 slots of two blocks, and one for padding
    assert report['evaluation_cache_bytes'] == (6 * 2 + 1) * 2 * 2 * 16 * 8 * 4
    page = (run.workdir / 'report.md').read_text()
    assert '| 2 | ' in page
    assert 'Evaluation beside training took ' in page
    assert (run.workdir / 'plots' / 'evaluation.png').stat().st_size > 10_000
    assert json.loads((run.workdir / 'report.json').read_text())['evaluation_curve'] == report['evaluation_curve']


def killed_after(run, step, to):
    """The workdir as kill -9 leaves it when the checkpoint of `step` is the newest."""
    shutil.copytree(run.workdir, to)
    for path in (to / 'checkpoints').glob('step_*'):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    for name in ('report.json', 'report.md', 'facts.json'):
        (to / name).unlink(missing_ok=True)
    return to


RESUMED = BESIDE | {'run__steps': 7, 'checkpoint__every': 1, 'checkpoint__keep': 9}


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    return SmallRun(tmp_path_factory.mktemp('whole'), **RESUMED).train()


@pytest.mark.parametrize('rows', ['as written', pytest.param('none', marks=pytest.mark.slow)])
def test_a_resumed_run_has_every_row_once(tmp_path, rows, whole, capsys):
    expected = {row['version']: row['greedy'] for row in rows_of(whole)}
    for step in (2, 5):
        at = killed_after(whole, step, tmp_path / str(step))
        if rows == 'none':  # killed before any evaluation ended
            scores = json.loads((at / 'evaluations.json').read_text())
            (at / 'evaluations.json').write_text(json.dumps({'before': scores['before']}))
        capsys.readouterr()
        resumed = SmallRun(at, resume=True, **RESUMED).train()
        assert equal(resumed.final, whole.final)
        found = {row['version']: row['greedy'] for row in rows_of(resumed)}
        assert len(rows_of(resumed)) == len(found)
        # which later versions are skipped depends on how long an evaluation is under way
        assert all(found[version] == expected[version] for version in found.keys() & expected.keys())
        earlier = {version for version in expected if version < step and rows == 'as written'}
        assert earlier | ({step} if step % 2 == 0 else set()) == {version for version in found if version <= step}
        versions = [v for line in read_metrics(at / 'metrics.jsonl') if (v := line.get('evaluation/version'))]
        assert len(versions) == len(set(versions))
        lost = f'the evaluation of version {step - 1} was under way' in capsys.readouterr().out
        state = json.loads((at / 'checkpoints' / f'step_{step:08d}' / 'run_state.json').read_text())
        under_way = state['observer']['evaluating']
        assert lost == (rows == 'none' and under_way == step - 1)


def test_rows_of_versions_after_the_checkpoint_are_made_again(tmp_path):
    from areal_jax.app.run.observer import Scores
    from areal_jax.telemetry.facts import EvaluationScores, VersionScores, read_curve

    scores = Scores(tmp_path, resume=False)
    for version in (2, 4, 6):
        scores.add_version(VersionScores(version, 1.5, EvaluationScores((1.0, 0.0), ((), ()), None)))
    resumed = Scores(tmp_path, resume=True, step=4)
    assert [row.version for row in resumed.curve] == [2, 4]
    assert [row.version for row in read_curve(tmp_path / 'evaluations.json')] == [2, 4]  # also where it is killed now


def test_without_problems_there_is_nothing_to_evaluate(tmp_path):
    with pytest.raises(ConfigError, match=r'evaluation\.every=2 measures nothing with evaluation\.problems=0'):
        build_run(small_config(evaluation__every=2), tmp_path)


def test_fields_of_an_evaluation_beside_training_are_not_used_without_one(tmp_path):
    config = small_config(evaluation__slots=3, evaluation__problems=2)
    with pytest.raises(ConfigError, match=r'^set but never read: evaluation\.slots=3\. '):
        build_run(config, tmp_path, overrides=['evaluation.slots'])


def test_under_the_real_clock_the_lane_runs_the_dispatches_of_both_in_turn(tmp_path):
    fields = BESIDE | {'run__clock': 'real', 'run__steps': 8, 'run__stall_timeout_s': 120.0, 'evaluation__slots': 2}
    run = SmallRun(tmp_path, **fields).train()
    skipped = [e['version'] for e in run.events if e['kind'] == 'evaluation_skip']
    assert sorted([row['version'] for row in rows_of(run)] + skipped) == [2, 4, 6]
    assert run.session.site.compilations.count == 0  # the programs of both sets of slots are compiled in the warm-up
    done = [e for e in run.events if e['kind'] == 'run_done' and e['lane'] == 'engine/0']
    ends = [(e['started'], e['started'] + e['seconds']) for e in sorted(done, key=lambda e: e['started'])]
    assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(ends))
    assert {'decode', 'evaluation_decode'} <= {e['work'] for e in done}
    assert 0 < run.report['evaluation_lane_share'] < 1
