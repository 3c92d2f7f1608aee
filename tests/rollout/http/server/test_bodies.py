"""Large bodies: counted, parsed in a process that may die, one at a time for a client; small ones as ever."""

import asyncio
import dataclasses
import json
import os
import signal
import time
import types

import pytest

from areal_jax.errors import UserError
from areal_jax.rollout.http.server import limits
from areal_jax.rollout.http.server.body_parser import BodyParser
from areal_jax.rollout.http.server.limits import SMALL_BYTES, BodyBound, Limits, Places
from areal_jax.rollout.http.server.replies import Bodies
from areal_jax.rollout.http.wire.exchange import RequestError
from tests.rollout.http.server.rig import CONTEXT, PROMPT, ToyServer
from tests.rollout.http.server.rig import body as generate_body

PAD = ' ' * SMALL_BYTES  # makes a body large without a value more


@pytest.fixture(scope='module')
def server():
    with ToyServer(slots=4) as server:
        yield server


@pytest.fixture
def parser():
    parser = BodyParser(deadline_s=60.0)
    yield parser
    parser.close()


def post(server, path, body, **headers):
    content = body if isinstance(body, bytes) else body.encode()
    headers = {'Content-Type': 'application/json', **headers}
    return server.run(lambda client: client.post(path, data=content, headers=headers), 60)


def test_a_large_body_has_the_answer_of_a_small_one(server):
    for path, fields in {
        '/generate': generate_body(6, rid='x'),
        '/v1/completions': {'prompt': [PROMPT, [4]], 'max_tokens': 3, 'seed': 1, 'temperature': 0},
        '/v1/completions?': {'prompt': ['abc', 'd'], 'max_tokens': 3, 'temperature': 0, 'seed': 1, 'logprobs': 1},
        '/v1/messages/count_tokens': {'messages': [{'role': 'user', 'content': 'abc'}]},
        '/tokenize': {'prompt': ['abc', 'd']},
        '/detokenize': {'tokens': [[1, 2], [3]]},
        '/v1/chat/completions': {'messages': [], 'max_tokens': 3},  # refused
        '/pause_generation': {'mode': 'never'},
    }.items():
        text = json.dumps(fields)
        small, large = post(server, path, text), post(server, path, text + PAD)
        assert _without_times(large) == _without_times(small), path


def _without_times(reply):
    status, body = reply
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name not in ('id', 'created')}
        if 'meta_info' in body:
            body['meta_info'] = {**body['meta_info'], 'e2e_latency': 0, 'cached_tokens': 0}
    return status, body


@pytest.mark.parametrize('path', ['/generate', '/v1/chat/completions', '/v1/messages', '/tokenize', '/pause'])
def test_too_many_values_are_refused_before_they_are_parsed_in_the_form_of_the_dialect(server, path):
    status, reply = post(server, path, b'{"tools":[' + b'[[[]]],' * 2_000_000 + b'0]}')
    assert status == 413
    message = reply['error']['message']
    assert message.startswith('the body has ')
    assert 'values ("[", "{" and ","), and a request of this route for a context of 400 tokens has' in message
    assert message.endswith('at most: send less at once, or flatter schemas')


def test_a_text_of_commas_as_long_as_the_context_is_served(server):
    """As far as the vocabulary goes: what is refused is not the commas."""
    status, reply = post(server, '/v1/completions', json.dumps({'prompt': ',' * (CONTEXT - 2), 'max_tokens': 1}) + PAD)
    assert (status, 'has no token ids' in reply['error']['message']) == (400, True)


def test_a_body_without_a_length_is_read_in_the_place_too(server):
    async def chunks():
        yield json.dumps({'tokens': [1, 2]}).encode()
        for _ in range(40):
            yield b' ' * 4096

    async def script(client):
        return await client.post('/detokenize', data=chunks(), headers={'Content-Type': 'application/json'})

    assert server.run(script) == (200, {'prompt': 'ab', 'text': 'ab'})


def test_the_process_is_started_by_a_large_body_and_kept(parser):
    assert parser.pid is None
    assert parser.parse(len, b'abc') == 3
    kept = parser.pid
    assert parser.parse(bytes.upper, b'abc') == b'ABC'
    assert parser.pid == kept is not None
    assert os.getpriority(os.PRIO_PROCESS, kept) > 0


def test_a_process_that_was_killed_is_replaced(parser):
    assert parser.parse(len, b'abc') == 3
    killed = parser.pid
    os.kill(killed, signal.SIGKILL)
    assert parser.parse(len, b'abcd') == 4
    assert parser.pid not in (killed, None)


def test_a_body_that_kills_the_process_twice_is_refused(parser):
    with pytest.raises(RequestError, match=r'can not be parsed here \(the process that parses has ended\)') as caught:
        parser.parse(_die, b'abc')
    assert caught.value.status == 503
    assert parser.parse(len, b'abc') == 3


def test_a_body_that_takes_too_long_is_refused(parser):
    parser.parse(len, b'')
    hasty = BodyParser(deadline_s=0.2)
    with pytest.raises(RequestError, match='it takes too long'):
        hasty.parse(_wait, b'60')
    assert hasty.pid is None


def test_errors_cross_the_process(parser):
    with pytest.raises(RequestError, match='what is wrong') as caught:
        parser.parse(_refuse, b'')
    assert (caught.value.field, caught.value.status) == ('field', 418)
    with pytest.raises(RequestError, match='of the user') as caught:
        parser.parse(_fail, b'')
    assert caught.value.status == 400


def test_a_large_message_is_parsed_in_the_process_and_in_the_place_of_its_client(parser):
    async def main():
        bodies = Bodies(Limits(), BodyBound(CONTEXT, 1, 1), parser, wait_s=0.01)
        async with bodies.parsed(bytes(SMALL_BYTES), _name_process, 'a') as found:
            assert (found, parser.pid) == (os.getpid(), None)
        large = bytes(SMALL_BYTES + 1)
        async with bodies.parsed(large, _name_process, 'a') as found:
            assert found == parser.pid is not None
            with pytest.raises(RequestError, match='of which a client has one in work at a time'):
                async with bodies.parsed(large, _name_process, 'a'):
                    pass
            async with bodies.parsed(large, _name_process, 'b') as other:
                assert other == found
        bodies.close()

    asyncio.run(main())


def _name_process(content):
    return os.getpid()


def _die(content):
    os.kill(os.getpid(), signal.SIGKILL)


def _wait(content):
    time.sleep(float(content))


def _refuse(content):
    raise RequestError('field', 'what is wrong', 418)


def _fail(content):
    raise UserError('of the user')


def test_a_client_has_one_place_and_others_have_theirs():
    async def main():
        places, order = Places(wait_s=30.0), []
        first, second = asyncio.Event(), asyncio.Event()

        async def work(client, name, end):
            async with places.taken(client):
                order.append(name)
                await end.wait()

        tasks = [asyncio.ensure_future(work('a', 'a1', first)), asyncio.ensure_future(work('a', 'a2', second))]
        tasks.append(asyncio.ensure_future(work('b', 'b1', second)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == ['a1', 'b1']
        first.set()
        second.set()
        await asyncio.gather(*tasks)
        assert order == ['a1', 'b1', 'a2']

    asyncio.run(main())


def test_who_waits_too_long_is_told_to_come_again():
    async def main():
        places = Places(wait_s=0.01)
        async with places.taken('a'):
            with pytest.raises(RequestError, match='of which a client has one in work at a time') as caught:
                async with places.taken('a'):
                    pass
            assert caught.value.status == 429
        async with places.taken('a'):  # free again
            pass

    asyncio.run(main())


@pytest.mark.parametrize(('took_s', 'rest_s'), [(0.125, 0.5), (0.0, 0.1), (8.0, 2.0)])
def test_a_refused_body_keeps_its_place_for_a_while(took_s, rest_s, monkeypatch):
    """The rest is of four times what it took, within bounds."""
    began, rests = iter([10.0, 10.0 + took_s]), []

    async def rest(seconds):
        rests.append(seconds)

    async def take(error=None):
        async with places.taken('a'):
            if error is not None:
                raise error

    async def main():
        with pytest.raises(RequestError):
            await take(RequestError('', 'no'))

    places = Places(wait_s=30.0)
    monkeypatch.setattr(limits, 'time', types.SimpleNamespace(monotonic=lambda: next(began)))
    monkeypatch.setattr(limits.asyncio, 'sleep', rest)
    asyncio.run(main())
    assert rests == [rest_s]


def test_a_client_that_leaves_keeps_its_place_until_its_body_is_done(server):
    """Else one that comes and goes would have many bodies in work."""

    async def main():
        bodies = Bodies(Limits(), server.texts.bound(CONTEXT), wait_s=30.0)
        began, end, done = asyncio.Event(), asyncio.Event(), []
        loop = asyncio.get_running_loop()

        def work():
            loop.call_soon_threadsafe(began.set)
            asyncio.run_coroutine_threadsafe(end.wait(), loop).result(30)
            done.append(True)

        task = asyncio.ensure_future(bodies.run(work))
        await began.wait()
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == [True]
        bodies.close()

    asyncio.run(main())


def test_a_large_body_beyond_the_limit_is_not_read():
    with ToyServer(limits=dataclasses.replace(Limits(), body_bytes=1 << 17)) as server:
        status, reply = post(server, '/generate', b' ' * (1 << 18))
        assert (status, reply['error']['message']) == (413, 'the body is larger than 131072 bytes: send less at once')


def test_large_replies_are_those_of_one_piece(server):
    """24,150 ids: beyond what is written at once."""
    texts = ['abcdefghi' * 450, 'ab' * 2000] * 3
    status, reply = server.run(lambda client: client.post('/tokenize', {'prompt': texts, 'return_token_strs': True}))
    assert (status, reply['count']) == (200, [4050, 4000] * 3)
    assert reply['token_strs'] == [list(text) for text in texts]


def test_honest_calls_are_served_while_a_large_body_is_parsed(server):
    """They do not wait for its end: it is held back until they are done."""

    async def script(client):
        async def slow():
            yield b' ' * (SMALL_BYTES + 1)
            await release.wait()
            yield b'{}'

        release = asyncio.Event()
        large = asyncio.ensure_future(client.post('/pause', data=slow(), headers={'Content-Type': 'application/json'}))
        for _ in range(3):
            assert (await client.post('/generate', generate_body(2)))[0] == 200
        assert not large.done()
        release.set()
        assert (await large)[0] == 200
        assert (await client.post('/resume', {}))[0] == 200

    server.run(script)
