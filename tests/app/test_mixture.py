"""A run on two tasks with different scorers: shares, rewards, resume, replay, and every table by source."""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np
import pytest

from areal_jax import main_check_log, main_replay, main_rollouts
from areal_jax.app.command_line import load_config
from areal_jax.app.evaluate.evaluate import evaluate_model
from areal_jax.app.library import build_run
from areal_jax.errors import ExitCode, UserError
from areal_jax.tasks import jsonl, token_reversal
from areal_jax.tasks.mixture import Interleaving
from areal_jax.tasks.task import TaskError
from areal_jax.telemetry.metrics import read_metrics
from areal_jax.telemetry.rollout_views import read_rollouts
from tests.app.small import SmallRun, resume_killed, small_config, train_until_killed

WEIGHTS = {'lines': 1.0, 'reversal': 2.0}
SCORERS = {'lines': jsonl.KINDS['integer'], 'reversal': token_reversal}


@pytest.fixture(scope='module')
def fields(tmp_path_factory):
    """A mixture of strings to reverse and of lines whose answer is a number, each scored in worker processes."""
    path = tmp_path_factory.mktemp('data') / 'lines.jsonl'
    questions = [f'{a}{b}{c}' for a in 'ab' for b in 'ab' for c in '01']
    path.write_text(''.join(json.dumps({'question': f'{q}=', 'answer': int(q[-1])}) + '\n' for q in questions))
    sources = {
        'lines': {'weight': 1.0, 'name': 'jsonl', 'path': str(path)},
        'reversal': {'weight': 2.0, 'length': 3},
    }
    return {
        'task__sources': sources, 'task__verifier': 'process', 'task__filter': 'equal_rewards',
        'task__held_out_fraction': 0.4, 'model__characters': 'ab=01', 'checkpoint__every': 2,
        'evaluation__problems': 6, 'evaluation__samples': 2, 'evaluation__every': 2, 'evaluation__every_problems': 3,
        'telemetry__rollouts': 'all',
    }  # fmt: skip


def copied(fields):
    return {**fields, 'task__sources': {name: dict(own) for name, own in fields['task__sources'].items()}}


@pytest.fixture(scope='module')
def runs(fields, tmp_path_factory):
    return resume_killed(tmp_path_factory.mktemp('runs'), **copied(fields))


def list_draws(run):
    return [(event['draw'], event['source']) for event in run.events if event['kind'] == 'draw']


def test_the_draws_are_interleaved_by_weight_and_a_resumed_run_draws_the_same(runs):
    whole, resumed = runs
    draws = list_draws(whole)
    order = Interleaving(WEIGHTS)
    assert draws == [(number, order.draw()) for number in range(len(draws))]
    assert len(draws) >= 10
    assert list_draws(resumed) == draws
    assert [[g.trajectories[0].prompt.source for g in batch] for batch in resumed.batches] == [
        [g.trajectories[0].prompt.source for g in batch] for batch in whole.batches[-len(resumed.batches) :]
    ]


def test_every_answer_is_scored_by_its_source(runs):
    records = read_rollouts(runs[0].workdir)
    assert {record['source'] for record in records} == set(WEIGHTS)
    rewards = set()
    for record in records:
        assert record['task'] == {'lines': 'jsonl', 'reversal': 'token_reversal'}[record['source']]
        for answer in record['answers']:
            score = SCORERS[record['source']].score
            expected = score(record['problem'], answer['text'], answer['finish'])
            assert answer['reward'] == pytest.approx(float(expected))
            rewards.add((record['source'], answer['reward']))
    assert ('lines', 1.0) in rewards  # a reversal is never right there
    assert any(0 < reward < 1 for source, reward in rewards if source == 'reversal')


def test_the_metrics_of_a_source_are_those_of_its_groups(runs):
    whole, _ = runs
    lines = read_metrics(whole.workdir / 'metrics.jsonl')
    for line, batch in zip(lines, whole.batches, strict=True):
        tokens = {}
        for source in WEIGHTS:
            rows = [row for group in batch for row in group.heads if row.prompt.source == source]
            known = line.get(f'source/{source}/groups', 0)
            assert known == len(rows) / 4
            tokens[source] = sum(int(row.loss_mask.sum()) for row in rows)
            if rows:
                assert line[f'source/{source}/reward_mean'] == pytest.approx(np.mean([row.reward for row in rows]))
                assert line[f'source/{source}/answer_tokens_mean'] == pytest.approx(tokens[source] / len(rows))
                assert line[f'source/{source}/token_share'] == pytest.approx(tokens[source] / line['tokens/trained'])
            else:
                assert f'source/{source}/reward_mean' not in line
        assert sum(tokens.values()) == line['tokens/trained']
    drops = [event['draw'] for event in whole.events if event['kind'] == 'drop']
    sources = dict(list_draws(whole))
    assert drops
    last = lines[-1]
    assert sum(last[f'source/{source}/drawn'] for source in WEIGHTS) == len(sources)
    for source in WEIGHTS:
        counted = sum(line.get(f'source/{source}/dropped', 0) for line in lines)
        assert counted <= sum(sources[draw] == source for draw in drops)
        assert counted >= sum(sources[draw] == source for draw in drops) - 4  # after the last update was formed


def test_the_report_tells_the_sources_apart(runs):
    report, events = runs[0].report, runs[0].events
    rows = {row['source']: row for row in report['sources']}
    sources = dict(list_draws(runs[0]))
    assert list(rows) == sorted(WEIGHTS)
    assert sum(row['drawn'] for row in rows.values()) == report['groups']['drawn']
    assert sum(row['trained'] for row in rows.values()) == report['groups']['trained'] == 10
    assert sum(row['token_share'] for row in rows.values()) == pytest.approx(1.0)
    for source, row in rows.items():
        drops = [e for e in events if e['kind'] == 'drop' and sources[e['draw']] == source]
        kept = [e for e in events if e['kind'] == 'buffer' and sources[e['draw']] == source]
        assert sum(row['dropped'].values()) == len(drops)
        assert row['filtered_rate'] == (len(drops) / (len(drops) + len(kept)) if drops else None)
        assert row['drawn_share'] == row['drawn'] / len(sources)
    page = (runs[0].workdir / 'report.md').read_text()
    assert '## Sources' in page
    assert re.search(r'^\| lines \| \d+ \(\d+%\) \|', page, re.MULTILINE)
    assert re.search(r'^\| reversal, sampled \| .+ \(n = 3\) \|', page, re.MULTILINE)


def test_evaluations_are_told_by_source_and_together(runs, capsys):
    report = runs[0].report
    scores = json.loads((runs[0].workdir / 'evaluations.json').read_text())
    for phase in ('before', 'after'):
        found = scores[phase]
        assert found['sources'] == [
            'reversal',
            'lines',
            'reversal',
            'reversal',
            'lines',
            'lines',
        ]  # 8 strings: 3 held out
        pooled = report['accuracy']['sampled'][phase]
        assert pooled['mean'] == pytest.approx(np.mean(found['sampled']))
        for row in report['sources']:
            own = [s for s, source in zip(found['sampled'], found['sources'], strict=True) if source == row['source']]
            interval = row['accuracy']['sampled'][phase]
            assert (interval['mean'], interval['n']) == (pytest.approx(np.mean(own)), len(own))
            assert interval['low'] <= interval['mean'] <= interval['high']
    line = next(line for line in read_metrics(runs[0].workdir / 'metrics.jsonl') if 'evaluation/version' in line)
    assert line['evaluation/greedy_accuracy'] == pytest.approx(
        (2 * line['evaluation/source/reversal/greedy_accuracy'] + line['evaluation/source/lines/greedy_accuracy']) / 3
    )


def test_kept_answers_are_shown_by_source(runs, capsys):
    workdir = str(runs[0].workdir)
    assert main_rollouts.main([workdir, '--source=lines', '--json']) == ExitCode.FINISHED
    shown = json.loads(capsys.readouterr().out)
    assert {group['source'] for group in shown} == {'lines'}
    assert main_rollouts.main([workdir, '--limit=0']) == ExitCode.FINISHED
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:4] == ['update', 'draw', 'source', 'answer']
    assert {line.split()[2] for line in table[1:5]} <= set(WEIGHTS)
    assert main_rollouts.main([workdir, '--source=line']) == ExitCode.USER_ERROR
    assert (
        '--source=line: no answers of it are kept; did you mean lines?; of lines, reversal some are'
        in capsys.readouterr().err
    )


def test_the_log_keeps_its_rules(runs, capsys):
    assert main_check_log.main([str(runs[1].workdir)]) == ExitCode.FINISHED, capsys.readouterr().err


def test_a_model_is_evaluated_by_source(runs, fields, tmp_path):
    results = evaluate_model(small_config(**copied(fields)), tmp_path, model=str(runs[0].workdir))
    assert results['task'] == 'mixture of lines, reversal'
    lines = [json.loads(line) for line in (tmp_path / 'answers.jsonl').read_text().splitlines()]
    for source, own in results['sources'].items():
        rewards = [line['answers'][0]['reward'] for line in lines if line['source'] == source]
        assert own['problems'] == len(rewards) == 3
        assert own['metrics']['greedy']['mean'] == pytest.approx(np.mean(rewards))
        assert own['metrics']['greedy']['low'] <= np.mean(rewards) <= own['metrics']['greedy']['high']
    assert results['metrics']['greedy']['mean'] == pytest.approx(np.mean([li['answers'][0]['reward'] for li in lines]))
    after = json.loads((runs[0].workdir / 'evaluations.json').read_text())['after']
    assert after['greedy'] == [line['answers'][0]['reward'] for line in sorted(lines, key=lambda line: line['draw'])]


def test_a_source_without_data_is_named(fields, tmp_path):
    empty, changed = tmp_path / 'empty.jsonl', copied(fields)
    empty.write_text('')
    changed['task__sources']['lines']['path'] = str(empty)
    with pytest.raises(TaskError, match=r"^task\.sources\.lines: task\.path='.*empty\.jsonl' has no line"):
        SmallRun(tmp_path / 'run', **changed)
    changed = copied(fields)
    changed['task__sources']['lines']['held_out_fraction'] = 0.0
    with pytest.raises(TaskError, match=r'^task\.sources\.lines: .*held_out'):
        SmallRun(tmp_path / 'run', **changed)


def test_other_weights_are_not_resumed(runs, fields):
    changed = copied(fields)
    changed['task__sources']['lines']['weight'] = 3.0
    with pytest.raises(UserError, match=r'task\.sources\.lines\.weight: 1\.0 -> 3\.0'):
        SmallRun(runs[0].workdir, resume=True, **changed)


def test_the_config_of_a_mixture_runs_under_the_virtual_clock(tmp_path):
    lines = tmp_path / 'words.jsonl'
    lines.write_text(
        ''.join(json.dumps({'question': f'I have {n} pens.', 'answer': f'#### {n}'}) + '\n' for n in range(9))
    )
    config = load_config(f'configs/mixture.py:{lines}')
    config.update_from_flattened_dict({
        'run.steps': 2, 'run.clock': 'virtual', 'run.export': False, 'evaluation.problems': 0,
        'telemetry.plots': False, 'telemetry.tensorboard': False, 'telemetry.progress': False,
        'rollout.context_tokens': 32, 'learner.row_tokens': 128, 'rollout.prefill_buckets': (32, 256),
    })  # fmt: skip
    report = build_run(config, tmp_path / 'run').train()
    rows = {row['source']: row for row in report['sources']}
    assert list(rows) == ['lines', 'reversal', 'sums']
    total = report['groups']['drawn']
    assert all(abs(rows[source]['drawn'] - total * weight / 4) < 1 for source, weight in config_weights(config).items())


def config_weights(config):
    return {source: own.weight for source, own in config.task.sources.items()}


@pytest.mark.slow
def test_a_killed_run_of_the_real_clock_is_replayed(fields, tmp_path, capsys):
    real = copied(fields) | {'run__clock': 'real', 'run__stall_timeout_s': 60.0}
    workdir: pathlib.Path = tmp_path / 'run'
    train_until_killed(SmallRun(workdir, **real), 3)
    SmallRun(workdir, resume=True, **real).train()
    assert main_replay.main([f'--workdir={workdir}', f'--out={tmp_path / "out"}']) == ExitCode.FINISHED
    assert 'equal: weights_sha256' in capsys.readouterr().out
    assert (tmp_path / 'out/events.jsonl').read_text() == (workdir / 'events.jsonl').read_text()
    pathlib.Path(fields['task__sources']['lines']['path']).rename(tmp_path / 'moved.jsonl')
    assert main_replay.main([f'--workdir={workdir}', f'--out={tmp_path / "not"}']) == ExitCode.USER_ERROR
    assert 'give it with --data=task.sources.lines.path=FILE' in capsys.readouterr().err
