"""Closing the pipes of a worker while a coroutine on another thread uses them."""

import asyncio
import os
import threading

import pytest

from areal_jax.tasks.pipes import WorkerDiedError, WorkerPipes


@pytest.fixture
def pipes():
    """Pipes whose other ends are never used."""
    requests, to_worker = os.pipe()
    from_worker, replies = os.pipe()
    yield WorkerPipes('some:scorer', os.fdopen(to_worker, 'wb', 0), os.fdopen(from_worker, 'rb', 0))
    for descriptor in (requests, replies):
        os.close(descriptor)


def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


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


async def receive(pipes, is_waiting):
    with pipes.in_use():
        asyncio.get_running_loop().call_soon(is_waiting.set)
        return await pipes.receive_line()


def test_a_close_from_another_thread_tells_the_coroutine_that_waits(pipes, loop):
    is_waiting = threading.Event()
    reply = asyncio.run_coroutine_threadsafe(receive(pipes, is_waiting), loop)
    assert is_waiting.wait(10)
    pipes.close()
    with pytest.raises(WorkerDiedError, match="the worker for 'some:scorer' was killed"):
        reply.result(10)
    assert not is_open(pipes._in)
    assert not is_open(pipes._out)


def test_descriptors_stay_open_until_their_loop_no_longer_watches_them(pipes, loop):
    is_waiting, is_blocked, go = threading.Event(), threading.Event(), threading.Event()
    reply = asyncio.run_coroutine_threadsafe(receive(pipes, is_waiting), loop)
    assert is_waiting.wait(10)
    loop.call_soon_threadsafe(lambda: (is_blocked.set(), go.wait(10)))
    assert is_blocked.wait(10)
    pipes.close()
    assert is_open(pipes._out)  # the loop watches it: its number must not be taken by another file
    go.set()
    with pytest.raises(WorkerDiedError):
        reply.result(10)
    assert not is_open(pipes._out)


def test_pipes_that_were_closed_before_the_coroutine_began_are_not_touched(pipes, loop):
    pipes.close()
    with pytest.raises(WorkerDiedError, match='was killed'):
        asyncio.run_coroutine_threadsafe(receive(pipes, threading.Event()), loop).result(10)


def test_a_cancelled_coroutine_gives_the_pipes_back(pipes, loop):
    is_waiting = threading.Event()
    reply = asyncio.run_coroutine_threadsafe(receive(pipes, is_waiting), loop)
    assert is_waiting.wait(10)
    reply.cancel()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(10)
    pipes.close()
    assert not is_open(pipes._out)  # at once: nobody uses them
