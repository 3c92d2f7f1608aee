"""Calls in a notation of the package renderers over HTTP: chat, responses and messages, whole and streamed."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.rollout.http.server.scripted import CALL, ScriptedServer, ScriptedTokenizer
from tests.rollout.http.server.test_conversations import CHAT, MESSAGES, RESPONSES, events_of

pytest.importorskip('renderers', reason="the package renderers is not installed: pip install -e '.[agents]'")
from areal_jax.rollout.http.wire.renderers_parser import RenderersParser

MARKS = (
    '<|im_start|>', '<|im_end|>', '<|endoftext|>', '<tool_call>', '</tool_call>', '<tool_response>', '</tool_response>',
    '</think>',
)  # fmt: skip
BROKEN = '<tool_call>{"name": "add"</tool_call>'
ANSWER = f'<think>\nHm.\n</think>\n\nI add.\n{CALL}\n{CALL}'
WRITTEN = '{"a": 1, "b": 2}'  # arguments of CALL, as this project writes objects


class MarkedTokenizer(ScriptedTokenizer):
    """With tokens for the marks of Qwen3."""

    def __init__(self, write):
        super().__init__(write)
        self._texts += MARKS
        self._ids |= {mark: self._texts.index(mark) for mark in MARKS}
        self.vocab_size = len(self._texts)

    def encode(self, text):
        parts = re.findall('|'.join([*map(re.escape, MARKS), '(?s:.)']), text)
        return np.array([self._ids[part] for part in parts], np.int32)


class RenderersServer(ScriptedServer):
    make_tokenizer = MarkedTokenizer

    def make_parser(self):
        return RenderersParser(self.tokenizer, 'qwen3', 'server.notation')


def ask(server, path, body):
    status, reply = server.run(lambda client: client.post(path, body))
    assert status == 200, reply
    return reply


def describe(message):
    """(content, reasoning, [(name, arguments)]) of a message of chat."""
    calls = [(call['function']['name'], call['function']['arguments']) for call in message.get('tool_calls', [])]
    return message.get('content'), message.get('reasoning_content'), calls


@pytest.mark.parametrize('decode_steps', [1, 400])
def test_replies_and_streams_have_reasoning_text_and_calls(decode_steps):
    with RenderersServer(ANSWER, decode_steps=decode_steps) as server:
        chosen = ask(server, *CHAT)['choices'][0]
        *chunks, _ = server.run(lambda client: client.events(CHAT[0], CHAT[1] | {'stream': True}))
        response, events = ask(server, *RESPONSES), events_of(server, *RESPONSES)
        message, parts = ask(server, *MESSAGES), events_of(server, *MESSAGES)
        assert (server.metric('tool_calls_total'), server.metric('tool_calls_unparsed_total')) == (12, 0)
    assert describe(chosen['message']) == ('I add.', 'Hm.', [('add', WRITTEN)] * 2)
    assert chosen['finish_reason'] == chunks[-1]['choices'][0]['finish_reason'] == 'tool_calls'
    assert join_chunks(chunks) == describe(chosen['message'])
    thought, text, *calls = response['output']
    assert [item['content'][0]['text'] for item in (thought, text)] == ['Hm.', 'I add.']
    assert [(call['name'], call['arguments']) for call in calls] == [('add', WRITTEN)] * 2
    assert without_ids(events[-1]['response']['output']) == without_ids(response['output'])
    assert [block['type'] for block in message['content']] == ['thinking', 'text', 'tool_use', 'tool_use']
    assert message['content'][2]['input'] == json.loads(WRITTEN)
    deltas = [event['delta'] for event in parts if event['type'] == 'content_block_delta']
    assert [next(text for name, text in delta.items() if name != 'type') for delta in deltas] == [
        'Hm.', 'I add.', WRITTEN, WRITTEN,
    ]  # fmt: skip


def join_chunks(chunks):
    """What `describe` says of the message that the chunks of a stream make."""
    deltas = [chunk['choices'][0]['delta'] for chunk in chunks]
    pieces = [call['function'] for delta in deltas for call in delta.get('tool_calls', [])]
    calls = [(one['name'], two['arguments']) for one, two in zip(pieces[::2], pieces[1::2], strict=True)]
    content, reasoning = (''.join(d.get(name) or '' for d in deltas) for name in ('content', 'reasoning_content'))
    return content or None, reasoning or None, calls


def without_ids(items):
    return [{name: value for name, value in item.items() if name not in ('id', 'call_id')} for item in items]


def test_a_broken_call_stays_text_and_is_counted():
    with RenderersServer(f'{CALL}{BROKEN}') as server:
        message = ask(server, *CHAT)['choices'][0]['message']
        assert describe(message) == ('{"name": "add"', None, [('add', WRITTEN)])
        assert server.metric('tool_calls_unparsed_total') == 1


@pytest.mark.parametrize(('fields', 'expected'), [
    ({'parallel_tool_calls': False}, ('I add.', 'Hm.', [('add', WRITTEN)])),
    ({'tools': []}, (ANSWER, None, [])),
    ({'stop': ['dd.']}, ('I a', 'Hm.', [])),
    ({'max_tokens': 10}, ('', '\nHm', [])),
])  # fmt: skip
def test_what_a_request_asks_besides(fields, expected):
    with RenderersServer(ANSWER) as server:
        for stream in (False, True):
            body = CHAT[1] | fields | {'stream': stream}
            if stream:
                *chunks, _ = server.run(lambda client, body=body: client.events(CHAT[0], body))
                content, *others = join_chunks(chunks)
                found = (content or '', *others)
            else:
                found = describe(ask(server, CHAT[0], body)['choices'][0]['message'])
            assert found == expected
