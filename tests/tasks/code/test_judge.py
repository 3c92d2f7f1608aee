"""What the judge says of an answer: as a plain run would, and nothing that the answer itself could say."""

from __future__ import annotations

import ast
import contextlib
import os
import pathlib
import random
import resource
import signal
import tempfile
import threading
import time

import pytest

from areal_jax.tasks.code import code_task
from areal_jax.tasks.code.judge import Judge
from areal_jax.workers.sandbox.confined_children import ServerLostError
from areal_jax.workers.sandbox.confinement import find_abi
from tests.tasks.code.hacks import HACKS, WRITE

pytestmark = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')
LIMITS = {'time_limit_s': 0.5, 'memory_limit_mb': 512}
SORTED = {
    'question': 'Sort.', 'entry_point': 'f', 'solution': 'def f(xs):\n    return sorted(xs)\n',
    'tests': [[[[2, 1]], [1, 2]], [[[]], []], [[[3, 3, 0]], [0, 3, 3]]],
}  # fmt: skip


@pytest.fixture(scope='module')
def judge():
    judge = Judge('landlock')
    yield judge
    judge.close()


def make_problem(**fields):
    return LIMITS | code_task.complete_problem(fields or SORTED, 'here')


THIRD = make_problem(
    question='Divide.', entry_point='f', solution='def f(x, y):\n    return x / y, {1: y}\n',
    tests=[[[1, 3], [0.3333333333, {'1': 3}]]],
)  # fmt: skip


def ask(judge, code, problem=None, **options):
    problem = problem or make_problem()
    return judge.check(problem, code, problem['tests'], **options)


def test_a_right_answer_passes_and_is_measured(judge):
    found = ask(judge, SORTED['solution'])
    assert (found.label, found.share, found.reason) == ('ok', 1.0, '')
    assert 0 < found.cpu_s < 5
    assert found.wall_s > 0


@pytest.mark.parametrize(
    ('body', 'label', 'reason'),
    [
        ('return xs', 'wrong', 'another result'),
        ('return', 'wrong', 'another result'),
        ('return (', 'syntax', 'SyntaxError'),
        ('return xs[99]', 'exception', 'IndexError: list index out of range'),
        ('return {}["a"]', 'exception', "KeyError: 'a'"),
        ('return f(xs)', 'exception', 'RecursionError'),
        ('while True: pass', 'time_limit', 'more than 0.5 s'),
        ('import time\n    time.sleep(99)', 'time_limit', 'more than 0.5 s'),
        ('return bytearray(2**31)', 'memory_limit', 'MemoryError'),
        ('import os\n    os.kill(os.getpid(), 9)', 'killed', 'by SIGKILL'),
        ('import ctypes\n    ctypes.string_at(0)', 'killed', 'by SIGSEGV'),
        ('import os\n    os._exit(3)', 'exception', 'its process ended with exit code 3'),
        ('import socket\n    socket.socket()', 'forbidden', 'PermissionError'),
        ('return open("/etc/passwd").read()', 'forbidden', 'PermissionError'),
        ('import nothing', 'exception', 'ModuleNotFoundError'),
        ('return (x for x in xs)', 'wrong', 'it returned a value of type generator'),
        ('"\0"', 'syntax', ''),
        ('"\ud800"', 'syntax', 'UnicodeEncodeError'),
        ('return ' + '(' * 10_000, 'syntax', ''),
    ],
)
def test_what_an_answer_does_is_its_label(judge, body, label, reason):
    found = ask(judge, f'def f(xs):\n    {body}\n')
    assert found.label == label, found
    assert found.reason.startswith(reason)
    assert found.share < 1
    assert ask(judge, SORTED['solution']).label == 'ok'


def test_a_long_answer_is_one(judge):
    assert ask(judge, SORTED['solution'] + '# x\n' * 2_000_000).label == 'ok'
    assert ask(judge, 'x = [' + '1,' * 5_000_000 + ']').label in ('memory_limit', 'time_limit', 'exception', 'syntax')


def test_partial_credit_runs_all_tests(judge):
    code = 'def f(xs):\n    if len(xs) == 2: raise ValueError\n    return sorted(xs)\n'
    assert ask(judge, code).share == 0
    found = ask(judge, code, is_partial=True)
    assert (found.label, found.share) == ('exception', 2 / 3)


@pytest.mark.parametrize('name', HACKS)
def test_a_hack_does_not_pass_and_its_twin_does(judge, name):
    hack, problem = HACKS[name], make_problem()
    test = '\n'.join(f'assert f(*{arguments!r}) == {result!r}' for arguments, result in problem['tests'])
    by_asserts = make_problem(**{**SORTED, 'tests': [test]})
    for one in (problem, by_asserts):
        found = ask(judge, hack.attack('f'), one)
        assert found.label in hack.labels, found
        assert found.share < 1
    assert ask(judge, hack.twin('f', SORTED['solution'])).label == 'ok'


@pytest.mark.parametrize('name', [name for name, hack in HACKS.items() if not hack.runs_out])
def test_a_hack_does_not_pass_where_decimals_have_a_tolerance(judge, name):
    found = ask(judge, HACKS[name].attack('f'), THIRD)
    assert found.label in HACKS[name].labels, found
    assert ask(judge, THIRD['answer'], THIRD).label == 'ok'


@pytest.mark.parametrize(
    ('body', 'label'),
    [
        ('return (x / y, {1: y})', 'ok'),
        ('return [round(x / y, 6), {"1": y}]', 'ok'),
        ('return [x / y, {True: y}]', 'wrong'),
        ('return (x / y + 2e-6, {1: y})', 'wrong'),
        ('return (x / y, {1: float(y)})', 'ok'),
        ('return (x / y, {1: y + 1e-9})', 'wrong'),
        ('return {x / y, y}', 'wrong'),
        ('return f"{x / y}", {1: y}', 'wrong'),
    ],
)
def test_values_agree_as_json_writes_them(judge, body, label):
    assert ask(judge, f'def f(x, y):\n    {body}\n', THIRD).label == label


@pytest.mark.parametrize(
    ('body', 'label'),
    [
        ('print(a / b, a)', 'ok'), ('print(f"{a / b:.6f}", a)', 'ok'), ('print(f" {a / b:e}\\t{a} ")', 'ok'),
        ('print(a / b + 1e-5, a)', 'wrong'), ('print(a / b, a / 1)', 'wrong'), ('print(a / b)\nprint(a)', 'wrong'),
        ('print(a / b, a, a)', 'wrong'), ('print("nan", a)', 'wrong'), ('print("1e999", a)', 'wrong'),
        ('print("0.333_333_333_3", a)', 'wrong'), ('print("9" * 10**6 + ".0", a)', 'wrong'),
    ],
)  # fmt: skip
def test_printed_decimals_have_a_tolerance(judge, body, label):
    problem = make_problem(question='Divide.', tests=[{'input': '1 3', 'output': '0.3333333333 1\n'}])
    assert ask(judge, f'a, b = map(int, input().split())\n{body}\n', problem).label == label


def test_asserts_and_check_functions_and_helpers(judge):
    prompt = 'import math\n\ndef half(x):\n    return x / 2\n\ndef f(x):\n    """Twice."""\n'
    problem = make_problem(
        prompt=prompt, entry_point='f', test='def check(candidate):\n    assert half(candidate(math.pi)) == math.pi\n'
    )
    assert ask(judge, f'{prompt}    return x * 2\n', problem).label == 'ok'
    assert ask(judge, f'{prompt}    return x * 3\n', problem).label == 'wrong'
    raising = make_problem(
        question='Raise.', entry_point='f',
        tests=['try: f(0)\nexcept ZeroDivisionError: pass\nelse: raise AssertionError', 'assert f(1) == 1'],
    )  # fmt: skip
    assert ask(judge, 'def f(x):\n    return 1 // x\n', raising).label == 'ok'
    assert ask(judge, 'def f(x):\n    return 1\n', raising).label == 'wrong'


def test_a_test_that_catches_everything_gets_no_answer_through(judge):
    swallow = make_problem(question='?', entry_point='f', tests=['try: f()\nexcept BaseException: pass'])
    assert ask(judge, 'def f(): return object()', swallow).label == 'wrong'
    assert ask(judge, 'def f(: pass', swallow).label == 'syntax'
    assert ask(judge, 'import os\ndef f(): os._exit(0)', swallow).label == 'exception'
    assert ask(judge, 'def f(): return 1', swallow).label == 'ok'


@pytest.mark.parametrize(
    ('test', 'label'),
    [
        ('import os\nfor _ in range(1024): os.write(1, b"x" * 2**20)\nassert f(1) == 1', 'ok'),  # a GB
        ('pass', 'ok'),  # it asks nothing
        ('f(1)', 'ok'),
        ('while True: pass', 'time_limit'),
        ('f(1) == open("/etc/passwd")', 'wrong'),
    ],
)
def test_tests_that_flood_ask_nothing_or_never_end(judge, test, label):
    problem = make_problem(question='?', entry_point='f', tests=[test])
    assert ask(judge, 'def f(x):\n    return x\n', problem).label == label
    assert ask(judge, SORTED['solution']).label == 'ok'


def test_a_full_disk_is_not_noticed(judge, monkeypatch):
    """What is handed over lies in memory, and nothing is written."""
    monkeypatch.setenv('TMPDIR', '/dev/full')
    before = set(os.listdir(tempfile.gettempdir()))
    assert ask(judge, SORTED['solution']).label == 'ok'
    code = 'def f(xs):\n    open("/tmp/areal-code", "w")\n    return sorted(xs)\n'
    assert ask(judge, code).label == 'forbidden'
    assert 'areal-code' not in set(os.listdir(tempfile.gettempdir())) - before


def test_changed_arguments_come_back(judge):
    problem = make_problem(
        question='Sort in place.', entry_point='f',
        tests=['xs, inner = [3, 1], [2, 0]\nf(xs, {"k": inner})\nassert xs == [1, 3] and inner == [0, 2]'],
    )  # fmt: skip
    assert ask(judge, 'def f(xs, d):\n    xs.sort()\n    d["k"].sort()\n', problem).label == 'ok'
    assert ask(judge, 'def f(xs, d):\n    xs.sort()\n', problem).label == 'wrong'


def test_a_program_reads_and_prints(judge):
    problem = make_problem(
        question='Double each line.', tests=[{'input': '1\n2\n', 'output': '2\n4'}, {'input': '', 'output': ''}]
    )
    right = 'import sys\nfor line in sys.stdin:\n    print(int(line) * 2, "")\n'
    assert ask(judge, right, problem).label == 'ok'
    assert ask(judge, right + 'sys.exit()\n', problem).label == 'ok'
    for code, label in (
        ('print(2)', 'wrong'), ('print(2)\nprint(4)\nraise ValueError', 'exception'),
        ('import os\nos._exit(0)', 'exception'), ('import os\nos.close(1)\nwhile 1: pass', 'killed'),
        ('while True: pass', 'time_limit'), ('while True: print("x" * 9999)', 'wrong'), ('print(', 'syntax'),
        (f'{WRITE}write(b\'["ok", ""]\')\nos._exit(0)', 'wrong'),
        (f'{WRITE}write(b\'["visible_only", ""]\')\nos._exit(0)', 'exception'),  # that label has a reward
    ):  # fmt: skip
        assert ask(judge, code, problem).label == label, code
    assert ask(judge, 'print(2)\nprint(4)\n', problem, is_partial=True).share == 0.5


def run_plainly(code, tests):
    namespace = {}
    try:
        exec(code, namespace)
        for arguments, expected in tests:
            if namespace['f'](*ast.literal_eval(repr(arguments))) != expected:
                return 'wrong'
    except Exception:
        return 'exception'
    return 'ok'


_STEPS = (
    'x = x + {n}', 'x = x * {n}', 'x = x // {n}', 'x = abs(x) % ({n} + 1)', 'xs = xs[{n}:]', 'xs = sorted(xs)',
    'xs = [y * {n} for y in xs]', 'xs = [y for y in xs if y > {n}]', 'x = xs[{n}]', 'xs.append(x)', 'x = len(xs)',
    'xs = list(set(xs))', 'x = {{y: {n} for y in xs}}.get(x, {n})', 'x = max(xs)', 'x = int(str(x)[:{n}])',
)  # fmt: skip


@pytest.mark.parametrize('programs', [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_verdict_is_that_of_a_plain_run(judge, programs):
    """Of generated harmless programs, against tests that every second one meets."""
    rng, counts = random.Random(0), {'ok': 0, 'wrong': 0, 'exception': 0}
    for _ in range(programs):

        def write(rng=rng):
            steps = [rng.choice(_STEPS).format(n=rng.randrange(4)) for _ in range(rng.randrange(1, 5))]
            return '\n    '.join(['def f(x, xs):', *steps, 'return x, xs, {"k": (x, None)}'])

        code = write()
        inputs = [[rng.randrange(-5, 9), [rng.randrange(-5, 9) for _ in range(rng.randrange(5))]] for _ in range(2)]
        other, namespace, tests = (code if rng.random() < 0.5 else write()), {}, []
        exec(other, namespace)
        for arguments in inputs:
            with contextlib.suppress(Exception):
                # a tuple cannot be written in JSON, so the expected result is an assert's
                tests.append([arguments, namespace['f'](*ast.literal_eval(repr(arguments)))])
        asserts = [f'assert f(*{arguments!r}) == {result!r}' for arguments, result in tests]
        if not asserts:
            continue
        problem = make_problem(question='?', entry_point='f', tests=asserts)
        found = ask(judge, code, problem).label
        assert found == run_plainly(code, tests), code
        counts[found] += 1
    assert min(counts.values()) > programs / 20, counts


@pytest.mark.parametrize('harm', [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_killed_or_stopped_says_nothing_of_the_answer(monkeypatch, harm):
    monkeypatch.setattr('areal_jax.workers.sandbox.confined_children._REPLY_S', 0.3)
    judge = Judge('landlock')
    os.kill(judge.server_pid, harm)
    try:
        with pytest.raises(ServerLostError):
            ask(judge, SORTED['solution'])
    finally:
        judge.close()


def test_a_server_without_descriptors_says_nothing_of_the_answer(judge):
    limits = resource.prlimit(judge.server_pid, resource.RLIMIT_NOFILE)
    resource.prlimit(judge.server_pid, resource.RLIMIT_NOFILE, (8, limits[1]))
    try:
        with pytest.raises(ServerLostError):
            ask(judge, SORTED['solution'])
    finally:
        resource.prlimit(judge.server_pid, resource.RLIMIT_NOFILE, limits)
    assert ask(judge, SORTED['solution']).label == 'ok'


def test_a_test_child_that_is_killed_in_the_middle_says_nothing_of_the_answer(judge):
    pids = []
    start = judge._children.start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge._children, 'start', lambda children: pids.extend(start(children)) or pids)
        threading.Timer(0.2, lambda: os.kill(pids[1], signal.SIGKILL)).start()
        with pytest.raises(ServerLostError, match='ended with status 9 before its verdict'):
            ask(judge, 'import time\ndef f(xs):\n    time.sleep(9)\n')
    assert ask(judge, SORTED['solution']).label == 'ok'


def test_a_wall_clock_that_jumps_changes_nothing(judge, monkeypatch):
    jumping = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(time, 'time', lambda: float(next(jumping)))
    assert ask(judge, SORTED['solution']).label == 'ok'


def test_draws_at_random_differ_from_check_to_check(judge):
    draws = set()
    for _ in range(2):
        found = ask(judge, 'import random\ndef f(x): raise ValueError(random.random())')
        draws.add(found.reason)
        by_test = make_problem(
            question='?', entry_point='f', tests=['import random\nraise ValueError(random.random())']
        )
        draws.add(ask(judge, 'def f(x): return x', by_test).reason)
    assert len(draws) == 4


def test_threads_and_forks_of_an_answer_work(judge):
    code = (
        'import os, threading\ndef f(xs):\n    out = []\n'
        '    thread = threading.Thread(target=out.extend, args=(sorted(xs),))\n    thread.start()\n    thread.join()\n'
        '    pid = os.fork()\n    if not pid: os._exit(threading.active_count() != 1)\n'
        '    return out if os.waitpid(pid, 0)[1] == 0 else None\n'
    )
    assert ask(judge, code).label == 'ok'


def test_nothing_is_left_behind(judge):
    fork = 'for _ in range(3):\n        if os.fork() == 0: time.sleep(99)'
    code = f'import os, time\ndef f(xs):\n    {fork}\n    return sorted(xs)\n'
    before = set(os.listdir('/proc/self/fd'))
    for _ in range(5):
        assert ask(judge, code).label == 'ok'
    assert set(os.listdir('/proc/self/fd')) == before
    children = pathlib.Path(f'/proc/{judge.server_pid}/task/{judge.server_pid}/children')
    assert children.read_text() == ''
