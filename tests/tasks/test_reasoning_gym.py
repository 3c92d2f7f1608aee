from __future__ import annotations

import importlib.util
import json
import re
import sys

import pytest

from areal_jax.installation import describe_install
from areal_jax.tasks import reasoning_gym
from areal_jax.tasks.scoring.score_call import score_answer
from areal_jax.tasks.task import ListedTask, TaskError
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.tasks.declared import task_values

# importing it takes more than a second
NO_GYM = importlib.util.find_spec('reasoning_gym') is None
pytestmark = pytest.mark.skipif(NO_GYM, reason='one of its packages needs a C compiler')

MIX = ('basic_arithmetic', 'chain_sum', 'products')
ASCII = ''.join(map(chr, range(32, 127)))


def build(datasets, **changes):
    values = task_values('dataset_size', 'system_prompt', 'held_out_fraction', **changes)
    return reasoning_gym.build(CharacterTokenizer(ASCII), datasets, **values)


@pytest.fixture(scope='module')
def task() -> ListedTask:
    return build(MIX, system_prompt='Answer with the number only.')


def test_every_question_is_found(task):
    counts = {name: len(reasoning_gym.list_arithmetic(name)) for name in MIX}
    # basic_arithmetic: terms 0..10, + and -: 11 * 11 * 2; chain_sum: 0..9: 10 * 10 * 2; products: 10 * 10
    assert counts == {'basic_arithmetic': 242, 'chain_sum': 200, 'products': 100}
    problems = [*task.problems['train'], *task.problems['held_out']]
    assert len({problem['question'] for problem in problems}) == len(problems) == 542
    json.dumps(problems)


def test_no_expression_on_both_sides_and_both_wordings_on_one(task):
    train = {problem['expression'] for problem in task.problems['train']}
    held_out = {problem['expression'] for problem in task.problems['held_out']}
    assert train & held_out == set()
    # 242 + 100: every expression of chain_sum is one of basic_arithmetic too
    assert len(train) + len(held_out) == 342
    for side in ('train', 'held_out'):
        wordings: dict[str, set[str]] = {}
        for problem in task.problems[side]:
            wordings.setdefault(problem['expression'], set()).add(problem['dataset'])
        sums = [e for e in wordings if '*' not in e and '10' not in e]
        assert len(sums) > 20
        assert all(wordings[e] == {'basic_arithmetic', 'chain_sum'} for e in sums)


def test_sizes_of_the_split(task):
    # a quarter of 542 is 135.5; the sides are whole expressions, so not exactly
    assert (len(task.problems['train']), len(task.problems['held_out'])) == (414, 128)


def test_side_depends_on_the_expression_alone(task):
    alone = build(('products',))
    for side in ('train', 'held_out'):
        assert [p for p in task.problems[side] if p['dataset'] == 'products'] == list(alone.problems[side])


def test_normal_form_of_an_expression():
    assert reasoning_gym.normalize_expression('7+8') == reasoning_gym.normalize_expression(' 7 +  8 ') == '7 + 8'
    assert reasoning_gym.normalize_expression('3*10') == '3 * 10'


def test_prompt_is_the_question_under_the_system_prompt(task):
    prompt = task.prompts('train', seed=0).draw()
    text = CharacterTokenizer(ASCII).decode(prompt.tokens)
    assert text == 'Answer with the number only.' + prompt.problem['question']


@pytest.mark.parametrize(
    ('text', 'finish_reason', 'reward'),
    [
        ('6', 'stop', 1.0),
        ('The answer is 6', 'stop', 1.0),  # the data set's scorer alone would say 0.067
        ('<answer>6</answer>', 'stop', 1.0),
        ('2 * 3 = 6.', 'stop', 1.0),
        (' 06 ', 'stop', 1.0),
        ('6.0', 'stop', 1.0),
        ('5', 'stop', 0.0),
        ('6 or 5', 'stop', 0.0),  # the last one counts
        ('-6', 'stop', 0.0),
        ('16', 'stop', 0.0),  # contains the answer: partial credit is none
        ('6.5', 'stop', 0.0),
        ('', 'stop', 0.0),
        ('six', 'stop', 0.0),
        ('6', 'length', 0.0),  # no EOS
    ],
)
@pytest.mark.parametrize('dataset', MIX)
def test_reward_by_hand(dataset, text, finish_reason, reward):
    assert reasoning_gym.score({'dataset': dataset, 'answer': '6'}, text, finish_reason) == reward


@pytest.mark.parametrize(('text', 'reward'), [('-4', 1.0), ('3 - 7 = -4', 1.0), ('4', 0.0), ('3-4', 0.0)])
def test_reward_of_negative_numbers(text, reward):
    assert reasoning_gym.score({'dataset': 'basic_arithmetic', 'answer': '-4'}, text, 'stop') == reward


def test_every_listed_answer_is_right_and_its_successor_wrong(task):
    for problem in [*task.problems['train'], *task.problems['held_out']]:
        assert task.score(problem, problem['answer'], 'stop') == 1.0
        assert task.score(problem, str(int(problem['answer']) + 1), 'stop') == 0.0


@pytest.mark.parametrize(('text', 'label'), [('five', 'unparsed'), ('5', 'ok'), ('6.5', 'ok')])
def test_an_answer_without_a_number_is_unparsed(text, label):
    assert score_answer(reasoning_gym.score, {'dataset': 'products', 'answer': '6'}, text, 'stop').label == label


@pytest.mark.parametrize(
    ('datasets', 'message'),
    [
        ((), r"task\.datasets=\(\) names none: choose one or more of \['ab', 'acre', "),
        (
            ('chain_sum', 'sudokku'),
            r"task\.datasets: reasoning-gym has no data set 'sudokku'; did you mean 'sudoku' or 'mini_sudoku'",
        ),
        (
            ('chain_sum:terms=3',),
            r"task\.datasets: 'chain_sum:terms=3' has no option 'terms'; its options: min_terms, max_terms,",
        ),
        (('chain_sum:min_terms',), r"task\.datasets: 'min_terms' in 'chain_sum:min_terms' must be option=value"),
        (('chain_sum:min_terms=9:max_terms=3',), r"'chain_sum:min_terms=9:max_terms=3' cannot be made: AssertionError"),
        (
            ('composite',),
            r"task\.datasets: 'composite' cannot be made: AssertionError: Must specify at least one dataset",
        ),
    ],
)
def test_what_the_package_does_not_have_is_named(datasets, message):
    with pytest.raises(TaskError, match=message):
        build(datasets)


def test_a_data_set_with_options_is_the_packages_own():
    task = build(('products', 'chain_sum:min_digits=3:max_digits=3'), dataset_size=8)
    problems = [p for side in ('train', 'held_out') for p in task.problems[side] if p['dataset'] == 'chain_sum']
    assert len(problems) == 8
    assert all(len(number) == 3 for p in problems for number in re.findall('[0-9]+', p['question']))
    json.dumps(problems)
    for problem in problems:
        assert task.score(problem, problem['answer'], 'stop') == 1.0
        assert task.score(problem, f'<answer>{problem["answer"]}</answer>', 'stop') == 1.0
        assert task.score(problem, problem['answer'], 'length') == 0.0
        assert score_answer(task.score, problem, ' ', 'stop').label == 'unparsed'
    assert task.final_answer('so it is <answer> 17 </answer>.') == '17'


# word_ladder and isomorphic_strings follow the order of a set, list_functions the global generator of `random`,
# ab has empty golds, bf prints, arc_agi has tuples and graph_color numbers as keys, gsm_symbolic fractions
NAMES = (
    'ab',
    'bf',
    'word_ladder',
    'isomorphic_strings',
    'list_functions',
    'arc_agi',
    'graph_color',
    'gsm_symbolic',
    'sudoku',
)


def test_items_depend_on_the_data_set_alone_and_survive_json():
    one = list_all(*NAMES, size=5)  # one process
    assert len(one) > 5 * len(NAMES) / 2
    two = ('word_ladder', 'list_functions')
    of_name = lambda found, name: [p for p in found if p['dataset'] == name]
    again = list_all(*two, size=5)
    assert [of_name(one, name) for name in two] == [of_name(again, name) for name in two]
    read = json.loads(json.dumps(one))
    assert read == one
    rewards = {(p['dataset'], reasoning_gym.score(p, p['answer'], 'stop')) for p in read if 'answer' in p}
    assert rewards == {(name, 1.0) for name in NAMES if name != 'graph_color'}  # which has no single gold


def list_all(*names, size):
    return reasoning_gym.draw_problems([reasoning_gym.parse_name(name) for name in names], size)


def test_an_answer_that_makes_the_scorer_raise_is_unparsed():
    [problem] = list_all('prime_factorization', size=1)
    assert score_answer(reasoning_gym.score, problem, 'no idea', 'stop').label == 'unparsed'


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'reasoning_gym', None)  # import fails
    with pytest.raises(TaskError, match=rf'^task\.name=.* needs a package: {re.escape(describe_install("tasks"))} \('):
        build(('products',))
