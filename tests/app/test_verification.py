"""Whole runs whose scorer misbehaves."""

import json

import psutil
import pytest

from areal_jax.app.model.text_model import describe_text_model
from areal_jax.app.parts import task_builder
from areal_jax.control.groups import UnverifiedError
from areal_jax.tasks import token_reversal
from areal_jax.tasks.answers import mathematics
from areal_jax.tasks.scoring.score_call import UNPARSED, score_answer
from areal_jax.tasks.scoring.verifier import Audit
from areal_jax.telemetry.metrics import read_metrics
from tests.app.small import SmallRun, call_after, equal
from tests.tasks import hostile_scorers
from tests.tasks.process_table import all_end


@pytest.mark.parametrize('verifier', ['inline', 'process'])
def test_a_scorer_that_always_exits_ends_the_first_evaluation(verifier, tmp_path, monkeypatch):
    monkeypatch.setattr(token_reversal, 'score', hostile_scorers.exits)
    fields = {'task__verifier': verifier, 'task__max_failed_groups': 5, 'evaluation__problems': 4}
    run = SmallRun(tmp_path, **fields, evaluation__samples=2)
    message = r"^5 answers of the evaluation 'before' in a row \(task\.max_failed_groups\).* ended in: error\."
    with pytest.raises(UnverifiedError, match=message):
        run.train()
    assert run.session.program.parts.host.verifier.attempts_by_label['error'] < 12  # of 4 problems x 3 answers


def test_a_scorer_that_always_exits_ends_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(token_reversal, 'score', hostile_scorers.exits)
    with pytest.raises(UnverifiedError, match=r'^3 groups in a row \(task\.max_failed_groups\).* ended in: error\.'):
        SmallRun(tmp_path, task__max_failed_groups=3).train()


def test_a_run_whose_scorer_forks_and_leaves_daemons_ends_with_the_rewards_of_its_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(token_reversal, 'score', hostile_scorers.forks_leaves_a_daemon_and_returns_the_length)
    run = SmallRun(tmp_path, task__verifier='process', task__verifier_memory_mb=512, run__steps=2)
    workers = [
        process for process in psutil.Process().children() if 'areal_jax.tasks.scoring.worker' in process.cmdline()
    ]
    assert {tuple(process.cmdline()[-2:]) for process in workers} == {('512', 'none')}  # memory, sandbox
    run.train()
    decode = describe_text_model(run.session.context.config).tokenizer.decode
    answers = [t for groups in run.batches for group in groups for t in group.trajectories]
    assert len(answers) == 2 * 2 * 4
    for trajectory in answers:
        tokens = [token for segment in trajectory.segments for token in segment.tokens]
        assert trajectory.reward == len(decode(tokens))
    assert all_end([process.pid for process in workers], within_s=0.0)


def is_unreadable(answer_text):
    return answer_text.startswith('b')


def read_or_not(problem, answer_text, finish_reason):
    return UNPARSED if is_unreadable(answer_text) else float(finish_reason == 'stop')


def right_or_wrong(problem, answer_text, finish_reason):
    return 0.0 if is_unreadable(answer_text) else float(finish_reason == 'stop')


def unparsed_rates(run):
    return [line['reward/unparsed_rate'] for line in read_metrics(run.workdir / 'metrics.jsonl')]


def test_unparsed_answers_are_trained_as_reward_0_and_counted(tmp_path, monkeypatch):
    runs = []
    for name, scorer in (('labelled', read_or_not), ('plain', right_or_wrong)):
        monkeypatch.setattr(token_reversal, 'score', scorer)
        runs.append(SmallRun(tmp_path / name, run__steps=3).train())
    labelled, plain = runs
    assert equal(labelled.final, plain.final)
    decode = describe_text_model(labelled.session.context.config).tokenizer.decode
    unread = [
        [is_unreadable(decode(t.answer_tokens)) for group in batch for t in group.trajectories]
        for batch in labelled.batches
    ]
    assert 0 < sum(map(sum, unread)) < sum(map(len, unread))
    expected = [sum(found) / len(found) for found in unread]
    assert unparsed_rates(labelled) == expected
    assert unparsed_rates(plain) == [0.0] * 3
    assert {event['label'] for event in labelled.events if event['kind'] == 'reward'} == {'ok', 'unparsed'}
    rate = labelled.report['unparsed_rate']
    assert rate == {'first': expected[0], 'last': expected[-1], 'mean': pytest.approx(sum(expected) / 3)}


@pytest.mark.slow
def test_a_resumed_run_knows_which_answers_were_unparsed(tmp_path, monkeypatch):
    monkeypatch.setattr(token_reversal, 'score', read_or_not)
    fields = {'run__steps': 4, 'checkpoint__every': 2}
    whole = SmallRun(tmp_path / 'whole', **fields).train()
    part = SmallRun(tmp_path / 'part', **fields)
    call_after(part.session, 2, part.session.program.parts.controller.stop_requested.set)
    part.train()
    resumed = SmallRun(tmp_path / 'part', resume=True, **fields).train()
    buffered = [t for group in resumed.batches[0] for t in group.trajectories]
    assert any(t.label == 'unparsed' for t in buffered)
    assert unparsed_rates(resumed)[:2] == unparsed_rates(whole)[:2]
    assert unparsed_rates(resumed)[2] == sum(t.label == 'unparsed' for t in buffered) / len(buffered)


@pytest.mark.slow
def test_the_audit_counts_and_changes_no_reward(tmp_path, monkeypatch):
    monkeypatch.setattr(token_reversal, 'score', right_or_wrong)
    runs = []
    for name, compare in (('with', lambda gold, text: len(text) > 2), ('without', None)):
        build = lambda config, workdir, compare=compare: Audit(workdir, 1.0, compare) if compare else None
        monkeypatch.setattr(task_builder, 'build_audit', build)
        runs.append(SmallRun(tmp_path / name, run__steps=3, task__verifier='process').train())
    audited, plain = runs
    assert equal(audited.final, plain.final)
    outcomes = [event['outcome'] for event in audited.events if event['kind'] == 'audit']
    ended = [event for event in audited.events if event['kind'] == 'finish' and event['reason'] == 'stop']
    assert 0 < outcomes.count('disagrees') < len(outcomes) <= len(ended)
    report = audited.report['audit']
    assert (report['answers'], report['disagreements']) == (len(outcomes), outcomes.count('disagrees'))
    counted = [line.get('reward/audit_disagreements', 0) for line in read_metrics(audited.workdir / 'metrics.jsonl')]
    assert 0 < sum(counted) <= outcomes.count('disagrees')  # some come after the last update
    texts = (audited.workdir / 'audit.jsonl').read_text().splitlines()
    assert 0 < len(texts) <= outcomes.count('disagrees')  # equal answers of a group are one line
    assert plain.report['audit'] is None
    assert not any('audit' in name for line in read_metrics(plain.workdir / 'metrics.jsonl') for name in line)


def test_a_run_on_a_file_of_mathematics(tmp_path):
    # the alphabet of the model is a, b and =; its answers are products, and b b a equals a b^2
    golds = {'ab=': 'ab', 'ba=': 'a b^2', 'aab=': r'\frac{a}{b}', 'abb=': 'a'}
    rows = [json.dumps({'problem': question, 'solution': rf'\boxed{{{gold}}}'}) for question, gold in golds.items()]
    path = tmp_path / 'rows.jsonl'
    path.write_text('\n'.join(rows))
    fields = {'task__name': 'jsonl', 'task__path': str(path), 'task__answer': 'math', 'task__verifier': 'process'}
    audit = {'task__audit_fraction': 1.0, 'task__held_out_fraction': 0.0}
    run = SmallRun(tmp_path / 'run', run__steps=2, **fields, **audit).train()
    decode = describe_text_model(run.session.context.config).tokenizer.decode
    for trajectory in (t for batch in run.batches for group in batch for t in group.trajectories):
        text, gold = decode(trajectory.answer_tokens), trajectory.prompt.problem['answer']
        expected = score_answer(mathematics.score, {'answer': gold}, text, trajectory.finish_reason)
        assert (trajectory.reward, trajectory.label) == (expected, expected.label)
    assert run.report['audit']['answers'] > 0
