"""Calls of a program: what they generate, what a budget ends, and what a resumed episode does not generate again."""

from __future__ import annotations

import asyncio
import json

import pytest

from areal_jax.agents.agent_workflow import AgentWorkflow
from areal_jax.agents.dialogue import Budgets, Dialogue, EpisodeEnd, ToolFailedError
from areal_jax.checkpoint.store import _decode_episode, _encode_episode
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.episode import Episode, describe_episode
from areal_jax.control.event_writer import EventLog
from areal_jax.types import NOT_GENERATED, Prompt, SamplingParams
from tests.agents.toy_format import CLOSE, ToyFormat, ToyPool, ids_of, result, user

PROMPT = Prompt(5, ToyFormat().render([user('q')], ()), 'task', {'question': 'q'})
SAMPLING = SamplingParams(max_new_tokens=20, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=(3,))
BUDGETS = Budgets(max_turns=4, max_turn_tokens=0, context_tokens=100, tool_deadline_s=5.0, tool_bytes=10)
TOOLS = ({'type': 'function', 'function': {'name': 'add'}},)


class Run:
    """An episode whose agent is a function of a dialogue; `again` starts one as a resumed run does."""

    def __init__(self, agent, *answers, episode=None, sampling=SAMPLING, deadline_s=0.0, **budgets):
        self.episode, self.pool, self.errors, self.log = episode or Episode(2), ToyPool(*answers), [], EventLog()
        clock = VirtualClock({'tools': 2}, self.log, {'tool': 0.5})
        self.dialogues = []

        def make(prompt, episode):
            self.dialogues.append(
                Dialogue(
                    self.pool, clock, prompt, episode, sampling=sampling, seed=7, chat_format=ToyFormat(),
                    budgets=Budgets(**{**vars(BUDGETS), **budgets}), lane='tools',
                )
            )  # fmt: skip
            return self.dialogues[-1]

        workflow = AgentWorkflow(agent, make, lambda prompt, error: self.errors.append(error), clock, deadline_s)
        clock.execute(workflow.run(PROMPT, self.episode))

    @property
    def rows(self):
        return [[s.tokens.tolist() for s in row.segments] for row in self.episode.rows]

    @property
    def ends(self):
        return self.episode.label, self.episode.finish_reason


def saved(episode):
    """As a checkpoint brings it back."""
    return _decode_episode(_encode_episode(episode))


async def two_turns(prompt, dialogue):
    history = [user('q')]
    first = await dialogue.chat(history)
    history += [first.message, user('again')]
    second = await dialogue.chat(history)
    assert (first.text, second.text) == ('a', 'b')


def test_the_second_turn_reads_the_sampled_ids_of_the_first():
    run = Run(two_turns, ids_of('a'), ids_of('b'))
    ((first, between, second),) = run.rows
    assert (first, second) == (ids_of('a'), ids_of('b'))
    assert run.pool.requests[1].prompt_tokens.tolist() == [*PROMPT.tokens, *first, *between]
    assert run.episode.rows[0].prompt_tokens is None  # it begins with the prompt of the draw
    assert [s.policy_version for s in run.episode.rows[0].segments] == [1, NOT_GENERATED, 2]
    assert run.ends == ('stop', 'stop')


def test_rows_of_an_episode_have_requests_and_noise_of_their_own():
    async def agents(prompt, dialogue):
        await dialogue.chat([user('q')])
        await dialogue.chat([user('q')])

    run = Run(agents, ids_of('a'), ids_of('b'))
    assert [r.request_id for r in run.pool.requests] == ['7/5/2', '7/5/2/1']
    assert len({r.noise_sample for r in run.pool.requests}) == 2
    assert [row.fork for row in run.episode.rows] == ['', 'resampled']


# Tools.


async def with_tool(prompt, dialogue, tool):
    history = [user('q')]
    reply = await dialogue.chat(history, TOOLS)
    assert reply.finish_reason == 'tool_calls'
    (call,) = reply.tool_calls
    text = await dialogue.call_tool(call['function']['name'], call['function']['arguments'], tool)
    return await dialogue.chat([*history, reply.message, result(text, call['id'])], TOOLS)


@pytest.mark.parametrize(('tool', 'text'), [
    ('fine', 'fine'),
    ('longer than that', 'longer tha [cut off]'),
    (ValueError('bad'), 'error: Val [cut off]'),
])  # fmt: skip
def test_what_a_tool_gives_or_raises_is_read_by_the_model(tool, text):
    async def work():
        if isinstance(tool, Exception):
            raise tool
        return tool

    run = Run(lambda prompt, dialogue: with_tool(prompt, dialogue, work), ids_of('T'), ids_of('b'))
    assert run.rows[0][1] == ToyFormat().extend([result(text)], TOOLS, closed_by=CLOSE).tolist()
    assert run.ends == ('stop', 'stop')


def test_an_environment_that_fails_ends_the_episode_without_an_answer():
    async def work():
        raise ToolFailedError('the server is gone')

    run = Run(lambda prompt, dialogue: with_tool(prompt, dialogue, work), ids_of('T'))
    assert run.ends == ('env_error', None)


@pytest.mark.parametrize('kind', [ToolFailedError, ValueError])
def test_what_a_tool_says_of_its_failure_is_cut_where_it_enters(kind):
    async def work():
        raise kind('x' * 10**7)

    run = Run(lambda prompt, dialogue: with_tool(prompt, dialogue, work), ids_of('T'), ids_of('b'))
    (recorded,) = run.episode.results
    assert len(json.dumps(recorded)) < 3000


# Budgets.


def ask_on(prompt, dialogue):
    async def ask():
        history = [user('q')]
        while True:
            history += [(await dialogue.chat(history)).message, user('u')]

    return ask()


@pytest.mark.parametrize(('budget', 'label', 'lengths'), [
    ({'max_turns': 3}, 'turns', [3, 3, 3]),
    ({'max_turn_tokens': 2}, 'turns', [2, 2, 2, 2]),  # cut, and closed by the environment
    ({'context_tokens': len(PROMPT.tokens) + 3 + 4}, 'length', [3]),  # no room behind the second question
    ({'context_tokens': len(PROMPT.tokens) + 3 + 6}, 'length', [3, 2]),
    ({'sampling': SamplingParams(7, 1.0, 0, 1.0, (3,))}, 'length', [3, 3, 1]),  # sampled tokens alone count
])  # fmt: skip
def test_a_budget_ends_an_episode_which_is_scored(budget, label, lengths):
    run = Run(ask_on, *[ids_of('ab')] * 6, **budget)
    generated = [len(s.tokens) for s in run.episode.rows[0].segments if s.policy_version != NOT_GENERATED]
    assert generated == lengths
    assert run.ends == (label, 'length')
    assert run.episode.rows[0].segments[-1].policy_version != NOT_GENERATED or label == 'turns'


def test_an_agent_cannot_go_on_behind_its_budget():
    async def stubborn(prompt, dialogue):
        for _ in range(10):
            try:
                await dialogue.chat([user('q')])
            except Exception:
                continue

    run = Run(stubborn, *[ids_of('a')] * 10, max_turns=2)
    assert len(run.pool.requests) == 2
    assert run.ends == ('turns', 'length')


async def raises(prompt, dialogue):
    await dialogue.chat([user('q')])
    raise KeyError('x')


async def silent(prompt, dialogue):
    pass


@pytest.mark.parametrize('agent', [raises, silent])
def test_an_agent_that_raises_or_asks_nothing_has_no_answer(agent):
    run = Run(agent, ids_of('a'))
    assert run.ends == ('agent_error', None)
    assert len(run.errors) == (agent is raises)


@pytest.mark.parametrize(('deadline_s', 'label'), [(0.3, 'deadline'), (0.7, 'stop')])
def test_an_agent_that_waits_for_a_tool_beyond_the_deadline_has_no_reward(deadline_s, label):
    async def work():  # takes 0.5 s on the clock
        return 'fine'

    agent = lambda prompt, dialogue: with_tool(prompt, dialogue, work)
    run = Run(agent, ids_of('T'), ids_of('b'), deadline_s=deadline_s)
    assert run.ends == (label, None if label == 'deadline' else 'stop')
    assert len(run.pool.requests) == (1 if label == 'deadline' else 2)


# A resumed episode.


def test_calls_that_were_answered_are_not_made_again():
    called = []

    async def work():
        called.append(1)
        return 'fine'

    agent = lambda prompt, dialogue: with_tool(prompt, dialogue, work)
    whole = Run(agent, ids_of('T'), ids_of('b'))
    cut = Run(agent, ids_of('T'), None)  # cancelled within the second turn, as when the run stops
    assert cut.ends == ('', None)
    resumed = Run(agent, ids_of('b'), episode=saved(cut.episode))
    assert resumed.rows == whole.rows
    assert len(resumed.pool.requests) == 1
    assert len(called) == 2  # of the whole run and of the one that was cut
    assert resumed.ends == ('stop', 'stop')


def test_a_resumed_episode_is_described_as_one_that_was_not_cut():
    async def work():
        return 'fine'

    agent = lambda prompt, dialogue: with_tool(prompt, dialogue, work)
    found = describe_episode(Run(agent, ids_of('T'), ids_of('b')).episode)
    cut = Run(agent, ids_of('T'), None)
    assert describe_episode(Run(agent, ids_of('b'), episode=saved(cut.episode)).episode) == found
    call = {'id': 'call_0_0', 'type': 'function', 'function': {'name': 'add', 'arguments': '{}'}}
    first, last = {'role': 'assistant', 'content': '', 'tool_calls': [call]}, {'role': 'assistant', 'content': 'b'}
    assert found['messages'] == [user('q'), first, result('fine', 'call_0_0'), last]
    assert found['tools'] == [{'name': 'add', 'arguments': '{}', 'text': 'fine', 'failed': False}]
    assert (found['label'], found['turns']) == ('stop', 2)


def test_what_a_program_changes_later_and_results_that_it_does_not_ask_for_again_are_not_told():
    async def work():
        return 'fine'

    async def agent(prompt, dialogue):
        history = [user('q')]
        reply = await dialogue.chat(history, TOOLS)
        history[0]['content'] = 'changed'
        await dialogue.call_tool('add', (1,), work)
        await dialogue.chat([user('q'), reply.message, user('u')], TOOLS)

    async def another(prompt, dialogue):
        await dialogue.chat([user('else')])

    cut = Run(agent, ids_of('a'), None)
    found = describe_episode(cut.episode)
    assert found['messages'][0] == user('q')
    assert found['tools'][0]['arguments'] == [1]
    resumed = Run(another, ids_of('c'), episode=saved(cut.episode))
    found = describe_episode(resumed.episode)
    assert found['messages'] == [user('else'), {'role': 'assistant', 'content': 'c'}]
    assert found['tools'] == []


def test_an_answer_that_was_under_way_goes_on_where_it_was():
    cut = Run(two_turns, ids_of('a'), None)
    cut.episode.rows[0].append(run_segment := Run(two_turns, ids_of('a'), ids_of('b')).episode.rows[0].segments[2])
    resumed = Run(two_turns, ids_of('c'), episode=saved(cut.episode))
    (request,) = resumed.pool.requests
    assert [s.tokens.tolist() for s in request.prefix] == [run_segment.tokens.tolist()]
    assert resumed.errors  # 'b' and then 'c' is another text than `two_turns` expects


def test_a_program_that_goes_another_way_leaves_the_record_and_its_tokens_are_counted():
    async def another(prompt, dialogue):
        first = await dialogue.chat([user('q')])
        await dialogue.chat([user('q'), first.message, user('else')])

    cut = Run(two_turns, ids_of('a'), ids_of('b'))
    episode = saved(cut.episode)
    episode.label, episode.finish_reason = '', None
    resumed = Run(another, ids_of('d'), episode=episode)
    ((first, _, last),) = resumed.rows
    assert (first, last) == (ids_of('a'), ids_of('d'))
    assert resumed.episode.discarded == {2: len(ids_of('b'))}
    assert len(resumed.pool.requests) == 1
    assert len(resumed.episode.rows) == 1


def test_no_message_is_an_error_of_the_program():
    run = Run(lambda prompt, dialogue: dialogue.chat([]))
    assert run.ends == ('agent_error', None)
    assert 'give at least one turn' in str(run.errors[0])


def test_the_end_of_an_episode_is_no_exception_that_programs_catch():
    assert not issubclass(EpisodeEnd, Exception)
    assert asyncio.CancelledError.__bases__ == (BaseException,)
