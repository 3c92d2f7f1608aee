"""Functions in long-lived workers: what they are given, how each end is told, what else the end of a worker ends."""

import asyncio
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from areal_jax.agents.programs import program_host
from areal_jax.agents.programs.function_worker import check_function
from areal_jax.agents.programs.program_host import Ending, FunctionHost, Job
from areal_jax.errors import UserError
from tests.agents.programs.loop_thread import is_alive, read_when_there, wait_for

ROOT = pathlib.Path(__file__).parents[3]
KEY = 'sk-2718281828459045'
SOURCE = """
import asyncio, os, subprocess, sys, time

async def agent(problem, base_url, api_key, model, *, kind='own', **others):
    assert (base_url, model, kind, others) == ('http://127.0.0.1:9/v1', 'policy', 'own', {})
    await globals()[problem['do']](problem.get('file'), api_key)

async def end(file, key):
    pass

async def fail(file, key):
    raise ValueError(f'no {key}')

async def exit(file, key):
    sys.exit(3)

async def cancel(file, key):
    raise asyncio.CancelledError

async def meet(file, key):  # ends once two episodes are in it
    global here, both
    here, both = globals().get('here', 0) + 1, globals().get('both') or asyncio.Event()
    if here == 2:
        both.set()
    await both.wait()

async def hang(file, key):
    child = subprocess.Popen(['sleep', '100'], start_new_session=True)
    print(os.getpid(), child.pid, file=open(file, 'w'), flush=True)
    await asyncio.sleep(100)

async def hang_for_ever(file, key):
    while True:
        try:
            await hang(file, key)
        except asyncio.CancelledError:
            pass

async def block(file, key):
    print(os.getpid(), file=open(file, 'w'), flush=True)
    time.sleep(100)

async def die(file, key):
    print('my last words', key)
    os.kill(os.getpid(), 11)

async def show(file, key):
    for number in range(30):
        print(number, key)
"""


@pytest.fixture(scope='module')
def spec(tmp_path_factory):
    folder = tmp_path_factory.mktemp('function')
    (folder / 'agent.py').write_text(SOURCE)
    return f'{folder}/agent.py:agent'


@pytest.fixture(scope='module')
def host(loop, spec):
    host = FunctionHost(spec, workers=1)
    yield host
    loop.run(host.close())


def job(do, file=None):
    problem = {'do': do, 'file': file and str(file)}
    return Job({'OPENAI_BASE_URL': 'http://127.0.0.1:9/v1', 'OPENAI_API_KEY': KEY}, problem)


def line_of(text):
    return SOURCE.partition(text)[0].count('\n') + 1


@pytest.mark.parametrize(
    ('do', 'detail'),
    [
        ('end', ''),
        ('fail', 'ValueError: no *** (line {} of {})'),
        ('exit', 'SystemExit: 3 (line {} of {})'),
        ('cancel', 'CancelledError (line {} of {})'),
    ],
)
def test_each_end_is_told_in_a_sentence(loop, host, spec, do, detail):
    line = line_of(f'async def {do}') + 1
    said = detail.format(line, spec.rpartition(':')[0])
    assert loop.run(host.run(job(do))) == Ending('failed' if detail else 'ended', said)


def test_two_episodes_share_a_worker(loop, host):
    async def meet():
        return await asyncio.gather(host.run(job('meet')), host.run(job('meet')))

    assert loop.run(meet()) == [Ending('ended')] * 2


def test_a_job_goes_to_the_worker_with_the_fewest(loop, spec, tmp_path):
    host = FunctionHost(spec, workers=2)
    running = [loop.start(host.run(job('hang', tmp_path / str(number)))) for number in range(4)]
    pids = [read_when_there(tmp_path / str(number)).split()[0] for number in range(4)]
    loop.run(host.close())
    assert sorted(map(pids.count, pids)) == [2, 2, 2, 2]
    assert {call.result(1).detail for call in running} == {'a worker of agent.function ended: the run has ended it'}


def test_a_cancelled_call_cancels_its_function_alone(loop, host, tmp_path):
    running, other = (loop.start(host.run(job('hang', tmp_path / name))) for name in 'ab')
    worker, child = map(int, read_when_there(tmp_path / 'a').split())
    running.cancel()
    assert loop.run(host.run(job('end'))) == Ending('ended')
    assert is_alive(worker)
    os.kill(worker, signal.SIGKILL)
    assert other.result(5).detail == (
        'a worker of agent.function ended: it was killed by SIGKILL, which the kernel sends where memory runs out'
    )
    wait_for(lambda: not is_alive(child))  # what a function starts ends with its worker
    assert loop.run(host.run(job('end'))) == Ending('ended')


@pytest.mark.parametrize('do', ['hang_for_ever', 'block'])
def test_a_function_that_does_not_end_loses_its_worker(loop, spec, tmp_path, do, monkeypatch):
    monkeypatch.setattr(program_host, 'FUNCTION_PATIENCE_S', 0.2)
    host = FunctionHost(spec, workers=1)
    other = loop.start(host.run(job('hang', tmp_path / 'other')))
    read_when_there(tmp_path / 'other')
    running = loop.start(host.run(job(do, tmp_path / 'pid')))
    worker = int(read_when_there(tmp_path / 'pid').split()[0])
    running.cancel()
    said = 'a worker of agent.function ended: another episode did not end within 0.2 s of its cancellation'
    assert other.result(5) == Ending('failed', said)
    assert not is_alive(worker)
    assert loop.run(host.run(job('end'))) == Ending('ended')
    loop.run(host.close())


def test_a_worker_that_dies_says_what_it_printed_last(loop, host):
    said = 'a worker of agent.function ended: it was killed by SIGSEGV; its last line: my last words ***'
    assert loop.run(host.run(job('die'))) == Ending('failed', said)


def test_the_first_lines_of_output_are_shown_without_keys(loop, spec, capfd):
    host = FunctionHost(spec, workers=1)
    assert loop.run(host.run(job('show'))) == Ending('ended')
    loop.run(host.close())
    assert capfd.readouterr().err.splitlines() == [f'agent.function printed: {number} ***' for number in range(20)]


def test_after_a_kill_of_the_run_nothing_is_left(spec, tmp_path):
    source = f"""
import asyncio
from areal_jax.agents.programs.program_host import FunctionHost, Job
problem = {{'do': 'hang_for_ever', 'file': {str(tmp_path / 'pids')!r}}}
job = Job({{'OPENAI_BASE_URL': 'http://127.0.0.1:9/v1'}}, problem)
asyncio.run(FunctionHost({spec!r}, 1).run(job))
"""
    with subprocess.Popen([sys.executable, '-c', source], cwd=ROOT) as run:
        pids = [int(pid) for pid in read_when_there(tmp_path / 'pids').split()]
        assert all(map(is_alive, pids))
        run.kill()
    wait_for(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(
    ('declared', 'refused'),
    [
        ('async def agent(problem, tools)', "nobody gives it its parameter 'tools'; name one of problem, base_url"),
        ('async def agent(problem, /)', "its parameter 'problem' is positional only"),
        ('def agent(problem)', 'it is no `async def`'),
        ('async def other()', "there is no function 'agent' in"),
    ],
)
def test_functions_that_cannot_run_are_refused(tmp_path, declared, refused):
    (tmp_path / 'agent.py').write_text(f'{declared}: ...\n')
    for check in (check_function, lambda spec: FunctionHost(spec, 1)):
        with pytest.raises(UserError, match=refused) as error:
            check(f'{tmp_path}/agent.py:agent')
        assert str(error.value).startswith(f'agent.function={tmp_path}/agent.py:agent: ')


def test_a_function_that_only_its_worker_cannot_load_is_refused(loop, tmp_path):
    file = tmp_path / 'agent.py'
    file.write_text('async def agent(problem): ...\n')
    host = FunctionHost(f'{file}:agent', 1)
    file.write_text('import no_such_module\n')
    with pytest.raises(UserError, match=r'^agent\.function=.*: line 1 of .* raises ModuleNotFoundError'):
        loop.run(host.run(job('end')))
    loop.run(host.close())


OPENAI = """
class DefaultAsyncHttpxClient:
    def __init__(self, trust_env): self.is_open = not trust_env

class AsyncOpenAI:
    def __init__(self, base_url='', api_key='', http_client=None):
        self.base_url, self.api_key, self.http_client = base_url, api_key, http_client
    def copy(self, base_url, api_key): return type(self)(base_url, api_key, self.http_client)
    async def close(self): self.http_client.is_open = False
"""


def test_a_client_of_its_own_shares_the_connections_and_does_not_close_them(loop, tmp_path, monkeypatch):
    (tmp_path / 'agent.py').write_text("""
async def agent(client, problem):
    said = (client.base_url, client.api_key, client.http_client.is_open)
    await client.close()
    assert said == ('http://127.0.0.1:9/v1', problem['do'], True), said
""")
    monkeypatch.delitem(sys.modules, 'openai', raising=False)
    if importlib.util.find_spec('openai') is None:
        with pytest.raises(UserError, match="its parameter 'client' needs the package openai; install it, or take"):
            check_function(f'{tmp_path}/agent.py:agent')
    (tmp_path / 'openai.py').write_text(OPENAI)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path), prepend=os.pathsep)
    host = FunctionHost(f'{tmp_path}/agent.py:agent', workers=1)
    assert [loop.run(host.run(job(KEY))) for _ in range(2)] == [Ending('ended')] * 2
    loop.run(host.close())
