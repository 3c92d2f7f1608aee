"""A scorer in the sandbox: what it runs reaches neither files, network nor other processes, and it scores as before."""

from __future__ import annotations

import asyncio
import functools
import os
import time

import numpy as np
import pytest

from areal_jax.tasks.scoring.verifier import ProcessVerifier, TaskScoring, VerifierError
from areal_jax.types import Prompt
from areal_jax.workers.descendants import list_marked
from areal_jax.workers.sandbox.confinement import SandboxError, find_abi, wrap_command
from areal_jax.workers.worker_process import WorkerDiedError, WorkerProcess
from tests.tasks.fake_clock import FakeClock

pytestmark = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')


@pytest.fixture(params=['landlock', 'bubblewrap'])
def level(request):
    try:
        wrap_command(request.param, [])
    except SandboxError as error:
        pytest.skip(str(error))
    return request.param


SCORER = """
import os, socket

def score(problem, answer_text, finish_reason):
    try:
        exec(answer_text or 'pass')
    except OSError:
        return 0.0
    except MemoryError:
        return 0.25
    return 1.0
"""
THREADS = """
import threading, time

threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

def score(problem, answer_text, finish_reason):
    return 1.0
"""


@pytest.fixture
def make(request, tmp_path):
    def build(source, sandbox):
        judge = ProcessVerifier(
            FakeClock(), {'': TaskScoring(write(tmp_path, source))}, lambda tokens: ''.join(map(chr, tokens)),
            workers=1, deadline_s=30.0, attempts=1, memory_mb=512,
            start_worker=functools.partial(WorkerProcess, sandbox=sandbox),
        )  # fmt: skip
        request.addfinalizer(judge.close)
        judge.start()
        return judge

    return build


def ask(judge, text):
    answer = np.array([ord(character) for character in text], np.int32)
    verdict = asyncio.run(judge.verify(Prompt(0, np.zeros(1, np.int32), 'x', {}), answer, 'stop'))
    return verdict.label, verdict.reward


ATTEMPTS = (
    "open('/etc/passwd')",
    "open('/tmp/areal-escape', 'w'), os.remove('/tmp/areal-escape')",
    'socket.socket()',
    'os.kill(os.getppid(), 0)',
    "os.listdir('/')",
)


def test_attempts_pass_without_the_sandbox_and_fail_in_it(make, level):
    outside, inside = make(SCORER, 'none'), make(SCORER, level)
    for attempt in ATTEMPTS:
        assert (ask(outside, attempt), ask(inside, attempt)) == (('ok', 1.0), ('ok', 0.0)), attempt


def test_what_harms_nobody_works_in_the_sandbox(make, level):
    judge = make(SCORER, level)
    for code in ('pass', 'socket.socketpair()', 'os._exit(0) if os.fork() == 0 else os.wait()', 'sorted([2, 1])'):
        assert ask(judge, code) == ('ok', 1.0)
    assert ask(judge, 'bytearray(2**30)') == ('ok', 0.25)


def test_a_scorer_that_starts_threads_when_it_is_loaded_is_refused(make, level, capfd):
    with pytest.raises(VerifierError):
        make(THREADS, level)
    assert 'a process with several threads cannot be confined' in capfd.readouterr().err


LEAVES = """
import os, signal, time

def score(problem, answer_text, finish_reason):
    if answer_text == 'crash':
        os.kill(os.getpid(), signal.SIGKILL)
    if answer_text == 'hang':
        time.sleep(1000)
    for _ in range(3):
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
        os.wait()
    return 1.0
"""


def write(folder, source):
    (folder / 'scorer.py').write_text(source)
    return f'{folder}/scorer.py:score'


def ask_for(answer):
    return {'draw': 0, 'problem': {}, 'text': answer, 'finish_reason': 'stop'}


def test_a_crash_and_what_a_scorer_leaves_behind_end_with_the_worker(tmp_path, level):
    worker = WorkerProcess(write(tmp_path, LEAVES), 512, level)
    try:
        worker.wait_until_ready(time.monotonic() + 30)
        assert worker.ask_at_once(ask_for('ok'), time.monotonic() + 30)['reward'] == 1.0
        left = list_marked(worker.mark)
        assert len(left) >= 3
        networks = {os.stat(f'/proc/{process.pid}/ns/net').st_ino for process in left if process.pid != worker.pid}
        assert (os.stat('/proc/self/ns/net').st_ino in networks) == (level == 'landlock')
        with pytest.raises(TimeoutError):
            worker.ask_at_once(ask_for('hang'), time.monotonic() + 0.3)
    finally:
        worker.close(10.0)
    assert list_marked(worker.mark) == []
    worker = WorkerProcess(write(tmp_path, LEAVES), 512, level)
    try:
        worker.wait_until_ready(time.monotonic() + 30)
        with pytest.raises(WorkerDiedError, match='killed by SIGKILL'):
            worker.ask_at_once(ask_for('crash'), time.monotonic() + 30)
    finally:
        worker.close(10.0)
