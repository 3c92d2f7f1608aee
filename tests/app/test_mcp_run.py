"""A run whose agent calls a tool of an MCP server: a resume asks no server for what its record has, and is exact."""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.app.small import SmallRun, equal
from tests.app.test_session import lines_of, tokens_of
from tests.tasks.process_table import all_end

pytest.importorskip('mcp', reason="the package mcp is not installed: pip install -e '.[agents]'")

AGENT = """
async def agent(chat, mcp, problem):
    (tool,) = await mcp.tools()
    history = [{'role': 'user', 'content': problem['question']}]
    first = await chat(history)
    if first.finish_reason == 'length':
        return
    mark = await mcp.call(tool['function']['name'], {'text': first.text})
    await chat([*history, first.message, {'role': 'user', 'content': mark}])
"""
# speaks the protocol by itself, which starts in a few milliseconds
SERVER = """
import json, os, sys
open(sys.argv[1], 'a').write(f'{os.getpid()}\\n')
info = {'protocolVersion': '2025-06-18', 'capabilities': {'tools': {}}, 'serverInfo': {'name': 's', 'version': '1'}}
RESULTS = {
    'initialize': info,
    'tools/list': {'tools': [{'name': 'look_up', 'inputSchema': {'type': 'object'}}]},
    'tools/call': {'content': [{'type': 'text', 'text': '='}]},
}
for line in sys.stdin:
    call = json.loads(line)
    if call['method'] == 'tools/call':
        open(sys.argv[1] + '_called', 'a').write('1\\n')
    if 'id' in call:
        error = {'code': -32601, 'message': 'unknown'}
        found = RESULTS.get(call['method'])
        reply = {'result': found} if found else {'error': error}
        print(json.dumps({'jsonrpc': '2.0', 'id': call['id'], **reply}), flush=True)
"""


def count(path):
    return len(path.read_text().split())


@pytest.mark.slow
def test_a_resumed_run_is_the_same_and_calls_nothing_again(tmp_path):
    pids, called = tmp_path / 'pids', tmp_path / 'pids_called'
    (tmp_path / 'agent.py').write_text(AGENT)
    (tmp_path / 'server.py').write_text(SERVER)
    fields = {
        'rollout__workflow': f'{tmp_path}/agent.py:agent', 'rollout__max_new_tokens': 11, 'agent__max_turn_tokens': 6,
        'agent__mcp_servers': (f'{sys.executable} {tmp_path}/server.py {pids}',), 'checkpoint__every': 1,
        'checkpoint__keep': 5, 'run__steps': 4,
    }  # fmt: skip
    whole = SmallRun(tmp_path / 'whole', **fields).train()
    tools = [event for event in whole.events if event['kind'] == 'run_start' and event['work'] == 'tool']
    assert count(pids) == sum(event['tool'] == 'tools/list' for event in tools) > 4  # a process an episode
    assert count(called) == sum(event['tool'] == 'look_up' for event in tools) > 2
    assert all_end([int(pid) for pid in pids.read_text().split()])

    shutil.copytree(whole.workdir, tmp_path / 'at')
    for later in (2, 3, 4):
        shutil.rmtree(tmp_path / 'at' / 'checkpoints' / f'step_{later:08d}')
    called.unlink()
    resumed = SmallRun(tmp_path / 'at', resume=True, **fields)
    running = resumed.session.program.parts.controller.snapshot()['running']
    asked = [e for group in running for e in group.episodes if e.results and not e.finish_reason]
    resumed.train()
    assert asked
    assert equal(resumed.final, whole.final)
    assert tokens_of(resumed.batches) == tokens_of(whole.batches[1:])
    assert lines_of(resumed) == lines_of(whole)
    after = [event for event in resumed.events if event['kind'] == 'run_start' and event['work'] == 'tool']
    assert len(after) == len(tools)
    assert count(called) < sum(event['tool'] == 'look_up' for event in tools)
