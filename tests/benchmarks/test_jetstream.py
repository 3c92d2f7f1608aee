"""benchmarks/jetstream.py: its clients, its options, and the interpreter that it needs."""

import asyncio
import importlib.util

import pytest

from areal_jax.errors import UserError
from benchmarks import jetstream
from benchmarks.side_http import PORT
from tests.benchmarks.test_serving import REQUESTS
from tests.rollout.jetstream.rig import JetstreamToyServer, needs_jetstream


@needs_jetstream
@pytest.mark.slow
def test_clients_get_all_answers_and_their_log_probs():
    from benchmarks.grpc_clients import answer, post, wait_healthy

    with JetstreamToyServer() as server:
        assert wait_healthy(server.url, 10, lambda: True)
        found = answer(server.url, REQUESTS, clients=2, temperature=1.0)
        post(f'{server.url}/FlushCache')
        assert answer(server.url, REQUESTS, clients=2, temperature=1.0) == found
    # the log-prob of the toy is -1 - p / 100 at position p: 3 to 7 after a prompt of three, 2 to 8 after one of two
    assert found['tokens'] == 12.0
    assert found['mean_logprob'] == pytest.approx(-1 - (sum(range(3, 8)) + sum(range(2, 9))) / 1200)
    assert not wait_healthy('http://127.0.0.1:1', 0.1, lambda: True)


@needs_jetstream
@pytest.mark.slow
def test_messages_of_every_kind_of_a_crowding_client_are_answered_and_honest_clients_are_served():
    from benchmarks.crowding import JETSTREAM, JETSTREAM_ANSWERS, ask, find_kinds, open_sender

    with JetstreamToyServer() as server:
        with open_sender(JETSTREAM, server.url, '') as send:
            for kind, (path, make) in find_kinds(JETSTREAM).items():
                assert send(path, make(100_000)) in JETSTREAM_ANSWERS, kind
        turn = asyncio.run(ask(JETSTREAM, server.url, ['', ''], 0.5))
    assert turn.faults == []
    assert turn.rate > 0
    assert turn.healths > 0


def test_both_sides_serve_one_engine_of_one_size():
    options = jetstream.read_options(['--decode_steps=4', '--lengths=equal'])
    theirs, ours = (jetstream.jetstream_server(options, 'r.npz'), jetstream.HTTP['streams'](options, 'r.npz'))
    without = [word for word in theirs.arguments['command'] if word != '--config.rollout.server=jetstream']
    assert without == ours.arguments['command']
    assert f'--port={PORT}' in without
    assert '--config.rollout.decode_steps=4' in without
    assert theirs.arguments['engine'] == ours.arguments['engine']
    assert (theirs.arguments['clients'], ours.arguments['client_options']) == (32, {'stream': True})


@pytest.mark.parametrize(('arguments', 'says'), [(['--http=fast'], 'fast'), (['--lengths=short'], 'short')])
def test_options_that_cannot_be_are_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        jetstream.read_options(arguments)


def test_an_interpreter_without_jetstream_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match=r'has no JetStream: run this with the interpreter of the environment'):
        jetstream.main([])
