"""Rows of an episode: which one a call continues, that sampled ids stay, and why another one begins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.agents.dialogue import Conversation
from areal_jax.control.episode import Episode
from areal_jax.types import NOT_GENERATED, Segment
from tests.agents.toy_format import CLOSE, ToyFormat, reply, result, user

PROMPT = np.array([1, 2], np.int32)
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
        self.conversation = Conversation(self.episode, PROMPT, self.template)
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
