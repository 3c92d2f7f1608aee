"""A run whose agent has the tool `python`: a resume and a replay run no code for what the log has, and are exact."""

from __future__ import annotations

import shutil

import pytest

from areal_jax import main_replay
from areal_jax.agents.python_tool import PythonTool
from areal_jax.app.parts import task_builder
from areal_jax.app.run import loop
from areal_jax.errors import ExitCode, UserError
from areal_jax.workers.sandbox.confinement import find_abi
from tests.app.small import SmallRun, equal
from tests.app.test_session import lines_of, tokens_of

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

    shutil.copytree(whole.workdir, tmp_path / 'at')
    for later in (2, 3, 4):
        shutil.rmtree(tmp_path / 'at' / 'checkpoints' / f'step_{later:08d}')
    called.clear()
    resumed = SmallRun(tmp_path / 'at', resume=True, **fields)
    running = resumed.session.program.parts.controller.snapshot()['running']
    assert [e for group in running for e in group.episodes if e.results and not e.finish_reason]
    resumed.train()
    assert equal(resumed.final, whole.final)
    assert tokens_of(resumed.batches) == tokens_of(whole.batches[1:])
    assert lines_of(resumed) == lines_of(whole)
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
