"""One conversation in three dialects is one call: messages, tools, sampling and wishes."""

import dataclasses
import itertools

import pytest

from areal_jax.rollout.http.wire import chat, messages, responses
from areal_jax.rollout.http.wire.exchange import Message, RequestError
from tests.rollout.http.server.test_malformed import BAD, places, replace

FUNCTION = {'name': 'add', 'description': 'a sum', 'parameters': {'type': 'object'}}
ARGUMENTS = '{"a": 1}'
CALLS = [{'id': name, 'type': 'function', 'function': {'name': 'add', 'arguments': ARGUMENTS}} for name in 'cd']
CHAT = {
    'model': 'm', 'temperature': 0.5, 'max_tokens': 9, 'stream': True, 'parallel_tool_calls': False,
    'tools': [{'type': 'function', 'function': FUNCTION | {'strict': True}}], 'tool_choice': 'required',
    'messages': [
        {'role': 'system', 'content': 'be brief'}, {'role': 'user', 'content': 'hi'},
        {'role': 'assistant', 'content': 'I add.', 'tool_calls': CALLS},
        {'role': 'tool', 'tool_call_id': 'c', 'content': '3'}, {'role': 'tool', 'tool_call_id': 'd', 'content': '4'},
        {'role': 'user', 'content': 'more'},
    ],
}  # fmt: skip
RESPONSES = {
    'model': 'm', 'temperature': 0.5, 'max_output_tokens': 9, 'stream': True, 'parallel_tool_calls': False,
    'tools': [{'type': 'function', 'strict': True} | FUNCTION], 'tool_choice': 'required', 'instructions': 'be brief',
    'input': [
        {'role': 'user', 'content': [{'type': 'input_text', 'text': 'hi'}]},
        {'type': 'reasoning', 'id': 'r', 'summary': []},
        {'type': 'message', 'role': 'assistant', 'id': 'x', 'content': [
            {'type': 'output_text', 'text': 'I add.', 'annotations': []},
        ]},
        *({'type': 'function_call', 'call_id': one, 'name': 'add', 'arguments': ARGUMENTS} for one in 'cd'),
        {'type': 'function_call_output', 'call_id': 'c', 'output': '3'},
        {'type': 'function_call_output', 'call_id': 'd', 'output': [{'type': 'input_text', 'text': '4'}]},
        {'role': 'user', 'content': 'more'},
    ],
}  # fmt: skip
MESSAGES = {
    'model': 'm', 'temperature': 0.5, 'max_tokens': 9, 'stream': True,
    'tools': [{'name': 'add', 'description': 'a sum', 'input_schema': {'type': 'object'}, 'cache_control': {}}],
    'tool_choice': {'type': 'any', 'disable_parallel_tool_use': True},
    'system': [{'type': 'text', 'text': 'be brief', 'cache_control': {'type': 'ephemeral'}}],
    'messages': [
        {'role': 'user', 'content': 'hi'},
        {'role': 'assistant', 'content': [
            {'type': 'thinking', 'thinking': 'hm', 'signature': ''}, {'type': 'text', 'text': 'I add.'},
            *({'type': 'tool_use', 'id': one, 'name': 'add', 'input': {'a': 1}} for one in 'cd'),
        ]},
        {'role': 'user', 'content': [
            {'type': 'tool_result', 'tool_use_id': 'c', 'content': '3', 'is_error': False},
            {'type': 'tool_result', 'tool_use_id': 'd', 'content': [{'type': 'text', 'text': '4'}]},
            {'type': 'text', 'text': 'more'},
        ]},
    ],
}  # fmt: skip


def without_names(call):
    wishes = tuple(dataclasses.replace(wish, value=None) for wish in call.wishes)
    return dataclasses.replace(call, prompt_field='', ignored=(), wishes=wishes, fits_limit=False)


def test_three_dialects_make_the_same_call():
    call = without_names(chat.parse(CHAT))
    assert call == without_names(responses.parse(RESPONSES))
    assert call == without_names(messages.parse(MESSAGES))
    assert [turn.role for turn in call.prompts[0]] == ['system', 'user', 'assistant', 'tool', 'tool', 'user']
    assert len(call.prompts[0][2].tool_calls) == 2
    assert call.tools == ({'type': 'function', 'function': FUNCTION},)
    assert (call.one_tool_call, call.sampling[0].max_new_tokens, len(call.wishes)) == (True, 9, 1)


def test_a_model_s_broken_arguments_come_back_as_text():
    call = {'type': 'function_call', 'call_id': 'c', 'name': 'add', 'arguments': '{bad'}
    [turn] = responses.parse({'input': [call]}).prompts[0]
    assert turn.tool_calls[0]['function']['arguments'] == '{bad'


@pytest.mark.parametrize(('module', 'body', 'shape'), [
    (responses, RESPONSES, {'text': {'format': {'type': 'json_schema', 'name': 'n', 'schema': {'title': 'T'}}}}),
    (messages, MESSAGES, {'output_config': {'format': {'type': 'json_schema', 'schema': {'title': 'T'}}}}),
    (chat, CHAT, {'response_format': {'type': 'json_schema', 'json_schema': {'name': 'n', 'schema': {'title': 'T'}}}}),
])  # fmt: skip
def test_formats_are_wishes(module, body, shape):
    [_, wish] = module.parse(body | shape).wishes
    assert (wish.kind, wish.sentence) == (
        'json', 'Answer with a JSON object alone that fits this JSON schema: {"title": "T"}',
    )  # fmt: skip


def test_named_tools_are_wishes_and_none_hides_the_tools():
    named = {'type': 'function', 'name': 'add'}
    assert responses.parse(RESPONSES | {'tool_choice': named}).wishes[0].tool == 'add'
    assert messages.parse(MESSAGES | {'tool_choice': {'type': 'tool', 'name': 'add'}}).wishes[0].tool == 'add'
    assert messages.parse(MESSAGES | {'tool_choice': {'type': 'none'}}).tools == ()
    assert responses.parse(RESPONSES | {'tool_choice': 'none'}).tools == ()


@pytest.mark.parametrize(('module', 'body'), [(chat, CHAT), (responses, RESPONSES), (messages, MESSAGES)])
def test_no_value_of_a_body_breaks_a_parser(module, body):
    """Every value inside in turn is replaced by every bad one: the call is made or refused."""
    outcomes = set()
    for place, bad in itertools.product(places(body), BAD):
        try:
            module.parse(replace(body, place, bad))
        except RequestError as error:
            str(error).encode('utf-8', 'replace')
            outcomes.add(error.field.split('[')[0].split('.')[0])
        else:
            outcomes.add('accepted')
    assert outcomes > {'accepted', 'body', 'tools', 'tool_choice', 'temperature', 'stream'}


def test_json_for_the_model_has_a_bound_of_levels():
    deep = {}
    for _ in range(200):
        deep = {'a': deep}
    function = {'name': 'f', 'parameters': deep}
    for module, body, field in (
        (chat, {'tools': [{'type': 'function', 'function': function}]}, 'tools[0].function.parameters'),
        (responses, {'tools': [{'type': 'function'} | function]}, 'tools[0].parameters'),
        (messages, {'tools': [{'name': 'f', 'input_schema': deep}]}, 'tools[0].input_schema'),
        (responses, {'text': {'format': {'type': 'json_schema', 'schema': deep}}}, 'text.format.schema'),
    ):
        whole = {chat: CHAT, responses: RESPONSES, messages: MESSAGES}[module]
        with pytest.raises(RequestError, match='more than 128 levels') as error:
            module.parse(whole | {'tool_choice': None} | body)
        assert error.value.field == field


def test_a_text_between_results_is_a_turn_of_its_own():
    blocks = [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}, {'type': 'tool_result', 'tool_use_id': 'c'}]
    call = messages.parse({'max_tokens': 1, 'messages': [{'role': 'user', 'content': blocks}]})
    assert call.prompts[0] == (Message('user', 'ab'), Message('tool', '', tool_call_id='c'))
