"""Scorers that misbehave, each with what a ProcessVerifier must make of it.

Every entry of HOSTILE_SCORERS is a scorer, 'tests.tasks.hostile_scorers:NAME': a row of the tables, or a function. On a
problem {'reward': r} all of them behave and return r, so the answer after a hostile one has a known reward. With
{'pids': PATH} those that start processes append the numbers of these processes to the file. What only a few of them
need is imported there: a worker imports this module hundreds of times.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import fcntl
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn


@dataclasses.dataclass(frozen=True)
class Expected:
    """What the verifier must say of the answer."""

    label: str  # of every attempt
    reward: float = 0.0
    slow: bool = False  # waits for the deadline, or works for seconds


Problem = Mapping[str, Any]
HOSTILE_SCORERS: dict[str, Expected] = {}
_MIB = 2**20
_SLEEPER = [sys.executable, '-S', '-c', 'import time; time.sleep(1000)']


def _register(name: str, act: Callable[[Problem], Any], expected: Expected) -> Any:
    """Makes a scorer of (problem); the two other arguments of a scorer are dropped."""
    HOSTILE_SCORERS[name] = expected

    @functools.wraps(act)
    def score(problem: Problem, answer_text: str, finish_reason: str) -> Any:
        return problem['reward'] if 'reward' in problem else act(problem)

    score.__name__ = score.__qualname__ = name  # a worker finds it by name
    return score


def expect(label: str, reward: float = 0.0, *, slow: bool = False) -> Callable[[Callable[[Problem], Any]], Any]:
    """Registers a scorer of (problem)."""
    return lambda act: _register(act.__name__, act, Expected(label, reward, slow))


def _note(problem: Problem, *pids: int) -> None:
    if 'pids' in problem:
        with open(problem['pids'], 'a') as file:
            file.write(''.join(f'{pid}\n' for pid in pids))


def _daemonize(problem: Problem, act: Callable[[], Any], *, leave_session: bool = True) -> None:
    """Run `act` in a process whose parent has ended."""
    noted, note = os.pipe()
    child = os.fork()
    if not child:
        if leave_session:
            os.setsid()
        grandchild = os.fork()
        if not grandchild:
            act()
            os._exit(0)
        os.write(note, b'%d\n' % grandchild)
        os._exit(0)
    os.waitpid(child, 0)
    _note(problem, int(os.read(noted, 100)))
    os.close(noted)
    os.close(note)


def _leave_child(problem: Problem, **options: Any) -> None:
    _note(problem, subprocess.Popen(_SLEEPER, **options).pid)


def _sleep_without_environment() -> None:
    os.execve(sys.executable, _SLEEPER, {})


def _raise(error: BaseException | type[BaseException]) -> NoReturn:
    raise error


def _numpy() -> Any:
    import numpy

    return numpy


def _sleep_for_ever() -> None:
    time.sleep(1000)


def _find_pipe(mode: int) -> int:
    """The descriptor of this process's pipe of replies (O_WRONLY) or requests (O_RDONLY)."""
    for descriptor in range(3, 64):
        try:
            is_pipe = os.readlink(f'/proc/self/fd/{descriptor}').startswith('pipe:')
            if is_pipe and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == mode:
                return descriptor
        except OSError:
            continue
    raise AssertionError('no such pipe')


def _find_id() -> str:
    """The id of the request at hand, from the frame that handles it."""
    frame: Any = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get('request'), dict):
            return frame.f_locals['request']['id']
        frame = frame.f_back
    raise AssertionError('no request')


def _replace_the_reply(reward: str, number: str = '') -> None:
    worker = sys.modules['__main__']  # areal_jax.tasks.scoring.worker, which runs as a program
    write = worker.write_whole

    def write_another(descriptor: int, data: bytes) -> None:
        worker.write_whole = write
        write(descriptor, f'{{"id": "{number or json.loads(data)["id"]}", "reward": {reward}}}\n'.encode())

    worker.write_whole = write_another


class _Number:
    def __init__(self, act: Callable[[], float]):
        self._act = act

    def __float__(self) -> float:
        return self._act()


class _Misnamed(float):
    def __repr__(self) -> str:
        return 'NaN}'


# Scorers that give no reward, by what is expected.
_FAILURES: Mapping[Expected, Mapping[str, Callable[[Problem], Any]]] = {
    Expected('error'): {
        'returns_nan': lambda problem: float('nan'),
        'returns_infinity': lambda problem: float('inf'),
        'returns_minus_infinity': lambda problem: float('-inf'),
        'returns_too_much': lambda problem: 1.0000001e6,
        'returns_too_little': lambda problem: -1e7,
        'returns_an_integer_beyond_floats': lambda problem: 10**400,
        'returns_none': lambda problem: None,
        'returns_text': lambda problem: '1.0',
        'returns_bytes': lambda problem: b'1',
        'returns_a_bytearray': lambda problem: bytearray(b'1'),  # float() takes it
        'returns_a_complex': lambda problem: 1 + 0j,
        'returns_a_numpy_complex': lambda problem: _numpy().complex64(1),
        'returns_a_list': lambda problem: [1.0],
        'returns_a_dict': lambda problem: {'reward': 1.0},
        'returns_a_vector': lambda problem: _numpy().array([0.5]),
        'returns_an_array_of_text': lambda problem: _numpy().array('0.5'),  # float() takes it
        'returns_numpy_nan': lambda problem: _numpy().float32('nan'),
        'returns_an_object': lambda problem: object(),
        'returns_a_class': lambda problem: float,
        'returns_a_number_that_raises': lambda problem: _Number(lambda: 1 / 0),
        'returns_a_number_that_exits': lambda problem: _Number(lambda: sys.exit(0)),
        'raises': lambda problem: 1 / 0,
        'exits': lambda problem: sys.exit(0),
        'exits_with_an_object': lambda problem: _raise(SystemExit(object())),
        'raises_keyboard_interrupt': lambda problem: _raise(KeyboardInterrupt),
        'raises_generator_exit': lambda problem: _raise(GeneratorExit),
        'raises_a_base_exception': lambda problem: _raise(BaseException('neither an Exception nor an exit')),
        'raises_the_unprintable': lambda problem: _raise(_Unprintable),
        'raises_a_text_that_exits': lambda problem: _raise(_ExitingText),
        'raises_50_megabytes': lambda problem: _raise(ValueError('x' * 50 * _MIB)),
        'raises_lines_and_surrogates': lambda problem: _raise(ValueError('{"reward": 1.0}\n{"reward": 1.0}\n\ud800\0')),
        'allocates_at_once': lambda problem: len(bytearray(2**45)),
        'replies_nan_by_itself': lambda problem: _replace_the_reply('NaN'),
        'replies_text_by_itself': lambda problem: _replace_the_reply('"1.0"'),
        'replies_seconds_that_are_none': lambda problem: _replace_the_reply('1.0, "cpu_s": "long"'),
        'replies_seconds_without_end': lambda problem: _replace_the_reply('1.0, "wall_s": 1e999'),
    },
    Expected('crash'): {
        'ends_with_0': lambda problem: os._exit(0),
        'ends_with_3': lambda problem: os._exit(3),
        'segfaults': lambda problem: ctypes.string_at(0),
        'aborts': lambda problem: os.abort(),
        'kills_itself': lambda problem: os.kill(os.getpid(), signal.SIGKILL),
        'terminates_itself': lambda problem: os.kill(os.getpid(), signal.SIGTERM),
        'kills_its_group': lambda problem: os.killpg(0, signal.SIGKILL),
        'becomes_another_program': lambda problem: os.execv('/bin/true', ['true']),
        'replies_a_reason_of_70_kilobytes': lambda problem: _replace_the_reply(f'1.0, "reason": "{"x" * 70_000}"'),
        'replies_under_another_id': lambda problem: _replace_the_reply('1.0', '0123456789abcdef'),
    },
    Expected('timeout', slow=True): {
        'reads_the_next_request': lambda problem: os.read(_find_pipe(os.O_RDONLY), 1),
        'sleeps': lambda problem: _sleep_for_ever(),
        'spins_in_c': lambda problem: re.match('(a+)+b', 'a' * 60),
        'stops_itself': lambda problem: os.kill(os.getpid(), signal.SIGSTOP),
        'hangs_in_the_value_of_its_reward': lambda problem: _Number(lambda: time.sleep(1000)),
        'waits_for_a_child': lambda problem: subprocess.run(_SLEEPER),
    },
}

# Rewards, some of them unusual.
_REWARDS: Mapping[str, tuple[float, Callable[[Problem], Any]]] = {
    'returns_true': (1.0, lambda problem: True),
    'returns_numpy_true': (1.0, lambda problem: _numpy().bool_(True)),
    'replies_a_reason_of_30_kilobytes': (1.0, lambda problem: _replace_the_reply(f'1.0, "reason": "{"x" * 30_000}"')),
    'returns_false': (0.0, lambda problem: False),
    'returns_a_numpy_float': (0.25, lambda problem: _numpy().float32(0.25)),
    'forks_and_returns_from_both': (0.25, lambda problem: 0.75 if os.fork() == 0 else 0.25),
    'returns_a_numpy_integer': (7.0, lambda problem: _numpy().int64(7)),
    'returns_a_scalar_array': (0.5, lambda problem: _numpy().array(0.5)),
    'returns_a_misnamed_float': (0.5, lambda problem: _Misnamed(0.5)),
    'reads_its_stdin': (0.5, lambda problem: 0.5 if sys.stdin.read() == '' else 1.0),
    'returns_a_million': (1e6, lambda problem: 10**6),
    'returns_a_negative': (-1.5, lambda problem: -1.5),
}

# What a scorer does before it returns 0.5, which is its reward.
_ACTS: Mapping[str, Callable[[Problem], object]] = {
    'leaves_a_child': lambda problem: _leave_child(problem),
    'leaves_a_child_in_its_own_session': lambda problem: _leave_child(problem, start_new_session=True),
    'leaves_a_daemon': lambda problem: _daemonize(problem, _sleep_for_ever),
    'leaves_an_orphan': lambda problem: _daemonize(problem, _sleep_for_ever, leave_session=False),
    'leaves_a_daemon_without_environment': lambda problem: _daemonize(problem, _sleep_without_environment),
    'leaves_a_stopped_daemon': lambda problem: _daemonize(problem, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    'prints_16_megabytes_from_a_child': lambda problem: subprocess.run(['head', '-c', '16M', '/dev/zero'], check=True),
    'prints_surrogates': lambda problem: print('\ud800 \0 \x1b[31m', flush=True),
    'prints_binary': lambda problem: os.write(2, bytes(range(256))),
    'prints_without_a_line_end': lambda problem: sys.stdout.write('no end'),
    'closes_its_stdout': lambda problem: sys.stdout.close(),
    'closes_its_output': lambda problem: os.closerange(0, 3),
    'empties_the_problem': lambda problem: problem.clear(),
    'lowers_its_limits': lambda problem: resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)),
    'leaves_a_thread': lambda problem: threading.Thread(target=_sleep_for_ever).start(),
    'hangs_at_exit': lambda problem: atexit.register(_sleep_for_ever),
    'blocks_all_signals': lambda problem: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()),
}

# What a scorer does before it waits for its end, which is a crash.
_ENDS: Mapping[str, Callable[[Problem], object]] = {
    'kills_itself_by_a_realtime_signal': lambda problem: os.kill(os.getpid(), signal.SIGRTMIN + 3),
    'kills_its_worker': lambda problem: os.kill(os.getppid(), signal.SIGKILL),
    'kills_the_group_of_its_worker': lambda problem: os.killpg(os.getpgid(os.getppid()), signal.SIGKILL),
    'terminates_its_worker': lambda problem: os.kill(os.getppid(), signal.SIGTERM),
    'is_killed_by_an_alarm': lambda problem: signal.setitimer(signal.ITIMER_REAL, 0.01),
    'dies_in_a_thread': lambda problem: threading.Thread(target=os._exit, args=(0,)).start(),
}


def _then(act: Callable[[Problem], object], reward: Any) -> Callable[[Problem], Any]:
    def act_and_return(problem: Problem) -> Any:
        act(problem)
        return reward() if callable(reward) else reward

    return act_and_return


for _expected, _scorers in _FAILURES.items():
    globals().update({name: _register(name, act, _expected) for name, act in _scorers.items()})
globals().update({name: _register(name, act, Expected('ok', reward)) for name, (reward, act) in _REWARDS.items()})
globals().update({name: _register(name, _then(act, 0.5), Expected('ok', 0.5)) for name, act in _ACTS.items()})
globals().update({name: _register(name, _then(act, _sleep_for_ever), Expected('crash')) for name, act in _ENDS.items()})


# What takes more than an expression: rewards.


@expect('error')
def returns_a_coroutine(problem):
    async def reward():
        return 1.0

    return reward()


@expect('ok', 0.75)
def returns_a_fraction(problem):
    import fractions

    return fractions.Fraction(3, 4)


# Exceptions.


@expect('error')
def interrupts_itself(problem):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1000)


@expect('error')
def raises_cancelled(problem):
    import asyncio

    raise asyncio.CancelledError


@expect('error')
def recurses(problem):
    return recurses.__wrapped__(problem) + 1


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError('no text')


class _ExitingText(Exception):
    def __str__(self) -> str:
        sys.exit(0)


# Memory.


@expect('error')
def allocates_in_steps(problem):
    chunks = []
    while True:
        chunks.append(bytearray(64 * _MIB))


@expect('ok', 0.5)
def allocates_in_a_child(problem):
    child = [sys.executable, '-S', '-c', 'bytearray(2**45)']
    return 0.5 if subprocess.run(child, stderr=subprocess.DEVNULL).returncode else 1.0


# Ends of the process.


@expect('crash')
def closes_all_descriptors(problem):
    os.closerange(0, 4096)
    return 1.0


@expect('crash')
def closes_the_pipes(problem):
    os.closerange(3, 4096)
    return 1.0


# Replies that are not the worker's.


@expect('crash')
def replies_without_an_id(problem):
    os.write(_find_pipe(os.O_WRONLY), b'{"reward": 1.0}\n')
    return 0.5


@expect('crash')
def replies_to_another_request(problem):
    os.write(_find_pipe(os.O_WRONLY), b'{"id": "0123456789abcdef", "reward": 1.0}\n')
    return 0.5


@expect('crash')
def replies_twice(problem):
    reply = f'{{"id": "{_find_id()}", "reward": 1.0}}\n'.encode()
    os.write(_find_pipe(os.O_WRONLY), 2 * reply)
    time.sleep(1000)


@expect('crash')
def replies_junk(problem):
    os.write(_find_pipe(os.O_WRONLY), b'\xff\x00junk\n')
    return 0.5


@expect('crash')
def replies_without_end(problem):
    pipe = _find_pipe(os.O_WRONLY)
    for _ in range(1000):
        os.write(pipe, b'x' * 2**16)


@expect('crash')
def replies_into_nothing(problem):
    os.dup2(os.open(os.devnull, os.O_WRONLY), _find_pipe(os.O_WRONLY))
    return 0.5


# Forks that come back.


@expect('ok', 0.25)
def forks_twice_and_returns_from_all(problem):
    first, second = os.fork(), os.fork()
    return 0.25 if first and second else 0.75


@expect('ok', 0.25)
def forks_and_the_child_returns_first(problem):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return 0.25 if child else 0.75


@expect('ok', 0.25)
def forks_below_python(problem):
    # no hook of Python runs in this child: it still holds the pipes
    return 0.25 if ctypes.CDLL(None).fork() else 0.75


@expect('ok', 0.25)
def forks_below_python_and_the_child_returns_first(problem):
    child = ctypes.CDLL(None).fork()
    if child:
        os.waitpid(child, 0)
    return 0.25 if child else 0.75


@expect('ok', 0.25)
def forks_and_the_child_raises(problem):
    if os.fork() == 0:
        raise ValueError('in the child')
    return 0.25


@expect('ok', 0.25)
def forks_and_the_child_exits(problem):
    if os.fork() == 0:
        sys.exit(0)
    return 0.25


@expect('ok', 0.25)
def forks_and_the_child_looks_for_the_pipe(problem):
    child = os.fork()
    if not child:
        try:
            os._exit(_find_pipe(os.O_WRONLY))
        except AssertionError:
            os._exit(0)
    return 0.75 if os.waitpid(child, 0)[1] else 0.25


@expect('ok', 0.25)
def forks_a_hundred_times(problem):
    for _ in range(100):
        if os.fork() == 0:
            return 0.75
    return 0.25


@expect('crash')
def forks_and_dies(problem):
    child = ctypes.CDLL(None).fork()  # holds the pipes: the worker's end is not seen through them
    if child == 0:
        _sleep_for_ever()
    _note(problem, child)
    os._exit(0)


# Processes that are left behind.


@expect('ok', 0.5)
def leaves_a_daemon_that_ignores_signals(problem):
    def act():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        _sleep_for_ever()

    _daemonize(problem, act)
    return 0.5


@expect('ok', 0.5)
def leaves_a_daemon_that_prints(problem):
    def act():
        while True:
            os.write(1, b'y\n' * 2**14)
            time.sleep(0.001)

    _daemonize(problem, act)
    return 0.5


@expect('ok', 0.5)
def leaves_a_daemon_of_a_subreaper(problem):
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    _daemonize(problem, _sleep_for_ever)
    return 0.5


@expect('ok', 0.5)
def leaves_many_daemons(problem):
    for _ in range(20):
        _daemonize(problem, _sleep_for_ever)
    return 0.5


@expect('ok', 0.5)
def leaves_a_chain_of_forks(problem):
    def act():
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)

    _daemonize(problem, act)
    return 0.5


def forks_leaves_a_daemon_and_returns_the_length(problem: Problem, answer_text: str, finish_reason: str) -> float:
    """Not in the table: its reward tells answers apart."""
    _daemonize(problem, _sleep_for_ever)
    return float(len(answer_text)) if os.fork() else -1.0


@expect('ok', 0.5)
def leaves_a_pool_of_processes(problem):
    import multiprocessing

    for process in [multiprocessing.get_context('fork').Process(target=_sleep_for_ever) for _ in range(2)]:
        process.start()
        _note(problem, process.pid)
    return 0.5


@expect('crash')
def leaves_a_daemon_and_dies(problem):
    _daemonize(problem, _sleep_for_ever)
    os._exit(0)


@expect('crash')
def leaves_a_daemon_and_kills_its_worker(problem):
    _daemonize(problem, _sleep_for_ever)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


@expect('error')
def leaves_a_daemon_and_raises(problem):
    _daemonize(problem, _sleep_for_ever)
    raise ValueError('with a daemon')


# Output.


@expect('ok', 0.5)
def prints_replies(problem):
    print(f'{{"id": "{_find_id()}", "reward": 1.0}}', flush=True)
    subprocess.run(['echo', '{"reward": 1.0}'], check=True)
    return 0.5


@expect('ok', 0.5)
def prints_64_megabytes(problem):
    for _ in range(64):
        os.write(1, b'x' * _MIB)
    return 0.5


@expect('ok', 0.5, slow=True)
def prints_a_gigabyte(problem):
    for _ in range(1024):
        os.write(2, b'x' * _MIB)
    return 0.5


@expect('ok', 0.5)
def replaces_its_stdout(problem):
    sys.stdout, sys.stderr = None, object()
    return 0.5


# State of the process.


@expect('ok', 0.5)
def puts_a_reward_into_the_problem(problem):
    problem['reward'] = 1.0  # must not be there at the next scoring
    return 0.5


@expect('ok', 0.5)
def changes_directory_and_environment(problem):
    os.chdir('/')
    os.environ.clear()
    return 0.5


# Answers that do not come.


@expect('timeout', slow=True)
def spins(problem):
    while True:
        pass


@expect('timeout', slow=True)
def stops_its_worker(problem):
    os.kill(os.getppid(), signal.SIGSTOP)
    return 0.5


@expect('timeout', slow=True)
def stops_its_worker_with_a_daemon(problem):
    _daemonize(problem, _sleep_for_ever)
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(1000)


@expect('timeout', slow=True)
def hangs_with_signals_blocked(problem):
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _sleep_for_ever()


@expect('timeout', slow=True)
def hangs_with_a_daemon(problem):
    _daemonize(problem, _sleep_for_ever)
    _sleep_for_ever()


@expect('timeout', slow=True)
def hangs_in_the_text_of_its_error(problem):
    class Slow(Exception):
        def __str__(self) -> str:
            time.sleep(1000)
            return ''

    raise Slow


@expect('timeout', slow=True)
def prints_for_ever(problem):
    while True:
        os.write(1, b'x' * _MIB)


@expect('timeout', slow=True)
def waits_for_a_lock(problem):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
