"""Programs over HTTP: their turns are rows of ids, a retry samples nothing, and what they do wrong ends one episode."""

from __future__ import annotations

import asyncio
import json
from unittest import mock

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.agents.dialogue import ProgramsError, Reply, Turn
from areal_jax.agents.gateway import LEAST_LOGGED_BYTES, join_record
from areal_jax.agents.programs.program_host import SaidTurn
from areal_jax.control.episode import Call
from areal_jax.errors import UserError
from areal_jax.rollout.http.server.limits import Limits
from areal_jax.types import NOT_GENERATED, Segment
from tests.agents import gateway_rig as rig
from tests.agents.gateway_rig import CHAT, PROMPT, SAMPLING, CoroutineHost, Run, make_gateway, never
from tests.agents.test_dialogue import saved
from tests.agents.toy_format import SlowPool, ToyFormat, ids_of, result, user


def text_of(tokens):
    return ''.join(map(chr, tokens))


TOOLS = [{'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}]


async def two_turns(client):
    first = await client.chat(user('q'))
    second = await client.chat(user('q'), first, user('again'))
    assert (first['content'], second['content']) == ('a', 'b')


def test_the_turns_of_a_program_are_one_row_of_sampled_ids():
    run = Run(two_turns, ids_of('a'), ids_of('b'))
    ((first, between, second),) = run.rows
    assert (first, second) == (ids_of('a'), ids_of('b'))
    assert run.pool.requests[1].prompt_tokens.tolist() == [*PROMPT.tokens, *first, *between]
    assert run.episode.rows[0].prompt_tokens is None  # it begins with the prompt of the draw
    assert [s.policy_version for s in run.episode.rows[0].segments] == [1, NOT_GENERATED, 2]
    assert (run.ends, run.episode.counts, run.host.is_closed) == (('stop', 'stop'), {}, True)


def test_the_key_is_in_no_event():
    run = Run(two_turns, ids_of('a'), ids_of('b'))
    (job,) = run.host.jobs
    assert job.problem == {'question': 'q'}
    assert job.environment['AREAL_EPISODE'] == '5.2'
    assert len(job.environment['OPENAI_API_KEY']) >= 2 + 32
    assert job.environment['OPENAI_API_KEY'] not in json.dumps(list(run.log.events))


@pytest.mark.parametrize('marked', [True, False])
def test_a_marked_retry_gets_the_recorded_reply_and_an_equal_call_another_one(marked):
    seen = []

    async def program(client):
        body = {'messages': [user('q')]}
        seen.append((await client.post(body))[1])
        seen.append((await client.post(body, **{'x-stainless-retry-count': str(int(marked))}))[1])

    run = Run(program, ids_of('a'), ids_of('b'))
    texts = [reply['choices'][0]['message']['content'] for reply in seen]
    assert texts == (['a', 'a'] if marked else ['a', 'b'])
    assert [row.fork for row in run.episode.rows] == ([''] if marked else ['', 'resampled'])
    assert run.episode.counts == ({'retried': 1} if marked else {})


@pytest.mark.parametrize('count', ['9' * 5000, '-1', '1e3', '\u0661', '1_0', ''])
def test_a_count_of_retries_that_is_no_count_marks_none(count):
    statuses = []

    async def program(client):
        body = {'messages': [user('q')]}
        for more in ({}, {'x-stainless-retry-count': count}):
            statuses.append((await client.post(body, **more))[0])

    run = Run(program, ids_of('a'), ids_of('b'))
    assert (statuses, len(run.pool.requests)) == ([200, 200], 2)


def test_a_key_of_idempotency_marks_a_retry_whatever_else_is_equal():
    async def program(client):
        body = {'messages': [user('q')]}
        for key in ('one', 'two', 'one'):
            await client.post(body, **{'Idempotency-Key': key})

    run = Run(program, ids_of('a'), ids_of('b'))
    assert (len(run.rows), run.episode.counts) == (2, {'retried': 1})


def test_a_call_that_was_cut_goes_on_and_its_retry_gets_the_reply():
    pool = SlowPool(ids_of('a'))

    async def program(client):
        body = {'messages': [user('q')]}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.post(body)
        retry = asyncio.ensure_future(client.post(body, **{'x-stainless-retry-count': '1'}))
        await asyncio.sleep(0.1)
        pool.release()
        assert (await retry)[1]['choices'][0]['message']['content'] == 'a'

    run = Run(program, pool=pool)
    assert (run.rows, run.ends, len(pool.requests)) == ([[ids_of('a')]], ('stop', 'stop'), 1)


def test_a_reply_that_nobody_got_is_taken_out_and_its_tokens_are_counted():
    pool = SlowPool(ids_of('a'), ids_of('b'))

    async def program(client):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.post({'messages': [user('q')]})
        pool.release()
        await asyncio.sleep(0.1)
        pool.release()
        await client.chat(user('other'))

    run = Run(program, pool=pool)
    assert [row for row in run.rows if row] == [[ids_of('b')]]
    assert (run.episode.counts, sum(run.episode.discarded.values())) == ({'undelivered': 1}, 2)


def test_an_answer_that_a_program_does_not_wait_for_is_ended():
    async def program(client):
        await client.chat(user('q'))
        waiting = asyncio.ensure_future(client.post({'messages': [user('other')]}))
        await asyncio.sleep(0.2)
        waiting.cancel()

    pool = SlowPool(ids_of('a'), ids_of('b'))
    pool.release()
    run = Run(program, pool=pool)
    assert (run.rows, run.ends, len(pool.cancelled)) == ([[ids_of('a')]], ('stop', 'stop'), 1)


def test_several_choices_are_rows_of_their_own():
    async def program(client):
        _, reply = await client.post({'messages': [user('q')], 'n': 3})
        assert [choice['message']['content'] for choice in reply['choices']] == ['a', 'b', 'c']
        assert reply['usage']['completion_tokens'] == 6

    run = Run(program, ids_of('a'), ids_of('b'), ids_of('c'))
    assert run.rows == [[ids_of('a')], [ids_of('b')], [ids_of('c')]]


@pytest.mark.parametrize('path', [CHAT, '/responses', '/messages'])
def test_every_dialect_streams_what_it_says_at_once(path):
    body = {'input': 'q'} if path == '/responses' else {'messages': [user('q')]}
    body |= {'max_tokens': 9} if path == '/messages' else {}

    async def program(client):
        plain = await client.post(body, path)
        streamed = await client.post(body | {'stream': True}, path)
        assert (plain[0], streamed[0]) == (200, 200)
        assert 'hello' in json.dumps(plain[1])
        assert 'hello' in streamed[1]
        assert streamed[1].startswith(('data: ', 'event: '))

    run = Run(program, ids_of('hello'), ids_of('hello'))
    assert run.ends == ('stop', 'stop')
    assert run.episode.counts == ({'overridden/max_tokens': 2} if path == '/messages' else {})


class ThinkingFormat(ToyFormat):
    """With reasoning up to the first '|' of an answer."""

    def parse(self, answer, tools, prefix):
        message, unparsed = super().parse(answer, tools, prefix)
        reasoning, _, content = message['content'].partition('|')
        return message | {'content': content, 'reasoning_content': reasoning}, unparsed


def test_reasoning_is_in_the_replies_and_need_not_come_back():
    async def program(client):
        first = await client.chat(user('q'))
        assert (first['content'], first.pop('reasoning_content')) == ('yes', 'hm')
        _, second = await client.post({'input': [user('q'), first, user('again')]}, '/responses')
        assert [item['type'] for item in second['output']] == ['reasoning', 'message']

    run = Run(program, ids_of('hm|yes'), ids_of('so|no'), chat_format=ThinkingFormat())
    assert (len(run.rows), run.ends) == (1, ('stop', 'stop'))


def test_a_tool_is_called_and_its_result_continues_the_row():
    async def program(client):
        called = await client.chat(user('q'), tools=TOOLS)
        (call,) = called['tool_calls']
        assert call['function'] == {'name': 'add', 'arguments': '{}'}
        await client.chat(user('q'), called, result('3', call['id']), tools=TOOLS)

    run = Run(program, ids_of('T'), ids_of('b'))
    assert (len(run.rows), run.episode.counts) == (1, {'tool_calls': 1, 'called/add': 1, 'well_formed/add': 1})


def test_what_a_client_asks_otherwise_is_overridden_and_counted():
    async def program(client):
        await client.chat(
            user('q'), temperature=0.0, top_p=1.0, max_tokens=1, stop=['x'], seed=3, user='u', logit_bias={},
            prompt_logprobs=1, cache_salt='s', skip_special_tokens=False, include_stop_str_in_output=False,
        )  # fmt: skip

    run = Run(program, ids_of('ab'))
    assert run.rows == [[ids_of('ab')]]
    asked = (
        'max_tokens', 'seed', 'stop', 'temperature', 'prompt_logprobs', 'cache_salt', 'skip_special_tokens',
    )  # fmt: skip
    assert run.episode.counts == {f'overridden/{name}': 1 for name in asked} | {'ignored/user': 1}


@pytest.mark.parametrize('required', ['wish', 'refuse'])
def test_a_call_that_is_required_is_a_wish_or_refused(required):
    async def program(client):
        status, _ = await client.post({'messages': [user('q')], 'tools': TOOLS, 'tool_choice': 'required'})
        assert status == (200 if required == 'wish' else 400)

    run = Run(program, ids_of('T'), required=required)
    assert run.ends == (('stop', 'stop') if required == 'wish' else ('agent_error', None))
    called = {'tool_calls': 1, 'called/add': 1, 'well_formed/add': 1}
    assert run.episode.counts == (called if required == 'wish' else {'malformed': 1})


def test_a_wish_is_read_by_the_model_and_the_row_goes_on_without_it_in_the_history():
    async def program(client):
        asked = await client.chat(user('q'), tools=TOOLS, tool_choice='required')
        history = [user('q'), asked, result('3', asked['tool_calls'][0]['id'])]
        answer = await client.chat(*history, tools=TOOLS)
        await client.chat(*history, answer, user('more'), tools=TOOLS, response_format={'type': 'json_object'})

    run = Run(program, ids_of('T'), ids_of('b'), ids_of('c'))
    assert (run.ends, [row.fork for row in run.episode.rows]) == (('stop', 'stop'), [''])
    first, _, third = (text_of(request.prompt_tokens) for request in run.pool.requests)
    assert first.count('Answer with a call of one of the tools.') == 1
    assert third.startswith(first)
    assert third.count('more\n\nAnswer with a JSON object alone.') == 1


def test_an_answer_that_misses_a_wish_is_counted():
    async def program(client):
        await client.chat(user('q'), tools=TOOLS, tool_choice='required')

    assert Run(program, ids_of('a')).episode.counts == {'missed/tool_choice': 1}


def test_keys_of_nobody_and_of_episodes_that_have_ended_are_refused():
    keys, statuses = ['', 'sk-wrong'], []

    async def program(client):
        for key in keys:
            status, reply = await client.post({'messages': [user('q')]}, key=key)
            assert 'OPENAI_API_KEY' in reply['error']['message']
            statuses.append(status)
        keys.append(client.key)

    async def run_two_episodes():
        gateway = make_gateway(CoroutineHost(program))
        return [await gateway.open(SAMPLING, PROMPT, sample).next() for sample in range(2)]

    ends = asyncio.run(run_two_episodes())
    assert [end['status'] for end in ends] == ['ended', 'ended']
    assert statuses == [401] * 5  # two, and then three: the key of the first episode


def test_a_budget_ends_the_turns_and_a_program_that_goes_on_asking_is_ended():
    statuses = []

    async def program(client):
        while True:
            statuses.append((await client.post({'messages': [user('q')]}))[0])

    run = Run(program, *[ids_of('a')] * 3, max_turns=3)
    assert statuses[:4] == [200, 200, 200, 400]
    assert len(statuses) < 3 + 12
    assert run.ends == ('turns', 'length')


def read_as_lines(run):
    return [json.dumps(event) for event in run.log.events]


@pytest.mark.parametrize(
    'give', [pytest.param('messages', marks=pytest.mark.slow), 'tools', pytest.param('a wish', marks=pytest.mark.slow)]
)
def test_a_call_that_no_context_holds_costs_a_short_line_and_the_run_replays(monkeypatch, give):
    monkeypatch.setattr(rig, 'LIMITS', Limits(body_bytes=2**23, body_s=20.0))
    giant, seen = 'é' * 2**20, []
    body = {
        'messages': {'messages': [user(giant)]},
        'tools': {'messages': [user('q')], 'tools': [{**TOOLS[0], 'function': {'name': 'add', 'description': giant}}]},
        'a wish': {
            'messages': [user('q')],
            'response_format': {'type': 'json_schema', 'json_schema': {'name': 'n', 'schema': {'description': giant}}},
        },
    }[give]

    async def program(client):
        seen.append(await client.post(body))
        if give == 'messages':
            seen.append(await client.post({'messages': [user(giant), user('again')]}))
        await client.chat(user('q'))
        await client.chat(user('r' * 250))

    run = Run(program, ids_of('a'), ids_of('b'))
    for status, refused in seen:
        assert status == 400
        assert 'the maximum context length is reached' in refused['error']['message']
    assert (run.ends, run.episode.counts['refused']) == (('length', 'length'), len(seen))
    lines = read_as_lines(run)
    assert max(map(len, lines)) < 1000, [len(line) for line in lines]
    assert sum('too_long' in line for line in lines) == len(seen)
    again = Run(None, ids_of('a'), ids_of('b'), recorded=[json.loads(line) for line in lines])
    assert (read_as_lines(again), again.rows, again.ends) == (lines, run.rows, run.ends)


def test_a_call_is_logged_up_to_a_bound_that_follows_from_the_context(monkeypatch):
    monkeypatch.setattr(rig, 'LIMITS', Limits(body_bytes=2**23, body_s=20.0))
    fits, seen = 'x' * (LEAST_LOGGED_BYTES - 1000), []

    async def program(client):
        seen.append((await client.post({'messages': [user(fits)]}))[0])
        seen.append((await client.post({'messages': [user(fits), user(fits)]}))[0])  # the first is known already

    run = Run(program)
    assert seen == [400, 400]
    sizes = [len(line) for line in read_as_lines(run)]
    assert sum(size > 60_000 for size in sizes) == 2
    assert max(sizes) < LEAST_LOGGED_BYTES + 1000


@pytest.mark.parametrize(
    ('body', 'status'),
    [
        (b'{"messages": [{"role": "user", "content": "' + b'x' * (1 << 17) + b'"}]}', 413),
        (b'[' * 10_000 + b']' * 10_000, 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400),
        (b'{"messages": []}', 400),
        (b'{"messages": [{"role": "user", "content": "q"}], "return_routed_experts": true}', 400),
        (b'', 400),
    ],
)
def test_a_body_that_cannot_be_served_is_refused_in_one_sentence(body, status):
    async def program(client):
        headers = {'Authorization': f'Bearer {client.key}', 'Content-Type': 'application/json'}
        async with client.http.post(client.url + CHAT, data=body, headers=headers) as reply:
            assert reply.status == status
            assert '\n' not in (await reply.json())['error']['message']
        await client.chat(user('q'))

    assert Run(program, ids_of('a')).ends == ('stop', 'stop')


def test_a_body_that_never_comes_whole_is_given_up():
    async def program(client):
        host, port = client.url.removeprefix('http://').removesuffix('/v1').split(':')
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f'POST /v1{CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\nContent-Length: 99\r\n\r\n'
        writer.write(head.encode() + b'{')
        assert b' 408 ' in await reader.readline()
        writer.close()
        await client.chat(user('q'))

    assert Run(program, ids_of('a')).ends == ('stop', 'stop')


def test_a_program_that_fails_or_never_asks_has_no_reward():
    async def fails(client):
        await client.chat(user('q'))
        raise ValueError('a bug')

    async def never_asks(client):
        pass

    run = Run(fails, ids_of('a'))
    assert (run.ends, [str(error) for error in run.errors]) == (('agent_error', None), ['ValueError: a bug'])
    assert Run(never_asks).ends == ('agent_error', None)


def test_a_program_that_can_never_run_ends_the_run():
    async def program(client):
        raise UserError("agent.preload=('nothing',): no module of that name")

    with pytest.raises(ProgramsError, match='no module of that name'):
        Run(program)


@pytest.mark.parametrize('waits_for', ['nothing', 'an answer'])
def test_a_program_that_is_late_has_no_reward_and_leaves_no_answer_under_way(waits_for):
    pool = SlowPool(ids_of('a'))

    async def program(client):
        await (never() if waits_for == 'nothing' else client.chat(user('q')))

    run = Run(program, pool=pool, deadline_s=0.3)
    assert run.ends == ('deadline', None)
    assert len(pool.cancelled) == (waits_for == 'an answer')


def test_a_program_that_starts_again_gets_the_replies_of_the_record():
    before = Run(two_turns, ids_of('a'), ids_of('b'))
    again = Run(two_turns, episode=saved(before.episode))
    assert (again.rows, again.pool.requests) == (before.rows, [])

    async def other_way(client):
        first = await client.chat(user('q'))
        await client.chat(user('q'), first, user('another way'))

    other = Run(other_way, ids_of('c'), episode=saved(before.episode))
    ((first, _, second),) = other.rows
    assert (first, second, other.episode.discarded) == (ids_of('a'), ids_of('c'), {2: len(ids_of('b'))})
    assert len(other.pool.requests) == 1

    async def one_turn(client):
        await client.chat(user('q'))

    shorter = Run(one_turn, episode=saved(before.episode))
    assert (shorter.rows, sum(shorter.episode.discarded.values())) == ([[ids_of('a')]], 2)


def test_programs_see_the_model_and_count_tokens():
    async def program(client):
        headers = {'Authorization': f'Bearer {client.key}'}
        async with client.http.get(f'{client.url}/models', headers=headers) as reply:
            assert (await reply.json())['data'][0]['max_model_len'] == 400
        _, counted = await client.post({'messages': [user('q')]}, '/messages/count_tokens')
        assert counted == {'input_tokens': len(PROMPT.tokens)}
        await client.chat(user('q'))

    assert Run(program, ids_of('a')).ends == ('stop', 'stop')


PAGE, JSON = {'Origin': 'http://evil.example'}, {'Content-Type': 'application/json'}


@pytest.mark.parametrize(('headers', 'status'), [
    (PAGE | JSON, 403), ({'Origin': 'null', 'Content-Type': 'text/plain'}, 403),
    ({'Sec-Fetch-Site': 'cross-site'} | JSON, 403), ({'Host': 'evil.example'} | JSON, 403),
    ({'Content-Type': 'text/plain'}, 415), ({'Content-Type': 'application/x-www-form-urlencoded'}, 415), (JSON, 401),
])  # fmt: skip
def test_no_web_page_is_heard_on_any_route(headers, status):
    """Also one that knows the key of an episode; programs with the key may send any type of body and any Host."""

    async def program(client):
        key = {'Authorization': f'Bearer {client.key}'}
        routes = {(route.method, route.resource.canonical) for app in apps for route in app.router.routes()}
        posts = sorted(path.removeprefix('/v1') for method, path in routes if method == 'POST')
        assert len(posts) == 4
        for path in posts:
            for more in ({}, key):
                async with client.http.post(
                    client.url + path, data=b'{"messages": 7}', headers=headers | more
                ) as reply:
                    is_page = 'Origin' in headers or 'Sec-Fetch-Site' in headers
                    assert (path, reply.status) == (path, 400 if more and not is_page else status)
        await client.chat(user('q'))

    apps, make = [], web.AppRunner
    with mock.patch.object(web, 'AppRunner', lambda app, **more: apps.append(app) or make(app, **more)):
        run = Run(program, ids_of('a'))
    assert (run.ends, len(run.pool.requests)) == (('stop', 'stop'), 1)


CALL = Call('', '', 0, 0, True, (), '')


def turn(text, *ids, calls=()):
    functions = [{'id': 'c', 'function': {'name': name, 'arguments': arguments}} for name, arguments in calls]
    answer = tuple(Segment(np.array([token], np.int32), np.zeros(1, np.float32), 0) for token in ids)
    return Turn(CALL, Reply({'content': text, 'tool_calls': functions}, 'stop'), np.array([1], np.int32), answer)


def said(text, *ids, calls=()):
    return SaidTurn(text, calls, np.array(ids, np.int32) if ids else None)


def test_ids_decide_where_the_record_has_them():
    turns = {0: [turn('a', 5, 6)], 1: [turn('a', 7)]}
    assert join_record([said('a', 7), said('b', 5, 6)], turns) == ([], 0)
    assert join_record([said('a', 5)], turns) == ([0, 1], 1)


def test_text_and_calls_decide_elsewhere_and_arguments_are_compared_as_json():
    turns = {0: [turn('a', 5)], 1: [turn('a', 6, calls=[('add', '{"x": 1, "y": 2}')])]}
    assert join_record([said('a', calls=(('add', '{"y":2,"x":1}'),))], turns) == ([0], 0)
    assert join_record([said('a', calls=(('add', '{"x": 2}'),))], turns) == ([0, 1], 1)
    deep = '[' * 100_000  # no JSON, and no reason to stop
    assert join_record([said('a', calls=(('add', deep),))], {2: [turn('a', calls=[('add', deep)])]}) == ([], 0)
    assert join_record([said('a', calls=(('add', '{bad'),))], {2: [turn('a', calls=[('add', '{bad')])]}) == ([], 0)


def test_one_of_several_choices_is_enough():
    assert join_record([said('b')], {0: [turn('a', 1), turn('b', 2)]}) == ([], 0)


@given(st.lists(st.sampled_from('ab')), st.lists(st.sampled_from('ab')))
def test_each_turn_of_the_record_takes_one_of_the_gateway(recorded, sampled):
    left, strangers = join_record([said(text) for text in recorded], {i: [turn(t, 1)] for i, t in enumerate(sampled)})
    common = sum(min(recorded.count(text), sampled.count(text)) for text in 'ab')
    assert (len(left), strangers) == (len(sampled) - common, len(recorded) - common)
