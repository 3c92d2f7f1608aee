"""A Python program in a fork sees what it would see in an interpreter of its own."""

import subprocess
import sys

import pytest

from areal_jax.agents.programs.program_host import CommandHost, Job
from areal_jax.agents.programs.program_supervisor import find_python_program
from tests.agents.programs.loop_thread import LoopThread

SHOW = """
import sys
early = sorted({{'asyncio', 'logging', 'threading'}} & set(sys.modules))
import atexit, beside, dataclasses, os, pickle, sys, threading, time

@dataclasses.dataclass
class Own: x: int

def write(*values):
    with open('{out}', 'a') as file: print(*values, file=file)

assert pickle.loads(pickle.dumps(Own(1))) == Own(1)
main = sys.modules['__main__']
write(__name__, early, sys.argv, sys.path[0], sys.path[1:], main.Own is Own, __package__, type(__loader__))
write(main.__file__, __spec__ and __spec__.name, sys.stdin.isatty(), sys.stdout.line_buffering, sys.stdout.encoding)
atexit.register(lambda: write('exit function'))
threading.Thread(target=lambda: (time.sleep(0.05), write('thread', sys.modules['__main__'].Own is Own))).start()
print('a part of a line', end='')
{end}
"""


@pytest.mark.parametrize(
    ('command', 'end', 'code'),
    [
        (['python', 'agents/agent.py', '--turns', '3'], 'pass', 0),
        (['python3', 'agents/agent.py'], 'raise ValueError("bad")', 1),
        (['python', 'agents/agent.py'], 'sys.exit(258)', 2),
        (['python', '-m', 'agents.agent', 'x'], 'sys.exit("why")', 1),
        (['python', '-m', 'agents'], 'sys.exit(None)', 0),
        (['python', 'agents/agent.py'], 'if os.fork() == 0: sys.exit(9)\nsys.exit(os.wait()[1] >> 8)', 9),
    ],
)
def test_a_fork_is_like_a_new_interpreter(tmp_path, monkeypatch, command, end, code):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / 'agents'
    folder.mkdir()
    for name in ('agent', '__main__'):
        (folder / f'{name}.py').write_text(SHOW.format(out=tmp_path / 'seen', end=end))
    for place in (folder, tmp_path):
        (place / 'beside.py').write_text('')
    seen = []
    for run in (_run_alone, _run_in_fork):
        assert run(command) == code
        seen.append(sorted((tmp_path / 'seen').read_text().splitlines()))  # a fork of the program writes beside it
        (tmp_path / 'seen').unlink()
    assert seen[0] == seen[1]
    assert 'exit function' in seen[0]


def _run_alone(command):
    return subprocess.run([sys.executable, *command[1:]], input=b'', capture_output=True).returncode


def _run_in_fork(command):
    loop = LoopThread()
    host = CommandHost(command, [])
    detail = loop.run(host.run(Job({}, {}))).detail
    loop.run(host.close())
    loop.close()
    return int(detail.partition(';')[0].rpartition(' ')[2] or 0)


@pytest.mark.parametrize(
    ('command', 'words'),
    [
        ('python a.py x', ['a.py', 'x']),
        ('python3 -m a.b x', ['-m', 'a.b', 'x']),
        ('python -u a.py', []),
        ('python -m', []),
        ('python', []),
        ('node a.py', []),
    ],
)
def test_which_commands_are_run_in_a_fork(command, words):
    assert find_python_program(command.split()) == words
