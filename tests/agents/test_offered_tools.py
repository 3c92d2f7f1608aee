"""call_tool of an agent: its own tools, and those of agent.tools by their names."""

from __future__ import annotations

import pytest

from areal_jax.agents.agent_workflow import OfferedTools
from areal_jax.agents.dialogue import ToolFailedError
from tests.agents.test_dialogue import Run, saved
from tests.agents.toy_format import ids_of, user


def ask(*calls, tools, episode=None, answers=1):
    """(the results of the calls after a first turn, the episode)."""
    found = []

    async def agent(prompt, dialogue):
        await dialogue.chat([user('q')])
        offered = OfferedTools(dialogue, tools)
        for call in calls:
            found.append(await offered.call_tool(*call))

    return found, Run(agent, *[ids_of('a')] * answers, episode=episode, tool_bytes=200)


def make_tools(*texts):
    """A tool `python` that gives these in turn, and the arguments that it has got."""
    got, left = [], list(texts)

    async def run(arguments):
        got.append(arguments)
        text = left.pop(0)
        if isinstance(text, Exception):
            raise text
        return text

    return {'python': run}, got


async def own():
    return 'own'


def test_a_tool_of_the_config_is_called_by_its_name_and_one_of_the_agent_goes_first():
    tools, got = make_tools('1', '2')
    found, run = ask(
        ('python', '{"code": "x"}'), ('python', {'code': 'y'}), ('python', {'code': 'z'}, own), ('own', {}, own),
        tools=tools,
    )  # fmt: skip
    assert found == ['1', '2', 'own', 'own']
    assert got == [{'code': 'x'}, {'code': 'y'}]
    assert [result['arguments'] for result in run.episode.results][:2] == ['{"code": "x"}', {'code': 'y'}]
    assert run.ends == ('stop', 'stop')


def test_a_name_that_no_tool_has_is_read_by_the_model():
    tools, got = make_tools()
    found, run = ask(('pyton', {}), tools=tools)
    assert found == ["error: there is no tool 'pyton'; tools: python"]
    assert (got, run.ends) == ([], ('stop', 'stop'))


def test_without_a_tool_anywhere_the_agent_is_wrong():
    _, run = ask(('python', {}), tools={})
    assert run.ends == ('agent_error', None)
    assert "set agent.tools=('python',)" in str(run.errors[0])


def test_a_sandbox_that_failed_ends_the_episode_without_a_reward():
    tools, _ = make_tools(ToolFailedError('the sandbox failed'))
    _, run = ask(('python', {'code': 'x'}), tools=tools)
    assert run.ends == ('env_error', None)
    assert [str(error) for error in run.errors] == ['the sandbox failed']


@pytest.mark.parametrize('arguments', [{'code': 'x'}, '{"code": "x"}', 'no json'])
def test_a_resumed_episode_runs_nothing_for_what_its_record_has(arguments):
    tools, got = make_tools('1')
    found, run = ask(('python', arguments), tools=tools)
    episode = saved(run.episode)
    episode.label, episode.finish_reason = '', None
    again, _ = ask(('python', arguments), tools=tools, episode=episode, answers=0)
    assert again == found == ['1']
    assert len(got) == 1
