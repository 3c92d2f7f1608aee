"""Calls of tools over HTTP: in replies, in streams, in the history, wished for, and counted."""

import pytest

from tests.rollout.http.server.scripted import ARGUMENTS, CALL, FUNCTION, TOOL, ScriptedServer

PATH = '/v1/chat/completions'
USER = {'role': 'user', 'content': 'What is 1 + 2?'}
ASKED = {'messages': [USER], 'tools': [TOOL]}
BROKEN = CALL.replace('}}', '}')


def ask(server, *, status=200, **fields):
    found, reply = server.run(lambda client: client.post(PATH, ASKED | fields))
    assert found == status, reply
    return reply if status >= 400 else reply['choices'][0]


def test_a_call_is_parsed_and_its_arguments_are_what_the_model_wrote():
    with ScriptedServer(f'I add.\n{CALL}') as server:
        choice = ask(server, return_token_ids=True)
        [call] = choice['message'].pop('tool_calls')
        assert choice['message'] == {'role': 'assistant', 'content': 'I add.'}
        assert (choice['finish_reason'], call.pop('id')[:5]) == ('tool_calls', 'call_')
        assert call == {'type': 'function', 'function': {'name': 'add', 'arguments': ARGUMENTS}}
        assert server.tokenizer.decode(choice['token_ids']) == f'I add.\n{CALL}'  # all that was sampled
        assert server.metric('tool_calls_total') == 1


def test_an_answer_without_text_has_no_content_and_calls_have_ids_of_their_own():
    with ScriptedServer(f'{CALL}\n{CALL}\n') as server:
        message = ask(server)['message']
    assert message['content'] is None
    first, second = (call['id'] for call in message['tool_calls'])
    assert first != second


@pytest.mark.parametrize('fields', [{}, {'max_tokens': 40}, {'tool_choice': 'none'}])
def test_what_is_no_call_stays_text(fields):
    with ScriptedServer(BROKEN if not fields else CALL) as server:
        choice = ask(server, **fields)
        assert choice['message'] == {
            'role': 'assistant', 'content': BROKEN if not fields else CALL[: fields.get('max_tokens')],
        }  # fmt: skip
        assert choice['finish_reason'] == ('length' if 'max_tokens' in fields else 'stop')
        assert server.metric('tool_calls_unparsed_total') == ('tool_choice' not in fields)


def test_an_answer_that_was_cut_after_a_call_says_so():
    with ScriptedServer(f'{CALL}\nand more') as server:
        choice = ask(server, max_tokens=len(CALL) + 4)
    assert (len(choice['message']['tool_calls']), choice['finish_reason']) == (1, 'length')


def test_without_tools_nothing_is_parsed():
    with ScriptedServer(CALL) as server:
        choice = ask(server, tools=[])
    assert (choice['message']['content'], choice['finish_reason']) == (CALL, 'stop')


def test_one_call_is_shown_where_one_is_wanted_and_the_ids_stay():
    with ScriptedServer(f'{CALL}\n{CALL}') as server:
        choice = ask(server, parallel_tool_calls=False, return_token_ids=True)
        assert len(choice['message']['tool_calls']) == 1
        assert server.tokenizer.decode(choice['token_ids']) == f'{CALL}\n{CALL}'
        assert (server.metric('tool_calls_total'), server.metric('tool_calls_hidden_total')) == (1, 1)


@pytest.mark.parametrize('decode_steps', [1, 7, 400])
def test_a_stream_has_text_then_calls_and_nothing_of_their_notation(decode_steps):
    asked = ASKED | {'stream': True, 'return_token_ids': True}
    with ScriptedServer(f'I add. {CALL}\n{CALL}', decode_steps=decode_steps) as server:
        *events, last = server.run(lambda client: client.events(PATH, asked))
        text = server.tokenizer.decode([t for e in events for t in e['choices'][0].get('token_ids', [])])
    deltas = [event['choices'][0]['delta'] for event in events]
    assert ''.join(delta.get('content', '') for delta in deltas) == 'I add.'
    assert text == f'I add. {CALL}\n{CALL}'
    assert [delta.get('role') for delta in deltas] == ['assistant'] + [None] * (len(deltas) - 1)
    calls = [call for delta in deltas for call in delta.get('tool_calls', [])]
    assert [call['index'] for call in calls] == [0, 0, 1, 1]
    assert [call.get('type') for call in calls] == ['function', None] * 2
    assert [call['function'] for call in calls] == [{'name': 'add', 'arguments': ''}, {'arguments': ARGUMENTS}] * 2
    assert calls[0]['id'] != calls[2]['id']
    finishes = [event['choices'][0]['finish_reason'] for event in events]
    assert finishes == [None] * (len(events) - 1) + ['tool_calls']
    assert ('metadata' in events[-1], last) == (True, '[DONE]')


def test_history_with_calls_results_and_broken_arguments_goes_to_the_template():
    call = {'id': 'c', 'type': 'function', 'function': {'name': 'add', 'arguments': '{bad'}}
    turn = {'role': 'assistant', 'content': None, 'refusal': None, 'annotations': [], 'tool_calls': [call]}
    result = {'role': 'tool', 'tool_call_id': 'c', 'content': [{'type': 'text', 'text': '3', 'cache_control': {}}]}
    with ScriptedServer('3') as server:
        ask(server, messages=[{'role': 'developer', 'content': 'x'}, USER, turn, result], verbosity='low', store=True)
        messages, _ = server.seen
        assert messages[0] == {'role': 'system', 'content': 'x'}
        assert messages[2:] == [
            {'role': 'assistant', 'content': '', 'tool_calls': [call]},
            {'role': 'tool', 'content': '3', 'tool_call_id': 'c'},
        ]
        for field in ('messages.annotations', 'messages.content.cache_control', 'store', 'verbosity'):
            assert server.metric(f'fields_ignored_total{{field="{field}"}}') == 1


def test_what_cannot_change_the_answer_is_not_shown_to_the_model():
    sent = TOOL | {'function': FUNCTION | {'strict': True}, 'cache_control': {'type': 'ephemeral'}}
    with ScriptedServer('3') as server:
        ask(server, tools=[sent])
        assert server.seen[1] == [TOOL]


FORMAT = {'type': 'json_schema', 'json_schema': {'name': 'n', 'schema': {'type': 'object'}, 'strict': True}}
WISHES = [
    ({'tool_choice': 'required'}, 'tool_choice', 'Answer with a call of one of the tools.'),
    ({'tool_choice': {'type': 'function', 'function': {'name': 'add'}}}, 'tool_choice', 'a call of the tool add.'),
    ({'response_format': {'type': 'json_object'}}, 'response_format', 'Answer with a JSON object alone.'),
    ({'response_format': FORMAT}, 'response_format', 'that fits this JSON schema: {"type": "object"}'),
]


@pytest.mark.parametrize(('fields', 'field', 'sentence'), WISHES)
def test_a_wish_is_refused_or_shown_and_its_miss_is_counted_and_named(fields, field, sentence):
    with ScriptedServer('no') as server:
        error = ask(server, status=400, **fields)['error']
        assert error['param'] == field
        assert "server.required='wish'" in error['message']

    async def script(client):
        async with client.session.post(client.url + PATH, json=ASKED | fields) as reply:
            return reply.status, reply.headers.get('X-Areal-Missed')

    with ScriptedServer('no', required='wish') as server:
        assert server.run(script) == (200, field)
        messages, _ = server.seen
        assert [turn['role'] for turn in messages] == ['system', 'user']
        assert messages[0]['content'].endswith(sentence)
        label = f'{{field="{field}"}}'
        assert (server.metric(f'wishes_total{label}'), server.metric(f'wishes_missed_total{label}')) == (1, 1)
        server.run(lambda client: client.events(PATH, ASKED | fields | {'stream': True}))
        assert server.metric(f'wishes_missed_total{label}') == 2
    with ScriptedServer(CALL if field == 'tool_choice' else '{"a": 1}', required='wish') as server:
        assert server.run(script) == (200, None)
