"""Messages of a server of verifiers, read or refused by name, whatever is in their fields."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math

import msgpack
import pytest
import zmq
import zmq.asyncio

from areal_jax.agents.environment_host import EnvironmentClient, EpisodeRecord, RecordError, WireError
from tests.changed_json import changed

NODE = {
    'sampled': True,
    'token_ids': [3, 4, 5],
    'mask': [False, True, True],
    'message': {'content': [{'type': 'text', 'text': 'a'}], 'tool_calls': [{'name': 'add', 'arguments': '{"a": 1}'}]},
}
DELTA = {
    'trace': 't', 'nodes': [NODE], 'errors': [],
    'set': {
        'ok': True, 'rewards': {'long': {'score': 0.5, 'weight': 2.0}}, 'metrics': {'turns': 1.0},
        'stop_condition': 'x',
    },
}  # fmt: skip
FAILED = {'trace': 't', 'nodes': [NODE], 'errors': [{'type': 'OSError', 'message': 'gone'}], 'set': {'ok': False}}
REPLY = {'success': True, 'head': {'ok': True, 'errors': []}, 'traces': [{'id': 't', 'nodes': 1}]}


def finish(delta, reply):
    """The outcome of an episode, or None where it is refused by name or lost."""
    record = EpisodeRecord()
    try:
        record.add(delta)
        ending = record.finish(reply)
    except RecordError:
        return None
    assert len(ending.detail) <= 500
    outcome = ending.record.outcome if ending.record else None
    if outcome is not None:
        assert math.isfinite(outcome['reward'])
        json.dumps(outcome)
    return outcome


def test_a_record_is_read():
    assert finish(DELTA, REPLY) == {'reward': 1.0, 'rewards': {'long': 0.5}, 'metrics': {'turns': 1.0}, 'stop': 'x'}


@pytest.mark.parametrize('most', [pytest.param(300, id='some'), pytest.param(None, id='all', marks=pytest.mark.slow)])
@pytest.mark.parametrize('delta', [DELTA, FAILED])
def test_a_record_with_a_changed_field_is_read_or_refused(delta, most):
    outcomes = [finish(one, REPLY) for one in (*changed(delta, most), {**delta, 'discard': True})]
    outcomes += [finish(delta, one) for one in changed(REPLY, most)]
    assert outcomes.count(None) > 20


@pytest.mark.parametrize('given', [{'metrics': {'x' * 10**6: 1.0}}, {'stop_condition': 'x' * 10**6}])
def test_an_outcome_that_would_fill_the_event_log_is_lost(given):
    record = EpisodeRecord()
    record.add({**DELTA, 'set': {**DELTA['set'], **given}})
    ending = record.finish(REPLY)
    assert (ending.status, ending.record.outcome) == ('lost', None)
    assert 'and 65536 is the most: return fewer metrics' in ending.detail


@pytest.mark.parametrize('value', [b'\xff', {b'\xff': 1}, {('a',): 1}, msgpack.Timestamp(1)])
def test_scores_that_the_event_log_cannot_hold_are_refused(value):
    record = EpisodeRecord()
    record.add({**DELTA, 'set': {**DELTA['set'], 'metrics': {'turns': value}}})
    with pytest.raises(RecordError, match='the server sent what is no episode: TypeError'):
        record.finish(REPLY)


async def ask_all(address, bodies):
    """What becomes of a request to a server whose reply has each of the bodies."""
    context = zmq.asyncio.Context()
    front = context.socket(zmq.ROUTER)
    front.bind(address)

    async def serve():
        for body in bodies:
            method = b''
            while method != b'run':  # the client cancels what it could not read
                client, number, method, _ = await front.recv_multipart()
            await front.send_multipart([client, number, *body])

    server, client, found = asyncio.create_task(serve()), EnvironmentClient(address), []
    for _ in bodies:
        try:
            found.append(await client.ask('run', {}))
        except WireError as error:
            found.append(error)
    client.close()
    server.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await server
    front.close(0)
    context.term()
    return found


def test_bytes_that_are_no_message_are_refused(tmp_path):
    bodies = [
        [b'reply', msgpack.packb({'a': 1})],
        [b'reply'],
        [],
        [b'reply', b''],
        [b'reply', b'\xc1'],
        [b'reply', msgpack.packb([1])],
        [b'reply', b'\x81\x90\x01'],  # a list as the name of a field
        [b'reply', b'\x91' * 5000],
        [b'reply', b'\x81\xa1\xff\x01'],
        [b'reply', b'\xdf\xff\xff\xff\xff'],
        [b'reply', msgpack.packb({'a': 1}) + b'\x01'],
        [b'reply', b'\xd6\xff'],
    ]
    first, *others = asyncio.run(ask_all(f'ipc://{tmp_path}/server', bodies))
    assert first == {'a': 1}
    assert [type(one) for one in others] == [WireError] * len(others)
