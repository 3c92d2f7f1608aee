"""A scorer that does what its problem says, runs in worker processes of the tests."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from areal_jax.tasks.scoring.score_call import UNPARSED


def score(problem: Mapping[str, Any], answer_text: str, finish_reason: str) -> float:
    if 'record' in problem:
        with open(problem['record'], 'a') as file:
            file.write(f'{os.getpid()} {answer_text[:8]}\n')
    return ACTIONS[problem['do']](problem, answer_text)


def _hang_once(problem: Mapping[str, Any], answer_text: str) -> float:
    marker = pathlib.Path(problem['marker'])
    if marker.exists():
        return 1.0
    marker.touch()
    return _hang(problem, answer_text)


def _hang(problem: Mapping[str, Any], answer_text: str) -> float:
    _leave_child(problem)
    while True:
        time.sleep(1)


def _crash(problem: Mapping[str, Any], answer_text: str) -> float:
    _leave_child(problem)
    os._exit(3)


def _leave_child(problem: Mapping[str, Any]) -> None:
    sleeper = [sys.executable, '-S', '-c', 'import time; time.sleep(1000)']
    child = subprocess.Popen(sleeper, start_new_session=problem.get('detach', False))
    if 'pids' in problem:
        with open(problem['pids'], 'a') as file:
            file.write(f'{os.getpid()} {child.pid}\n')


def _print(problem: Mapping[str, Any], answer_text: str) -> float:
    print('{"reward": 0.25}', flush=True)
    os.system('echo \'{"reward": 0.25}\'')
    return 1.0


def _sleep(problem: Mapping[str, Any], answer_text: str) -> float:
    time.sleep(problem['seconds'])
    return float(len(answer_text))


def _answer_again(problem: Mapping[str, Any], answer_text: str) -> float:
    if ctypes.CDLL(None).fork():  # below Python, so that the child keeps the pipe of replies
        return 1.0
    while not pathlib.Path(problem['go']).exists():
        time.sleep(0.02)
    pipe = max(fd for fd in range(3, 64) if _is_pipe_for_writing(fd))
    os.write(pipe, b'{"id": "0123456789abcdef", "reward": 0.125}\n')
    pathlib.Path(problem['done']).touch()
    os._exit(0)


def _is_pipe_for_writing(descriptor: int) -> bool:
    try:
        is_pipe = os.readlink(f'/proc/self/fd/{descriptor}').startswith('pipe:')
        return is_pipe and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
    except OSError:
        return False


ACTIONS = {
    'unparsed': lambda problem, answer_text: UNPARSED,
    'answer_again': _answer_again,
    'length': lambda problem, text: float(len(text)),
    'raise': lambda problem, text: 1 / 0,
    'exit': lambda problem, text: sys.exit(1),
    'nan': lambda problem, text: float('nan'),
    'print': _print,
    'sleep': _sleep,
    'hang': _hang,
    'hang_once': _hang_once,
    'crash': _crash,
}
