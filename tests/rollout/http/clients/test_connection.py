"""A connection belongs to the I/O loop, and ends with it; a reply that is cut off is no error of the program."""

import asyncio
import contextlib
import threading

import pytest

from areal_jax.control.clocks.io import IoLoop
from areal_jax.rollout.http.clients.connection import Connection, NoReplyError
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


@pytest.mark.parametrize(('idle_s', 'connections'), [(60.0, 1), (0.01, 2)])
def test_a_connection_that_was_idle_for_long_is_not_used_again(idle_s, connections):
    """The server may be closing it, and what is sent on it is lost."""
    opened = []

    async def answer(reader, writer):
        opened.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b'\r\n\r\n'):
                writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}')
        writer.close()

    async def ask_twice():
        async with await asyncio.start_server(answer, '127.0.0.1', 0) as server:
            connection = Connection(f'http://127.0.0.1:{server.sockets[0].getsockname()[1]}', idle_s=idle_s)
            await connection.request('GET', '/')
            await asyncio.sleep(0.1)
            await connection.request('GET', '/')
            await connection.close()

    asyncio.run(ask_twice())
    assert len(opened) == connections


BODY = {'input_ids': [1], 'stream': True, 'sampling_params': {'max_new_tokens': 300, 'ignore_eos': True}}


def stream(take):
    """A stream whose lines go to `take(connection, line)`."""

    async def follow(url):
        connection = Connection(url)
        try:
            await connection.stream('/generate', BODY, lambda line: take(connection, line))
        finally:
            await connection.close()

    with ToyServer() as server:
        asyncio.run(asyncio.wait_for(follow(server.url), 20))


def test_a_connection_that_is_closed_in_the_middle_of_a_reply_gave_no_reply():
    def close(connection, line):
        closing = connection.close()
        with contextlib.suppress(StopIteration):
            closing.send(None)  # what it does at once
        closing.close()

    with pytest.raises(NoReplyError, match='/generate: the stream broke off'):
        stream(close)


@pytest.mark.parametrize('kind', [RuntimeError, TimeoutError, OSError])
def test_what_the_receiver_of_the_lines_raises_comes_as_it_is(kind):
    def fail(connection, line):
        raise kind('a fault of the receiver')

    with pytest.raises(kind, match='a fault of the receiver'):
        stream(fail)
