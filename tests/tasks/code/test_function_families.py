"""Problems of the task `code`: references, tests that tell them apart, splits."""

import collections
import functools
import json
import pathlib
import subprocess
import sys

import pytest

from areal_jax.tasks.code import function_families
from areal_jax.tasks.code.family_parts import Arguments, draw_inputs
from areal_jax.tasks.code.function_families import is_held_out, is_held_out_family, list_problems, load_function
from areal_jax.text.file_tokenizers import GgufTokenizer

ROOT = pathlib.Path(__file__).parents[3]
MOST_TOKENS = 64


@functools.cache
def all_problems():
    """One copy for all tests, none of which changes it."""
    return list_problems()


@functools.cache
def by_family():
    families = collections.defaultdict(list)
    for problem in all_problems():
        families[problem['family']].append(problem)
    return families


def passes(function, tests):
    """As strict as JSON: True is not 1."""
    try:
        return all(json.dumps(function(*json.loads(json.dumps(a)))) == json.dumps(result) for a, result in tests)
    except Exception:
        return False


def test_there_are_families_with_dozens_of_problems_each():
    sizes = {name: len(problems) for name, problems in by_family().items()}
    assert len(sizes) == len(function_families.list_families()) >= 20
    assert min(sizes.values()) >= 20
    assert max(sizes.values()) <= function_families.MOST_PROBLEMS
    # a problem is left out where another behaves alike or where six tests cannot tell it apart from all others
    listed = {
        name: min(len(v), function_families.MOST_PROBLEMS) for name, v in function_families.list_families().items()
    }
    assert sum(sizes.values()) > 0.9 * sum(listed.values())


def test_every_reference_passes_its_tests():
    for problem in all_problems():
        function = load_function(problem['solution'])
        assert len(problem['tests']) == function_families.VISIBLE_TESTS
        assert len(problem['hidden_tests']) == function_families.HIDDEN_TESTS
        assert passes(function, [*problem['tests'], *problem['hidden_tests']]), problem


def test_references_leave_their_arguments_as_they_are():
    for problem in all_problems():
        function = load_function(problem['solution'])
        for arguments, _ in problem['hidden_tests']:
            before = json.dumps(arguments)
            function(*arguments)
            assert json.dumps(arguments) == before


def test_hidden_tests_have_other_arguments():
    for problem in all_problems():
        arguments = [json.dumps(arguments) for arguments, _ in [*problem['tests'], *problem['hidden_tests']]]
        assert len(set(arguments)) == len(arguments), problem


def test_neither_a_constant_nor_an_argument_passes():
    for problem in all_problems():
        tests = problem['tests']
        assert len({json.dumps(result) for _, result in tests}) > 1, problem
        for index in range(len(tests[0][0])):
            assert not passes(lambda *arguments, index=index: arguments[index], tests), problem


@pytest.mark.parametrize('name', function_families.list_families())
def test_no_other_reference_of_the_family_passes(name):
    family = by_family()[name]
    functions = [load_function(problem['solution']) for problem in family]
    for index, problem in enumerate(family):
        assert [other for other, function in enumerate(functions) if passes(function, problem['tests'])] == [index]


def test_no_two_problems_behave_alike():
    """Also of different families, on inputs that chose no test."""
    kinds = {v.question: v.inputs for variants in function_families.list_families().values() for v in variants}
    drawn: dict[object, list[Arguments]] = {}
    rows = collections.defaultdict(list)
    for problem in all_problems():
        kind = kinds[problem['question']]
        if kind not in drawn:
            drawn[kind] = [*kind.edges, *(a for wide in (False, True) for a in draw_inputs(kind, 150, 'x', wide=wide))]
        function = load_function(problem['solution'])
        rows[repr([kind.signature, *((a, function(*a)) for a in drawn[kind])])].append(problem['question'])
    assert [questions for questions in rows.values() if len(questions) > 1] == []


@pytest.mark.slow
def test_another_process_lists_the_same_problems():
    program = (
        'import json; from areal_jax.tasks.code import function_families as f; print(json.dumps(f.list_problems()))'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads(done.stdout) == all_problems()


def test_a_caller_has_its_own_copy():
    before = json.dumps(list_problems())
    list_problems()[0]['tests'].clear()
    assert json.dumps(list_problems()) == before


@pytest.mark.slow
def test_another_seed_gives_other_tests_and_other_problems_of_large_families():
    other = list_problems(1)
    assert [p['tests'] for p in other] != [p['tests'] for p in all_problems()]
    both = {p['question'] for p in other} & {p['question'] for p in all_problems()}
    assert len(all_problems()) / 2 < len(both) < len(all_problems())  # large families are sampled


def test_problems_are_plain_json():
    assert json.loads(json.dumps(all_problems(), allow_nan=False)) == all_problems()
    assert not has_float(all_problems())


def has_float(value):
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, float) or (isinstance(value, dict | list) and any(map(has_float, items)))


def test_no_question_and_no_solution_appears_twice():
    assert max(collections.Counter(problem['question'] for problem in all_problems()).values()) == 1
    assert max(collections.Counter(problem['solution'] for problem in all_problems()).values()) == 1


def test_whole_families_and_some_problems_of_the_others_are_held_out():
    held_out = [name for name in by_family() if is_held_out_family(name)]
    assert sorted(held_out) == sorted(function_families.HELD_OUT_FAMILIES)
    for name, problems in by_family().items():
        questions = {problem['question'] for problem in problems}
        few, many = ({q for q in questions if is_held_out(q, share)} for share in (0.2, 0.4))
        assert few < many < questions
        assert 0 < len(few) / len(questions) < 0.4, name
    assert sum(is_held_out(p['question'], 0.25) for p in all_problems()) / len(all_problems()) == pytest.approx(
        0.25, abs=0.03
    )


def test_solutions_are_short(smollm2_fields):
    tokenizer = GgufTokenizer(smollm2_fields)
    lengths = {problem['solution']: len(tokenizer.encode(problem['solution'])) for problem in all_problems()}
    assert {solution: n for solution, n in lengths.items() if n >= MOST_TOKENS} == {}
    assert sum(20 <= n <= 45 for n in lengths.values()) > 0.8 * len(lengths)
