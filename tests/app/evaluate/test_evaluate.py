"""A model on its own gets the scores of the run's evaluation, is resumed exactly, and bad input leaves nothing."""

import json
import shutil

import jax
import numpy as np
import pytest

from areal_jax.app.evaluate.evaluate import evaluate_model
from areal_jax.config.fields import ConfigError
from areal_jax.errors import UserError
from areal_jax.evaluation.results import AnswerFile
from areal_jax.tasks.task import TaskError
from tests.app.small import SmallRun, small_config

EVALUATION = {'evaluation__problems': 4, 'evaluation__samples': 5, 'run__steps': 2}


def lines_of(workdir):
    lines = [json.loads(line) for line in (workdir / 'answers.jsonl').read_text().splitlines()]
    return sorted(lines, key=lambda line: line['draw'])


def scores_of(workdir):
    """As evaluations.json of a run has them."""
    rewards = [[answer['reward'] for answer in line['answers']] for line in lines_of(workdir)]
    return {'greedy': [row[0] for row in rewards], 'sampled': [row[1:] for row in rewards]}


def scores_of_run(workdir, phase):
    scores = json.loads((workdir / 'evaluations.json').read_text())[phase]
    return {name: scores[name] for name in ('greedy', 'sampled')}


def without_time(results):
    return {name: value for name, value in results.items() if name not in ('seconds', 'tokens_per_second')}


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return SmallRun(tmp_path_factory.mktemp('run'), **EVALUATION, checkpoint__every=1).train()


@pytest.mark.parametrize(
    'fields',
    [
        {'run__clock': 'real', 'cluster__engines': '2 x shared', 'rollout__slots': 3},
        pytest.param(
            {'lora__rank': 2, 'publication__channel': 'files', 'publication__dtype': 'bfloat16'},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {'cluster__engines': '2 x tensor=1', 'task__verifier': 'process', 'rollout__top_k': 2,
             'loss__truncated_sampling': 'full_softmax'},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda fields: ', '.join(f'{name}={value}' for name, value in fields.items()),
)  # fmt: skip
def test_the_scores_are_those_of_the_run_before_and_after_training(tmp_path, fields):
    fields = EVALUATION | fields
    finished = SmallRun(tmp_path / 'run', **fields).train()
    config = small_config(**fields)
    after = evaluate_model(config, tmp_path / 'after', model=str(tmp_path / 'run'))
    assert scores_of(tmp_path / 'after') == scores_of_run(tmp_path / 'run', 'after')
    assert after['model']['weights_sha256'] == finished.report['weights_sha256']
    assert after['model']['version'] == 2
    before = evaluate_model(config, tmp_path / 'before')  # the weights of the config: drawn
    assert scores_of(tmp_path / 'before') == scores_of_run(tmp_path / 'run', 'before')
    assert before['model']['weights_sha256'] != after['model']['weights_sha256']
    assert before['model']['version'] == 0


def test_a_checkpoint_is_a_model(run, tmp_path):
    config, checkpoints = small_config(**EVALUATION), run.workdir / 'checkpoints'
    last = evaluate_model(config, tmp_path / 'last', model=str(checkpoints / 'step_00000002'))
    assert scores_of(tmp_path / 'last') == scores_of_run(run.workdir, 'after')
    first = evaluate_model(config, tmp_path / 'first', model=str(checkpoints / 'step_00000001'))
    assert (first['model']['version'], last['model']['version']) == (1, 2)
    assert last['model']['weights_sha256'] == run.report['weights_sha256'] != first['model']['weights_sha256']


def test_the_results_say_what_was_measured(run, tmp_path):
    results = evaluate_model(small_config(**EVALUATION), tmp_path, model=str(run.workdir), source='configs/tiny_cpu.py')
    assert json.loads((tmp_path / 'results.json').read_text()) == results
    scores = scores_of(tmp_path)
    metrics = {name: metric['mean'] for name, metric in results['metrics'].items()}
    assert list(metrics) == ['greedy', 'avg@5', 'pass@1', 'pass@2', 'pass@4', 'pass@5', 'maj@5']
    assert metrics['greedy'] == pytest.approx(np.mean(scores['greedy']))
    assert [metrics['avg@5'], metrics['pass@1']] == pytest.approx([np.mean(scores['sampled'])] * 2)
    assert metrics['pass@5'] == pytest.approx(np.mean([max(row) for row in scores['sampled']]))
    for metric in results['metrics'].values():
        assert metric['low'] <= metric['mean'] <= metric['high']
    answers = [answer for line in lines_of(tmp_path) for answer in line['answers']]
    assert len(answers) == 4 * 6
    assert sum(results['finish_reasons'].values()) == results['labels']['ok'] == len(answers)
    tokens = results['tokens']
    assert tokens['greedy'] + tokens['sampled'] == sum(len(answer['tokens']) for answer in answers)
    assert results['config_file'] == 'configs/tiny_cpu.py'
    assert results['seed'] == 0
    assert results['versions']['jax'] == jax.__version__
    assert results['config']['rollout']['slots'] == 6


def test_a_line_has_the_problem_and_each_answer(run, tmp_path):
    evaluate_model(small_config(**EVALUATION), tmp_path, model=str(run.workdir))
    for line in lines_of(tmp_path):
        assert line['prompt'] == line['problem']['question']
        assert [answer['sample'] for answer in line['answers']] == ['greedy', 1, 2, 3, 4, 5]
        for answer in line['answers']:
            assert ''.join('?ab='[token] for token in answer['tokens'] if token) == answer['text'].replace('<eos>', '')
            assert (answer['finish_reason'] == 'stop') == (answer['tokens'][-1] == 0)
            assert answer['label'] == 'ok'
            assert answer['final'] == answer['text']  # no integer in it


def test_the_number_of_slots_changes_no_answer(run, tmp_path):
    evaluate_model(small_config(**EVALUATION, rollout__slots=1), tmp_path, model=str(run.workdir))
    assert scores_of(tmp_path) == scores_of_run(run.workdir, 'after')


def test_what_could_not_be_trained_can_be_evaluated(run, tmp_path):
    fields = {'rollout__group_size': 1, 'learner__row_tokens': 4, 'learner__row_loss_tokens': 2}
    fields |= {'rollout__top_k': 1, 'cluster__learner': 'data=64', 'buffer__capacity': 1}
    evaluate_model(small_config(**EVALUATION | fields), tmp_path, model=str(run.workdir))
    scores = scores_of(tmp_path)
    assert scores['sampled'] == [[greedy] * 5 for greedy in scores['greedy']]  # top_k=1 is greedy


@pytest.fixture
def killed(run, tmp_path, monkeypatch):
    """A workdir whose evaluation died after two problems, in the middle of a third line."""
    config, append, written = small_config(**EVALUATION), AnswerFile.append, []

    def die(file, problem, prompt):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(problem.draw)
        append(file, problem, prompt)

    monkeypatch.setattr(AnswerFile, 'append', die)
    with pytest.raises(KeyboardInterrupt):
        evaluate_model(config, tmp_path / 'killed', model=str(run.workdir))
    monkeypatch.undo()
    assert len(lines_of(tmp_path / 'killed')) == 2
    with (tmp_path / 'killed' / 'answers.jsonl').open('a') as file:
        file.write('{"draw": 3, "prob')
    return tmp_path / 'killed'


def test_a_resumed_evaluation_equals_the_uninterrupted_one(run, killed, tmp_path):
    config = small_config(**EVALUATION)
    whole = evaluate_model(config, tmp_path / 'whole', model=str(run.workdir))
    kept = (killed / 'answers.jsonl').read_text().splitlines()[:2]
    resumed = evaluate_model(config, killed, model=str(run.workdir), resume=True)
    assert without_time(resumed) == without_time(whole)
    assert (killed / 'answers.jsonl').read_text().splitlines()[:2] == kept
    drop = lambda line: line | {'finished_s': 0}
    assert [drop(line) for line in lines_of(killed)] == [drop(line) for line in lines_of(tmp_path / 'whole')]
    again = evaluate_model(config, killed, model=str(run.workdir), resume=True)  # nothing is left
    assert again == resumed


def test_answers_are_neither_overwritten_nor_continued_differently(run, killed):
    model, before = str(run.workdir), (killed / 'answers.jsonl').read_bytes()
    with pytest.raises(ConfigError, match=r'killed holds answers already: go on with --resume, or give another'):
        evaluate_model(small_config(**EVALUATION), killed, model=model)
    with pytest.raises(ConfigError, match=r'another config than .*: rollout\.temperature: 1\.0 -> 0\.5; use the same'):
        evaluate_model(small_config(**EVALUATION, rollout__temperature=0.5), killed, model=model, resume=True)
    with pytest.raises(
        ConfigError, match=r"another config .*: model\.path: .* -> '', model\.source: 'run' -> 'random'"
    ):
        evaluate_model(small_config(**EVALUATION), killed, resume=True)
    (killed / 'weights.json').write_text('{"samples_sha256": "0"}')
    with pytest.raises(ConfigError, match=r'--resume with other weights: the files of model\.path='):
        evaluate_model(small_config(**EVALUATION), killed, model=model, resume=True)
    assert (killed / 'answers.jsonl').read_bytes() == before


def test_answers_to_other_problems_are_refused(run, killed):
    text = (killed / 'answers.jsonl').read_text()
    fields = {'model': str(run.workdir), 'resume': True}
    (killed / 'answers.jsonl').write_text(text.replace('"prompt_tokens": [', '"prompt_tokens": [1, '))
    with pytest.raises(UserError, match=r'answers\.jsonl: line 1 answers another problem than draw \d of this evaluat'):
        evaluate_model(small_config(**EVALUATION), killed, **fields)
    (killed / 'answers.jsonl').write_text('{"torn\n' + text)
    with pytest.raises(UserError, match=r'answers\.jsonl: line 1 is no JSON: .*; restore the file as the evaluation'):
        evaluate_model(small_config(**EVALUATION), killed, **fields)


def snapshot(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()} if path.exists() else None


def refused(match, workdir, *, kind=UserError, model=None, overrides=(), **fields):
    """Checks that the evaluation is refused and the workdir is as it was, absent if it was absent."""
    before = snapshot(workdir)
    with pytest.raises(kind, match=match) as caught:
        evaluate_model(small_config(**EVALUATION | fields), workdir, model=model, overrides=overrides)
    assert snapshot(workdir) == before
    assert '\n' not in str(caught.value)


def test_bad_input_is_one_sentence_and_leaves_nothing(run, tmp_path):
    workdir, model = tmp_path / 'evaluation', str(run.workdir)
    (tmp_path / 'empty').mkdir()
    shutil.copy(run.workdir / 'config.json', tmp_path / 'empty' / 'config.json')
    refused(r"empty' holds no checkpoint: let that run end", workdir, model=str(tmp_path / 'empty'))
    refused(r'tokenizer of the model .* does not fit .*characters', workdir, model=model, task__symbols=3)
    refused(r'model\.d_model=48 is another architecture', workdir, model=model, model__d_model=48, model__d_ff=48)
    refused(r"engines='99 x tensor=1' needs 99 devices", workdir, cluster__engines='99 x tensor=1')
    refused(r'^set but never read: run\.steps=7\.', workdir, overrides=['run.steps'], run__steps=7)
    refused(r'cluster\.learner is set, but an evaluation has no learner', workdir, overrides=['cluster.learner'])
    refused(r'--model and --config\.model\.path are both given', workdir, model=model, overrides=['model.path'])
    refused(r"holds something else than an evaluation \('checkpoints'\)", run.workdir, model=model)
    (tmp_path / 'lines.jsonl').write_text('{"question": "1 + 1?", "answer": "2"}\n{"question": "1 + 2?"}\n')
    lines = {'task__name': 'jsonl', 'task__path': str(tmp_path / 'lines.jsonl')}
    refused(r'lines\.jsonl:2: .*answer.* is missing', workdir, kind=TaskError, **lines)
