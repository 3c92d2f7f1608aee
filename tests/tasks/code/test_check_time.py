"""Whose doing it is that an answer takes long: its processes, its sleep, or the machine."""

from __future__ import annotations

import random

import pytest

from areal_jax.tasks.code import code_task
from areal_jax.tasks.code import judge as judging
from areal_jax.tasks.code.judge import PRELOADED, PROGRAM, CheckTime, ProgramLimits, ProgramTime, run_program
from areal_jax.workers.sandbox import control_group
from areal_jax.workers.sandbox.confined_children import ConfinedChildren, ServerLostError
from areal_jax.workers.sandbox.confinement import find_abi
from areal_jax.workers.sandbox.control_group import Meter
from tests.tasks.code.test_bounds import FORK, judge, start

__all__ = ['judge', 'start']  # fixtures: with a control group, and without one
needs_landlock = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')
STARVE = {
    'spinning children': 'for _ in range(14):\n    if os.fork() == 0:\n        while True: pass\nwhile True: pass',
    'spinning children of one that sleeps': 'fork(14, lambda: burn(1e9))\ntime.sleep(1e6)',
    'spinning children of one that is stopped': 'fork(6, lambda: burn(1e9))\nos.kill(os.getpid(), signal.SIGSTOP)',
    'children that are stopped': 'fork(4, lambda: os.kill(os.getpid(), signal.SIGSTOP))\nburn(1e9)',
    'threads': 'import threading\nfor _ in range(12): threading.Thread(target=burn, args=(1e9,)).start()',
    'children that end at once, for which nobody waits': (
        'signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n    try: fork(14, lambda: burn(0.03))\n'
        '    except OSError: time.sleep(0.001)'
    ),
    'children that end at once, of several': (
        'def go():\n    signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n    while True:\n        try: fork(1, lambda: '
        'burn(time.process_time() + 0.008))\n        except OSError: time.sleep(0.001)\nfork(6, go)\ntime.sleep(1e6)'
    ),
    # each byte wakes the one who judges, who would find it at work
    'work for a moment at each byte': 'while True:\n    os.write(1, b"x"); end = time.monotonic() + 0.001\n'
    '    while time.monotonic() < end: pass\n    time.sleep(0.06)',
}  # fmt: skip


QUICK = ('spinning children', 'children that end at once, of several')


@pytest.fixture(scope='module')
def children(start):
    children = start(lambda: ConfinedChildren('landlock', (*PRELOADED, PROGRAM)))
    yield children
    children.close()


@needs_landlock
@pytest.mark.parametrize('how', [how if how in QUICK else pytest.param(how, marks=pytest.mark.slow) for how in STARVE])
def test_an_answer_that_starves_itself_is_late(children, how, monkeypatch):
    monkeypatch.setattr(judging, 'STARVED_WALL', 1e6)  # a machine that is busy with other tests is waited for
    end = run_program(children, FORK + STARVE[how], b'', ProgramLimits(0.3, 512, 10_000))
    assert end.label == 'time_limit', end


@needs_landlock
def test_a_function_that_starves_its_tests_is_late(judge, monkeypatch):
    monkeypatch.setattr(judging, 'STARVED_WALL', 1e6)
    body = 'fork(14, lambda: burn(1e9))\n    burn(1e9)'
    row = {'question': '?', 'entry_point': 'f', 'tests': [[[1], 1]], 'time_limit_s': 0.3}
    problem = {'memory_limit_mb': 512, **code_task.complete_problem(row, 'here')}
    found = judge.check(problem, f'{FORK}\ndef f(x):\n    {body}\n', problem['tests'])
    assert (found.label, found.share) == ('time_limit', 0.0), found


@needs_landlock
def test_many_inputs_have_one_budget(judge):
    """Each input has less than its limit."""
    row = {'question': '?', 'time_limit_s': 1.0, 'tests': [{'input': str(n), 'output': str(n)} for n in range(200)]}
    problem = {'memory_limit_mb': 512, **code_task.complete_problem(row, 'here')}
    sleeping = 'import time\ntime.sleep(0.6)\nprint(input())'
    found = judge.check(problem, sleeping, problem['tests'], is_partial=True, whole=CheckTime(1.0))
    assert (found.label, found.reason) == ('time_limit', 'its whole check took more than 1 s')
    assert found.share < 0.1


class _Time:
    """A clock, and a meter whose processes wait for a processor or not."""

    def __init__(self, monkeypatch):
        self.now_s, self.is_waiting, self.looks = 0.0, True, 0
        monkeypatch.setattr(judging.time, 'monotonic', lambda: self.now_s)

    def waits(self):
        self.looks += 1
        return self.is_waiting


def test_a_busy_machine_is_told_from_an_answer_that_sleeps(monkeypatch):
    clock = _Time(monkeypatch)
    program = ProgramTime(CheckTime(), clock, 1.0)
    while clock.now_s < 29:  # it gets 2 % of a processor
        clock.now_s += 0.05
        assert not program.find_late(0.02 * clock.now_s)
    clock.now_s = 30.1
    with pytest.raises(ServerLostError, match=r'got 0.60 s of a processor in 30 s'):
        program.find_late(0.6)
    clock.is_waiting = False
    program = ProgramTime(CheckTime(), clock, 1.0)
    start_s = clock.now_s
    while not program.find_late(0.0):
        clock.now_s += program.find_wait_s(0.0) + 1e-6
    assert clock.now_s - start_s == pytest.approx(3.0, abs=0.01)


def test_a_budget_is_the_answers_or_the_machines(monkeypatch):
    clock = _Time(monkeypatch)
    for share, is_late in ((0.02, False), (0.5, True)):
        whole, begun_s = CheckTime(10.0), clock.now_s
        for _ in range(3):
            program, start_s = ProgramTime(whole, clock, 4.0), clock.now_s
            while clock.now_s < start_s + 3:
                clock.now_s += 0.05
                assert not program.find_late(share * (clock.now_s - start_s))
            program.end()
        clock.now_s = begun_s + 10.1
        program = ProgramTime(whole, clock, 4.0)
        if is_late:
            assert program.find_late(0.0) == 'its whole check took more than 10 s'
        else:
            with pytest.raises(ServerLostError, match='of the machine in 10 s'):
                program.find_late(0.0)


def test_work_at_the_moments_of_output_alone_is_sleep(monkeypatch):
    """Each byte wakes the one who judges; 1 ms of work in 60 is less than a busy machine would give."""
    random.seed(0)
    clock = _Time(monkeypatch)
    program, says_s, used_s = ProgramTime(CheckTime(), clock, 1.0), 0.06, 0.0
    while not program.find_late(used_s):
        next_s = clock.now_s + max(program.find_wait_s(used_s), 0.002)
        clock.is_waiting = says_s <= next_s
        if clock.is_waiting:
            next_s, says_s, used_s = says_s, says_s + 0.06, used_s + 0.001
        clock.now_s = next_s
    assert 3.0 <= clock.now_s < 4.5
    assert clock.looks > 20


def _list_processes(*found):
    """As meter.list_session: pid, seconds of its own, and those of children that it waited for."""
    for pid, own_s, waited_s in found:
        fields = [b'S', *[b'0'] * 21]
        fields[11], fields[13] = (b'%d' % (100 * seconds) for seconds in (own_s, waited_s))
        yield pid, fields


def _make_meter(monkeypatch, looks, **fields):
    listed = iter(looks)
    monkeypatch.setattr(control_group, 'list_session', lambda *_: _list_processes(*next(listed)))
    monkeypatch.setattr(control_group, 'TICKS', 100)
    monkeypatch.setattr(control_group, 'read_process_s', lambda pid: 0.0)
    monkeypatch.setattr(control_group, 'LOOK_S', 0.0)
    return Meter(1, (2, 3), **fields)


def test_what_processes_used_counts_once_they_have_ended(monkeypatch):
    looks = [
        [(2, 0.5, 0.0), (4, 1.0, 0.0)],
        [(2, 0.5, 1.0), (5, 2.0, 0.0)],  # it waited for 4
        [(2, 0.5, 1.0)],  # nobody waited for 5
        [(2, 0.5, 1.0), (6, 0.25, 0.0)],
    ]
    found = _make_meter(monkeypatch, looks)
    assert [found.read_cpu_s() for _ in looks] == [1.5, 3.5, 3.5, 3.75]


def test_processes_that_come_and_go_are_no_busy_machine_where_no_group_counts_them(monkeypatch):
    looks = [[(2, 0, 0)], [(2, 0, 0), (4, 0, 0)], [(2, 0, 0), (4, 0, 0)], [(2, 0, 0), (5, 0, 0)], [(2, 0, 0)]]
    monkeypatch.setattr(control_group, 'is_runnable', lambda pid: True)
    found = _make_meter(monkeypatch, looks)
    assert [found.waits() for _ in looks] == [True, False, True, False, True]
    found = _make_meter(monkeypatch, looks, files=('cpu', 'kills'))
    assert all(found.waits() for _ in looks)
