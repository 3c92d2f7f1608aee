"""The tool `python`: what a program prints is its result, and code that fails, escapes or never ends is an error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time

import pytest

from areal_jax.agents.dialogue import ToolFailedError
from areal_jax.agents.python_tool import PythonTool
from areal_jax.tasks.code.judge import ProgramLimits
from areal_jax.workers.descendants import list_descendants
from areal_jax.workers.sandbox.confinement import BUBBLEWRAP, CONFINING, LANDLOCK, SandboxError, find_abi, wrap_command
from tests.tasks.process_table import all_end, is_alive
from tests.workers.sandbox.try_attempts import find_open_interpreter

pytestmark = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')
LIMITS = ProgramLimits(time_s=0.5, memory_mb=512, output_bytes=1000)
FORK = 'import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.close(1)\n        time.sleep(99)\n'


def call(*codes, level=LANDLOCK, meanwhile=None, deadline_s=20.0):
    """The results of calls one after the other, exceptions as they are; `meanwhile` gets the pids before the last."""

    async def ask():
        tool, found = PythonTool(level, LIMITS, deadline_s), []
        for number, code in enumerate(codes, start=1):
            if meanwhile and number == len(codes):
                await meanwhile(tool, found)
            try:
                arguments = code if isinstance(code, dict) else {'code': code}
                async with asyncio.timeout(deadline_s):
                    found.append(await tool.run(arguments))
            except (ToolFailedError, TimeoutError) as error:
                found.append(error)
        return found

    found = run_as_clock(ask)
    return found if len(found) > 1 else found[0]


def run_as_clock(ask):
    """On a loop that cancels its tasks at its end, as the I/O loop of a clock does; no process is left."""
    found = asyncio.run(ask())
    assert all_end([process.pid for process in list_descendants(os.getpid())])
    return found


@pytest.fixture(params=CONFINING)
def level(request, monkeypatch):
    """A level that works here, with an interpreter that every user can read."""
    interpreter = find_open_interpreter() if os.getuid() == 0 else sys.executable
    if not interpreter:
        pytest.skip('no interpreter that every user can read')
    try:
        wrap_command(request.param, [])
    except SandboxError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(sys, 'executable', interpreter)
    return request.param


def test_what_a_program_prints_is_its_result(level):
    code = 'import collections, sys\nprint(sum(range(10)), "ä")\nprint(repr(sys.stdin.read()))'
    assert call(code, 'pass', 'print(1)\nraise SystemExit', level=level) == ["45 ä\n''\n", '', '1\n']


@pytest.mark.parametrize(
    ('code', 'result'),
    [
        ('print(1)\n1 / 0', 'error: exception: ZeroDivisionError: division by zero'),
        ('import os\nos._exit(3)', 'error: exception: its process ended with exit code 3'),
        ('print(', 'error: syntax: SyntaxError: '),
        ('"\ud800"', 'error: syntax: UnicodeEncodeError: '),
        ('bytearray(2**31)', 'error: memory_limit: MemoryError'),
        ('while True: pass', 'error: time_limit: more than 0.5 s'),
        ('import time\ntime.sleep(99)', 'error: time_limit: more than 0.5 s'),
        ('import os\nos.kill(os.getpid(), 9)', 'error: killed: by SIGKILL'),
        ({}, "error: the arguments of python are a JSON object with a text 'code'"),
        ({'code': 3}, "error: the arguments of python are a JSON object with a text 'code'"),
    ],
)
def test_a_program_that_fails_is_an_error_with_label_and_reason(code, result):
    assert call(code).startswith(result)


@pytest.mark.parametrize(
    ('attempt', 'twin'),
    [
        ('open("/etc/passwd").read()', 'print(open("/dev/null").read() == "")'),
        ('import socket\nsocket.socket()', 'import socket\nprint(len(socket.socketpair()) == 2)'),
        ('open("/tmp/left", "w")', 'import os\nprint(os.memfd_create("x") > 2)'),
        ('import os\nos.kill(os.getppid(), 0)', 'import os\nos.kill(os.getpid(), 0)\nprint(True)'),
    ],
)
def test_an_attempt_to_get_out_is_forbidden_and_its_twin_runs(level, attempt, twin):
    refused, allowed = call(attempt, twin, level=level)
    assert refused.startswith(('error: forbidden: ', 'error: exception: ProcessLookupError')), refused
    assert allowed == 'True\n'


def test_output_beyond_the_limit_is_no_failure_and_ends_the_program():
    began = time.monotonic()
    found = call('while True: print("äx" * 100)')
    assert time.monotonic() - began < 20
    assert len(found.encode()) > LIMITS.output_bytes  # so that the cut is told
    assert len(found.encode()) < 2 * LIMITS.output_bytes
    assert found.startswith('äx')


def test_nothing_is_kept_between_calls_and_nothing_runs_on():
    first = 'import builtins, sys\nbuiltins.kept = 1\nsys.modules["kept"] = 1\n' + FORK
    assert call(first, 'import builtins, sys\nprint(hasattr(builtins, "kept"), "kept" in sys.modules)') == [
        '', 'False False\n',
    ]  # fmt: skip


@pytest.mark.parametrize('depth', [0, 1])
def test_a_sandbox_that_is_killed_is_a_fault_and_the_next_call_has_another(depth):
    async def kill(tool, found):
        if len(found) == 1:
            below = {process.parent: process.pid for process in list_descendants(os.getpid())}
            pid = os.getpid()
            for _ in range(depth + 1):
                pid = below[pid]
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ToolFailedError):
                found.append(await tool.run({'code': 'print(2)'}))
            found.append('killed')

    found = call('print(1)', 'print(3)', meanwhile=kill)
    assert found == ['1\n', 'killed', '3\n']


def test_a_server_that_is_killed_meanwhile_says_nothing_of_the_program():
    async def kill_soon(tool, found):
        tasks.append(asyncio.create_task(kill()))

    async def kill():
        await asyncio.sleep(0.2)
        (worker,) = [p.pid for p in list_descendants(os.getpid()) if p.parent == os.getpid()]
        (server,) = [p.pid for p in list_descendants(worker) if p.parent == worker]
        os.kill(server, signal.SIGKILL)

    tasks = []
    _, fault = call('print(1)', FORK + 'time.sleep(99)', meanwhile=kill_soon)
    assert isinstance(fault, ToolFailedError), fault
    assert str(fault).startswith("agent.tools: the sandbox of the tool 'python' failed: the server of children has ")


async def start_forks(tool):
    """(a call whose program has forked and sleeps, the pids of all processes of the tool)."""
    task = asyncio.create_task(tool.run({'code': FORK + 'time.sleep(99)'}))
    below = []
    while len(below) < 6:  # worker, server, program and what it has forked
        await asyncio.sleep(0.02)
        below = [process.pid for process in list_descendants(os.getpid())]
    return task, below


def test_a_call_that_is_late_leaves_no_process_and_the_next_one_gets_its_own_reply():
    async def be_late(tool, found):
        task, below = await start_forks(tool)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            while any(map(is_alive, below)):
                await asyncio.sleep(0.02)
        found.append('late')

    assert call('print(1)', 'print(2)', meanwhile=be_late) == ['1\n', 'late', '2\n']


def test_the_end_of_the_run_leaves_no_process():
    async def ask():
        task, below = await start_forks(PythonTool(LANDLOCK, LIMITS, 20.0))
        assert not task.done()
        return below

    assert all_end(run_as_clock(ask))


def test_a_sandbox_that_does_not_start_is_a_fault(monkeypatch):
    def refuse(level, command):
        raise SandboxError('bubblewrap is not installed')

    monkeypatch.setattr('areal_jax.agents.python_tool.wrap_command', refuse)
    fault = call('print(1)', level=BUBBLEWRAP)
    assert str(fault) == "agent.tools: the sandbox of the tool 'python' failed: bubblewrap is not installed"
    monkeypatch.setattr('areal_jax.agents.python_tool.wrap_command', lambda level, words: ['/bin/sleep', '99'])
    fault = call('print(1)', deadline_s=0.5)
    assert str(fault).endswith('it has not begun within 0.4 s; see agent.tool_deadline_s')


def test_its_definition_tells_the_limits():
    definition = PythonTool(LANDLOCK, LIMITS, 1.0).definition
    assert definition['function']['name'] == 'python'
    assert '0.5 s and 512 MiB' in definition['function']['description']
    assert definition['function']['parameters']['required'] == ['code']
    json.dumps(definition)


def test_programs_run_beside_each_other():
    async def ask():
        tool = PythonTool(LANDLOCK, LIMITS, 20.0)
        codes = [f'print({number})' for number in range(4)]
        return await asyncio.gather(*(tool.run({'code': code}) for code in codes))

    assert run_as_clock(ask) == ['0\n', '1\n', '2\n', '3\n']
