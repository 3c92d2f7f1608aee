"""OpenAI's chat: messages or ids in, text, log-probs and ids out, and the stream."""

import pytest

from areal_jax.rollout.http.wire import chat
from areal_jax.rollout.http.wire.exchange import CallSampling, Message, RequestError, tokenize_call
from tests.rollout.http.wire.calls import INFO, answer, stream

MESSAGES = [{'role': 'system', 'content': 'be brief'}, {'role': 'user', 'content': 'hi'}]
BODY = {'model': 'm', 'messages': MESSAGES}
TOOL = {'type': 'function', 'function': {'name': 'add', 'description': 'a sum', 'parameters': {'type': 'object'}}}


NAMED = {'type': 'function', 'function': {'name': 'add'}}


def asking(**function):
    """A turn in which the assistant calls a tool."""
    call = {'id': 'c', 'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1}'} | function}
    return {'role': 'assistant', 'content': None, 'tool_calls': [call]}


def test_messages_are_given_to_the_template_of_the_caller():
    call = chat.parse(BODY)
    assert call.prompts == ((Message('system', 'be brief'), Message('user', 'hi')),)
    assert (call.prompt_field, call.sampling) == ('messages', (CallSampling(None),))
    seen = []
    ids = tokenize_call(call, lambda text: [], lambda *turns: seen.append(turns) or [5, 6]).prompts[0]
    assert (ids.tolist(), seen) == ([5, 6], [(call.prompts[0], ())])


def test_content_may_come_in_parts_and_the_role_under_its_newer_name():
    parts = [{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]
    given = [{'role': 'developer', 'content': 'x'}, {'role': 'assistant', 'content': '', 'refusal': None}]
    call = chat.parse(BODY | {'messages': [*given, {'role': 'user', 'content': parts, 'name': 'n'}]})
    assert call.prompts == ((Message('system', 'x'), Message('assistant', ''), Message('user', 'ab')),)


def test_tools_calls_and_results_go_to_the_template():
    result = {'role': 'tool', 'tool_call_id': 'c', 'name': 'add', 'content': '3'}
    call = chat.parse(BODY | {'messages': [*MESSAGES, asking(), result], 'tools': [TOOL], 'tool_choice': 'auto'})
    assert call.tools == (TOOL,)
    told = {'id': 'c', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}
    assert [turn.describe() for turn in call.prompts[0][2:]] == [
        {'role': 'assistant', 'content': '', 'tool_calls': [told]}, result,
    ]  # fmt: skip
    seen = []
    tokenize_call(call, lambda text: [], lambda turns, tools: seen.append(tools) or [5])
    assert seen == [(TOOL,)]


def test_tools_that_shall_not_be_called_are_not_shown():
    assert chat.parse(BODY | {'tools': [TOOL], 'tool_choice': 'none'}).tools == ()


def test_ids_stand_in_place_of_the_template():
    call = chat.parse(BODY | {'input_ids': [1, 2]})
    assert (call.prompts[0].tolist(), call.prompt_field) == ([1, 2], 'input_ids')
    assert chat.parse({'input_ids': [1, 2]}).prompts[0].tolist() == [1, 2]


def test_the_limit_has_two_names():
    assert chat.parse(BODY | {'max_tokens': 5}).sampling[0].max_new_tokens == 5
    assert chat.parse(BODY | {'max_tokens': 5, 'max_completion_tokens': 7}).sampling[0].max_new_tokens == 7


def test_what_agent_programs_send_without_a_meaning_here_is_accepted():
    chat.parse(BODY | {
        'tools': [], 'tool_choice': 'auto', 'parallel_tool_calls': True, 'response_format': {'type': 'text'},
        'top_logprobs': 0, 'user': 'u', 'metadata': {}, 'service_tier': 'auto', 'modalities': ['text'],
    })  # fmt: skip


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'messages': None}, 'messages'),
        ({'messages': []}, 'messages'),
        ({'messages': 'hi'}, 'messages'),
        ({'messages': ['hi']}, 'messages[0]'),
        ({'messages': [{'content': 'x'}]}, 'messages[0].role'),
        ({'messages': [{'role': 'function', 'content': 'x'}]}, 'messages[0].role'),
        ({'messages': [{'role': 'user'}]}, 'messages[0].content'),
        ({'messages': [{'role': 'user', 'content': 3}]}, 'messages[0].content'),
        ({'messages': [{'role': 'user', 'content': '\ud800'}]}, 'messages[0].content'),
        ({'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}, 'messages[0].content[0].type'),
        ({'messages': [{'role': 'user', 'content': '', 'tool_calls': [{}]}]}, 'messages[0].tool_calls'),
        ({'messages': [{'role': 'user', 'content': '', 'tool_call_id': 'c'}]}, 'messages[0].tool_call_id'),
        ({'messages': [{'role': 'assistant', 'content': None}]}, 'messages[0].content'),
        ({'messages': [asking(name='')]}, 'messages[0].tool_calls[0].function.name'),
        ({'messages': [asking(arguments='\ud800')]}, 'messages[0].tool_calls[0].function.arguments'),
        ({'messages': [asking(arguments=3)]}, 'messages[0].tool_calls[0].function.arguments'),
        ({'messages': [{'role': 'user', 'content': 'x', 'more': 1}]}, 'messages[0].more'),
        ({'input_ids': [-1]}, 'input_ids'),
        ({'tools': 'add'}, 'tools'),
        ({'tools': ['add']}, 'tools[0]'),
        ({'tools': [{'type': 'function'}]}, 'tools[0].function.name'),
        ({'tools': [{'type': 'custom', 'custom': {'name': 'add'}}]}, 'tools[0].type'),
        ({'tools': [TOOL | {'function': {'name': 'add', 'parameters': 'x'}}]}, 'tools[0].function.parameters'),
        ({'tools': [TOOL], 'tool_choice': 'any'}, 'tool_choice'),
        ({'tool_choice': 'required'}, 'tool_choice'),
        ({'tools': [TOOL], 'tool_choice': NAMED | {'function': {'name': 'sub'}}}, 'tool_choice'),
        ({'tools': [TOOL], 'tool_choice': NAMED | {'function': {}}}, 'tool_choice.function.name'),
        ({'response_format': {'type': 'grammar'}}, 'response_format.type'),
        (
            {'response_format': {'type': 'json_schema', 'json_schema': {'schema': 3}}},
            'response_format.json_schema.schema',
        ),
        ({'top_logprobs': 5}, 'top_logprobs'),
        ({'logprobs': 1}, 'logprobs'),
        ({'max_completion_tokens': 0}, 'max_completion_tokens'),
        ({'n': 0}, 'n'),
        ({'stream': True, 'return_meta_info': True}, 'return_meta_info'),
        ({'prompt': 'x'}, 'prompt'),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes, field):
    with pytest.raises(RequestError) as error:
        chat.parse(BODY | changes)
    assert error.value.field == field
    assert str(error.value).startswith(f'{field}=')


def test_the_reply_has_every_field():
    call = chat.parse(BODY | {'logprobs': True, 'return_token_ids': True})
    reply = chat.render(call, [answer()], INFO)
    assert reply['choices'][0].pop('logprobs')['content'][1] == {
        'token': '<22>', 'bytes': list(b'<22>'), 'logprob': -1.25, 'top_logprobs': [],
    }  # fmt: skip
    ids = [21, 22, 23, 24, 2]
    assert reply == {
        'id': 'chatcmpl-r', 'object': 'chat.completion', 'created': 1795234194, 'model': 'm',
        'usage': {'prompt_tokens': 3, 'completion_tokens': 5, 'total_tokens': 8},
        'metadata': {
            'weight_version': '4',
            'weight_versions': [{'version': '3', 'start': 0, 'end': 2}, {'version': '4', 'start': 2, 'end': 5}],
        },
        'prompt_token_ids': [11, 12, 13],
        'choices': [{
            'index': 0, 'message': {'role': 'assistant', 'content': 'abcd'}, 'finish_reason': 'stop',
            'stop_reason': None, 'token_ids': ids, 'response_token_ids': ids, 'prompt_token_ids': [11, 12, 13],
        }],
    }  # fmt: skip


def test_parts_come_when_they_are_asked_for():
    plain = chat.render(chat.parse(BODY), [answer()], INFO)
    assert set(plain['choices'][0]) == {'index', 'message', 'finish_reason', 'stop_reason', 'logprobs'}
    assert 'prompt_token_ids' not in plain
    prompt = chat.render(chat.parse(BODY | {'return_prompt_token_ids': True}), [answer()], INFO)
    assert ('token_ids' in prompt['choices'][0], prompt['prompt_token_ids']) == (False, [11, 12, 13])
    meta = chat.render(chat.parse(BODY | {'return_meta_info': True}), [answer()], INFO)['choices'][0]['meta_info']
    assert (meta['id'], meta['weight_version']) == ('r', '4')
    named = chat.parse(BODY | {'logprobs': True, 'return_tokens_as_token_ids': True})
    assert chat.render(named, [answer()], INFO)['choices'][0]['logprobs']['content'][0]['token'] == 'token_id:21'


def test_a_stream_names_the_role_once_and_adds_up():
    asked = {'stream': True, 'stream_options': {'include_usage': True}, 'logprobs': True, 'return_token_ids': True}
    first, last, usage = stream(chat, chat.parse(BODY | asked))
    assert first['choices'][0]['delta'] == {'role': 'assistant', 'content': 'ab'}
    assert last['choices'][0]['delta'] == {'content': 'cd'}
    assert {event['object'] for event in (first, last, usage)} == {'chat.completion.chunk'}
    assert [len(event['choices'][0]['logprobs']['content']) for event in (first, last)] == [2, 3]
    assert [event['choices'][0]['token_ids'] for event in (first, last)] == [[21, 22], [23, 24, 2]]
    assert (first['choices'][0]['prompt_token_ids'], 'prompt_token_ids' in last['choices'][0]) == ([11, 12, 13], False)
    assert (first['choices'][0]['finish_reason'], last['choices'][0]['finish_reason']) == (None, 'stop')
    assert (first['usage'], usage['usage']['total_tokens'], 'metadata' in first) == (None, 8, False)
    assert last['metadata']['weight_version'] == '4'


def test_a_part_of_a_character_has_no_bytes():
    call, info = chat.parse(BODY | {'logprobs': True}), type(INFO)('m', 0, lambda token: '\ufffd')
    assert chat.render(call, [answer()], info)['choices'][0]['logprobs']['content'][0]['bytes'] is None
