"""Tasks made of questions, and own builders: their options, their scorers, and what is refused."""

import pytest

from areal_jax.errors import UserError
from areal_jax.plugins import load_function
from areal_jax.tasks import registry
from areal_jax.tasks.questions import question_task
from areal_jax.tasks.scoring.worker import load_scorer
from areal_jax.tasks.task import TaskError, hash_fraction
from areal_jax.text.tokenizer import CharacterTokenizer

TOKENIZER = CharacterTokenizer('0123456789+=')
TASK = """from areal_jax.tasks.questions import question_task

def build(tokenizer, digits=1, base=10, held_out_fraction=0.25):
    numbers = range(base**digits)
    problems = [{'question': f'{a}+{b}=', 'answer': str(a + b)} for a in numbers for b in numbers]
    return question_task(tokenizer, problems, score, held_out_fraction=held_out_fraction)

def score(problem, answer_text, finish_reason):
    return float(finish_reason == 'stop' and answer_text == problem['answer'])
"""


def score(problem, answer_text, finish_reason):
    return 0.0


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes own.py into the working directory, and makes its task."""
    monkeypatch.chdir(tmp_path)

    def make(source=TASK, options=None, **values):
        (tmp_path / 'own.py').write_text(source)
        return registry.make_task('own.py:build', TOKENIZER, options or {}, **values)

    return make


def test_the_side_of_a_question_is_decided_by_its_hash_alone():
    questions = [f'{a}+{b}=' for a in range(10) for b in range(10)]
    task = question_task(TOKENIZER, [{'question': q} for q in [*questions, *questions]], score, held_out_fraction=0.3)
    held_out = [problem['question'] for problem in task.problems['held_out']]
    assert held_out == [question for question in questions if hash_fraction(question) < 0.3]
    assert task.sizes() == {'train': 100 - len(held_out), 'held_out': len(held_out), 'dropped': 0}
    half = question_task(TOKENIZER, [{'question': q} for q in questions[::2]], score, held_out_fraction=0.3)
    assert {p['question'] for p in half.problems['held_out']} == set(held_out) & set(questions[::2])


BAD_PROBLEMS = {
    'no dict': (['1+1='], r"task 'test_questions': problems\[0\]=1\+1= must be a dict with a text 'question'"),
    'no question': ([{'answer': '2'}], r"problems\[0\]=\{'answer': '2'\} must be a dict with a text 'question'"),
    'number as question': ([{'question': 2}], r"must be a dict with a text 'question'"),
    'no problem': ([], r"task 'test_questions' lists no problem"),
    'a tuple': ([{'question': '1', 'answer': (1, 2)}], r'problems\[0\] holds \(1, 2\) of type tuple, which JSON'),
    'an object': ([{'question': '1', 'x': {'y': object()}}], r'problems\[0\] holds <object .* of type object, which'),
    'a key': ([{'question': '1', 'x': {1: 2}}], r'problems\[0\] has the key 1, which JSON would turn into text'),
}


@pytest.mark.parametrize('case', BAD_PROBLEMS)
def test_problems_that_no_worker_could_be_sent_are_named(case):
    problems, message = BAD_PROBLEMS[case]
    with pytest.raises(TaskError, match=message):
        question_task(TOKENIZER, problems, score)


def test_an_own_task_gets_options_and_fields_by_the_names_of_its_parameters(own):
    assert registry.value_names('areal_jax.tasks.jsonl:build') == ('path', 'system_prompt', 'held_out_fraction')
    task = own(options={'base': 3}, held_out_fraction=0.0)
    assert registry.value_names('own.py:build') == ('held_out_fraction',)
    assert task.name == 'own'
    assert task.sizes() == {'train': 9, 'held_out': 0, 'dropped': 0}
    assert task.score({'answer': '2'}, '2', 'stop') == 1.0


def test_a_worker_in_another_directory_finds_the_scorer_of_a_file(own, tmp_path, monkeypatch):
    task = own()
    assert task.scorer == f'{tmp_path}/own.py:score'
    monkeypatch.chdir('/')
    assert load_scorer(task.scorer)({'answer': '2'}, '2', 'stop') == 1.0


HEAD = 'def build(tokenizer, digits, base=2, **more):\n    return None\n'
BAD_BUILDS = {
    'a misspelt option': (TASK, {'digit': 3}, r'task\.options\.digit: task\.name=own\.py:build has no such option; '
                          r'it takes digits, base; did you mean digits\?'),
    'no options': ('def build(tokenizer): ...', {'digits': 3}, r'has no such option; it takes none'),
    'a field': (TASK, {'held_out_fraction': 0.5}, r'the builder gets the field task\.held_out_fraction; set --config'),
    'a lacking option': (HEAD, {}, r"needs the option 'digits': set --config\.task\.options\.digits=VALUE, or give"),
    'no task': (HEAD, {'digits': 3, 'any': 1}, r'it returned None, which is no task .* return question_task'),
    'a dict': ('def build(t):\n  return {}', {}, r"it returned a dict, which is no task \(it has no 'name'\)"),
    'it raises': ('def build(t):\n  return 1 / 0', {}, r'line 2 of own\.py raises ZeroDivisionError: division by zero'),
    'it takes nothing': ('def build():\n  return {}', {}, r'own\.py raises TypeError: build\(\) takes 0 pos'),
    'it exits': ('import sys\ndef build(t):\n  sys.exit("bye")', {}, r'line 3 of own\.py raises SystemExit: bye'),
    'no function': ('def make(t): ...', {}, r"there is no function 'build' in own\.py"),
    'a set among the problems': (
        TASK.replace("'answer': str(a + b)", "'answer': {a + b}"), {}, r"'own': problems\[0\] holds \{0\} of type set"
    ),
}  # fmt: skip


@pytest.mark.parametrize('case', BAD_BUILDS)
def test_a_builder_that_cannot_be_used_is_one_sentence(own, case):
    source, options, message = BAD_BUILDS[case]
    with pytest.raises(UserError, match=message) as refused:
        own(source, options)
    assert '\n' not in str(refused.value)


def test_built_in_tasks_take_no_options():
    message = r"task\.options\.digits=3: task\.name='token_reversal' takes no options; remove them, or name a task"
    with pytest.raises(TaskError, match=message):
        registry.make_task('token_reversal', TOKENIZER, {'digits': 3}, symbols=2, length=4, held_out_fraction=0.25)


@pytest.mark.parametrize(
    ('name', 'message'),
    [('own.py', r'name the function that builds the task, own\.py:build'), ('json', r'did you mean jsonl\?')],
)
def test_a_name_that_is_no_task_suggests_one(name, message):
    with pytest.raises(TaskError, match=message):
        registry.make_task(name, TOKENIZER)


def test_what_is_loaded_for_a_worker_is_what_the_run_has(own):
    own()
    assert load_function('own.py:score', 'x')({'answer': '7'}, '7', 'length') == 0.0
