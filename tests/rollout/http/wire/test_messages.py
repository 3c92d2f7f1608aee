"""Anthropic's messages: what is refused by name, blocks, reasons and events."""

import dataclasses
import json

import pytest

from areal_jax.rollout.http.wire import messages
from areal_jax.rollout.http.wire.exchange import Answer, Finish, RequestError
from tests.rollout.http.wire.calls import INFO, PROMPT, STOP, pieces
from tests.rollout.http.wire.test_responses import parts

TOOL = {'name': 'add', 'input_schema': {'type': 'object'}}
USER = {'role': 'user', 'content': 'hi'}
BODY = {'model': 'm', 'max_tokens': 9, 'messages': [USER], 'tools': [TOOL]}


def answer(found=None, finish=STOP):
    return Answer('r', PROMPT, 0, parts() if found is None else found, finish, '4', cached_tokens=1)


def block(**fields):
    return {'messages': [{'role': 'user', 'content': [fields]}]}


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'max_tokens': None}, 'max_tokens'),
        ({'messages': None}, 'messages'),
        ({'messages': [USER | {'role': 'tool'}]}, 'messages[0].role'),
        ({'messages': [{'content': 'x'}]}, 'messages[0].role'),
        ({'messages': [{'role': 'user'}]}, 'messages[0].content'),
        ({'messages': [USER, {'role': 'assistant', 'content': 'The'}]}, 'messages[1].role'),
        (block(type='image', source={}), 'messages[0].content[0].type'),
        (block(type='tool_result', content=[{'type': 'image'}]), 'messages[0].content[0].content[0].type'),
        (block(type='text', text=3), 'messages[0].content[0].text'),
        ({'messages': [{'role': 'assistant', 'content': [{'type': 'tool_use', 'input': {}}]}, USER]},
         'messages[0].content[0].name'),
        ({'messages': [{'role': 'assistant', 'content': [{'type': 'tool_use', 'name': 'f', 'input': 3}]}, USER]},
         'messages[0].content[0].input'),
        ({'system': 3}, 'system'),
        ({'tools': [{'type': 'web_search_20250305', 'name': 'web_search'}]}, 'tools[0].type'),
        ({'tools': [], 'tool_choice': {'type': 'any'}}, 'tool_choice'),
        ({'tool_choice': {'type': 'tool', 'name': 'sub'}}, 'tool_choice'),
        ({'tool_choice': {'type': 'any', 'more': 1}}, 'tool_choice.more'),
        ({'mcp_servers': [{}]}, 'mcp_servers'),
        ({'stop_sequences': ['']}, 'stop_sequences'),
        ({'more': 1}, 'more'),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(changes, field):
    with pytest.raises(RequestError) as error:
        messages.parse(BODY | changes)
    assert error.value.field == field
    assert str(error.value).startswith(f'{field}=')


def test_sampling_and_what_is_ignored():
    call = messages.parse(BODY | {
        'stop_sequences': ['END'], 'top_k': 5, 'top_p': 0.5, 'thinking': {'type': 'enabled'}, 'metadata': {'a': 'u'},
    })  # fmt: skip
    assert (call.sampling[0].stop_strings, call.sampling[0].top_k) == (('END',), 5)
    assert call.ignored == ('metadata', 'thinking')
    assert messages.parse_count({'messages': [USER]}).sampling[0].max_new_tokens is None


@pytest.mark.parametrize(('finish', 'calls', 'reason', 'matched'), [
    (Finish('stop', 2), True, 'tool_use', None),
    (Finish('stop', 2), False, 'end_turn', None),
    (Finish('stop', 'END'), False, 'stop_sequence', 'END'),
    (Finish('length'), True, 'max_tokens', None),
])  # fmt: skip
def test_how_an_answer_ended(finish, calls, reason, matched):
    reply = messages.render(messages.parse(BODY), [answer(None if calls else pieces(), finish)], INFO)
    assert (reply['stop_reason'], reply['stop_sequence']) == (reason, matched)


def test_the_reply_has_blocks_in_their_order_and_counts_cached_tokens_apart():
    reply = messages.render(messages.parse(BODY), [answer()], INFO)
    assert reply['content'] == [
        {'type': 'text', 'text': 'ab'}, {'type': 'tool_use', 'id': 'call_1', 'name': 'add', 'input': {'a': 1}},
        {'type': 'text', 'text': 'cd'},
    ]  # fmt: skip
    assert reply['usage'] == {
        'input_tokens': 2, 'cache_creation_input_tokens': 0, 'cache_read_input_tokens': 1, 'output_tokens': 5,
    }  # fmt: skip


def stream(given):
    """The events of an answer that grows piece by piece."""
    call, growing, frames = messages.parse(BODY | {'stream': True}), answer([], None), []
    for index, piece in enumerate(given):
        growing.pieces.append(piece)
        growing.finish = STOP if index else None
        frames.append(messages.render_event(call, growing, piece, INFO))
    lines = b''.join(frames).decode().strip().split('\n\n')
    events = [json.loads(line.split('\n')[1].removeprefix('data: ')) for line in lines]
    assert [line.split('\n')[0] for line in lines] == [f'event: {event["type"]}' for event in events]
    return events


def test_a_stream_has_the_documented_events():
    events = stream(parts())
    one = ['start', 'delta', 'stop']
    expected = ['message_start', *(f'content_block_{word}' for _ in range(3) for word in one), 'message_delta']
    assert [event['type'] for event in events] == [*expected, 'message_stop']
    assert [event['index'] for event in events if 'index' in event] == [0] * 3 + [1] * 3 + [2] * 3
    assert events[4]['content_block'] == {'type': 'tool_use', 'id': 'call_1', 'name': 'add', 'input': {}}
    assert events[5]['delta'] == {'type': 'input_json_delta', 'partial_json': '{"a":1}'}  # as it was written
    assert events[-2]['delta'] == {'stop_reason': 'tool_use', 'stop_sequence': None}
    assert (events[0]['message']['usage']['output_tokens'], events[-2]['usage']['output_tokens']) == (0, 5)


def test_reasoning_is_a_block_before_the_text():
    first, second = pieces()
    given = [dataclasses.replace(first, text=''), dataclasses.replace(second, reasoning='Hm.')]
    blocks = messages.render(messages.parse(BODY), [answer(given)], INFO)['content']
    assert blocks == [{'type': 'thinking', 'thinking': 'Hm.', 'signature': ''}, {'type': 'text', 'text': 'cd'}]
    events = stream(given)
    assert events[1]['content_block'] == {'type': 'thinking', 'thinking': '', 'signature': ''}
    assert events[2]['delta'] == {'type': 'thinking_delta', 'thinking': 'Hm.'}
    assert [event['index'] for event in events if 'index' in event] == [0] * 3 + [1] * 3
    call = messages.parse(BODY | {'messages': [USER, {'role': 'assistant', 'content': blocks}, USER]})
    assert [turn.content for turn in call.prompts[0]] == ['hi', 'cd', 'hi']  # what comes back is left out


@pytest.mark.parametrize(('status', 'kind'), [
    (400, 'invalid_request_error'), (401, 'authentication_error'), (404, 'not_found_error'), (413, 'request_too_large'),
    (429, 'rate_limit_error'), (500, 'api_error'), (503, 'overloaded_error'), (405, 'invalid_request_error'),
])  # fmt: skip
def test_errors_have_anthropic_s_shape(status, kind):
    assert messages.render_error('no', status) == {'type': 'error', 'error': {'type': kind, 'message': 'no'}}
