"""Calls: I/O on a loop of its own, whose outcome enters the program as a completion."""

import asyncio
import collections
import contextlib
import functools
import gc
import os
import socket
import sys
import threading
import time
import traceback
import weakref

import pytest

from areal_jax.control.clocks import io, virtual
from areal_jax.control.clocks.loop import CallDeadlineError, StallError
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.types import Work

LANES = {'a': 1, 'b': 1, 'wide': 2}
X = Work('x', 1)


def make_virtual():
    return VirtualClock(LANES, EventLog(), {'x': 1.0})


def make_real(stall_timeout_s=30.0):
    return RealClock(LANES, EventLog(), stall_timeout_s)


BOTH = pytest.mark.parametrize('make', [make_virtual, make_real])


def execute(clock, program):
    return clock.execute(program(clock, Supervisor(clock)))


def execute_supervised(clock, program):
    supervisor = Supervisor(clock)
    return clock.execute(supervisor.run(program(clock, supervisor)))


# Asyncio libraries work unchanged.


async def never_answer(reader, writer):
    await reader.read()  # until the client closes
    writer.close()


async def get_with_timeout(port, timeout_s):
    """The seconds after which the client gave up."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection('127.0.0.1', port)
    try:
        writer.write(b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n')
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readline(), timeout_s)
        return time.monotonic() - began
    finally:
        writer.close()
        await writer.wait_closed()


def make_busy_work(seconds):
    """A function that is inside XLA for about so long, without the GIL."""
    import jax
    import jax.numpy as jnp

    loop = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, y: jnp.tanh(y @ y), x))
    x = jnp.eye(64)
    loop(x, 1).block_until_ready()
    began = time.monotonic()
    loop(x, 1000).block_until_ready()
    n = int(1000 * seconds / (time.monotonic() - began))
    return lambda: loop(x, n).block_until_ready()


def seconds_to_give_up(work):
    """(seconds after which the client's timeout of .3 s fired, whether lane a was still busy with `work`)."""

    async def program(clock, supervisor):
        is_done = clock.event('done')

        async def be_busy():
            await clock.run('a', work, X)
            is_done.set()

        start = functools.partial(asyncio.start_server, never_answer, '127.0.0.1', 0)
        server = await clock.call('b', start, X, 10.0)
        supervisor.start('busy', be_busy())
        port = server.sockets[0].getsockname()[1]
        seconds = await clock.call('b', lambda: get_with_timeout(port, 0.3), X, 10.0)
        was_busy = not is_done.is_set()
        await clock.wait(is_done)

        async def close():
            server.close()

        await clock.call('b', close, X, 10.0)
        return seconds, was_busy

    return execute(make_real(), program)


def test_a_timeout_of_an_http_client_does_not_wait_for_a_busy_lane():
    seconds, was_busy = seconds_to_give_up(make_busy_work(2.0))
    assert seconds >= 0.3
    assert was_busy


@pytest.mark.slow
def test_a_timeout_of_an_http_client_is_exact_beside_a_busy_lane():
    seconds, _ = seconds_to_give_up(make_busy_work(2.0))
    assert 0.3 <= seconds < 0.5


def test_a_timer_alone_is_no_deadlock():
    async def program(clock, supervisor):
        began = time.monotonic()
        result = await clock.call('a', lambda: asyncio.sleep(0.1, 'slept'), X, 30.0)
        return result, time.monotonic() - began

    result, seconds = execute(make_real(), program)
    assert result == 'slept'
    assert 0.1 <= seconds < 2.0  # the machine may be busy


@BOTH
def test_calls_share_locks_and_queues_of_asyncio(make):
    async def program(clock, supervisor):
        queue, lock, steps = asyncio.Queue(), asyncio.Lock(), []

        async def take():
            async with lock:
                steps.append('take')
                return await queue.get()

        async def put():
            while not lock.locked():
                await asyncio.sleep(0.001)
            steps.append('put')
            await queue.put('item')

        supervisor.start('put', clock.call('a', put, X, 10.0))
        return await clock.call('b', take, X, 10.0), steps

    assert execute(make(), program) == ('item', ['take', 'put'])


@BOTH
def test_a_stream_is_one_call_for_each_item(make):
    async def squares():
        for n in range(3):
            await asyncio.sleep(0.001)
            yield n * n

    async def program(clock, supervisor):
        stream, found = squares(), []
        while True:
            try:
                found.append((await clock.call('a', functools.partial(anext, stream), X, 10.0), clock.now()))
            except StopAsyncIteration:
                return found

    found = execute(make(), program)
    assert [item for item, _ in found] == [0, 1, 4]
    if make is make_virtual:
        assert [now for _, now in found] == [1.0, 2.0, 3.0]


def test_subprocesses_of_asyncio_work():
    async def run():
        process = await asyncio.create_subprocess_exec(sys.executable, '-c', 'print(6 * 7)', stdout=-1)
        output, _ = await process.communicate()
        return output, process.returncode

    assert execute(make_real(), lambda clock, supervisor: clock.call('a', run, X, 60.0)) == (b'42\n', 0)


def test_the_io_loop_runs_in_a_thread_of_its_own():
    async def name():
        return threading.current_thread().name

    async def program(clock, supervisor):
        return {await clock.call(lane, name, X, 10.0) for lane in ('a', 'b')}

    assert execute(make_real(), program) == {'io'}


# Outcomes.


@BOTH
def test_an_exception_arrives_with_its_traceback_and_frees_the_lane(make):
    async def read_reply():
        raise ValueError('not a reply')

    async def program(clock, supervisor):
        with pytest.raises(ValueError, match='not a reply') as caught:
            await clock.call('a', read_reply, X, 10.0)
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        return 'read_reply' in frames, await clock.call('a', lambda: asyncio.sleep(0, 'next'), X, 10.0)

    assert execute(make(), program) == (True, 'next')


@BOTH
def test_a_future_of_another_loop_is_refused(make):
    async def program(clock, supervisor):
        future = asyncio.get_running_loop().create_future()
        await clock.call('a', lambda: future, X, 10.0)

    with pytest.raises(RuntimeError, match="call 'x' on lane 'a' awaits a future of another event loop; create it on"):
        execute(make(), program)


@BOTH
def test_system_exit_in_a_call_is_raised_at_the_caller_and_the_io_loop_goes_on(make):
    async def leave():
        sys.exit(3)

    async def program(clock, supervisor):
        with pytest.raises(SystemExit):
            await clock.call('a', leave, X, 10.0)
        return await clock.call('a', lambda: asyncio.sleep(0, 'next'), X, 10.0)

    assert execute(make(), program) == 'next'


def test_a_call_that_is_cancelled_from_within_is_an_error_and_no_cancellation_of_its_caller():
    async def give_up():
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="call 'x' on lane 'a' was cancelled, not by its caller"):
        execute(make_real(), lambda clock, supervisor: clock.call('a', give_up, X, 10.0))


# Deadlines.


def test_a_call_past_its_deadline_raises_timeout_on_the_real_clock_and_frees_the_lane():
    async def program(clock, supervisor):
        with pytest.raises(TimeoutError, match=r"call 'x' on lane 'a' exceeded its deadline of 0\.05 s"):
            await clock.call('a', lambda: asyncio.sleep(60), X, 0.05)
        return await clock.run('a', lambda: 'next', X)

    assert execute(make_real(), program) == 'next'


def test_a_coroutine_that_ignores_its_cancellation_does_not_hold_up_the_timeout(caplog):
    times_cancelled = []

    async def be_stubborn():
        for _ in range(3):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                times_cancelled.append(1)
        return 'too late'

    async def program(clock, supervisor):
        with pytest.raises(TimeoutError):
            await clock.call('a', be_stubborn, X, 0.05)
        return len(times_cancelled)

    before = threading.active_count()
    assert execute(make_real(), program) == 1
    assert len(times_cancelled) == 3  # by the deadline, then when the run ended
    assert threading.active_count() == before
    assert caplog.text == ''


def test_a_coroutine_that_never_ends_is_named(caplog, monkeypatch):
    monkeypatch.setattr(io, 'END_S', 0.3)
    is_over = threading.Event()

    async def be_stubborn():
        while not is_over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async def program(clock, supervisor):
        with pytest.raises(TimeoutError):
            await clock.call('a', be_stubborn, X, 0.05)

    execute(make_real(), program)
    assert "tasks on the I/O loop ignore that they are cancelled: call 'x' on lane 'a'" in caplog.text
    is_over.set()
    gc.collect()


@BOTH
def test_calls_that_have_ended_leave_nothing_to_the_garbage_collector(make):
    """A circle for each would make it look through everything that a run holds, again and again."""

    class Result:
        pass

    results = weakref.WeakSet()

    async def reply():
        result = Result()
        results.add(result)
        return result

    async def program(clock, supervisor):
        for _ in range(3):
            await clock.call('a', reply, X, 5.0)
        await clock.call('b', lambda: asyncio.sleep(0), X, 5.0)  # by now the I/O thread is done with them
        return len(results)

    gc.disable()
    try:
        assert execute(make(), program) == 0
    finally:
        gc.enable()


def test_a_reply_that_is_there_is_no_timeout_though_the_io_loop_was_blocked_past_the_deadline():
    here, there = socket.socketpair()

    async def receive():
        reader, writer = await asyncio.open_connection(sock=here)
        try:
            return await reader.readexactly(5)
        finally:
            writer.close()

    async def block_the_loop():
        await asyncio.sleep(0.05)
        there.send(b'reply')
        time.sleep(0.5)

    async def program(clock, supervisor):
        supervisor.start('blocker', clock.call('b', block_the_loop, X, 10.0))
        return await clock.call('a', receive, X, 0.2)

    with there:
        assert execute(make_real(), program) == b'reply'


def test_a_reply_that_is_there_is_no_timeout_though_the_host_was_blocked_past_the_deadline():
    async def program(clock, supervisor):
        async def block_the_loop():
            time.sleep(0.3)

        supervisor.start('blocker', block_the_loop())
        return await clock.call('a', lambda: asyncio.sleep(0, 'reply'), X, 0.1)

    assert execute(make_real(), program) == 'reply'


def test_a_call_without_end_is_a_stall():
    with pytest.raises(StallError, match=r"run.stall_timeout_s.*lane 'a' busy with 'x'"):
        execute(make_real(0.1), lambda clock, supervisor: clock.call('a', lambda: asyncio.sleep(60), X, 60.0))


# Under the virtual clock.


def test_a_call_holds_virtual_time_at_its_modelled_end():
    # the call takes 50 ms of wall time and 1 s of virtual time; work of 2 s on another lane must end after it
    async def program(clock, supervisor):
        ends = []

        async def call():
            ends.append((await clock.call('a', lambda: asyncio.sleep(0.05, 'reply'), X, 10.0), clock.now()))

        supervisor.start('call', call())
        ends.append((await clock.run('b', lambda: 'work', Work('x', 2)), clock.now()))
        return ends

    assert execute(make_virtual(), program) == [('reply', 1.0), ('work', 2.0)]


@pytest.mark.parametrize('seconds', [(0.0, 0.0, 0.0), (0.1, 0.0, 0.05), (0.0, 0.1, 0.0)])
def test_the_order_of_virtual_completions_does_not_depend_on_what_calls_really_take(seconds):
    async def program(clock, supervisor):
        ends = []

        async def call(lane, amount, real_s):
            await clock.call(lane, lambda: asyncio.sleep(real_s), Work('x', amount), 10.0)
            ends.append((lane, clock.now()))

        for lane, amount, real_s in zip(('a', 'b', 'wide'), (2, 1, 2), seconds, strict=True):
            supervisor.start(lane, call(lane, amount, real_s))
        await clock.run('wide', lambda: None, Work('x', 3))
        return ends

    clock = make_virtual()
    assert execute(clock, program) == [('b', 1.0), ('a', 2.0), ('wide', 2.0)]
    assert [event['run'] for event in clock.log.events if event['kind'] == 'run_done'] == [2, 1, 3, 0]


def test_a_call_past_its_wall_deadline_ends_a_virtual_run_by_name():
    async def program(clock, supervisor):
        await clock.call('a', lambda: asyncio.sleep(60), X, 0.05)

    with pytest.raises(CallDeadlineError, match="call 'x' on lane 'a' hit its wall-time deadline"):
        execute(make_virtual(), program)


def test_a_blocked_io_loop_ends_a_virtual_run_too(monkeypatch):
    monkeypatch.setattr(virtual, 'BLOCKED_S', 0.1)
    monkeypatch.setattr(io, 'JOIN_S', 0.1)
    is_over = threading.Event()

    async def block_the_loop():
        is_over.wait(30.0)

    with pytest.raises(CallDeadlineError, match="call 'x' on lane 'a'"):
        execute(make_virtual(), lambda clock, supervisor: clock.call('a', block_the_loop, X, 0.05))
    is_over.set()


# Cancellation, and nothing is left.


@BOTH
def test_a_call_cancelled_before_its_turn_is_never_made(make):
    async def program(clock, supervisor):
        made = []

        async def reply(index):
            made.append(index)
            await asyncio.sleep(0.05)

        calls = [supervisor.start(f'call {i}', clock.call('a', functools.partial(reply, i), X, 10.0)) for i in range(2)]
        await clock.run('b', lambda: None, Work('x', 0))
        calls[1].cancel()
        await calls[0]
        return made

    assert execute(make(), program) == [0]


def test_cancelling_the_caller_cancels_the_coroutine_and_frees_the_lane():
    async def program(clock, supervisor):
        steps = []

        async def wait_for_ever():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                steps.append('cancelled')
                raise

        task = supervisor.start('call', clock.call('a', wait_for_ever, X, 60.0))
        await clock.run('b', lambda: time.sleep(0.05), X)
        task.cancel()
        steps.append(await clock.call('a', lambda: asyncio.sleep(0, 'next'), X, 10.0))
        return steps

    assert execute(make_real(), program) == ['cancelled', 'next']


def open_channels() -> collections.Counter[str]:
    """Sockets, pipes and event queues of this process; regular files may be another thread's for a moment."""
    found = []
    for number in os.listdir('/proc/self/fd'):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f'/proc/self/fd/{number}'))
    return collections.Counter(target for target in found if target.startswith(('socket:', 'pipe:', 'anon_inode:')))


@BOTH
@pytest.mark.parametrize('end', ['returns', 'raises'])
def test_nothing_is_left_of_a_call_when_the_run_ends(make, end, recwarn, caplog):
    steps = []

    async def beat():
        while True:
            await asyncio.sleep(0.01)

    async def connect_and_wait(port, connected):
        heartbeat = asyncio.create_task(beat(), name='heartbeat')  # of a library: ends with the loop
        _, writer = await asyncio.open_connection('127.0.0.1', port)
        try:
            connected.set()
            await asyncio.sleep(60)
        finally:
            writer.close()
            steps.append(heartbeat.done())

    async def program(clock, supervisor):
        connected = asyncio.Event()
        wait = functools.partial(connect_and_wait, server.getsockname()[1], connected)
        supervisor.start('call', clock.call('a', wait, Work('x', 1000), 60.0))
        supervisor.start('queued call', clock.call('a', wait, X, 60.0))
        await clock.call('b', connected.wait, X, 10.0)
        if end == 'raises':
            raise KeyError('injected')
        return 'returned'

    gc.collect()
    recwarn.clear()
    with socket.create_server(('127.0.0.1', 0)) as server:  # accepts no connection, so never answers
        threads, channels = threading.active_count(), open_channels()
        if end == 'raises':
            with pytest.raises(KeyError, match='injected'):
                execute_supervised(make(), program)
        else:
            assert execute_supervised(make(), program) == 'returned'
        gc.collect()
        assert steps == [False]
        assert threading.active_count() == threads
        assert open_channels() <= channels
    assert [str(warning.message) for warning in recwarn] == []
    assert caplog.text == ''


def test_what_a_call_wrote_before_the_run_ended_is_sent():
    here, there = socket.socketpair()
    there.settimeout(5.0)
    received = []
    sent = b'x' * 2**22  # far more than a socket buffers

    async def write():
        _, writer = await asyncio.open_connection(sock=here)
        writer.write(sent)
        writer.close()  # goes on in the background

    def read():
        with contextlib.suppress(TimeoutError):
            while chunk := there.recv(2**16):
                received.append(len(chunk))

    with there:
        reader = threading.Timer(0.1, read)
        reader.start()
        execute(make_real(), lambda clock, supervisor: clock.call('a', write, X, 10.0))
        reader.join()
    assert sum(received) == len(sent)


@pytest.mark.filterwarnings('ignore::ResourceWarning')
def test_a_connection_that_its_owner_did_not_close_is_reported(monkeypatch, caplog):
    monkeypatch.setattr(io, 'TRANSPORTS_S', 0.05)
    here, there = socket.socketpair()
    pool = []

    async def connect():
        pool.append(await asyncio.open_connection(sock=here))

    with there:
        execute(make_real(), lambda clock, supervisor: clock.call('a', connect, X, 10.0))
    assert '1 connections or pipes were left open on the I/O loop' in caplog.text
    pool.clear()
    gc.collect()
