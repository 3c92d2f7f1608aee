"""Bounds and keys of a server, each with its status, and the routes that say how it is."""

import asyncio

import aiohttp
import pytest

from areal_jax.errors import UserError
from areal_jax.rollout.http.server import bridge
from areal_jax.rollout.http.server.limits import Limits
from areal_jax.rollout.http.server.thread import bind
from areal_jax.rollout.http.wire.exchange import INCARNATION
from tests.rollout.http.server.rig import PROMPT, ToyServer, body, until


def test_a_body_beyond_its_bound_is_413():
    with ToyServer(limits=Limits(body_bytes=1000)) as server:
        status, reply = server.run(lambda client: client.post('/generate', body() | {'input_ids': [1] * 1000}))
    assert status == 413
    assert '1000 bytes' in reply['error']['message']


def test_a_slow_body_is_408():
    async def drip():
        yield b'{'
        await asyncio.sleep(2)
        yield b'}'

    with ToyServer(limits=Limits(body_s=0.2)) as server:
        status, _ = server.run(lambda client: client.post('/generate', data=drip()))
    assert status == 408


def test_a_full_queue_is_503_and_says_when_to_come_again():
    async def script(client):
        open_ones = [asyncio.ensure_future(client.post('/generate', body(300))) for _ in range(2)]
        await until(lambda: _open(client, 2))
        async with client.session.post(client.url + '/generate', json=body(1)) as reply:
            refused = reply.status, reply.headers['Retry-After']
        too_many = await client.post('/generate', body(1, sampling={'n': 3}))
        await client.post('/abort_request', {'abort_all': True})
        await asyncio.gather(*open_ones)
        return refused, too_many[0], (await client.post('/generate', body(1)))[0]

    with ToyServer(limits=Limits(requests=2)) as server:
        assert server.run(script) == ((503, '1'), 400, 200)


def test_millions_of_answers_are_refused_before_they_are_named(monkeypatch):
    named = []
    monkeypatch.setattr(bridge, 'name_answers', lambda call, _: named.append(call.n_answers))
    asked = {'prompt': [PROMPT] * 4096, 'n': 256, 'max_tokens': 1}
    with ToyServer() as server:
        status, _ = server.run(lambda client: client.post('/v1/completions', asked))
    assert (status, named) == (400, [])


def test_too_many_streams_are_429():
    async def script(client):
        stream = asyncio.ensure_future(client.events('/generate', body(300, stream=True)))
        await until(lambda: _open(client, 1))
        refused, _ = await client.post('/generate', body(1, stream=True))
        plain, _ = await client.post('/generate', body(1))
        await client.post('/abort_request', {'abort_all': True})
        await stream
        return refused, plain

    with ToyServer(limits=Limits(streams=1)) as server:
        assert server.run(script) == (429, 200)


def test_an_answer_that_takes_too_long_is_504_and_its_slot_is_free():
    async def script(client):
        late, _ = await client.post('/generate', body(390))
        *_, event, done = await client.events('/generate', body(390, stream=True))
        await until(lambda: _open(client, 0))
        return late, 'error' in event or 'detail' in event, done

    with ToyServer(limits=Limits(request_s=0.2)) as server:
        assert server.run(script) == (504, True, '[DONE]')
        assert server.engine.open_requests() == []


def test_a_key_is_asked_for_everywhere_but_by_probes():
    async def script(client):
        key = {'headers': {'Authorization': 'Bearer secret'}}
        wrong = {'headers': {'Authorization': 'Bearer guess'}}
        statuses = [
            (await client.post('/generate', body(1)))[0],
            (await client.post('/pause_generation', {}, **wrong))[0],
            (await client.get('/v1/models'))[0],
            (await client.post('/generate', body(1), **key))[0],
            (await client.get('/health'))[0],
            (await client.get('/metrics'))[0],
        ]
        return statuses

    with ToyServer(api_key='secret') as server:
        assert server.run(script) == [401, 401, 401, 200, 200, 200]


def test_a_request_that_is_meant_for_another_process_at_this_address_is_409():
    async def script(client):
        meant = lambda holder: {'headers': {INCARNATION: holder}}
        return [
            await client.post('/generate', body(1), **meant('2-bb')),
            await client.post('/generate', body(1), **meant('1-aa')),
            await client.post('/pause_generation', {}, **meant('1-aa')),
            await client.post('/generate', body(1)),
        ]

    with ToyServer() as server:
        server.facts.holder = '2-bb'
        (own, _), (other, reply), (control, _), (anyone, _) = server.run(script)
    assert [own, other, control, anyone] == [200, 409, 409, 200]
    assert '1-aa is not this server, which is 2-bb' in reply['error']['message']


def test_the_state_of_a_server():
    async def script(client):
        await client.post('/generate', body(5))
        found = {path: await client.get(path) for path in ('/health', '/ready', '/health_generate', '/v1/models')}
        return found, (await client.get('/metrics'))[1], await client.get('/nowhere'), await client.get('/generate')

    with ToyServer() as server:
        found, metrics, unknown, wrong_method = server.run(script)
        server.http.refuse_new()
        assert server.run(lambda client: client.get('/ready'))[0] == 503
        assert server.run(lambda client: client.post('/generate', body(1)))[0] == 503
    assert [status for status, _ in found.values()] == [200] * 4
    [model] = found['/v1/models'][1]['data']
    assert (model['id'], model['max_model_len']) == ('toy', 400)
    assert 'areal_jax_generated_tokens_total 6\n' in metrics  # five, and one of /health_generate
    assert 'areal_jax_requests_finished_total{reason="length"} 2\n' in metrics
    assert (unknown[0], unknown[1]['error']['message']) == (404, 'GET /nowhere: Not Found')
    assert (wrong_method[0], wrong_method[1]['error']['message']) == (405, 'GET /generate: Method Not Allowed')


def test_a_server_whose_engine_hangs_is_not_healthy():
    async def script(client):
        server.backend.step_s = 0.0
        return (await client.get('/health'))[0]

    with ToyServer(limits=Limits(reply_s=0.2)) as server:
        block = server.service.inbox.put
        server.service.inbox.put = lambda item: None  # the host's side hears nothing
        assert server.run(script) == 503
        server.service.inbox.put = block


def test_a_prompt_reader_that_never_reads_is_let_go():
    async def script(client):
        connection = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connection, read_bufsize=1) as session:
            reply = await session.post(client.url + '/generate', json=body(390, stream=True))
            await until(lambda: _open(client, 0))
            reply.close()
        return True

    with ToyServer(limits=Limits(request_s=0.5)) as server:
        assert server.run(script)


def test_an_address_that_can_not_be_had_is_named():
    listener = bind('127.0.0.1', 0)
    listener.listen()
    with pytest.raises(UserError, match='is in use'):
        bind('127.0.0.1', listener.getsockname()[1])
    with pytest.raises(UserError, match='is no address of this machine'):
        bind('no.such.host.invalid', 0)
    listener.close()


async def _open(client, count):
    _, text = await client.get('/metrics')
    return f'areal_jax_answers_open {count}\n' in text
