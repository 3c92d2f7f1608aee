"""/v1/responses and /v1/messages over HTTP: the same prompts as chat, streams, keys and errors."""

import json

import pytest

from areal_jax.rollout.http.server.limits import Limits
from tests.rollout.http.server.rig import ToyServer
from tests.rollout.http.server.scripted import ARGUMENTS, CALL, FUNCTION, TOOL, ScriptedServer

BLOCK_TOOL = {'name': 'add', 'description': 'a sum', 'input_schema': FUNCTION['parameters']}
USER = {'role': 'user', 'content': 'What is 1 + 2?'}
CHAT = ('/v1/chat/completions', {'messages': [USER], 'tools': [TOOL]})
RESPONSES = ('/v1/responses', {'input': USER['content'], 'tools': [{'type': 'function'} | FUNCTION]})
MESSAGES = ('/v1/messages', {'messages': [USER], 'tools': [BLOCK_TOOL], 'max_tokens': 500})


def events_of(server, path, body):
    """The named events of a stream, which is all that there is of it."""

    async def script(client):
        async with client.session.post(client.url + path, json=body | {'stream': True}) as reply:
            assert reply.status == 200
            return await reply.text()

    found = [part.split('\n') for part in server.run(script).strip().split('\n\n')]
    events = [(name.removeprefix('event: '), json.loads(data.removeprefix('data: '))) for name, data in found]
    assert all(name == event['type'] for name, event in events)
    return [event for _, event in events]


def test_equal_conversations_have_equal_prompts():
    with ScriptedServer('3') as server:
        for path, body in (CHAT, RESPONSES, MESSAGES):
            assert server.run(lambda client, path=path, body=body: client.post(path, body))[0] == 200
        first, *others = server.tokenizer.seen
    assert all(one == first for one in others)


@pytest.mark.parametrize('decode_steps', [1, 400])
def test_replies_and_streams_have_the_call_and_its_arguments_as_they_were_written(decode_steps):
    with ScriptedServer(f'I add. {CALL}', decode_steps=decode_steps) as server:
        _, reply = server.run(lambda client: client.post(*RESPONSES))
        events = events_of(server, *RESPONSES)
        _, message = server.run(lambda client: client.post(*MESSAGES))
        parts = events_of(server, *MESSAGES)
    text, call = reply['output']
    assert (text['content'][0]['text'], call['name'], call['arguments']) == ('I add.', 'add', ARGUMENTS)
    streamed = events[-1]['response']['output'][1]
    assert {**streamed, 'id': '', 'call_id': ''} == {**call, 'id': '', 'call_id': ''}
    assert ''.join(event['delta'] for event in events if event['type'].endswith('text.delta')) == 'I add.'
    assert [block['type'] for block in message['content']] == ['text', 'tool_use']
    assert (message['stop_reason'], message['content'][1]['input']) == ('tool_use', json.loads(ARGUMENTS))
    deltas = [event['delta'] for event in parts if event['type'] == 'content_block_delta']
    assert ''.join(delta.get('text', '') for delta in deltas) == 'I add.'
    assert deltas[-1]['partial_json'] == ARGUMENTS


def test_tokens_of_a_conversation_are_counted_without_the_bounds_of_an_answer():
    body = {name: value for name, value in MESSAGES[1].items() if name != 'max_tokens'}
    long = body | {'messages': [{'role': 'user', 'content': 'a' * 20_000}]}
    with ScriptedServer('3') as server:
        _, message = server.run(lambda client: client.post(*MESSAGES))
        for asked, expected in ((body, message['usage']['input_tokens']), (long, None)):
            status, reply = server.run(lambda client, asked=asked: client.post('/v1/messages/count_tokens', asked))
            assert status == 200
            assert reply['input_tokens'] == expected or (expected is None and reply['input_tokens'] > 20_000)


def test_a_limit_beyond_the_context_is_lowered_for_anthropic_s_packages_alone():
    asked = {'messages': [{'role': 'user', 'content': 'abc'}], 'max_tokens': 30_000, 'ignore_eos': True}
    with ToyServer(decode_steps=32) as server:
        status, reply = server.run(lambda client: client.post('/v1/messages', asked))
        assert (status, reply['stop_reason'], reply['usage']['output_tokens']) == (200, 'max_tokens', 397)
        assert server.run(lambda client: client.post('/v1/chat/completions', asked))[0] == 400


def test_anthropic_s_key_and_errors():
    with ScriptedServer('3', api_key='secret') as server:
        for headers, expected in (({}, 401), ({'x-api-key': 'wrong'}, 401), ({'x-api-key': 'secret'}, 200)):
            status, reply = server.run(
                lambda client, headers=headers: client.post(MESSAGES[0], MESSAGES[1], headers=headers)
            )
            assert status == expected
            assert status == 200 or reply['error']['type'] == 'authentication_error'
        status, reply = server.run(
            lambda client: client.post('/v1/messages', {'messages': []}, headers={'Authorization': 'Bearer secret'})
        )
    assert (status, reply['type'], reply['error']['type']) == (400, 'error', 'invalid_request_error')


@pytest.mark.parametrize(('path', 'body'), [
    ('/v1/responses', {'input': 'abc'}),
    ('/v1/messages', {'messages': [{'role': 'user', 'content': 'abc'}], 'max_tokens': 390}),
])  # fmt: skip
def test_a_stream_that_is_too_late_ends_with_an_error_event(path, body):
    with ToyServer(limits=Limits(request_s=0.2)) as server:
        events = events_of(server, path, body | {'ignore_eos': True})
    assert events[-1]['type'] == 'error'
    assert 'not complete after 0.2 s' in json.dumps(events[-1])
