"""Closing the pipes of a worker while a coroutine on another thread uses them."""

import asyncio
import os
import threading
from typing import NamedTuple

import pytest

from areal_jax.workers.worker_process import WorkerDiedError, WorkerPipes


class Ends(NamedTuple):
    """Descriptors: the two that the pipes own, and the one that a worker would write its replies to."""

    to_worker: int
    from_worker: int
    replies: int


@pytest.fixture
def ends():
    requests, to_worker = os.pipe()
    from_worker, replies = os.pipe()
    yield Ends(to_worker, from_worker, replies)
    for descriptor in (requests, replies):
        os.close(descriptor)


@pytest.fixture
def pipes(ends):
    return WorkerPipes('some:scorer', os.fdopen(ends.to_worker, 'wb', 0), os.fdopen(ends.from_worker, 'rb', 0))


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


def test_a_close_from_another_thread_tells_the_coroutine_that_waits(pipes, ends, loop):
    is_waiting = threading.Event()
    reply = asyncio.run_coroutine_threadsafe(receive(pipes, is_waiting), loop)
    assert is_waiting.wait(10)
    pipes.close()
    with pytest.raises(WorkerDiedError, match="the worker for 'some:scorer' was killed"):
        reply.result(10)
    assert not is_open(ends.to_worker)
    assert not is_open(ends.from_worker)


def test_descriptors_stay_open_until_their_loop_no_longer_watches_them(pipes, ends, loop):
    is_waiting, is_blocked, go = threading.Event(), threading.Event(), threading.Event()
    reply = asyncio.run_coroutine_threadsafe(receive(pipes, is_waiting), loop)
    assert is_waiting.wait(10)
    loop.call_soon_threadsafe(lambda: (is_blocked.set(), go.wait(10)))
    assert is_blocked.wait(10)
    pipes.close()
    assert is_open(ends.from_worker)  # the loop watches it: its number must not be taken by another file
    go.set()
    with pytest.raises(WorkerDiedError):
        reply.result(10)
    assert not is_open(ends.from_worker)


def test_pipes_that_were_closed_before_the_coroutine_began_are_not_touched(pipes, loop):
    pipes.close()
    with pytest.raises(WorkerDiedError, match='was killed'):
        asyncio.run_coroutine_threadsafe(receive(pipes, threading.Event()), loop).result(10)


def test_a_cancelled_coroutine_gives_the_pipes_back(pipes, ends, loop):
    is_waiting = threading.Event()
    reply = asyncio.run_coroutine_threadsafe(receive(pipes, is_waiting), loop)
    assert is_waiting.wait(10)
    reply.cancel()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result(10)
    pipes.close()
    assert not is_open(ends.from_worker)  # at once: nobody uses them


def test_a_closed_descriptor_is_watched_no_more(pipes, ends):
    """Its number is free for another file."""

    async def main():
        reply = asyncio.ensure_future(receive(pipes, threading.Event()))
        await asyncio.sleep(0)
        pipes.close()
        assert not asyncio.get_running_loop().remove_reader(ends.from_worker)
        with pytest.raises(WorkerDiedError, match='was killed'):
            await reply

    asyncio.run(main())


def test_a_close_between_readiness_and_reading_reads_nothing(pipes, ends):
    async def main():
        loop = asyncio.get_running_loop()
        reply = asyncio.ensure_future(receive(pipes, threading.Event()))
        await asyncio.sleep(0)
        os.write(ends.replies, b'a line\n')
        # the next turn of the loop finds the line; the one after closes the pipes before the coroutine goes on
        loop.call_soon(lambda: loop.call_soon(pipes.close))
        with pytest.raises(WorkerDiedError, match='was killed'):
            await reply

    asyncio.run(main())
