"""The chat form of a real tokenizer: calls in sampled ids, and rows that have the text of their history."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.agents.dialogue import Conversation, NotationParser, TokenizerFormat
from areal_jax.control.episode import Episode
from areal_jax.rollout.http.wire.answer_reader import NOTATIONS
from areal_jax.types import Segment
from tests.text.test_extension import HERMES, build

TOOLS = ({'type': 'function', 'function': {'name': 'add', 'description': 'Adds.', 'parameters': {'type': 'object'}}},)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
WRITTEN = CALL.replace('  ', ' ')  # with the spaces of a template, which writes arguments by itself


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
    message, unparsed = form.parse(sampled(f'I add. {CALL}'), TOOLS, 'call_3')
    assert unparsed == 0
    (call,) = message['tool_calls']
    assert message['content'] == 'I add.'
    assert call == {
        'id': 'call_3_0', 'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1,  "b": 2}'},
    }  # fmt: skip


@pytest.mark.parametrize(('text', 'tools'), [(CALL, ()), ('<tool_call>\n{"name": "add"}\n</tool_call>', TOOLS)])
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
        call = conversation.begin(history, TOOLS)
        ids = sampled(text, closed)
        episode.rows[call.row].append(Segment(ids, np.zeros(len(ids), np.float32), 0))
        reply, _ = form.parse(ids, TOOLS, f'call_{len(history)}')
        conversation.end(call, history, TOOLS, reply, closed=closed, finish_reason='stop')
        calls = reply.get('tool_calls', [])
        history = [*history, reply, *({**m, **({'tool_call_id': calls[0]['id']} if calls else {})} for m in added)]
    conversation.begin(history, TOOLS)
    assert len(episode.rows) == 1
    assert tokenizer.decode(conversation.tokens(0)) == tokenizer.decode(form.render(history, TOOLS))
