"""A connection belongs to the I/O loop, and ends with it."""

import threading

import pytest

from areal_jax.control.clocks.io import IoLoop
from areal_jax.rollout.http.clients.connection import Connection
from tests.rollout.http.server.rig import ToyServer


@pytest.mark.parametrize('is_under_way', [False, True])
def test_nothing_is_left_open_when_the_loop_ends(caplog, is_under_way):
    body = {'input_ids': [1], 'sampling_params': {'max_new_tokens': 300, 'ignore_eos': True}}
    with ToyServer() as server:
        loop, connection, ended = IoLoop(), Connection(server.url), threading.Event()
        loop.start('look', lambda: connection.request('GET', '/health'), 5.0, ended.set)
        assert ended.wait(5)
        if is_under_way:
            loop.start('generate', lambda: connection.request('POST', '/generate', body), 5.0, lambda: None)
        loop.close()
    assert caplog.text == ''
