"""Limits of an answer hold for all its processes: by a control group, and by the sum where none can be made."""

from __future__ import annotations

import pathlib
import time

import pytest

from areal_jax.tasks.code import code_task
from areal_jax.tasks.code.judge import PROGRAM, Judge, ProgramLimits, run_program
from areal_jax.workers.sandbox import confined_children
from areal_jax.workers.sandbox.confined_children import ConfinedChildren
from areal_jax.workers.sandbox.confinement import find_abi
from areal_jax.workers.sandbox.control_group import make_group

pytestmark = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')
WITHOUT_GROUP = """
import runpy, sys
sys.path.insert(0, {root!r})
from areal_jax.workers.sandbox import control_group
control_group.make_group = lambda: None
sys.path.pop(0)
runpy.run_path({server!r}, run_name='__main__')
"""
FORK = """
import os, signal, time
def fork(count, action):
    for _ in range(count):
        if os.fork() == 0:
            action()
            os._exit(0)
def fill():
    memory = b'x' * (50 << 20)
    time.sleep(60)
def burn(seconds):
    while time.process_time() < seconds: pass
"""
GREEDY = {
    'children': 'fork(6, fill)\n    time.sleep(60)',
    'grandchildren whose parents have ended': 'fork(6, lambda: fork(1, fill))\n    time.sleep(60)',
    'children of a thread': (
        'import threading\n    threading.Thread(target=fork, args=(6, fill)).start()\n    time.sleep(60)'
    ),
}


@pytest.fixture(params=['group', 'sum'], scope='module')
def start(request, tmp_path_factory):
    """Starts something with a server of children of this kind."""
    if request.param == 'group' and (group := make_group()) is None:
        pytest.skip('no control group can be made here')
    if request.param == 'group':
        group.close()
    server = tmp_path_factory.mktemp('server') / 'server.py'
    root = str(pathlib.Path(confined_children.__file__).parents[3])
    server.write_text(WITHOUT_GROUP.format(root=root, server=confined_children.SERVER))

    def start(make):
        with pytest.MonkeyPatch.context() as patch:
            if request.param == 'sum':
                patch.setattr(confined_children, 'SERVER', str(server))
            return make()

    return start


@pytest.fixture(scope='module')
def judge(start):
    judge = start(lambda: Judge('landlock'))
    yield judge
    judge.close()


def ask(judge, body, time_s=20.0, memory_mb=128):
    problem = code_task.complete_problem({'question': '?', 'entry_point': 'f', 'tests': [[[1], 1]]}, 'here')
    problem |= {'time_limit_s': time_s, 'memory_limit_mb': memory_mb}
    return judge.check(problem, f'{FORK}\ndef f(x):\n    {body}\n    return x\n', problem['tests'])


@pytest.mark.parametrize('kind', GREEDY)
def test_memory_of_all_processes_is_bounded(judge, kind):
    """A thread needs address space of its own."""
    start_s = time.monotonic()
    found = ask(judge, GREEDY[kind], memory_mb=256)
    assert (found.label, found.share) == ('memory_limit', 0.0), found
    assert time.monotonic() - start_s < 20  # it would sleep for a minute
    assert found.reason == 'its processes had more memory together than one may have'
    assert ask(judge, 'pass').label == 'ok'


def test_what_stays_below_the_bound_passes(judge):
    assert ask(judge, 'fork(2, lambda: len(b"x" * (20 << 20)))\n    os.wait(), os.wait()').label == 'ok'
    assert ask(judge, 'fork(12, lambda: time.sleep(0.4))\n    for _ in range(12): os.wait()').label == 'ok'
    with_memory = 'memory = b"x" * (40 << 20)\n    fork(8, lambda: time.sleep(0.4))\n    for _ in range(8): os.wait()'
    assert ask(judge, with_memory).label == 'ok'  # which they share


def test_processor_time_of_all_processes_is_told(judge):
    waited = 'fork(4, lambda: burn(0.25))\n    for _ in range(4): os.wait()'
    orphans = (
        'fork(1, lambda: fork(4, lambda: burn(0.25)))\n    time.sleep(0.1)\n    os.waitpid(-1, 0)\n    time.sleep(1)'
    )
    found = ask(judge, waited)
    assert found.label == 'ok'
    assert 0.9 <= found.cpu_s <= 1.8, found  # counted once
    assert ask(judge, orphans).cpu_s > 0.1


def test_processor_time_of_all_processes_is_bounded(judge):
    """Each has less than the limit."""
    start_s = time.monotonic()
    found = ask(judge, 'fork(8, lambda: burn(0.9))\n    for _ in range(8): os.wait()', time_s=1.0)
    assert found.label == 'time_limit', found
    assert found.cpu_s < 2.0
    assert time.monotonic() - start_s < 30


def test_programs_are_bounded_alike(start, request):
    children = start(lambda: ConfinedChildren('landlock', (PROGRAM,)))
    try:
        assert bool(children.group) == ('group' in request.node.callspec.id)
        limits = ProgramLimits(20.0, 128, 1000)
        end = run_program(children, f'{FORK}\nfork(6, fill)\ntime.sleep(60)\nprint(1)', b'', limits)
        assert end.label == 'memory_limit', end
        end = run_program(children, f'{FORK}\nfork(3, lambda: burn(0.2))\nfor _ in range(3): os.wait()', b'', limits)
        assert end.label == 'ok'
        assert 0.54 <= end.cpu_s <= 1.1, end
    finally:
        children.close()
