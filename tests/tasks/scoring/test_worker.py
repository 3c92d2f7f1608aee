from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from areal_jax.tasks.scoring.worker import reply_to
from tests.tasks.process_table import all_end, is_alive, read_pids

ROOT = pathlib.Path(__file__).parents[3]


def run_worker(scorer: str, lines: list[str], *limit_mb: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, '-m', 'areal_jax.tasks.scoring.worker', scorer, *limit_mb],
        input=''.join(line + '\n' for line in lines), capture_output=True, text=True, cwd=ROOT, timeout=20,
    )  # fmt: skip


def request(text: str = '', **problem) -> str:
    return json.dumps({'id': 'a', 'problem': problem, 'text': text, 'finish_reason': 'stop'})


def test_one_line_in_one_line_out_and_no_error_ends_it():
    done = run_worker(
        'tests.tasks.bad_scorer:score',
        [request('abc', do='length'), request(do='raise'), 'junk', request(do='exit'), request(do='nan'), '{}',
         request('é😀', do='length')],
    )  # fmt: skip
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert replies[:2] == [{'ready': True}, {'id': 'a', 'reward': 3.0}]
    errors = ['ZeroDivisionError: division by zero', 'JSONDecodeError', 'SystemExit: 1', 'returned nan', "'problem'"]
    for reply, error in zip(replies[2:7], errors, strict=True):
        assert error in reply['error']
    assert replies[7:] == [{'id': 'a', 'reward': 2.0}]
    assert done.returncode == 0


def test_what_a_scorer_prints_is_not_a_reply():
    done = run_worker('tests.tasks.bad_scorer:score', [request(do='print')])
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{'ready': True}, {'id': 'a', 'reward': 1.0}]
    assert done.stderr.count('{"reward": 0.25}') == 2


def test_of_what_a_scorer_prints_two_kilobytes_are_shown_and_the_rest_is_counted():
    lines = [json.dumps(json.loads(request()) | {'draw': draw}) for draw in (3, 4)]
    done = subprocess.run(
        [sys.executable, '-c', ANSWER_ONE_BY_ONE, 'tests.tasks.hostile_scorers:prints_64_megabytes', *lines],
        capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ['0.5', '0.5']
    shown = 'the scorer printed for draw {}:\n' + 'x' * 2000 + f'\n[{64 * 2**20 - 2000} bytes more are not shown]\n'
    assert done.stderr == shown.format(3) + shown.format(4)


ANSWER_ONE_BY_ONE = """
import asyncio, json, sys
from areal_jax.workers.worker_process import WorkerProcess
worker = WorkerProcess(sys.argv[1], 0)
async def main():
    await worker.become_ready()
    for line in sys.argv[2:]:
        print((await worker.ask(json.loads(line)))['reward'])
asyncio.run(main())
worker.close()
"""


def test_what_is_printed_before_the_end_of_a_worker_is_shown(tmp_path):
    (tmp_path / 'last_words.py').write_text('import os\ndef score(*_):\n    print("almost")\n    os._exit(7)\n')
    done = subprocess.run(
        [sys.executable, '-c', ANSWER_ONE_BY_ONE, 'last_words:score', request()], text=True, capture_output=True,
        cwd=ROOT, env=os.environ | {'PYTHONPATH': str(tmp_path)}, timeout=20,
    )  # fmt: skip
    assert 'the scorer printed for an answer:\nalmost\n' in done.stderr
    assert "the scorer's process ended with exit code 7" in done.stderr


def test_the_memory_limit_leaves_room_for_the_imports_of_a_scorer():
    pytest.importorskip('reasoning_gym', reason='one of its packages needs a C compiler')
    done = run_worker(
        'areal_jax.tasks.reasoning_gym:score', [request('The answer is 6', dataset='chain_sum', answer='6')], '2048'
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{'ready': True}, {'id': 'a', 'reward': 1.0}]


@pytest.mark.parametrize(('limit_mb', 'reply'), [('256', 'error'), ('0', 'reward')])
def test_the_memory_limit_is_the_one_given(limit_mb, reply, tmp_path):
    # 600 MiB of address space that nobody touches
    (tmp_path / 'large.py').write_text(
        'import mmap\ndef score(*_):\n    return len(mmap.mmap(-1, 600 * 2**20, mmap.MAP_PRIVATE)) / 2**30\n'
    )
    done = subprocess.run(
        [sys.executable, '-m', 'areal_jax.tasks.scoring.worker', 'large:score', limit_mb],
        input=request() + '\n', text=True,
        capture_output=True, cwd=ROOT, env=os.environ | {'PYTHONPATH': str(tmp_path)}, timeout=20,
    )  # fmt: skip
    assert reply in json.loads(done.stdout.splitlines()[1])


def test_scorer_that_cannot_be_loaded_ends_it_before_the_ready_line():
    done = run_worker('tests.tasks.no_such_module:score', [])
    assert done.stdout == ''
    assert 'no_such_module' in done.stderr
    assert done.returncode != 0


def modules_of_a_worker(scorer: str, line: str) -> tuple[dict[str, float], set[str]]:
    program = (
        f'import json, sys; from areal_jax.tasks.scoring.worker import load_scorer, reply_to; '
        f'score = load_scorer({scorer!r}); modules = sorted(sys.modules); '
        f'print(json.dumps([reply_to(score, {line.encode()!r}), modules]))'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, cwd=ROOT, check=True)
    reply, modules = json.loads(done.stdout)
    return reply, set(modules)


def test_worker_imports_its_scorer_and_little_else():
    reply, modules = modules_of_a_worker('areal_jax.tasks.token_reversal:score', request('ab', answer='ab'))
    assert reply == {'id': 'a', 'reward': 1.0}
    assert modules & {'jax', 'flax', 'reasoning_gym', 'tokenizers', 'jinja2', 'gguf', 'areal_jax.tasks.jsonl'} == set()


def test_worker_of_reasoning_gym_is_warm_before_the_first_answer():
    pytest.importorskip('reasoning_gym', reason='one of its packages needs a C compiler')
    line = request('The answer is 6', dataset='chain_sum', answer='6')
    reply, modules = modules_of_a_worker('areal_jax.tasks.reasoning_gym:score', line)
    assert reply == {'id': 'a', 'reward': 1.0}
    assert 'reasoning_gym' in modules
    assert modules & {'jax', 'flax', 'tokenizers', 'gguf'} == set()


def test_reply_names_the_error():
    assert reply_to(lambda problem, text, reason: 0.5, request().encode()) == {'id': 'a', 'reward': 0.5}
    assert reply_to(lambda problem, text, reason: None, request().encode())['error'].startswith('TypeError')


PARENT = """
import asyncio, json, sys
from areal_jax.workers.worker_process import WorkerProcess
worker = WorkerProcess('tests.tasks.bad_scorer:score', 0)
async def main():
    await worker.become_ready()
    print(worker._process.pid, flush=True)
    if sys.argv[1] != 'idle':
        await worker.ask(json.loads(sys.argv[2]))
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.parametrize('state', ['idle', 'hang', 'daemon'])
def test_worker_dies_with_a_parent_that_is_killed(state, tmp_path):
    path = tmp_path / 'pids'
    arguments = [sys.executable, '-c', PARENT, state, request(do='hang', pids=str(path), detach=state == 'daemon')]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline())]
        if state != 'idle':
            pids += read_pids(path, 2)  # the scorer's process and its child
        assert all(map(is_alive, pids))
        os.kill(parent.pid, signal.SIGKILL)
        assert all_end(pids)


CLOSING_PARENT = """
import asyncio, sys, time
import numpy as np
from areal_jax.tasks.scoring.verifier import ProcessVerifier, TaskScoring
from areal_jax.types import Prompt
from tests.tasks.fake_clock import FakeClock
judge = ProcessVerifier(
    FakeClock(), {'': TaskScoring('tests.tasks.hostile_scorers:' + sys.argv[1])}, lambda tokens: '', workers=1,
    deadline_s=30.0, attempts=1, memory_mb=2048,
)
judge.start()
prompt = Prompt(0, np.zeros(1, np.int32), 'hostile', {'pids': sys.argv[2]})
print(asyncio.run(judge.verify(prompt, np.zeros(0, np.int32), 'stop')).label)
if sys.argv[3] == 'close':
    judge.close()
"""


@pytest.mark.parametrize('end', ['close', 'exit'])
@pytest.mark.parametrize('scorer', ['leaves_a_daemon', 'leaves_a_daemon_without_environment', 'leaves_an_orphan'])
def test_a_detached_process_does_not_hold_up_the_end(scorer, end, tmp_path):
    """`run` returns when nobody holds stdout and stderr any more, so a process that inherited them would hold it up."""
    path = tmp_path / 'pids'
    arguments = [sys.executable, '-c', CLOSING_PARENT, scorer, str(path), end]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.stdout, done.returncode) == ('ok\n', 0)
    assert all_end(read_pids(path, 1))
