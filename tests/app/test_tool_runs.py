"""A run whose agent has the tool `python`, or one of an MCP server: a resume and a replay ask for nothing again."""

from __future__ import annotations

import sys

import pytest

from areal_jax import main_replay
from areal_jax.agents.python_tool import PythonTool
from areal_jax.app.parts import task_builder
from areal_jax.app.run import loop
from areal_jax.errors import ExitCode, UserError
from areal_jax.workers.sandbox.confinement import find_abi
from tests.app.small import SmallRun, open_episodes, require_same, resume_at
from tests.tasks.process_table import all_end

needs_landlock = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')
AGENT = """
async def agent(chat, call_tool, tools, problem):
    (tool,) = tools
    assert tool['function']['name'] == 'python'
    history = [{'role': 'user', 'content': problem['question']}]
    first = await chat(history)
    if first.finish_reason == 'length':
        return
    code = f'print(len({first.text!r}[:0]) or "=", end="")'
    mark = await call_tool('python', {'code': code})
    await chat([*history, first.message, {'role': 'user', 'content': mark}])
"""
OTHERS = """
async def asks(chat, tools): pass

async def cannot_call(chat): pass
"""
RECORD = {
    'level': 'landlock', 'landlock_abi': 7, 'user': 60_007, 'own_processes': False,
    'refused': ['open a socket'], 'allowed': ['fork'],
}  # fmt: skip


@pytest.fixture
def fields(tmp_path, monkeypatch):
    """Of a run of the agent; the self-test is recorded, since it needs an interpreter that every user can read."""
    (tmp_path / 'agent.py').write_text(AGENT)
    monkeypatch.setattr(
        loop, 'try_scorer_sandbox',
        lambda config, try_out: task_builder.try_scorer_sandbox(config, lambda level, _: {**RECORD, 'level': level}),
    )  # fmt: skip
    return {
        'rollout__workflow': f'{tmp_path}/agent.py:agent', 'rollout__max_new_tokens': 11, 'agent__max_turn_tokens': 6,
        'agent__tools': ('python',), 'checkpoint__every': 1, 'checkpoint__keep': 5, 'run__steps': 4,
    }  # fmt: skip


@pytest.fixture
def called(monkeypatch):
    """The results of the programs that ran."""
    found, run = [], PythonTool.run

    async def note(tool, arguments):
        found.append(await run(tool, arguments))
        return found[-1]

    monkeypatch.setattr(PythonTool, 'run', note)
    return found


def count_calls(run):
    return sum(event['kind'] == 'run_start' and event['work'] == 'tool' for event in run.events)


@needs_landlock
@pytest.mark.slow
def test_a_resumed_run_is_the_same_and_runs_no_code_again(fields, called, tmp_path):
    whole = SmallRun(tmp_path / 'whole', **fields).train()
    assert set(called) == {'='}
    assert len(called) == count_calls(whole) > 2
    assert whole.report['sandbox'] == {**RECORD, 'runners': ['the tool python']}
    assert 'confines the code that the tool python runs' in (whole.workdir / 'report.md').read_text()

    called.clear()
    resumed = resume_at(whole, tmp_path / 'at', 1, **fields)
    assert any(episode.results for episode in open_episodes(resumed))
    require_same(resumed.train(), whole)
    assert len(called) < count_calls(whole)


@needs_landlock
@pytest.mark.slow
def test_a_replay_runs_no_code(fields, called, tmp_path):
    workdir, out = tmp_path / 'run', tmp_path / 'out'
    run = SmallRun(workdir, run__clock='real', **fields).train()
    assert len(called) == count_calls(run) > 2
    called.clear()
    assert main_replay.main([f'--workdir={workdir}', f'--out={out}']) == ExitCode.FINISHED
    assert called == []


@pytest.mark.parametrize(
    ('changed', 'said'),
    [
        ({'agent__tools': ()}, r"agent has a parameter tools: name them in agent\.tools, \('python',\)$"),
        ({'rollout__workflow': 'asks'}, r"^agent\.tools=\('python',\): the agent .*:asks has no parameter call_tool$"),
        (
            {'rollout__workflow': 'cannot_call'},
            r"^agent\.tools=\('python',\): the agent .*:cannot_call has no parameter call_tool$",
        ),
        ({'rollout__workflow': 'single_turn'}, r"^agent\.tools=\('python',\): .* is no agent, which could call tools"),
        (
            {'task__sandbox': 'none'},
            r"^task\.sandbox='none' with agent\.tools=\('python',\): .*; use task\.sandbox='auto'$",
        ),
        (
            {'agent__tools': ('pyton',)},
            r"^agent\.tools=\('pyton',\): 'pyton' is .*; did you mean python\?; use",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(fields, tmp_path, changed, said):
    (tmp_path / 'others.py').write_text(OTHERS)
    if (name := changed.get('rollout__workflow')) in ('asks', 'cannot_call'):
        changed = {'rollout__workflow': f'{tmp_path}/others.py:{name}'}
    with pytest.raises(UserError, match=said):
        SmallRun(tmp_path / 'run', **{**fields, **changed})


MCP_AGENT = """
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


def count_words(path):
    return len(path.read_text().split())


@pytest.mark.slow
def test_a_resumed_run_is_the_same_and_calls_nothing_again(tmp_path):
    pytest.importorskip('mcp', reason="the package mcp is not installed: pip install -e '.[agents]'")
    pids, called = tmp_path / 'pids', tmp_path / 'pids_called'
    (tmp_path / 'agent.py').write_text(MCP_AGENT)
    (tmp_path / 'server.py').write_text(SERVER)
    fields = {
        'rollout__workflow': f'{tmp_path}/agent.py:agent', 'rollout__max_new_tokens': 11, 'agent__max_turn_tokens': 6,
        'agent__mcp_servers': (f'{sys.executable} {tmp_path}/server.py {pids}',), 'checkpoint__every': 1,
        'checkpoint__keep': 5, 'run__steps': 4,
    }  # fmt: skip
    whole = SmallRun(tmp_path / 'whole', **fields).train()
    tools = [event for event in whole.events if event['kind'] == 'run_start' and event['work'] == 'tool']
    assert count_words(pids) == sum(event['tool'] == 'tools/list' for event in tools) > 4  # a process an episode
    assert count_words(called) == sum(event['tool'] == 'look_up' for event in tools) > 2
    assert all_end([int(pid) for pid in pids.read_text().split()])

    called.unlink()
    resumed = resume_at(whole, tmp_path / 'at', 1, **fields)
    assert any(episode.results for episode in open_episodes(resumed))
    require_same(resumed.train(), whole)
    after = [event for event in resumed.events if event['kind'] == 'run_start' and event['work'] == 'tool']
    assert len(after) == len(tools)
    assert count_words(called) < sum(event['tool'] == 'look_up' for event in tools)
