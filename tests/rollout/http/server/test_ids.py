"""Ids of requests: whoever uses one that is open is refused, and ends nothing that another client has opened."""

import asyncio
import re

import pytest

from tests.rollout.http.server.rig import PROMPT, ToyServer, body, until
from tests.toys import token

NEW = 150  # tokens of the answer that must come whole
WHOLE = [token(0, 0, 0, position) for position in range(len(PROMPT), len(PROMPT) + NEW)]


@pytest.fixture(scope='module')
def server():
    with ToyServer() as server:
        yield server


def asked(path, name, new, n=1):
    """A body of the route with an id of the client's own."""
    sampling = {'max_tokens': new, 'ignore_eos': True, 'seed': 0, 'n': n}
    messages = [{'role': 'user', 'content': 'abc'}]
    return {
        '/generate': body(new, sampling={'n': n}) | {'rid': name},
        '/inference/v1/generate': {'token_ids': PROMPT, 'sampling_params': sampling, 'request_id': name},
        '/v1/completions': {'prompt': PROMPT, 'return_token_ids': True, 'request_id': name, **sampling},
        '/v1/chat/completions': {'messages': messages, 'return_token_ids': True, 'rid': name, **sampling},
    }[path]


def ids_of(path, reply):
    if path == '/generate':
        found = reply if isinstance(reply, list) else [reply]
        return [one['output_ids'] for one in found]
    return [choice['token_ids'] for choice in reply['choices']]


def ask_twice(server, first, second):
    """The replies to two requests, of which the second comes while the first is open; each is (path, body)."""

    async def script(client):
        earlier = asyncio.ensure_future(client.post(*first))
        await until(lambda: _is_open(client, len(server.engine.open_requests())))
        later = await client.post(*second)
        return await earlier, later

    return server.run(script)


async def _is_open(client, count):
    await asyncio.sleep(0.01)
    return count > 0


PATHS = ['/generate', '/inference/v1/generate', '/v1/completions', '/v1/chat/completions']


@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('other', PATHS)
def test_a_second_request_of_an_open_id_is_refused_and_the_first_one_is_answered_whole(server, path, other):
    (status, reply), refused = ask_twice(server, (path, asked(path, 'm', NEW)), (other, asked(other, 'm', 5)))
    assert status == 200
    assert ids_of(path, reply) == [WHOLE]
    assert refused[0] == 400
    assert "'m' is open already" in refused[1]['error']['message']


@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('other', ['/generate', '/v1/chat/completions'])
def test_several_answers_one_of_whose_ids_is_open_are_refused_whole(server, path, other):
    cancelled = server.finished()['cancelled']
    (status, reply), refused = ask_twice(server, (path, asked(path, 'm_1', NEW)), (other, asked(other, 'm', NEW, n=2)))
    assert (status, refused[0]) == (200, 400)
    assert ids_of(path, reply) == [WHOLE]
    server.run(lambda client: until(lambda: _none_open(server)))
    assert server.finished()['cancelled'] == cancelled + 1  # m_0, which nobody waits for


@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('other', ['/generate', '/v1/chat/completions'])
def test_an_id_of_one_of_several_open_answers_is_refused(server, path, other):
    (status, reply), refused = ask_twice(server, (path, asked(path, 'm', NEW, n=2)), (other, asked(other, 'm_1', 5)))
    assert (status, refused[0]) == (200, 400)
    assert [len(ids) for ids in ids_of(path, reply)] == [NEW, NEW]
    assert ids_of(path, reply)[0] == WHOLE


def test_a_reader_of_a_stream_that_leaves_ends_its_own_request_alone(server):
    async def script(client):
        first = asyncio.ensure_future(client.post('/generate', body(NEW) | {'rid': 'm_1'}))
        await until(lambda: _is_open(client, len(server.engine.open_requests())))
        async with client.session.post(client.url + '/generate', json=body(390, stream=True) | {'rid': 'm'}) as reply:
            await reply.content.readline()
        await client.post('/generate', body(1))
        return await first

    status, reply = server.run(script)
    assert (status, reply['output_ids']) == (200, WHOLE)


def test_an_abort_ends_the_request_of_that_id_as_the_protocols_say(server):
    async def script(client):
        one = asyncio.ensure_future(client.post('/generate', body(390) | {'rid': 'x'}))
        several = asyncio.ensure_future(client.post('/v1/completions', asked('/v1/completions', 'y', 390, n=2)))
        await until(lambda: _is_open(client, len(server.engine.open_requests()) - 2))
        await client.post('/abort_request', {'rid': 'x'})
        await client.post('/abort_requests', {'request_ids': ['cmpl-y']})
        return (await one)[1], (await several)[1]

    one, several = server.run(script)
    assert one['meta_info']['finish_reason']['type'] == 'abort'
    assert [choice['finish_reason'] for choice in several['choices']] == ['abort', 'abort']


def test_ids_that_the_server_finds_can_not_be_guessed(server):
    async def script(client):
        return [(await client.post('/generate', body(1)))[1]['meta_info']['id'] for _ in range(20)]

    found = server.run(script)
    assert all(re.fullmatch('request-[0-9a-f]{32}', name) for name in found)
    assert len({name[:12] for name in found}) > 15  # no counter: they differ from their beginning


async def _none_open(server):
    return not server.engine.open_requests()
