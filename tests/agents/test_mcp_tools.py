"""MCP servers of an agent: results as text, faults that end the episode, deadlines, and a resume that starts none."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import re
import shlex
import socket
import subprocess
import sys

import pytest

from areal_jax.config.addresses import find_free_port
from areal_jax.control.episode import describe_episode
from tests.agents.programs.loop_thread import wait_for
from tests.agents.test_dialogue import Run, saved
from tests.agents.toy_format import ids_of, result, user
from tests.tasks.process_table import all_end, is_alive

pytest.importorskip('mcp', reason="the package mcp is not installed: pip install -e '.[agents]'")
from areal_jax.agents.mcp_tools import McpTools

PAGE = (pathlib.Path(__file__).parents[2] / 'docs' / 'agents.md').read_text()
ROOM = {'tool_deadline_s': 20.0, 'tool_bytes': 1000, 'context_tokens': 2000}
FILES = ('sums.py', 'mcp_agent.py')
SERVER = """
import os, sys, time
from mcp.server.mcpserver import MCPServer
from mcp_types import ImageContent, TextContent

open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')
server = MCPServer('toy')

@server.tool()
def add(a: int, b: int) -> int:
    return a + b

@server.tool()
def show(how: str) -> list[TextContent | ImageContent]:
    if how == 'hang':
        time.sleep(1000)
    if how == 'die':
        print('out of luck', file=sys.stderr, flush=True)
        os._exit(3)
    if how == 'fail':
        raise ValueError
    image = ImageContent(type='image', data='AAAA', mime_type='image/png')
    return [TextContent(type='text', text=how), image, TextContent(type='text', text='x' * 2000)]

server.run()
"""
# speaks the protocol by itself, which starts in a few milliseconds
LIGHT_SERVER = """
import json, os, sys, time
open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')
for line in sys.stdin:
    call = json.loads(line)
    result = {
        'initialize': {'protocolVersion': '2025-06-18', 'capabilities': {'tools': {}},
                       'serverInfo': {'name': 'light', 'version': '1'}},
        'tools/list': {'tools': [{'name': 'flood', 'inputSchema': {'type': 'object'}}]},
    }.get(call['method'])
    if call['method'] == 'tools/call':
        while call['params']['arguments']['to'] != 'nowhere':
            os.write(int(call['params']['arguments']['to']), b'{"x": 1}\\n' * 5000)
        sys.stdin.close()
        time.sleep(1000)
    if result:
        print(json.dumps({'jsonrpc': '2.0', 'id': call['id'], 'result': result}), flush=True)
    elif 'id' in call:
        error = {'code': -32601, 'message': 'unknown'}
        print(json.dumps({'jsonrpc': '2.0', 'id': call['id'], 'error': error}), flush=True)
"""


@pytest.fixture
def write(tmp_path):
    """A command of a server; each start of it adds a line to the file pids."""

    def make(source):
        (tmp_path / 'server.py').write_text(source)
        return f'{sys.executable} {tmp_path}/server.py {tmp_path}/pids'

    make.path = tmp_path
    make.pids = lambda: [int(pid) for pid in (tmp_path / 'pids').read_text().split()]
    return make


def is_served(host, port):
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
        return True
    return False


def with_servers(body, *servers, deadline_s=20.0):
    """An agent that has a turn, and then does what `body` says with its servers."""

    async def agent(prompt, dialogue):
        await dialogue.chat([user('q')])
        mcp = McpTools(servers, dialogue, deadline_s)
        try:
            await body(mcp)
        finally:
            mcp.close()

    return agent


def faults(run):
    assert run.ends == ('env_error', None)
    return [str(error) for error in run.errors]


def test_what_tools_give_is_text_and_a_server_that_dies_ends_the_episode(write):
    texts = []

    async def use(mcp):
        names = [tool['function']['name'] for tool in await mcp.tools()]
        for name, arguments in [
            ('add', '{"a": 1, "b": 2}'), ('add', {'a': 1, 'b': 4}), ('add', {'a': 1}), ('add', '[1, 2]'),
            ('add', '{"a'), ('add', '{"a": "\\ud800"}'), ('shift', {}),
            ('show', {'how': 'fail'}), ('show', {'how': 'one'}),
        ]:  # fmt: skip
            texts.append(await mcp.call(name, arguments))
        assert names == ['add', 'show']
        await mcp.call('show', {'how': 'die'})

    command = write(SERVER)
    run = Run(with_servers(use, command), ids_of('a'), tool_deadline_s=20.0, tool_bytes=1000)
    assert faults(run) == [f'the MCP server {command!r} ended with exit code 3: out of luck']
    assert texts[:2] == ['3', '5']
    assert 'Field required' in texts[2]
    assert texts[3:5] == ['error: the arguments are not a JSON object'] * 2
    assert texts[5].startswith('error: the arguments cannot be sent as JSON')
    assert texts[6] == "error: there is no tool 'shift'; tools: add, show"
    assert texts[7] == 'Error executing tool show'
    assert texts[8] == f'one\n[image image/png]\n{"x" * (1000 - 22)} [cut off]'
    assert [tool['name'] for tool in describe_episode(run.episode)['tools']] == ['add'] * 6 + ['shift'] + ['show'] * 3
    assert len(write.pids()) == 1


def test_a_call_that_hangs_is_read_by_the_model_and_the_server_ends_with_its_episode(write):
    async def agent(prompt, dialogue):
        await dialogue.chat([user('q')])
        mcp = McpTools([write(LIGHT_SERVER)], dialogue, 1.5)
        texts.append(await mcp.call('flood', {'to': 'nowhere'}))
        mcp.close()
        texts.append(await dialogue.call_tool('wait', {}, wait))

    async def wait():  # other episodes go on meanwhile
        while any(map(is_alive, write.pids())):
            await asyncio.sleep(0.02)
        return 'ended'

    texts = []
    run = Run(agent, ids_of('a'), tool_deadline_s=1.5, tool_bytes=99)
    assert texts == ['error: no result within 1.5 s', 'ended']
    assert run.ends == ('stop', 'stop')


@pytest.mark.parametrize('to', ['1', '2'])
def test_a_server_that_floods_ends_the_episode(write, to):
    command = write(LIGHT_SERVER)
    run = Run(with_servers(lambda mcp: mcp.call('flood', {'to': to}), command), ids_of('a'), tool_deadline_s=20.0)
    assert faults(run) == [f'the MCP server {command!r} sent more than 32 MiB or 10000 lines without being asked']
    assert all_end(write.pids())


@pytest.mark.parametrize(('command', 'fault'), [
    ('no_such_program_at_all', 'ended with exit code 127: no_such_program_at_all: No such file or directory'),
    ('sleep 1000', 'has not begun within 0.4 s; see agent.tool_deadline_s'),
    ('cat /dev/zero', 'sent a message of more than 8 MiB'),
    ('http://127.0.0.1:9/mcp', 'failed with ConnectError: All connection attempts failed'),
])  # fmt: skip
def test_a_server_that_cannot_be_started_ends_the_episode(command, fault):
    deadline_s = 0.5 if command.startswith('sleep') else 20.0
    agent = with_servers(lambda mcp: mcp.tools(), command, deadline_s=deadline_s)
    run = Run(agent, ids_of('a'), tool_deadline_s=deadline_s)
    assert faults(run) == [f'the MCP server {command!r} {fault}']


def test_a_server_over_http_serves_episodes_and_one_that_dies_ends_its_own(write, tmp_path):
    """It is not started by an episode, and does not end with one."""
    port = find_free_port('127.0.0.1')
    over_http = SERVER.replace('server.run()', f"server.run('streamable-http', host='127.0.0.1', port={port})")
    url, texts = f'http://127.0.0.1:{port}/mcp', []

    async def use(mcp):
        texts.append(await mcp.call('add', {'a': 1, 'b': len(texts)}))

    async def kill(mcp):
        await mcp.call('show', {'how': 'die'})

    with subprocess.Popen(shlex.split(write(over_http)), stderr=subprocess.DEVNULL) as server:
        wait_for(lambda: is_served('127.0.0.1', port) or server.poll() is not None)
        for _ in range(2):
            assert Run(with_servers(use, url), ids_of('a'), tool_deadline_s=20.0).ends == ('stop', 'stop')
        run = Run(with_servers(kill, url), ids_of('a'), tool_deadline_s=20.0)
        assert server.wait(20) == 3
    assert texts == ['1', '2']
    (fault,) = faults(run)
    assert fault.startswith(f'the MCP server {url!r} ')
    assert len(write.pids()) == 1


def test_tools_of_one_name_are_refused(write):
    command = write(LIGHT_SERVER)
    run = Run(with_servers(lambda mcp: mcp.tools(), command, command), ids_of('a'), tool_deadline_s=20.0)
    assert faults(run) == ["agent.mcp_servers: the tool 'flood' is offered twice; rename one of the two"]


def test_the_page_has_an_agent_whose_server_ends_with_it_and_is_not_started_by_a_resumed_one(write):
    server, source = (re.search(f'^```python {name}\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE)[1] for name in FILES)
    exec(source, names := {})

    async def agent(prompt, dialogue):
        mcp = McpTools([command], dialogue, 20.0)
        try:
            await names['agent'](dialogue.chat, mcp, prompt.problem)
        finally:
            mcp.close()

    write(server)
    command = shlex.join(['sh', '-c', f'echo $$ >> {write.path}/pids; exec {sys.executable} {write.path}/server.py'])
    cut = Run(agent, ids_of('T'), None, **ROOM)
    assert cut.ends == ('', None)  # cancelled within the second turn
    (pid,) = write.pids()
    assert all_end([pid])
    resumed = Run(agent, ids_of('b'), episode=saved(cut.episode), **ROOM)
    assert resumed.ends == ('stop', 'stop')
    (call,) = describe_episode(resumed.episode)['tools']
    assert (call['name'], call['arguments']) == ('add', '{}')
    assert call['text'].startswith('Error executing tool add: 2 validation errors')
    assert describe_episode(resumed.episode)['messages'][2] == result(call['text'], 'call_0_0')
    assert write.pids() == [pid]
