"""Commands: what a program sees, how each end is told, and that nothing it started outlives it."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from areal_jax.agents.programs.program_host import CommandHost, Ending, Job
from areal_jax.errors import UserError
from tests.agents.programs.loop_thread import is_alive, read_when_there, wait_for

pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='what it asserts of orphans is that of Linux')
ROOT = pathlib.Path(__file__).parents[3]
KEY = 'sk-3141592653589793'
# A setsid'ed child, and a daemon whose parent has ended.
LEAVE = """
import subprocess, time
child = subprocess.Popen(['sleep', '100'], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(1), os.close(2)
        with open(os.environ['FILE'] + '.new', 'w') as file:
            file.write(f'{os.getpid()} {child.pid}' + chr(10))
        os.rename(file.name, os.environ['FILE'])  # whole when it is there, for then the program ends
        time.sleep(100)
    os._exit(0)
while not os.path.exists(os.environ['FILE']): time.sleep(0.002)
"""
HANG = "print(os.getpid(), file=open(os.environ['FILE'], 'w'), flush=True); import time; time.sleep(100)"


@pytest.fixture(scope='module')
def program(tmp_path_factory):
    """Does what its environment says."""
    file = tmp_path_factory.mktemp('program') / 'agent.py'
    file.write_text("import json, os, signal, sys\nexec(os.environ['DO'])\n")
    return file


@pytest.fixture(scope='module')
def host(loop, program):
    host = CommandHost(['python', str(program)], ['fractions', 'numpy.random'])
    yield host
    loop.run(host.close())


def job(do, file='', problem=None):
    return Job({'OPENAI_API_KEY': KEY, 'DO': do, 'FILE': str(file)}, problem or {})


@pytest.mark.parametrize(
    ('do', 'detail'),
    [
        ('pass', ''),
        ('sys.exit(0)', ''),
        ('os.close(0); os.close(1); os.close(2)', ''),
        ('sys.exit(3)', 'it ended with exit code 3'),
        ("sys.exit('no luck')", 'it ended with exit code 1; its last line: no luck'),
        ('os.kill(os.getpid(), signal.SIGTERM)', 'it was killed by SIGTERM'),
        ('print(os.environ["OPENAI_API_KEY"]); sys.exit(4)', 'it ended with exit code 4; its last line: ***'),
    ],
)
def test_each_end_is_told_in_a_sentence(loop, host, do, detail):
    assert loop.run(host.run(job(do))) == Ending('failed' if detail else 'ended', detail)


def test_an_exception_is_told_with_file_and_line_and_without_the_key(loop, tmp_path):
    file = tmp_path / 'agent.py'
    file.write_text('import os\n\nraise ValueError(f\'bad {os.environ["OPENAI_API_KEY"]}\')\n')
    host = CommandHost(['python', str(file)], [])
    ending = loop.run(host.run(job('')))
    loop.run(host.close())
    said = f'it ended with exit code 1; its last line: ValueError: bad *** (line 3 of {file})'
    assert ending == Ending('failed', said)


def test_the_problem_is_a_line_and_the_environment_is_that_of_the_run_with_the_job_s(loop, host, tmp_path):
    problem = {'question': 'é\n' * 100_000}  # more than a pipe holds
    do = f"""
[line] = sys.stdin.readlines()
problem = json.loads(line)
assert len(problem['question']) == 200_000 and os.environ['PATH'] == {os.environ['PATH']!r}
assert 'fractions' in sys.modules and sorted(map(int, os.listdir('/dev/fd'))) == [0, 1, 2, 3]  # 3: of the list
assert os.getsid(0) == os.getpid()
"""
    assert loop.run(host.run(job(do, problem=problem))) == Ending('ended')
    assert loop.run(host.run(job('pass', problem=problem))) == Ending('ended')  # never read


def test_forks_draw_other_numbers(loop, host, tmp_path):
    do = "import random, numpy; open(os.environ['FILE'], 'w').write(f'{random.random()} {numpy.random.rand()}')"
    files = [tmp_path / name for name in 'ab']
    for file in files:
        assert loop.run(host.run(job(do, file))) == Ending('ended')
    first, second = (file.read_text().split() for file in files)
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_output_without_end_takes_no_memory_and_nobody_s_time(loop, host):
    do = (
        "line = b'x' * 99 + bytes([10])\nfor _ in range(500): os.write(1, line * 1000)\nsys.exit(f'end {sys.argv[1:]}')"
    )
    assert loop.run(host.run(job(do))) == Ending('failed', 'it ended with exit code 1; its last line: end []')


def test_nothing_that_a_program_leaves_is_alive(loop, host, tmp_path):
    assert loop.run(host.run(job(LEAVE, tmp_path / 'pids'))) == Ending('ended')
    assert [is_alive(int(pid)) for pid in read_when_there(tmp_path / 'pids').split()] == [False, False]


@pytest.mark.parametrize('do', [HANG, f'signal.signal(signal.SIGTERM, signal.SIG_IGN); {HANG}'])
def test_a_cancelled_call_returns_at_once_and_the_program_is_killed(loop, host, tmp_path, do):
    running = loop.start(host.run(job(do, tmp_path / 'pid')))
    pid = int(read_when_there(tmp_path / 'pid'))
    assert is_alive(pid)
    running.cancel()
    wait_for(lambda: not is_alive(pid))
    assert loop.run(host.run(job('pass'))) == Ending('ended')


def test_a_cancelled_call_kills_what_left_the_session(loop, host, tmp_path):
    running = loop.start(host.run(job(f'{LEAVE}\ntime.sleep(100)', tmp_path / 'pids')))
    pids = [int(pid) for pid in read_when_there(tmp_path / 'pids').split()]
    assert all(map(is_alive, pids))
    running.cancel()
    wait_for(lambda: not any(map(is_alive, pids)))


def test_a_program_that_kills_or_stops_its_supervisor_ends_alone(loop, host, tmp_path):
    ending = loop.run(host.run(job(f'{LEAVE}\nos.kill(os.getppid(), 9); time.sleep(100)', tmp_path / 'pids')))
    assert ending == Ending('failed', 'the process that watches it was killed')
    wait_for(lambda: not any(is_alive(int(pid)) for pid in read_when_there(tmp_path / 'pids').split()))
    stopping = loop.start(host.run(job(f'os.kill(os.getppid(), signal.SIGSTOP); {HANG}', tmp_path / 'pid')))
    pid = int(read_when_there(tmp_path / 'pid'))
    stopping.cancel()
    wait_for(lambda: not is_alive(pid))


def test_many_at_once(loop, host, tmp_path):
    async def run_all():
        return await asyncio.gather(*(host.run(job(f'sys.exit({number})')) for number in range(30)))

    codes = [ending.detail.rpartition(' ')[2] for ending in loop.run(run_all())]
    assert codes == ['', *map(str, range(1, 30))]


def test_after_a_kill_of_the_fork_server_its_jobs_have_failed_and_the_next_one_runs(loop, host, tmp_path):
    running = loop.start(host.run(job(f'{LEAVE}\ntime.sleep(100)', tmp_path / 'pids')))
    pids = [int(pid) for pid in read_when_there(tmp_path / 'pids').split()]
    os.kill(host.pid, signal.SIGKILL)
    ending = running.result(10)
    assert ending.status == 'failed'
    assert ending.detail.startswith('the fork server of agent.command ended: it was killed by SIGKILL')
    wait_for(lambda: not any(map(is_alive, pids)))
    assert loop.run(host.run(job('pass'))) == Ending('ended')


def test_a_program_does_not_outlive_its_supervisor_and_the_fork_server(loop, host, tmp_path):
    running = loop.start(host.run(job(HANG.replace('os.getpid()', 'os.getppid(), os.getpid()'), tmp_path / 'pids')))
    supervisor, pid = map(int, read_when_there(tmp_path / 'pids').split())
    os.kill(host.pid, signal.SIGSTOP)  # it would end the program too
    for process in (supervisor, host.pid):
        os.kill(process, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid))
    assert running.result(10).status == 'failed'


@pytest.mark.parametrize('preload', [[], ['hang']])
def test_after_a_kill_of_the_run_nothing_is_left(program, tmp_path, preload):
    program.with_name('hang.py').write_text(f'import os; {HANG}')
    source = f"""
import asyncio, os
from areal_jax.agents.programs.program_host import CommandHost, Job
os.environ['FILE'] = {str(tmp_path / 'pids')!r}
host = CommandHost(['python', {str(program)!r}], {preload})
asyncio.run(host.run(Job({{'DO': {LEAVE + 'time.sleep(100)'!r}}}, {{}})))
"""
    with subprocess.Popen([sys.executable, '-c', source], cwd=ROOT) as run:
        pids = [int(pid) for pid in read_when_there(tmp_path / 'pids').split()]
        assert all(map(is_alive, pids))
        run.kill()
    wait_for(lambda: not any(map(is_alive, pids)))


def test_closing_ends_programs_and_fork_server(loop, program, tmp_path):
    host = CommandHost([sys.executable, str(program)], [])
    running = loop.start(host.run(job(HANG, tmp_path / 'pid')))
    pid, server = int(read_when_there(tmp_path / 'pid')), host.pid
    loop.run(host.close())
    assert running.result(1) == Ending('failed', 'it was told to end')
    assert not is_alive(pid)
    assert not is_alive(server)
    assert loop.run(host.run(job('pass'))) == Ending('failed', 'the run has ended')


@pytest.mark.parametrize(
    ('command', 'detail'),
    [
        (['no-such'], "it ended with exit code 127; its last line: 'no-such' cannot be started: No such file"),
        (
            ['sh', '-c', 'read line; echo "$line" $OPENAI_API_KEY; exit 5'],
            'it ended with exit code 5; its last line: {} ***',
        ),
        (['python', '-u', '-c', 'import sys; sys.exit(6)'], 'it ended with exit code 6'),
        (['python', 'no_such_file.py'], 'it ended with exit code 2; its last line: '),
    ],
)
def test_other_commands_are_executed(loop, command, detail):
    host = CommandHost(command, [])
    ending = loop.run(host.run(job('')))
    loop.run(host.close())
    assert ending.status == 'failed'
    assert ending.detail.startswith(detail)


def test_a_module_that_cannot_be_imported_is_named(loop):
    host = CommandHost(['cat'], ['json', 'no_such_module'])
    start_s = time.monotonic()
    with pytest.raises(
        UserError, match=r"^agent.preload='no_such_module': it cannot be imported \(ModuleNotFoundError"
    ):
        loop.run(host.run(job('')))
    loop.run(host.close())
    assert time.monotonic() - start_s < 14  # of 15 s that a fork server gets which does not answer


@pytest.mark.parametrize('where', ['the fork server', 'the process that watches it'])
def test_a_fork_that_fails_ends_a_job_alone(loop, tmp_path, where):
    (tmp_path / 'agent.py').write_text('')
    (tmp_path / 'few.py').write_text(f"""
import errno, os
server, fork, n = os.getpid(), os.fork, 0
def fail():
    global n
    n += (os.getpid() == server) == {where == 'the fork server'}
    if n == 1:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = fail
""")
    host = CommandHost(['python', str(tmp_path / 'agent.py')], ['few'])
    failed = Ending('failed', 'no process could be started for it: Resource temporarily unavailable')
    assert loop.run(host.run(job(''))) == failed
    if where == 'the fork server':
        assert loop.run(host.run(job(''))) == Ending('ended')
    loop.run(host.close())


OPENAI = """
import os
made = open(os.environ['MADE'], 'a', buffering=1)

class OpenAIError(Exception): ...

class OpenAI:
    def __init__(self, **options):
        self.chat = self.completions = self
        print(os.getpid(), type(self).__name__, options['base_url'], options['max_retries'], file=made)
    def create(self, model, messages):
        print('called', file=made)
        raise OpenAIError
    def __enter__(self): return self
    def __exit__(self, *error): print('closed', file=made)

class AsyncOpenAI(OpenAI):
    async def create(self, **call): super().create(**call)
    async def __aenter__(self): return self
    async def __aexit__(self, *error): print('closed', file=made)
"""


def test_clients_are_tried_and_closed_once_before_the_forks(loop, tmp_path, monkeypatch):
    (tmp_path / 'openai.py').write_text(OPENAI)
    (tmp_path / 'agent.py').write_text('import openai\n')
    monkeypatch.setenv('MADE', str(tmp_path / 'made'))
    host = CommandHost(['python', str(tmp_path / 'agent.py')], ['openai'])
    assert [loop.run(host.run(job(''))) for _ in range(2)] == [Ending('ended')] * 2
    made = [f'{host.pid} {name} http://127.0.0.1:9/v1 0\ncalled\nclosed\n' for name in ('OpenAI', 'AsyncOpenAI')]
    assert (tmp_path / 'made').read_text() == ''.join(made)
    loop.run(host.close())
