"""OpenAI's responses: what is refused by name, and the events in their documented order."""

import dataclasses
import json

import pytest

from areal_jax.rollout.http.wire import responses
from areal_jax.rollout.http.wire.exchange import Answer, Finish, Piece, RequestError, ToolCall
from tests.rollout.http.wire.calls import INFO, PROMPT, STOP, pieces

TOOL = {'type': 'function', 'name': 'add', 'parameters': {'type': 'object'}}
BODY = {'model': 'm', 'input': 'hi', 'tools': [TOOL]}
MESSAGE = {'role': 'user', 'content': 'x'}


def parts():
    """Two pieces: 'ab' and a call, then 'cd'."""
    first, second = pieces()
    call = ToolCall('call_1', 'add', '{"a":1}', after=2)
    return [Piece(first.tokens, first.logprobs, '3', first.columns, 'ab', (call,)), second]


def answer(found=None, finish=STOP):
    return Answer('r', PROMPT, 0, parts() if found is None else found, finish, '4', cached_tokens=1)


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'input': None}, 'input'),
        ({'input': []}, 'input'),
        ({'input': ''}, 'input'),
        ({'input': [{'type': 'reasoning'}]}, 'input'),
        ({'input': [{'type': 'item_reference', 'id': 'x'}]}, 'input[0].type'),
        ({'input': [{'content': 'x'}]}, 'input[0].role'),
        ({'input': [{'role': 'user'}]}, 'input[0].content'),
        ({'input': [{'role': 'user', 'content': [{'type': 'input_image'}]}]}, 'input[0].content[0].type'),
        ({'input': [{'type': 'function_call', 'call_id': 'c', 'arguments': '{}'}]}, 'input[0].name'),
        ({'input': [{'type': 'function_call', 'name': 'f', 'arguments': 3}]}, 'input[0].arguments'),
        ({'input': [{'type': 'function_call_output', 'call_id': 'c'}]}, 'input[0].output'),
        ({'input': [MESSAGE | {'more': 1}]}, 'input[0].more'),
        ({'previous_response_id': 'resp_1'}, 'previous_response_id'),
        ({'conversation': 'conv_1'}, 'conversation'),
        ({'background': True}, 'background'),
        ({'top_logprobs': 2}, 'top_logprobs'),
        ({'tools': [{'type': 'web_search'}]}, 'tools[0].type'),
        ({'tool_choice': {'type': 'function', 'name': 'sub'}}, 'tool_choice'),
        ({'tool_choice': 'any'}, 'tool_choice'),
        ({'text': {'format': {'type': 'grammar'}}}, 'text.format.type'),
        ({'max_output_tokens': 0}, 'max_output_tokens'),
        ({'n': 2}, 'n'),
        ({'temperature': -1}, 'temperature'),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes, field):
    with pytest.raises(RequestError) as error:
        responses.parse(BODY | changes)
    assert error.value.field == field
    assert str(error.value).startswith(f'{field}=')


def test_what_is_stored_elsewhere_is_said_in_one_sentence():
    with pytest.raises(RequestError, match='nothing is stored: send the whole conversation as input'):
        responses.parse(BODY | {'previous_response_id': 'resp_1'})
    call = responses.parse(BODY | {'store': True, 'include': ['reasoning.encrypted_content'], 'metadata': {'a': 'b'}})
    assert call.ignored == ('include', 'metadata', 'store')


def test_the_reply_has_items_in_their_order():
    reply = responses.render(responses.parse(BODY), [answer()], INFO)
    text, call, more = reply['output']
    assert [item['content'][0]['text'] for item in (text, more)] == ['ab', 'cd']
    assert call == {
        'type': 'function_call', 'id': 'fc_call_1', 'call_id': 'call_1', 'name': 'add', 'arguments': '{"a":1}',
        'status': 'completed',
    }  # fmt: skip
    assert (reply['status'], reply['incomplete_details'], reply['store']) == ('completed', None, False)
    assert reply['usage'] == {
        'input_tokens': 3, 'input_tokens_details': {'cached_tokens': 1}, 'output_tokens': 5,
        'output_tokens_details': {'reasoning_tokens': 0}, 'total_tokens': 8,
    }  # fmt: skip
    assert reply['tools'] == [TOOL | {'strict': False}]
    cut = responses.render(responses.parse(BODY), [answer(finish=Finish('length'))], INFO)
    assert (cut['status'], cut['incomplete_details']) == ('incomplete', {'reason': 'max_output_tokens'})


def stream(given):
    """(name, event) of each event, for an answer that grows piece by piece."""
    call, growing, frames = responses.parse(BODY | {'stream': True}), answer([], None), []
    for index, piece in enumerate(given):
        growing.pieces.append(piece)
        growing.finish = STOP if index == len(given) - 1 else None
        frames.append(responses.render_event(call, growing, piece, INFO))
    lines = (b''.join(frames) + responses.render_last(call, [growing], INFO)).decode().strip().split('\n\n')
    named = [line.split('\n') for line in lines]
    return [(name.removeprefix('event: '), json.loads(data.removeprefix('data: '))) for name, data in named]


def test_a_stream_has_the_documented_events_and_ends_with_the_whole_response():
    events = stream(parts())
    assert all(name == event['type'] for name, event in events)
    assert [event['sequence_number'] for _, event in events] == list(range(len(events)))
    text = ['output_item.added', 'content_part.added', 'output_text.delta']
    text += ['output_text.done', 'content_part.done', 'output_item.done']
    arguments = [f'function_call_arguments.{word}' for word in ('delta', 'done')]
    call = ['output_item.added', *arguments, 'output_item.done']
    expected = ['created', 'in_progress', *text, *call, *text, 'completed']
    assert [name for name, _ in events] == [f'response.{name}' for name in expected]
    assert [event['output_index'] for _, event in events if 'output_index' in event] == [0] * 6 + [1] * 4 + [2] * 6
    whole = events[-1][1]['response']
    assert whole == responses.render(responses.parse(BODY), [answer()], INFO)
    assert [e['item'] for name, e in events if name.endswith('item.done')] == whole['output']
    assert (events[0][1]['response']['output'], events[0][1]['response']['usage']) == ([], None)


def test_a_text_in_several_pieces_is_one_item():
    first, second = pieces()
    events = stream([first, second])
    assert [event['delta'] for name, event in events if name.endswith('text.delta')] == ['ab', 'cd']
    assert [event['text'] for name, event in events if name.endswith('text.done')] == ['abcd']


def test_a_failure_is_the_last_event():
    growing = answer([], None)
    growing.written.events = 4
    name, data = responses.render_failure([growing], 'late', 504, '').decode().strip().split('\n')
    assert (name, json.loads(data.removeprefix('data: '))['sequence_number']) == ('event: error', 4)


def test_reasoning_is_an_item_before_the_text():
    first, second = pieces()
    given = [dataclasses.replace(first, text=''), dataclasses.replace(second, reasoning='Hm.')]
    reply = responses.render(responses.parse(BODY), [answer(given)], INFO)
    thought, text = reply['output']
    assert (thought['type'], thought['content']) == ('reasoning', [{'type': 'reasoning_text', 'text': 'Hm.'}])
    assert (text['content'][0]['text'], thought['id'], text['id']) == ('cd', 'rs_r_0', 'msg_r_1')
    events = stream(given)
    assert events[-1][1]['response'] == reply
    names = ['output_item.added', 'reasoning_text.delta', 'reasoning_text.done', 'output_item.done']
    assert [name for name, _ in events[2:6]] == [f'response.{name}' for name in names]
    assert (events[2][1]['item']['content'], events[3][1]['delta'], events[4][1]['text']) == ([], 'Hm.', 'Hm.')
    assert [event['output_index'] for _, event in events[2:-1]] == [0] * 4 + [1] * 6
    call = responses.parse(BODY | {'input': [MESSAGE, thought, text]})
    assert [turn.content for turn in call.prompts[0]] == ['x', 'cd']  # what comes back is left out
