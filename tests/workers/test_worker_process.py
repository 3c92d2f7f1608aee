"""Closing the connection to a worker while a coroutine or another thread uses it; what a worker's end says."""

import asyncio
import socket
import threading
import time

import pytest

from areal_jax.workers.worker_process import WorkerConnection, WorkerDiedError


@pytest.fixture
def sockets():
    """(the socket that the connection owns, the socket of the worker)."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def worker(sockets):
    return sockets[1]


@pytest.fixture
def connection(sockets):
    return WorkerConnection('some:scorer', sockets[0])


@pytest.fixture
def is_open(sockets):
    return lambda: sockets[0].fileno() >= 0


@pytest.fixture
def loop():
    """A loop that runs in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def receive(connection, is_waiting):
    with connection.in_use():
        asyncio.get_running_loop().call_soon(is_waiting.set)
        return await connection.receive_line()


async def send(connection, data, is_waiting):
    with connection.in_use():
        asyncio.get_running_loop().call_soon(is_waiting.set)
        await connection.send(data)


def test_a_close_from_another_thread_tells_the_coroutine_that_waits(connection, worker, is_open, loop):
    is_waiting = threading.Event()
    reply = asyncio.run_coroutine_threadsafe(receive(connection, is_waiting), loop)
    assert is_waiting.wait(10)
    connection.close()
    with pytest.raises(WorkerDiedError, match="the worker for 'some:scorer' was killed"):
        reply.result(10)
    assert not is_open()
    assert worker.recv(1) == b''


def test_a_close_from_another_thread_tells_the_coroutine_that_sends(connection, is_open, loop):
    is_waiting = threading.Event()
    sent = asyncio.run_coroutine_threadsafe(send(connection, bytes(2**24), is_waiting), loop)
    assert is_waiting.wait(10)
    connection.close()
    with pytest.raises(WorkerDiedError, match='was killed'):
        sent.result(10)
    assert not is_open()


def test_the_descriptor_stays_open_until_its_loop_no_longer_watches_it(connection, worker, is_open, loop):
    is_waiting, is_blocked, go = threading.Event(), threading.Event(), threading.Event()
    reply = asyncio.run_coroutine_threadsafe(receive(connection, is_waiting), loop)
    assert is_waiting.wait(10)
    loop.call_soon_threadsafe(lambda: (is_blocked.set(), go.wait(10)))
    assert is_blocked.wait(10)
    connection.close()
    assert is_open()  # the loop watches it: its number must not be taken by another file
    assert worker.recv(1) == b''  # the worker ends at once
    go.set()
    with pytest.raises(WorkerDiedError):
        reply.result(10)
    assert not is_open()


def test_a_connection_that_was_closed_before_the_coroutine_began_is_not_touched(connection, loop):
    connection.close()
    with pytest.raises(WorkerDiedError, match='was killed'):
        asyncio.run_coroutine_threadsafe(receive(connection, threading.Event()), loop).result(10)


def test_a_cancelled_coroutine_gives_the_connection_back(connection, is_open, loop):
    is_waiting = threading.Event()
    reply = asyncio.run_coroutine_threadsafe(receive(connection, is_waiting), loop)
    assert is_waiting.wait(10)
    reply.cancel()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(10)
    connection.close()
    assert not is_open()  # at once: nobody uses it


def test_a_closed_descriptor_is_watched_no_more(connection, sockets):
    """Its number is free for another file."""

    async def main():
        watched = sockets[0].fileno()
        reply = asyncio.ensure_future(receive(connection, threading.Event()))
        await asyncio.sleep(0)
        connection.close()
        with pytest.raises(WorkerDiedError, match='was killed'):
            await asyncio.wait_for(reply, 10)
        assert not asyncio.get_running_loop().remove_reader(watched)

    asyncio.run(main())


def test_a_close_between_readiness_and_reading_reads_nothing(connection, worker):
    async def main():
        loop = asyncio.get_running_loop()
        reply = asyncio.ensure_future(receive(connection, threading.Event()))
        await asyncio.sleep(0)
        worker.sendall(b'a line\n')
        # the next turn of the loop finds the line; the one after closes before the coroutine continues
        loop.call_soon(lambda: loop.call_soon(connection.close))
        with pytest.raises(WorkerDiedError, match='was killed'):
            await asyncio.wait_for(reply, 10)

    asyncio.run(main())


def test_a_worker_that_ended_is_named_and_its_last_line_is_read(connection, worker):
    worker.sendall(b'the last words\n')
    worker.close()
    with connection.in_use():
        assert connection.wait_for_line(time.monotonic() + 10) == b'the last words'
    for use in (connection.read, lambda: connection.send_at_once(b'a request', time.monotonic() + 10)):
        with pytest.raises(WorkerDiedError, match="the worker for 'some:scorer' has ended"), connection.in_use():
            use()


def test_a_worker_that_takes_or_says_nothing_in_time_is_named(connection, worker):
    began = time.monotonic()
    with connection.in_use():
        with pytest.raises(TimeoutError, match="the worker for 'some:scorer' was not ready in time"):
            connection.wait_for_line(began + 0.1)
        with pytest.raises(TimeoutError, match="the worker for 'some:scorer' took no request in time"):
            connection.send_at_once(bytes(2**24), began)  # the time is over already
        connection.read()  # does not wait
    assert time.monotonic() - began < 5
