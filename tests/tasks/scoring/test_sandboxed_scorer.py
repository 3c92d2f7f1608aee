"""A scorer in the sandbox: what it runs reaches neither files, network nor other processes, and it scores as before."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest

from areal_jax.tasks.scoring.verifier import ProcessVerifier, VerifierError
from areal_jax.types import Prompt
from areal_jax.workers.sandbox.confinement import find_abi
from areal_jax.workers.worker_process import WorkerProcess
from tests.tasks.fake_clock import FakeClock

pytestmark = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')
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
        (tmp_path / 'scorer.py').write_text(source)
        judge = ProcessVerifier(
            FakeClock(), f'{tmp_path}/scorer.py:score', lambda tokens: ''.join(map(chr, tokens)), workers=1,
            deadline_s=30.0, attempts=1, memory_mb=512,
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


def test_attempts_pass_without_the_sandbox_and_fail_in_it(make):
    outside, inside = make(SCORER, 'none'), make(SCORER, 'landlock')
    for attempt in ATTEMPTS:
        assert (ask(outside, attempt), ask(inside, attempt)) == (('ok', 1.0), ('ok', 0.0)), attempt


def test_what_harms_nobody_works_in_the_sandbox(make):
    judge = make(SCORER, 'landlock')
    for code in ('pass', 'socket.socketpair()', 'os._exit(0) if os.fork() == 0 else os.wait()', 'sorted([2, 1])'):
        assert ask(judge, code) == ('ok', 1.0)
    assert ask(judge, 'bytearray(2**30)') == ('ok', 0.25)


def test_a_scorer_that_starts_threads_when_it_is_loaded_is_refused(make, capfd):
    with pytest.raises(VerifierError):
        make(THREADS, 'landlock')
    assert 'a process with several threads cannot be confined' in capfd.readouterr().err
