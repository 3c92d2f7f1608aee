"""The second service of a server behind JetStream: leases of pauses, and messages that are too large for it."""

from __future__ import annotations

import json

import pytest

from areal_jax.rollout.jetstream.control import (
    FLUSH,
    PAUSE,
    RECORD,
    REGISTER,
    RENEW,
    RESUME,
    STAGE,
    STATUS,
    SWAP,
    describe_path,
)
from areal_jax.rollout.jetstream.messages import SERVICE
from tests.rollout.http.server.rig import write_weights
from tests.rollout.jetstream.rig import JetstreamToyServer, needs_jetstream, refusal

pytestmark = [pytest.mark.slow, needs_jetstream]
NAMED, OTHER = [('x-areal-client', 'run')], [('x-areal-client', 'next-run-of-the-host')]


@pytest.fixture
def server():
    with JetstreamToyServer(slots=2, decode_steps=3) as server:
        yield server
        assert server.death is None


async def look(talk):
    status = await talk.control(STATUS)
    return status['client'], status['pauses']


def test_a_pause_is_a_lease_of_the_client_that_names_itself(server):
    async def script(talk):
        await talk.control(REGISTER, metadata=NAMED)
        assert await look(talk) == ('run', [])
        await talk.control(PAUSE, {'mode': 'abort', 'lease_s': 60}, NAMED)
        name, (pause,) = await look(talk)
        assert (name, pause['holder'], pause['mode']) == ('run', 'run', 'abort')
        assert 0 <= pause['paused_seconds'] < 30 < pause['lease_seconds'] <= 60
        assert await talk.control(RENEW, {'lease_s': 600}, NAMED) == {'renewed': True}
        _, (pause,) = await look(talk)
        assert 60 < pause['lease_seconds'] <= 600
        code, sentence = await refusal(talk.control(RESUME))
        assert (code, sentence.startswith('this server is paused for ')) == ('FAILED_PRECONDITION', True)
        await talk.control(RESUME, metadata=NAMED)
        assert await look(talk) == ('run', [])
        assert await talk.control(RENEW, {'lease_s': 60}, NAMED) == {'renewed': False}
        return await talk.read(talk.decode(new=3))

    assert len(server.talk(script)[0]) == 3


def test_a_lease_that_lapses_serves_others_and_refuses_its_holder(server, tmp_path):
    async def script(talk):
        await talk.control(REGISTER, metadata=NAMED)
        await talk.control(PAUSE, {'mode': 'abort', 'lease_s': 0.2}, NAMED)
        assert len((await talk.read(talk.decode(new=3)))[0]) == 3  # it waits for the end of the lease
        path = {'path': write_weights(tmp_path / 'v9', 2)}
        late = [(PAUSE, {'mode': 'abort', 'lease_s': 60}), (RESUME, {}), (RENEW, {'lease_s': 60}), (STAGE, path),
                (SWAP, {'version': '9'}), (FLUSH, {})]  # fmt: skip
        for method, fields in late:
            code, sentence = await refusal(talk.control(method, fields, NAMED))
            assert (code, sentence.startswith('run is fenced (its lease has lapsed')) == ('ABORTED', True), method
        assert await look(talk) == (None, [])
        assert (await talk.control(STATUS))['weight_version'] == '0'
        await talk.control(REGISTER, metadata=NAMED)
        await talk.control(STAGE, path, NAMED)

    server.talk(script)


def test_a_new_run_takes_the_server_over(server):
    async def script(talk):
        await talk.control(REGISTER, metadata=NAMED)
        await talk.control(PAUSE, {'mode': 'abort', 'lease_s': 600}, NAMED)
        await talk.control(REGISTER, metadata=OTHER)
        assert len((await talk.read(talk.decode(new=3)))[0]) == 3
        return await refusal(talk.control(PAUSE, {'mode': 'abort', 'lease_s': 600}, NAMED))

    code, sentence = server.talk(script)
    assert (code, 'next-run-of-the-host has registered since' in sentence) == ('ABORTED', True)


@pytest.mark.parametrize(('method', 'fields', 'metadata', 'says'), [
    (PAUSE, {'mode': 'abort'}, NAMED, 'lease_s'),
    (PAUSE, {'mode': 'abort', 'lease_s': 4000}, NAMED, 'lease_s'),
    (PAUSE, {'mode': 'abort', 'lease_s': -1}, NAMED, 'lease_s'),
    (PAUSE, {'mode': 'abort', 'lease_s': 60}, [], 'X-Areal-Client'),
    (RENEW, {}, NAMED, 'lease_s'),
    (RENEW, {'lease_s': 60}, [], 'X-Areal-Client'),
    (REGISTER, {}, [], 'X-Areal-Client'),
    (REGISTER, {}, [('x-areal-client', 'a b')], 'X-Areal-Client'),
    (REGISTER, {}, [('x-areal-client', 'a' * 201)], 'X-Areal-Client'),
])  # fmt: skip
def test_a_lease_without_a_name_and_a_name_without_a_lease_are_refused(server, method, fields, metadata, says):
    async def script(talk):
        if metadata == NAMED:
            await talk.control(REGISTER, metadata=NAMED)
        return await refusal(talk.control(method, fields, metadata)), (await look(talk))[1]

    (code, sentence), pauses = server.talk(script)
    assert (code, says in sentence, pauses) == ('INVALID_ARGUMENT', True, []), sentence


@pytest.mark.parametrize('method', [REGISTER, RENEW, PAUSE, RESUME, STAGE, SWAP, STATUS, FLUSH, RECORD, 'HealthCheck'])
def test_a_large_message_is_refused_before_anything_parses_it(server, method):
    """A parser would hold the loop of gRPC for seconds, and every other call with it."""
    nested = b'{"path":[' + b'[[[]]],' * 500_000 + b'0]}'

    async def script(talk):
        path = f'/{SERVICE}/{method}' if method == 'HealthCheck' else describe_path(method)
        return await refusal(talk.channel.unary_unary(path)(nested))

    assert server.talk(script) == (
        'INVALID_ARGUMENT',
        'the message has 3500012 bytes, and one of this service 65536 at most: send the fields that it takes',
    )


def test_a_small_question_for_the_health_is_answered_whatever_it_has(server):
    async def script(talk):
        return await talk.channel.unary_unary(f'/{SERVICE}/HealthCheck')(b'\xff' * 100)

    assert server.talk(script) == b'\x08\x01'


def test_a_small_message_that_is_no_json_is_refused(server):
    async def script(talk):
        ask = talk.channel.unary_unary(describe_path(STATUS))
        return [await refusal(ask(message)) for message in (b'{', b'[1]', json.dumps({'a': 1}).encode(), b'\xff')]

    assert {code for code, _ in server.talk(script)} == {'INVALID_ARGUMENT'}
