"""Calls of a program: the rows that they continue, what a budget ends, and what a resumed episode does not repeat."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.agents.agent_workflow import AgentWorkflow
from areal_jax.agents.dialogue import (
    Budgets,
    Conversation,
    Dialogue,
    EpisodeEnd,
    NotationParser,
    TokenizerFormat,
    ToolFailedError,
    fits_definition,
)
from areal_jax.checkpoint.store import _decode_episode, _encode_episode
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.episode import Episode, describe_episode
from areal_jax.control.event_writer import EventLog
from areal_jax.rollout.http.wire.answer_reader import NOTATIONS
from areal_jax.types import NOT_GENERATED, Prompt, SamplingParams, Segment
from tests.agents.toy_format import CLOSE, ToyFormat, ToyPool, ids_of, reply, result, user
from tests.text.test_extension import HERMES, build

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


@pytest.mark.parametrize('tool', ['fine', 'error: no', ValueError('bad'), ToolFailedError('gone')])
def test_calls_and_errors_are_counted_by_tool_and_only_once_by_a_resumed_run(tool):
    async def work():
        if isinstance(tool, Exception):
            raise tool
        return tool

    asks = lambda prompt, dialogue: with_tool(prompt, dialogue, work)
    first = Run(asks, ids_of('T'), ids_of('b'))
    counts = {'tool_calls': 1, 'called/add': 1, 'well_formed/add': 1}
    assert first.episode.counts == counts | ({} if tool == 'fine' else {'errors/add': 1})
    if first.episode.label == 'stop':
        assert Run(asks, episode=saved(first.episode)).episode.counts == first.episode.counts


def test_a_call_of_a_tool_that_was_not_offered_has_no_count_of_its_own():
    async def agent(prompt, dialogue):
        await dialogue.chat([user('q')], ({'type': 'function', 'function': {'name': 'other'}},))

    assert Run(agent, ids_of('T')).episode.counts == {'tool_calls': 1}


@pytest.mark.parametrize(('arguments', 'fits'), [
    ('{"a": 1}', True), ('{"a": 1, "b": "x"}', True), ('{"a": 1.5}', False), ('{"a": true}', False),
    ('{"a": "1"}', False), ('{}', False), ('{"a": 1, "c": 2}', False), ('{"a": 1, "b": null}', False),
    ('[1]', False), ('{"a"', False), (None, False),
])  # fmt: skip
def test_arguments_fit_a_definition(arguments, fits):
    properties = {'a': {'type': 'integer'}, 'b': {'type': 'string'}}
    function = {'name': 'f', 'parameters': {'type': 'object', 'properties': properties, 'required': ['a']}}
    assert fits_definition(arguments, function) == fits
    assert fits_definition('{"x": 1}', {'name': 'f'})


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


def test_no_message_is_an_error_of_the_program():
    run = Run(lambda prompt, dialogue: dialogue.chat([]))
    assert run.ends == ('agent_error', None)
    assert 'give at least one turn' in str(run.errors[0])


def test_the_end_of_an_episode_is_no_exception_that_programs_catch():
    assert not issubclass(EpisodeEnd, Exception)
    assert asyncio.CancelledError.__bases__ == (BaseException,)


# Rows: which one a call continues, that sampled ids stay, and why another one begins.


PROMPT_IDS = np.array([1, 2], np.int32)
SYSTEM, USER = {'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'u'}
CALL = {'id': 'c1', 'type': 'function', 'function': {'name': 'add', 'arguments': '{"b": 2, "a": 1}'}}


def count_forks(episode):
    """Rows beyond the first one, by the reason for which they began."""
    reasons = [row.fork for row in episode.rows if row.fork]
    return {reason: reasons.count(reason) for reason in reasons}


class Program:
    """An episode whose answers are given: ids that no encoding of their text gives."""

    def __init__(self):
        self.episode, self.template = Episode(0), ToyFormat()
        self.conversation = Conversation(self.episode, PROMPT_IDS, self.template)
        self.version = 0

    def ask(self, messages, ids, answer, tools=(), closed=False):
        opened = self.conversation.begin(messages, tools)
        self.version += 1
        tokens = np.array(ids, np.int32)
        self.episode.rows[opened.row].append(Segment(tokens, np.full(len(ids), -1.0, np.float32), self.version))
        self.conversation.end(opened, messages, tools, answer, closed=closed, finish_reason='stop')
        return opened.row

    def rows(self):
        return [self.conversation.tokens(row).tolist() for row in range(len(self.episode.rows))]


def test_turns_continue_one_row_behind_the_sampled_ids():
    program = Program()
    history = [SYSTEM, USER]
    assert program.ask(history, [501, 502], reply('A')) == 0
    history = [*history, reply('A'), user('v')]
    assert program.ask(history, [503, CLOSE], reply('B'), closed=True) == 0
    program.ask([*history, reply('B'), user('w')], [504], reply('C'))
    first = ToyFormat().render([SYSTEM, USER], ()).tolist()
    turn_v, turn_w = [4, ord('v'), CLOSE, 9], [4, ord('w'), CLOSE, 9]
    assert program.rows() == [[*first, 501, 502, CLOSE, *turn_v, 503, CLOSE, *turn_w, 504]]
    (row,) = program.episode.rows
    assert [(s.policy_version, len(s.tokens)) for s in row.segments] == [
        (1, 2), (NOT_GENERATED, 5), (2, 2), (NOT_GENERATED, 4), (3, 1),
    ]  # fmt: skip
    assert count_forks(program.episode) == {}


def test_several_results_are_one_extension():
    program = Program()
    program.ask([USER], [501], reply(None, tool_calls=[CALL]))
    sent_back = reply('', tool_calls=[{**CALL, 'function': {'name': 'add', 'arguments': '{"a":1,"b":2}'}}])
    assert program.ask([USER, sent_back, result('x'), result('y', 'c2'), user('v')], [502], reply('B')) == 0
    assert count_forks(program.episode) == {}


@pytest.mark.parametrize(('messages', 'tools', 'fork'), [
    ([USER, reply('X'), user('v')], (), 'history'),  # an answer that nobody gave
    ([USER], (), 'resampled'),
    ([user('other')], (), 'conversation'),
    ([USER, reply('A'), user('v')], ({'name': 'add'},), 'tools'),
    ([USER, reply('A'), user('v'), user('w')], (), 'tail'),
    ([USER, reply('A'), reply('B'), user('w')], (), 'tail'),
])  # fmt: skip
def test_another_history_begins_another_row(messages, tools, fork):
    program = Program()
    program.ask([USER], [501], reply('A'))
    assert program.ask(messages, [502], reply('B'), tools) == 1
    assert count_forks(program.episode) == {fork: 1}
    assert program.rows()[1] == [*ToyFormat().render(messages, tools).tolist(), 502]


def test_a_template_that_writes_history_otherwise_forks():
    program = Program()
    program.ask([USER], [501], reply('A'))
    program.template.is_stable = False
    program.ask([USER, reply('A'), user('v')], [502], reply('B'))
    assert count_forks(program.episode) == {'template': 1}


def test_a_turn_that_is_continued_twice_keeps_the_ids_and_is_trained_once():
    program = Program()
    program.ask([USER], [501, 502], reply('A'))
    for text in ('v', 'w'):
        program.ask([USER, reply('A'), user(text)], [503], reply('B'))
    first, second = program.rows()
    assert first[: second.index(CLOSE, 5) + 1] == second[: second.index(CLOSE, 5) + 1]
    assert second[-1] == 503
    assert count_forks(program.episode) == {'resampled': 1}
    generated = [s.tokens.tolist() for row in program.episode.rows for s in row.segments if s.policy_version >= 0]
    assert generated == [[501, 502], [503], [503]]


def test_two_sub_agents_at_once_have_a_row_each():
    program = Program()
    one, other = (program.conversation.begin([user(text)], ()) for text in 'vw')
    assert (one.row, other.row) == (0, 1)
    program.episode.rows[one.row].append(Segment(np.array([501], np.int32), np.zeros(1, np.float32), 0))
    program.conversation.end(one, [user('v')], (), reply('A'), closed=False, finish_reason='stop')
    assert program.conversation.begin([user('v'), reply('A'), user('z')], ()).row == 0


def test_the_prompt_of_the_draw_is_not_repeated():
    episode = Episode(0)
    conversation = Conversation(episode, ToyFormat().render([USER], ()), ToyFormat())
    conversation.begin([USER], ())
    assert episode.rows[0].prompt_tokens is None


def test_a_call_that_was_cancelled_leaves_nothing():
    program = Program()
    program.ask([USER], [501], reply('A'))
    before, history = program.rows(), [USER, reply('A'), user('v')]
    for messages in (history, [user('other')]):
        opened = program.conversation.begin(messages, ())
        program.episode.rows[opened.row].append(Segment(np.array([7], np.int32), np.zeros(1, np.float32), 5))
        program.conversation.undo(opened)
        assert program.rows() == before
    assert program.ask(history, [502], reply('B')) == 0
    assert count_forks(program.episode) == {}


def test_a_first_call_after_cancelled_ones_has_the_first_row():
    program = Program()
    calls = [program.conversation.begin([user(text)], ()) for text in 'uvw']
    for call in calls:
        program.conversation.undo(call)
    assert program.ask([USER], [501], reply('A')) == 0
    assert program.rows() == [[*ToyFormat().render([USER], ()).tolist(), 501]]


def test_fields_that_say_the_same_are_one_history():
    program = Program()
    program.ask(
        [USER], [501], {'role': 'assistant', 'content': 'A', 'refusal': None, 'tool_calls': [], 'reasoning': 'r'}
    )
    sent = {'content': [{'type': 'text', 'text': 'A'}], 'role': 'assistant', 'annotations': []}
    assert program.ask([USER, sent, user('v')], [502], reply('B')) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(['user', 'tool', 'again'])), max_size=8))
def test_every_sampled_token_is_in_one_row_once_and_every_row_is_what_was_asked(calls):
    """Calls that continue the history of any call before: sampled ids are unique, and appear as generated once."""
    program, histories, sampled = Program(), [[USER]], []
    for number, (which, kind) in enumerate(calls):
        history = histories[which % len(histories)]
        if kind != 'again':
            history = [*history, user('v') if kind == 'user' else result('r')]
        ids = [1000 + 2 * number, 1001 + 2 * number]
        row = program.ask(history, ids, reply(f'{number}'))
        assert program.rows()[row][-2:] == ids
        histories.append([*history, reply(f'{number}')])
        sampled += ids
    generated = [
        int(token) for row in program.episode.rows for s in row.segments if s.policy_version >= 0 for token in s.tokens
    ]
    assert sorted(generated) == sampled


# The chat form of a real tokenizer: calls in sampled ids, and rows that have the text of their history.


ADDING = ({'type': 'function', 'function': {'name': 'add', 'description': 'Adds.', 'parameters': {'type': 'object'}}},)
SAMPLED_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
WRITTEN = SAMPLED_CALL.replace('  ', ' ')  # with the spaces of a template, which writes arguments by itself


@pytest.fixture(scope='module')
def tokenizer(smollm2_fields):
    return build(smollm2_fields, HERMES)


@pytest.fixture(scope='module')
def form(tokenizer):
    return TokenizerFormat(tokenizer, NotationParser(tokenizer, NOTATIONS['hermes']))


@pytest.fixture(scope='module')
def sampled(tokenizer):
    def sampled(text, closed=True):
        return np.array([*tokenizer.encode(text), *([tokenizer.eos_id] if closed else [])], np.int32)

    return sampled


def test_calls_are_read_from_ids_as_they_were_written(form, sampled):
    message, unparsed = form.parse(sampled(f'I add. {SAMPLED_CALL}'), ADDING, 'call_3')
    assert unparsed == 0
    (call,) = message['tool_calls']
    assert message['content'] == 'I add.'
    assert call == {
        'id': 'call_3_0', 'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1,  "b": 2}'},
    }  # fmt: skip


@pytest.mark.parametrize(
    ('text', 'tools'), [(SAMPLED_CALL, ()), ('<tool_call>\n{"name": "add"}\n</tool_call>', ADDING)]
)
def test_what_is_no_call_stays_text(form, sampled, text, tools):
    message, unparsed = form.parse(sampled(text), tools, 'call_0')
    assert (message, unparsed) == ({'role': 'assistant', 'content': text}, int(bool(tools)))


def test_the_end_of_a_turn_is_an_end_token_alone(form, tokenizer):
    assert form.closes(tokenizer.eos_id)
    assert not form.closes(int(tokenizer.encode('a')[0]))


def test_a_turn_that_another_end_closed_than_the_templates_is_encoded_anew(smollm2_fields):
    tokenizer = build(smollm2_fields | {'eot_id': 0}, HERMES)  # <|endoftext|>; the template writes <|im_end|>
    form = TokenizerFormat(tokenizer, NotationParser(tokenizer, NOTATIONS['hermes']))
    question = [{'role': 'user', 'content': 'x'}]
    assert [form.closes(token) for token in (0, 2, 1)] == [True, True, False]
    assert form.extend(question, (), closed_by=0) is None
    assert form.extend(question, (), closed_by=2) is not None
    answer = np.array([*tokenizer.encode('a'), 0], np.int32)
    assert form.parse(answer, (), 'call')[0]['content'] == 'a'


@pytest.mark.parametrize('closed', [True, False])
def test_a_row_of_turns_and_results_is_the_text_of_the_whole_history(form, tokenizer, sampled, closed):
    episode = Episode(0)
    conversation = Conversation(episode, np.zeros(0, np.int32), form)
    history = [{'role': 'system', 'content': 'Be short.'}, {'role': 'user', 'content': 'What is 1 + 2?'}]
    for text, added in (
        (WRITTEN, [{'role': 'tool', 'content': '3'}]),
        ('It is 3.', [{'role': 'user', 'content': 'Sure?'}]),
    ):
        call = conversation.begin(history, ADDING)
        ids = sampled(text, closed)
        episode.rows[call.row].append(Segment(ids, np.zeros(len(ids), np.float32), 0))
        reply, _ = form.parse(ids, ADDING, f'call_{len(history)}')
        conversation.end(call, history, ADDING, reply, closed=closed, finish_reason='stop')
        calls = reply.get('tool_calls', [])
        history = [*history, reply, *({**m, **({'tool_call_id': calls[0]['id']} if calls else {})} for m in added)]
    conversation.begin(history, ADDING)
    assert len(episode.rows) == 1
    assert tokenizer.decode(conversation.tokens(0)) == tokenizer.decode(form.render(history, ADDING))
