"""Which problem a line names, and the sentences for lines that name none or several."""

import re

import pytest

from areal_jax.app.score.problem_index import ProblemIndex, list_prompts
from areal_jax.files import FileError
from areal_jax.tasks.task import ListedTask, question_task
from areal_jax.text.tokenizer import CharacterTokenizer

TOKENIZER = CharacterTokenizer('abcdefgh0123456789=', has_eos=True)
PROBLEMS = [{'question': f'{n}=', 'task_id': f't/{n}', 'id': n, 'gold': n} for n in range(10)]


def score(problem, answer_text, finish_reason):
    return 1.0


def task_of(problems):
    messages = lambda problem: [{'role': 'user', 'content': problem.get('question', 'a')}]
    return ListedTask('own', score, {'train': problems[:3], 'held_out': problems[3:]}, messages, TOKENIZER)


def find(problems, record):
    index = ProblemIndex(task_of(problems), 0)
    place, names = index.find(record, 'a.jsonl: line 7')
    return index.prompts[place].problem, names


@pytest.mark.parametrize(
    ('record', 'names'),
    [
        ({'question': '4='}, {'question': '4='}),
        ({'prompt': '4='}, {'prompt': '4='}),
        ({'problem': '4='}, {'problem': '4='}),
        ({'task_id': 't/4'}, {'task_id': 't/4'}),
        ({'id': 4}, {'id': 4}),
        ({'id': '4'}, {'id': '4'}),
        ({'question': '4=', 'id': 4, 'gold': 9}, {'question': '4=', 'id': 4}),
        ({'problem': PROBLEMS[4], 'prompt': 'with a chat template'}, PROBLEMS[4] | {'gold': None}),
        ({'problem': PROBLEMS[4] | {'gold': 'mended since'}}, PROBLEMS[4] | {'gold': None}),
    ],
)
def test_a_line_names_a_problem(record, names):
    found = find(PROBLEMS, record)
    assert found == (PROBLEMS[4], {name: value for name, value in names.items() if value is not None})


def test_both_sides_of_the_task_are_found_and_nothing_is_tokenized():
    task = question_task(None, [{'question': f'{n}='} for n in range(50)], score)  # without a tokenizer
    index = ProblemIndex(task, 0)
    assert task.sizes()['held_out'] > 0 < task.sizes()['train']
    assert {index.prompts[index.find({'question': f'{n}='}, '')[0]].problem['question'] for n in range(50)} == {
        f'{n}=' for n in range(50)
    }


def test_an_id_counts_only_where_the_problems_have_one():
    assert find([{'question': 'a='}], {'question': 'a=', 'id': 'of the answer'}) == (
        {'question': 'a='}, {'question': 'a='},
    )  # fmt: skip


def test_problems_without_a_question_have_their_prompts_and_are_named_whole():
    problems = [{'letters': letters} for letters in ('ab', 'ba')]
    prompts = list_prompts(task_of(problems), 0)
    assert [len(prompt.tokens) for prompt in prompts] == [1, 1]
    assert find(problems, {'problem': {'letters': 'ba'}}) == (problems[1], {'problem': problems[1]})


def test_equal_questions_are_told_apart_by_the_whole_problem_or_an_id():
    problems = [{'question': 'a=', 'id': n} for n in range(2)]
    assert find(problems, {'problem': problems[1]})[0] == find(problems, {'question': 'a=', 'id': 1})[0] == problems[1]
    without_id = [{'question': 'a=', 'gold': n} for n in range(2)]
    assert find(without_id, {'problem': without_id[1]})[0] == without_id[1]


@pytest.mark.parametrize(
    ('record', 'said'),
    [
        (
            {'answer': '1'},
            'names no problem: give its question as the task has it, as a text, or its task_id, or its id',
        ),
        ({'question': 4}, 'names no problem: give its question as the task has it'),
        ({'question': '11='}, "names no problem of task 'own' by question='11=': write it exactly as the task has it"),
        ({'question': '4=', 'id': 5}, "names no problem of task 'own' by question='4=' and id=5: write"),
        ({'task_id': 't/44'}, "names no problem of task 'own' by task_id='t/44'"),
        ({'problem': {'gold': 3}}, "names no problem of task 'own' by problem={'gold': 3}"),
        (
            {'question': 'twice'},
            "names 2 problems of task 'own' by question='twice': add a field that tells them apart",
        ),
    ],
)
def test_a_line_that_names_none_or_several_is_refused(record, said):
    twice = [{'question': 'twice', 'gold': n} for n in range(2)]
    with pytest.raises(FileError, match=f'^a.jsonl: line 7 {re.escape(said)}'):
        find([*PROBLEMS, *twice], record)


def test_the_digest_sees_a_changed_problem_and_not_the_order():
    digest = lambda problems: ProblemIndex(task_of(problems), 0).digest()
    assert digest(PROBLEMS) == digest(PROBLEMS[::-1])
    assert digest(PROBLEMS) != digest([*PROBLEMS[:-1], PROBLEMS[-1] | {'gold': 11}])
