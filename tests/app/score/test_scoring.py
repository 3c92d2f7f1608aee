"""Answers scored offline: the rewards of an evaluation, labels and reasons of scorers that fail, and going on."""

import json
import pathlib
import re

import pytest

from areal_jax.app.evaluate.evaluate import evaluate_model
from areal_jax.app.score import scoring
from areal_jax.app.score.scoring import Scoring, describe_failures, render_summary
from areal_jax.config import default_config
from areal_jax.config.fields import ConfigError
from areal_jax.errors import UserError
from tests.app.small import small_config

OWN = f'{pathlib.Path(__file__).parent / "own_scorer.py"}:build'


def own_config(**fields):
    config = default_config()
    config.task.name = OWN
    config.task.verifier_deadline_s, config.task.verifier_attempts = 0.5, 2
    config.telemetry.progress = False
    config.update_from_flattened_dict({name.replace('__', '.'): value for name, value in fields.items()})
    return config


def write(path, answers):
    """`answers`: (number of the problem, text)."""
    lines = [json.dumps({'question': f'q{n}', 'answer': text}) for n, text in answers]
    path.write_text('\n'.join(lines))
    return path


def score(config, answers, out, **options):
    with Scoring(config, answers, out, **options) as found:
        assert found.run()
    return [json.loads(line) for line in out.read_text().splitlines()], found


@pytest.mark.parametrize('verifier', ['inline', 'process'])
def test_the_rewards_are_those_of_the_evaluation_that_gave_the_answers(tmp_path, verifier):
    config = small_config(evaluation__problems=4, evaluation__samples=5)
    evaluate_model(config, tmp_path / 'eval')
    given = [json.loads(line) for line in (tmp_path / 'eval' / 'answers.jsonl').read_text().splitlines()]
    config = small_config(task__verifier=verifier, task__verifier_workers=2 if verifier == 'process' else 1)
    scores, _ = score(config, tmp_path / 'eval' / 'answers.jsonl', tmp_path / 's.jsonl')
    named = [(line['draw'], line['problem']['question'], answer) for line in given for answer in line['answers']]
    assert [(s['draw'], s['question'], s['sample'], s['reward'], s['label']) for s in scores] == [
        (draw, question, answer['sample'], answer['reward'], answer['label']) for draw, question, answer in named
    ]
    assert len(scores) == 4 * 6
    assert len({s['reward'] for s in scores}) > 1


def test_a_scorer_that_fails_gives_a_label_and_a_reason(tmp_path, caplog):
    texts = ['right', 'hang', 'crash', 'raise', 'none', 'unread', 'right']
    answers = write(tmp_path / 'a.jsonl', enumerate(texts))
    scores, found = score(own_config(), answers, tmp_path / 's.jsonl', workers=3)
    assert [(s['question'], s['label'], s['reward'], s['attempts']) for s in scores] == [
        ('q0', 'ok', 0.0, 1),
        ('q1', 'timeout', None, 2),
        ('q2', 'crash', None, 2),
        ('q3', 'error', None, 1),
        ('q4', 'error', None, 1),
        ('q5', 'unparsed', 0.0, 1),
        ('q6', 'ok', 6.0, 1),
    ]
    reasons = [s.get('reason') for s in scores]
    assert reasons[0] is reasons[5] is reasons[6] is None
    assert reasons[1] == "call 'reward' on lane 'reward' exceeded its deadline of 0.5 s"
    assert "the scorer's process ended with exit code 3" in reasons[2]
    assert reasons[3] == r'ValueError: no digit\nin it'
    assert 'the scorer returned a NoneType, which is not a number' in reasons[4]
    summary = found.tally.summarise(found.scored_before, found.seconds, 's.jsonl')
    assert summary['labels'] == {'ok': 2, 'error': 2, 'timeout': 1, 'crash': 1, 'unparsed': 1}
    assert (summary['answers'], summary['failed'], summary['mean_reward']) == (7, 4, 2.0)
    assert 'mean reward 2.0000 of the 3 that have one' in render_summary(summary)
    assert describe_failures(found.tally, 's.jsonl').startswith(
        '4 of 7 answers have no reward (2 error, 1 timeout, 1 crash): s.jsonl has the reason of each; mend the scorer'
    )
    assert 'scoring draw 2 of own_scorer, attempt 1: timeout' in caplog.text  # the number of the line


def test_the_reason_of_an_inline_scorer(tmp_path):
    config = own_config(task__verifier='inline')
    scores, _ = score(config, write(tmp_path / 'a.jsonl', [(0, 'raise'), (1, 'right')]), tmp_path / 's.jsonl')
    assert [(s['label'], s.get('reason')) for s in scores] == [('error', r'ValueError: no digit\nin it'), ('ok', None)]


@pytest.mark.parametrize(('room', 'called'), [(3, {0, 1, 2}), (4096, set(range(10)))])
def test_a_slow_answer_holds_others_up_only_where_there_is_no_room_for_their_scores(
    tmp_path, monkeypatch, room, called
):
    notes, append, before = tmp_path / 'notes', scoring.ScoreFile.append, []

    def note(file, record):
        before.append({int(line.split()[1]) for line in notes.read_text().splitlines()})
        append(file, record)

    monkeypatch.setattr(scoring, 'MOST_AHEAD', room)
    monkeypatch.setattr(scoring.ScoreFile, 'append', note)
    config = own_config(task__options={'notes': str(notes)}, task__verifier_attempts=1)
    answers = write(tmp_path / 'a.jsonl', [(0, 'hang'), *((n, 'right') for n in range(1, 10))])
    scores, _ = score(config, answers, tmp_path / 's.jsonl', workers=2)
    assert [s['reward'] for s in scores] == [None, *map(float, range(1, 10))]
    assert before[0] == called  # when the first score was written


def test_it_goes_on_after_the_last_score_and_scores_nothing_twice(tmp_path):
    notes, out = tmp_path / 'notes', tmp_path / 's.jsonl'
    config = own_config(task__options={'notes': str(notes)})
    answers = write(tmp_path / 'a.jsonl', [(n, 'right') for n in range(6)])
    whole, _ = score(config, answers, out)
    assert [s['reward'] for s in whole] == [float(n) for n in range(6)]
    text = out.read_text()
    out.write_text(''.join(text.splitlines(keepends=True)[:4]) + text.splitlines()[4][:20])
    notes.unlink()
    config.task.verifier_workers = 2  # may change, as what concerns no reward
    config.task.held_out_fraction = 0.25
    again, found = score(config, answers, out)
    assert again == whole
    assert found.scored_before == 4
    assert sorted(line.split()[1] for line in notes.read_text().splitlines()) == ['4', '5']
    score(config, answers, out)
    with answers.open('a') as file:
        file.write('\n{"question": "q9", "answer": "late"}')
    longer, found = score(config, answers, out)
    assert (longer[:6], longer[6]['reward'], found.scored_before) == (whole, 9.0, 6)


def test_other_answers_and_another_task_are_refused(tmp_path, monkeypatch):
    out = tmp_path / 's.jsonl'
    own = tmp_path / 'own.py'
    own.write_text(pathlib.Path(OWN.rpartition(':')[0]).read_text())
    config = own_config(task__name=f'{own}:build')
    answers = write(tmp_path / 'a.jsonl', [(0, 'right'), (1, 'right')])
    score(config, answers, out)
    before = out.read_bytes()

    def refused(match, config=config):
        with pytest.raises(UserError, match=match):
            Scoring(config, answers, out)
        assert out.read_bytes() == before

    deadline = own_config(task__name=f'{own}:build', task__verifier_deadline_s=9.0)
    refused(r'scores of another task: task\.verifier_deadline_s: 0\.5 -> 9\.0; use the same, or another', deadline)
    more = own_config(task__name=f'{own}:build', task__options={'count': 30})
    refused(r"task: sha256 of the problems: '\w+' -> '\w+', task.options.count: None -> 30; use", more)
    write(answers, [(0, 'right'), (1, 'wrong')])
    refused(r'a\.jsonl: line 2 is not what \S+s\.jsonl has a score of: the answers have changed since; restore them')
    write(answers, [(0, 'right')])
    refused(r'a\.jsonl: line 2 is not what \S+s\.jsonl has a score of')
    own.write_text(own.read_text() + '\n# changed\n')
    refused(r"scores of another task: sha256 of the file of the scorer: '\w+' -> '\w+'; use the same")


def test_places_that_cannot_be_used_are_refused_and_nothing_is_left(tmp_path):
    answers = write(tmp_path / 'a.jsonl', [(0, 'right')])
    for out, said in (
        (tmp_path, 'is no regular file: name a file for the scores'),
        (tmp_path / 'none' / 's.jsonl', 'cannot be written: there is no directory'),
        (answers, 'is the file of --answers: give the scores a file of their own'),
    ):
        with pytest.raises(UserError, match=re.escape(f'--out={out} {said}')):
            Scoring(own_config(), answers, out)
    with pytest.raises(UserError, match=r'line 1 names no problem of task'):
        Scoring(small_config(), answers, tmp_path / 's.jsonl')
    assert [path.name for path in tmp_path.iterdir()] == ['a.jsonl']


def test_the_number_of_workers_is_given_once_and_where_there_are_workers(tmp_path):
    answers = write(tmp_path / 'a.jsonl', [(0, 'right')])
    give = lambda config, **options: Scoring(config, answers, tmp_path / 's.jsonl', **options)
    with pytest.raises(ConfigError, match=r"--workers=2, but task\.verifier='inline' scores without workers: remove"):
        give(own_config(task__verifier='inline'), workers=2)
    with pytest.raises(ConfigError, match=r'--workers and --config\.task\.verifier_workers are both given'):
        give(own_config(), workers=2, overrides=('task.verifier_workers',))
    with pytest.raises(ConfigError, match=r'task\.verifier_workers=0 must be at least 1'):
        give(own_config(), workers=0)
    with pytest.raises(ConfigError, match=r'set but never read: rollout\.slots=3'):
        give(own_config(rollout__slots=3), overrides=('rollout.slots',))
    assert [path.name for path in tmp_path.iterdir()] == ['a.jsonl']


def test_a_write_that_fails_keeps_the_scores_before_it(tmp_path, monkeypatch):
    answers = write(tmp_path / 'a.jsonl', [(n, 'right') for n in range(6)])
    out, append, written = tmp_path / 's.jsonl', scoring.ScoreFile.append, []

    def fail(file, record):
        if len(written) == 3:
            raise OSError(28, 'No space left on device', str(out))
        written.append(record)
        append(file, record)

    monkeypatch.setattr(scoring.ScoreFile, 'append', fail)
    with pytest.raises(OSError, match='No space left'):
        score(own_config(), answers, out)
    monkeypatch.undo()
    scores, found = score(own_config(), answers, out)
    assert [s['reward'] for s in scores] == [float(n) for n in range(6)]
    assert found.scored_before == 3
