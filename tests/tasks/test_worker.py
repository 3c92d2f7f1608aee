from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from areal_jax.tasks.worker import reply_to
from tests.tasks.process_table import all_end, is_alive, read_pids

ROOT = pathlib.Path(__file__).parents[2]


def run_worker(scorer: str, lines: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, '-m', 'areal_jax.tasks.worker', scorer],
        input=''.join(line + '\n' for line in lines), capture_output=True, text=True, cwd=ROOT, timeout=20,
    )  # fmt: skip


def request(text: str = '', **problem) -> str:
    return json.dumps({'problem': problem, 'text': text, 'finish_reason': 'stop'})


def test_one_line_in_one_line_out_and_no_error_ends_it():
    done = run_worker(
        'tests.tasks.bad_scorer:score',
        [request('abc', do='length'), request(do='raise'), 'junk', request(do='exit'), request(do='nan'), '{}',
         request('é😀', do='length')],
    )  # fmt: skip
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert replies[:2] == [{'ready': True}, {'reward': 3.0}]
    errors = ['ZeroDivisionError: division by zero', 'JSONDecodeError', 'SystemExit: 1', 'returned nan', "'problem'"]
    for reply, error in zip(replies[2:7], errors, strict=True):
        assert error in reply['error']
    assert replies[7:] == [{'reward': 2.0}]
    assert done.returncode == 0


def test_what_a_scorer_prints_is_not_a_reply():
    done = run_worker('tests.tasks.bad_scorer:score', [request(do='print')])
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{'ready': True}, {'reward': 1.0}]
    assert done.stderr.count('{"reward": 0.25}') == 2


def test_scorer_that_cannot_be_loaded_ends_it_before_the_ready_line():
    done = run_worker('tests.tasks.no_such_module:score', [])
    assert done.stdout == ''
    assert 'no_such_module' in done.stderr
    assert done.returncode != 0


def modules_of_a_worker(scorer: str, line: str) -> tuple[dict[str, float], set[str]]:
    program = (
        f'import json, sys; from areal_jax.tasks.worker import load_scorer, reply_to; score = load_scorer({scorer!r}); '
        f'modules = sorted(sys.modules); print(json.dumps([reply_to(score, {line.encode()!r}), modules]))'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, cwd=ROOT, check=True)
    reply, modules = json.loads(done.stdout)
    return reply, set(modules)


def test_worker_imports_its_scorer_and_little_else():
    reply, modules = modules_of_a_worker('areal_jax.tasks.token_reversal:score', request('ab', answer='ab'))
    assert reply == {'reward': 1.0}
    assert modules & {'jax', 'flax', 'reasoning_gym', 'tokenizers', 'jinja2', 'gguf', 'areal_jax.tasks.jsonl'} == set()


def test_worker_of_reasoning_gym_is_warm_before_the_first_answer():
    line = request('The answer is 6', dataset='chain_sum', answer='6')
    reply, modules = modules_of_a_worker('areal_jax.tasks.reasoning_gym:score', line)
    assert reply == {'reward': 1.0}
    assert 'reasoning_gym' in modules
    assert modules & {'jax', 'flax', 'tokenizers', 'gguf'} == set()


def test_reply_names_the_error():
    assert reply_to(lambda problem, text, reason: 0.5, request().encode()) == {'reward': 0.5}
    assert reply_to(lambda problem, text, reason: None, request().encode())['error'].startswith('TypeError')


PARENT = """
import asyncio, sys
from areal_jax.tasks.process import WorkerProcess
worker = WorkerProcess('tests.tasks.bad_scorer:score')
async def main():
    await worker.become_ready()
    print(worker._process.pid, flush=True)
    if sys.argv[1] == 'hang':
        await worker.ask(sys.argv[2].encode())
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.parametrize('state', ['idle', 'hang'])
def test_worker_dies_with_a_parent_that_is_killed(state, tmp_path):
    path = tmp_path / 'pids'
    arguments = [sys.executable, '-c', PARENT, state, request(do='hang', pids=str(path))]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline())]
        if state == 'hang':
            worker, child = read_pids(path, 2)
            assert pids == [worker]
            pids.append(child)
        assert all(map(is_alive, pids))
        os.kill(parent.pid, signal.SIGKILL)
        assert all_end(pids)
