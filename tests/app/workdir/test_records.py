"""Runs with the user's own task, reward, advantage and workflow: equal to what is built in, noted, refused in time."""

import json
import os
import pathlib

import numpy as np
import pytest

from areal_jax.app.command_line import load_config
from areal_jax.app.library import build_run
from areal_jax.app.model.text_model import describe_text_model
from areal_jax.app.workdir.records import load_own_code
from areal_jax.config import validate
from areal_jax.errors import UserError
from areal_jax.plugins import load_module
from areal_jax.tasks.registry import make_task
from areal_jax.telemetry.facts import RunFacts
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.app.own_files import COPIES
from tests.app.run.test_supervised import sft_config
from tests.app.small import SmallRun, equal, small_config

FIELDS = {'run__steps': 3, 'evaluation__problems': 2, 'evaluation__samples': 1}


@pytest.fixture(scope='module')
def built_in(tmp_path_factory):
    return SmallRun(tmp_path_factory.mktemp('run'), **FIELDS).train()


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes own.py into the working directory; a function that makes a run with fields beside FIELDS."""
    monkeypatch.chdir(tmp_path)

    def run(source=COPIES, resume=False, workdir='run', **fields):
        (tmp_path / 'own.py').write_text(source)
        return SmallRun(tmp_path / workdir, resume=resume, **FIELDS | fields)

    return run


def scores(run):
    return [e['value'] for e in run.events if e['kind'] == 'reward']


@pytest.mark.parametrize(
    'fields',
    [
        pytest.param({'task__name': 'own.py:build'}, marks=pytest.mark.slow),
        {'task__name': 'own.py:build', 'task__verifier': 'process', 'task__options__length': 4},
        {'task__reward': 'own.py:score', 'loss__advantage': 'own.py:advantage', 'rollout__workflow': 'own.py:workflow'},
    ],
    ids=['task', 'task in a worker', 'the others'],
)
def test_a_copy_of_what_is_built_in_gives_the_same_run_bit_for_bit(own, built_in, fields):
    run = own(**fields)
    os.chdir('/')  # the working directory of the run may change: what was loaded is found by its whole path
    run.train()
    assert equal(run.final, built_in.final)
    assert scores(run) == scores(built_in)
    assert run.report['accuracy'] == built_in.report['accuracy']


def test_an_own_reward_takes_the_place_of_the_tasks_in_training_and_evaluation(own):
    source = 'def reward(problem, answer_text, finish_reason):\n    return len(answer_text) + len(problem["answer"])\n'
    run = own(source, task__reward='own.py:reward', task__verifier='process').train()
    trajectories = [t for groups in run.batches for g in groups for t in g.trajectories]
    decode = describe_text_model(run.session.context.config).tokenizer.decode
    assert [t.reward for t in trajectories] == [len(decode(t.answer_tokens)) + 4 for t in trajectories]
    assert run.report['accuracy']['sampled']['after']['mean'] >= 4


def test_an_own_advantage_sees_the_whole_update_and_what_it_returns_is_trained(own):
    source = 'seen = []\ndef zero(rewards, groups):\n    seen.append(groups.tolist())\n    return 0 * rewards\n'
    fields = {'loss__advantage': 'own.py:zero', 'learner__filter_equal_rewards': False, 'evaluation__problems': 0}
    run = own(source, **fields).train()
    assert equal(run.final, run.weights[0])  # without entropy or KL, advantages of 0 give no gradient
    assert load_module('own.py:zero', 'x').seen == 4 * [[0, 0, 0, 0, 1, 1, 1, 1]]  # one before the run, three updates


BAD = {
    'task.name': {
        'no file': ('', 'other.py:build', r"there is no file 'other\.py'"),
        'import': ('import nothing_here', 'own.py:build', r'line 1 of own\.py raises ModuleNotFoundError'),
        'build': ('def build(t):\n  raise ValueError("no")', 'own.py:build', r'line 2 of own\.py raises ValueError'),
        'no task': ('def build(t):\n  return 3', 'own.py:build', r'it returned a int, which is no task'),
        'nothing held out': (
            COPIES.replace('[make(s) for s in strings if s in held_out]', '[]'), 'own.py:build',
            r"task 'token_reversal' has no problem on the side 'held_out'.*set evaluation\.problems=0",
        ),
        'score': (
            COPIES.replace("[*problem['answer'], 'end']", 'problem["solution"]'), 'own.py:build',
            r"own\.py:score fails at an empty answer to the first problem: KeyError: 'solution'; it must give",
        ),
    },
    'task.reward': {
        'a name': ('', 'math', r"task\.reward='math' must name a function: path/to/file\.py:name or"),
        'no number': ('def f(p, a, r):\n  return "1"', 'own.py:f', r'own\.py:f fails .* returned a str, which is not'),
        'arguments': ('def f(p):\n  return 1', 'own.py:f', r'own\.py:f fails at an empty answer .*TypeError'),
    },
    'loss.advantage': {
        'arguments': ('def f(r):\n  return r', 'own.py:f', r'^loss\.advantage=own\.py:f: .*TypeError: f\(\) takes 1'),
        'raises': ('def f(r, g):\n  return r[99]', 'own.py:f', r'line 2 of own\.py raises IndexError'),
        'shape': ('def f(r, g):\n  return r[:3]', 'own.py:f', r'shape \(3,\) for 8 rewards of 2 groups; .* \(8,\)'),
        'nan': ('def f(r, g):\n  return r / 0', 'own.py:f', r'advantage 0 is nan, for the reward 0; advantages must'),
        'no array': ('def f(r, g):\n  return "x"', 'own.py:f', r'^loss\.advantage=own\.py:f: .*ValueError: could not'),
        'nothing': ('def f(r, g):\n  ...', 'own.py:f', r'^loss\.advantage=own\.py:f: '),
    },
    'rollout.workflow': {
        'a parameter': ('def f(pool, clock): ...', 'own.py:f', r"has a parameter 'clock', which nobody gives"),
        'no server': ('async def f(mcp): ...', 'own.py:f', r'has a parameter mcp: name the servers in agent\.mcp_s'),
        'no workflow': ('def f(pool):\n  return pool', 'own.py:f', r'it returned a Pool, which is no workflow'),
        'raises': ('def f(pool):\n  return pool.x', 'own.py:f', r'line 2 of own\.py raises AttributeError'),
    },
}  # fmt: skip


@pytest.mark.parametrize(('field', 'case'), [(field, case) for field in BAD for case in BAD[field]])
@pytest.mark.filterwarnings('ignore::RuntimeWarning')
def test_what_cannot_be_used_is_one_sentence_before_anything_is_computed(own, tmp_path, field, case):
    source, spec, message = BAD[field][case]
    with pytest.raises(UserError, match=message) as refused:
        own(source, **{field.replace('.', '__'): spec})
    assert '\n' not in str(refused.value)
    if field == 'loss.advantage' or case in ('no file', 'import', 'a name'):
        assert not (tmp_path / 'run').exists()
    assert all(not path.stat().st_size for path in tmp_path.glob('run/metrics.jsonl'))


@pytest.mark.parametrize(
    ('score', 'message'),
    [
        ('import os\ndef score(p, a, r):\n    os._exit(7)', r'ended with exit code 7'),
        ('import time\ndef score(p, a, r):\n    time.sleep(99)', r'takes more than task\.verifier_deadline_s=2'),
    ],
    ids=['exits', 'hangs'],
)
def test_a_scorer_that_kills_or_stops_its_worker_ends_the_run_at_its_start(own, score, message):
    source = COPIES.partition('def score')[0] + score
    with pytest.raises(UserError, match=message):
        own(source, task__name='own.py:build', task__verifier='process', task__verifier_deadline_s=2.0)


def test_a_scorer_inside_a_function_needs_the_inline_verifier(own):
    source = COPIES.replace("ListedTask('token_reversal', score", "ListedTask('token_reversal', lambda *a: score(*a)")
    fields = {'task__name': 'own.py:build', 'task__verifier': 'process'}
    with pytest.raises(UserError, match=r"build\.<locals>\.<lambda> of task .* is not at the top level .*='inline'"):
        own(source, **fields)


@pytest.mark.filterwarnings('ignore::RuntimeWarning')
def test_what_an_own_function_raises_later_ends_the_run_with_its_line(own):
    source = 'calls = []\ndef late(rewards, groups):\n    calls.append(1)\n    return rewards / (len(calls) < 3)\n'
    run = own(source, loss__advantage='own.py:late', evaluation__problems=0)
    with pytest.raises(UserError, match=r'^loss\.advantage=own\.py:late: advantage \d is (inf|nan)'):
        run.train()


@pytest.mark.slow
def test_digests_are_noted_and_a_resume_says_what_has_changed(own, tmp_path, capsys):
    fields = {'task__name': 'own.py:build', 'loss__advantage': 'own.py:advantage', 'evaluation__problems': 0}
    run = own(run__steps=1, **fields).train()
    noted = json.loads((tmp_path / 'run' / 'own_code.json').read_text())
    assert noted == RunFacts.load(tmp_path / 'run').own_code
    assert noted.keys() == {'task.name', 'loss.advantage'}
    assert noted['task.name']['function'] == 'own.py:build'
    assert noted['task.name']['file'] == str(tmp_path / 'own.py')
    assert len(noted['task.name']['sha256']) == 64
    own(run__steps=2, resume=True, **fields).train()
    assert 'warning' not in capsys.readouterr().out
    own(COPIES + '# changed\n', run__steps=3, resume=True, **fields).train()
    said = capsys.readouterr().out
    assert f'warning: task.name=own.py:build: {tmp_path}/own.py was changed since the run used it last (sha256' in said
    assert 'warning: loss.advantage=own.py:advantage: ' in said
    after = json.loads((tmp_path / 'run' / 'own_code.json').read_text())
    assert after['task.name']['sha256'] != noted['task.name']['sha256']
    with pytest.raises(UserError, match=r'task\.options\.symbols: not set -> 3; use the same'):
        own(run__steps=3, resume=True, task__options__symbols=3, **fields)
    assert run.report['steps'] == 1


def test_a_run_without_own_code_notes_none(built_in):
    assert not (built_in.workdir / 'own_code.json').exists()
    assert RunFacts.load(built_in.workdir).own_code == {}


def test_an_own_task_with_answers_is_imitated_by_a_supervised_run(own, tmp_path):
    (tmp_path / 'own.py').write_text(COPIES)
    config = sft_config(task__name='own.py:build', run__steps=1)
    own_session = build_run(config, tmp_path / 'own')
    session = build_run(sft_config(run__steps=1), tmp_path / 'built_in')
    shown = [one.program.demonstrations.train for one in (own_session, session)]
    for mine, theirs in zip(*shown, strict=True):
        np.testing.assert_array_equal(mine.prompt_tokens, theirs.prompt_tokens)
        np.testing.assert_array_equal(mine.answers, theirs.answers)
    session.close()
    own_session.close()
    (tmp_path / 'own.py').write_text(COPIES.replace(", 'answer': text[::-1]", ''))
    with pytest.raises(UserError, match=r"token_reversal: '[ab]{4}=' has no answer to imitate"):
        build_run(config, tmp_path / 'own')


def test_one_answer_a_group_is_possible_with_an_own_advantage_alone(own):
    own_one = {'rollout__group_size': 1, 'loss__advantage': 'own.py:advantage'}
    with pytest.raises(UserError, match=r'leaves no group to train: set learner\.filter_equal_rewards=False'):
        own(**own_one)
    own(**own_one, learner__filter_equal_rewards=False).session.close()


def test_the_characters_of_a_random_model_can_be_named(tmp_path):
    config = small_config(model__characters='=ba', run__steps=1)
    run = SmallRun(tmp_path, model__characters='=ba', run__steps=1)
    assert config.model.characters == '=ba'
    assert run.session.site.model.decoder.config.vocab_size == 4
    run.session.close()
    with pytest.raises(UserError, match=r"model\.characters='aab=' must have each character once"):
        SmallRun(tmp_path / 'twice', model__characters='aab=')


def test_the_template_of_a_task_can_be_run(monkeypatch):
    monkeypatch.chdir(pathlib.Path(__file__).parents[3])
    config = load_config('configs/templates/my_task.py')
    assert config.task.name == 'configs/templates/my_task.py:build'
    validate(config)
    assert load_own_code(config).keys() == {'task.name'}
    task = make_task(config.task.name, CharacterTokenizer(config.model.characters), held_out_fraction=0.25)
    sizes = task.sizes()
    assert sizes['train'] + sizes['held_out'] == 4**3
    assert sizes['held_out'] >= config.evaluation.problems
    best = [task.score(prompt.problem, prompt.problem['answer'], 'stop') for prompt in task.held_out(9, seed=0)]
    assert best == [1.0] * 9
