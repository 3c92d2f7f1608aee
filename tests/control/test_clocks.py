import asyncio
import signal
import threading
import time
import weakref

import pytest

from areal_jax.control.buffer import BoundedQueue
from areal_jax.control.clocks.loop import DeadlockError, StallError
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.types import Work

LANES = {'a': 1, 'b': 1, 'wide': 2}


def virtual(prices=None):
    return VirtualClock(LANES, EventLog(), prices or {'x': 1.0})


def real(stall_timeout_s=30.0):
    return RealClock(LANES, EventLog(), stall_timeout_s)


def execute(clock, program):
    return clock.execute(program(clock, Supervisor(clock)))


async def _gather(clock, supervisor, coros):
    done, results = clock.event('all done'), []

    async def one(coro):
        results.append(await coro)
        if len(results) == len(coros):
            done.set()

    for index, coro in enumerate(coros):
        supervisor.start(f'worker {index}', one(coro))
    await clock.wait(done)
    return results


def test_a_lane_serves_in_order_of_request_and_lanes_overlap():
    # lane a: 2 s then 1 s = ends at 2 and 3; lane b: 2.5 s, in between
    async def program(clock, supervisor):
        async def work(lane, seconds):
            await clock.run(lane, lambda: None, Work('x', seconds))
            return lane, clock.now()

        return await _gather(clock, supervisor, [work('a', 2), work('a', 1), work('b', 2.5)])

    assert execute(virtual(), program) == [('a', 2.0), ('b', 2.5), ('a', 3.0)]


def test_a_lane_of_width_two_runs_two_at_once():
    async def program(clock, supervisor):
        async def work(seconds):
            await clock.run('wide', lambda: None, Work('x', seconds))
            return clock.now()

        return await _gather(clock, supervisor, [work(2), work(3), work(2)])

    assert execute(virtual(), program) == [2.0, 3.0, 4.0]  # the third starts at 2


def test_equal_times_are_released_in_order_of_request():
    async def program(clock, supervisor):
        async def work(lane, name):
            await clock.run(lane, lambda: None, Work('x', 1))
            return name

        return await _gather(clock, supervisor, [work('b', 'first'), work('a', 'second')])

    assert execute(virtual(), program) == ['first', 'second']


@pytest.mark.parametrize('make', [virtual, real])
def test_wait_tells_event_from_deadline(make):
    async def program(clock, supervisor):
        late, soon = clock.event('late'), clock.event('soon')

        async def setter():
            await clock.run('a', lambda: None, Work('x', 0.01))
            soon.set()
            return None

        supervisor.start('setter', setter())
        return await clock.wait(soon, 60.0), await clock.wait(late, 0.02), await clock.wait(soon)

    assert execute(make(), program) == (True, False, True)


def test_virtual_deadline_is_exact():
    async def program(clock, supervisor):
        await clock.wait(clock.event('never'), 7.25)
        return clock.now()

    assert execute(virtual(), program) == 7.25


@pytest.mark.parametrize('make', [virtual, real])
def test_deadlock_names_its_waiters(make):
    async def program(clock, supervisor):
        supervisor.start('patient', clock.wait(clock.event('godot')))
        await clock.wait(clock.event('the end'))

    with pytest.raises(DeadlockError, match="'the end' awaited by main; 'godot' awaited by patient"):
        execute(make(), program)


def test_stall_names_the_busy_lane():
    release = threading.Event()

    async def program(clock, supervisor):
        await clock.run('a', release.wait, Work('x'))

    with pytest.raises(StallError, match=r"run.stall_timeout_s.*lane 'a' busy with 'x'"):
        execute(real(stall_timeout_s=0.1), program)
    release.set()


@pytest.mark.parametrize('make', [virtual, real])
def test_an_exception_in_work_reaches_its_caller_and_frees_the_lane(make):
    async def program(clock, supervisor):
        with pytest.raises(ZeroDivisionError):
            await clock.run('a', lambda: 1 / 0, Work('x', 0.01))
        return await clock.run('a', lambda: 'next', Work('x', 0.01))

    assert execute(make(), program) == 'next'


@pytest.mark.parametrize('make', [virtual, real])
def test_an_iterator_that_ends_in_work_is_told_from_the_end_of_a_coroutine(make):
    with pytest.raises(RuntimeError, match="work 'x' on lane 'a' raised StopIteration") as caught:
        execute(make(), lambda clock, supervisor: clock.run('a', lambda: next(iter([])), Work('x', 0.01)))
    assert isinstance(caught.value.__cause__, StopIteration)


def test_real_lanes_have_their_own_thread():
    async def program(clock, supervisor):
        async def name(lane):
            return await clock.run(lane, lambda: threading.current_thread().name, Work('x'))

        return sorted(await _gather(clock, supervisor, [name('a'), name('b'), name('a')]))

    assert execute(real(), program) == ['a#0', 'a#0', 'b#0']


def test_real_lag_sees_a_callback_that_blocks_the_loop():
    async def program(clock, supervisor):
        async def blocker():
            await clock.run('a', lambda: None, Work('x'))
            time.sleep(0.2)  # lane b completes meanwhile and has to wait
            return None

        return await _gather(clock, supervisor, [blocker(), clock.run('b', lambda: time.sleep(0.05), Work('x'))])

    clock = real()
    execute(clock, program)
    assert clock.max_lag_s > 0.1


@pytest.mark.parametrize('make', [virtual, real])
def test_a_signal_enters_as_a_completion(make):
    async def program(clock, supervisor):
        stop = clock.event('stop')
        clock.post_signal(signal.SIGUSR1, stop)
        return await clock.wait(stop, 5.0)

    clock = make()
    assert execute(clock, program) is True
    assert [e['name'] for e in clock.log.events if e['kind'] == 'signal'] == ['SIGUSR1']


def test_undeclared_lane_and_unpriced_work_are_named():
    async def lane(clock, supervisor):
        await clock.run('c', lambda: None, Work('x'))

    async def price(clock, supervisor):
        await clock.run('a', lambda: None, Work('y'))

    with pytest.raises(ValueError, match="lane 'c' was not declared"):
        execute(virtual(), lane)
    with pytest.raises(ValueError, match="work 'y' has no price"):
        execute(virtual(), price)


def test_the_first_exception_ends_the_run():
    async def program(clock, supervisor):
        async def main():
            async def fails():
                await clock.run('a', lambda: None, Work('x', 1))
                raise KeyError('engine died')

            supervisor.start('fails', fails())
            await clock.run('b', lambda: None, Work('x', 5))

        await supervisor.run(main())

    with pytest.raises(KeyError, match='engine died'):
        execute(virtual(), program)


def test_a_bounded_queue_keeps_order_and_makes_its_producer_wait():
    async def program(clock, supervisor):
        queue = BoundedQueue(clock, 'edge', 2)
        done, put_at, got = clock.event('done'), [], []

        async def produce():
            for item in range(4):
                await queue.put(item)
                put_at.append(clock.now())

        async def consume():
            for _ in range(4):
                await clock.run('a', lambda: None, Work('x', 1))
                got.append(await queue.get())
            done.set()

        supervisor.start('produce', produce())
        supervisor.start('consume', consume())
        await clock.wait(done)
        return got, put_at

    # two fit at once, the third when the first is taken at 1 s, the fourth at 2 s
    assert execute(virtual(), program) == ([0, 1, 2, 3], [0.0, 0.0, 1.0, 2.0])


@pytest.mark.parametrize('make', [virtual, real])
def test_a_signal_before_the_program_runs_is_not_lost_and_one_after_it_does_nothing(make):
    async def program(clock, supervisor):
        return await clock.wait(stop, 5.0)

    clock = make()
    stop = clock.event('stop')
    clock.post_signal(signal.SIGUSR1, stop)
    assert execute(clock, program) is True
    clock.post_signal(signal.SIGUSR1, stop)


def test_a_signal_from_another_thread_wakes_the_program():
    async def program(clock, supervisor):
        threading.Thread(target=clock.post_signal, args=(signal.SIGUSR1, stop)).start()
        return await clock.wait(stop, 30.0)

    clock = real()
    stop = clock.event('stop')
    assert execute(clock, program) is True


@pytest.mark.parametrize('make', [virtual, real])
@pytest.mark.parametrize('when', ['before', 'while it works', 'after'])
def test_an_abandoned_program_ends_with_keyboard_interrupt(make, when):
    clock, cleaned, worked = make(), [], []

    def work():
        worked.append('begun')
        thread = threading.Thread(target=clock.abandon)
        if when == 'while it works':
            thread.start()
            thread.join()
        worked.append('ended')

    async def program(clock, supervisor):
        try:
            await clock.run('a', work, Work('x', 1))
            await clock.run('a', lambda: worked.append('more'), Work('x', 1))
        finally:
            cleaned.append(True)
        return 'a result'

    if when == 'before':
        clock.abandon()
    if when == 'after':
        assert execute(clock, program) == 'a result'
        clock.abandon()
        return
    with pytest.raises(KeyboardInterrupt):
        execute(clock, program)
    assert worked == ([] if when == 'before' else ['begun', 'ended'])
    assert cleaned == ([] if when == 'before' else [True])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith('a#')]


def test_the_end_of_the_program_waits_for_work_as_long_as_it_is_told():
    ended, begun, release, done = [], threading.Event(), threading.Event(), threading.Event()

    def work():
        begun.set()
        release.wait(20)
        ended.append(True)
        done.set()

    def run(end_of_work_s, beside):
        async def program(clock, supervisor):
            supervisor.start('slow', clock.run('a', work, Work('x')))
            await clock.run('b', beside, Work('x'))

        execute(RealClock(LANES, EventLog(), 30.0, end_of_work_s=end_of_work_s), program)

    run(0.01, lambda: begun.wait(20))
    assert ended == []
    release.set()
    assert done.wait(20)
    begun.clear()
    release.clear()
    run(20.0, lambda: begun.wait(20) and threading.Timer(0.2, release.set).start())
    assert ended == [True, True]


def test_the_loop_of_the_host_has_no_timers():
    with pytest.raises(RuntimeError, match=r"the host's loop has no timers: wait with clock\.wait"):
        execute(virtual(), lambda clock, supervisor: asyncio.sleep(0.1))


def test_an_event_costs_the_same_whatever_the_number_of_waiters():
    async def program(clock, supervisor):
        event, others = clock.event('reply'), []

        async def measure(n_waiting):
            """Wall seconds for 200 waits that end at a deadline of their own, while others wait for the same event."""
            others.extend(supervisor.start('other', clock.wait(event, 1000.0)) for _ in range(n_waiting - len(others)))
            seconds = []
            for _ in range(4):
                await clock.wait(clock.event('the others have started'), 0.01)
                began = time.perf_counter()
                for _ in range(200):
                    assert not await supervisor.start('one', clock.wait(event, 0.01))
                seconds.append(time.perf_counter() - began)
            return min(seconds)

        return await measure(16), await measure(20_000)

    few, many = execute(virtual(), program)
    assert many < 4 * few  # many times as long where a waiter or a task is searched in a list


def test_the_threads_of_the_lanes_end_with_the_program():
    async def program(clock, supervisor):
        supervisor.start('long', clock.run('a', lambda: time.sleep(0.3), Work('x')))
        await clock.run('b', lambda: None, Work('x'))

    before = threading.active_count()
    execute(real(), program)
    assert threading.active_count() == before


def test_work_in_the_background_takes_its_time_and_delays_nothing_in_the_foreground():
    async def program(clock, supervisor, background):
        ends = []

        async def work(name, seconds, in_background=False):
            await clock.run('a', lambda: None, Work('x', seconds, {}, in_background))
            ends.append((name, clock.now()))

        behind = [work('E', 3.0, True), work('F', 1.5, True)] if background else []
        await _gather(clock, supervisor, [*behind, work('T', 2.0), work('U', 2.0)])
        return ends

    run = lambda background: execute(virtual(), lambda clock, supervisor: program(clock, supervisor, background))
    assert run(True) == [('T', 2.0), ('E', 3.0), ('U', 4.0), ('F', 4.5)]
    assert [end for end in run(True) if end[0] in 'TU'] == run(False)


def test_items_of_other_threads_wake_an_idle_program_in_their_order():
    async def program(clock, supervisor):
        inbox = clock.inbox('requests', may_idle=True)
        thread = threading.Thread(target=lambda: (time.sleep(0.3), [inbox.put(item) for item in range(3)]))
        thread.start()
        found = [await inbox.take() for _ in range(3)]
        thread.join()
        return found

    # idle for longer than the stall timeout: neither a deadlock nor a stall
    assert execute(real(stall_timeout_s=0.1), program) == [0, 1, 2]


def test_a_wait_with_a_deadline_may_be_longer_than_a_stall_where_items_may_come():
    async def program(clock, supervisor):
        clock.inbox('requests', may_idle=True)
        return await clock.wait(clock.event('never'), 0.3)

    assert execute(real(stall_timeout_s=0.1), program) is False


def test_a_lane_that_hangs_is_a_stall_also_where_items_may_come():
    async def program(clock, supervisor):
        clock.inbox('requests', may_idle=True)
        await clock.run('a', lambda: time.sleep(1.0), Work('x'))

    with pytest.raises(StallError, match="lane 'a' busy"):
        execute(real(stall_timeout_s=0.1), program)


async def look_for_ever(clock):
    """As at servers: work on a lane of upkeep, and a wait."""
    while True:
        await clock.run('registry', lambda: None, Work('registry'))
        await clock.wait(clock.event('next look'), 0.02)


def test_looks_at_servers_do_not_hide_a_stall():
    async def program(clock, supervisor):
        inbox = clock.inbox('tokens')
        supervisor.start('registry', look_for_ever(clock))
        await inbox.take()

    clock = real(stall_timeout_s=0.3)
    clock.declare('registry', 1)
    with pytest.raises(StallError, match=r"no completion for 0\.3 s .*'tokens' awaited by main"):
        execute(clock, program)


def test_a_run_that_nobody_tells_anything_has_stalled_where_it_may_not_idle():
    async def program(clock, supervisor):
        await clock.inbox('tokens').take()

    with pytest.raises(StallError, match=r"no completion for 0\.1 s .*'tokens' awaited by main"):
        execute(real(stall_timeout_s=0.1), program)


def test_what_servers_say_is_no_stall_however_little_it_is():
    async def program(clock, supervisor):
        inbox = clock.inbox('tokens')
        supervisor.start('registry', look_for_ever(clock))
        threading.Thread(target=lambda: [(time.sleep(0.2), inbox.put(item)) for item in range(4)]).start()
        return [await inbox.take() for _ in range(4)]

    clock = real(stall_timeout_s=0.5)
    clock.declare('registry', 1)
    assert execute(clock, program) == [0, 1, 2, 3]


@pytest.mark.parametrize('make', [virtual, real])
def test_an_item_enters_in_its_turn_among_the_completions(make):
    async def program(clock, supervisor):
        inbox, seen = clock.inbox('requests'), []

        async def work():
            await clock.run('a', lambda: inbox.put('item'), Work('x'))
            seen.append('work')

        supervisor.start('work', work())
        seen.append(await inbox.take())
        await clock.run('b', lambda: time.sleep(0.05), Work('x'))
        return seen

    # put while the work runs: before the work completes
    assert execute(make(), program) == ['item', 'work']


def test_an_item_that_was_put_before_the_program_runs_is_not_lost():
    clock = real()
    inbox = clock.inbox('requests')
    inbox.put('early')
    assert clock.execute(inbox.take()) == 'early'
    inbox.put('late')  # nothing happens


def test_under_the_virtual_clock_nothing_comes_from_another_thread():
    async def program(clock, supervisor):
        inbox, errors = clock.inbox('requests'), []

        def put():
            try:
                inbox.put(1)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=put)
        thread.start()
        thread.join()
        return errors

    [error] = execute(virtual(), program)
    assert 'use run.clock=real' in error


def test_a_price_may_depend_on_the_lane_and_on_the_size_of_the_work():
    prices = {'x': lambda lane, work: (2 if lane == 'b' else 1) * work.size['rows'] * work.amount, 'y': 2.0}

    async def program(clock, supervisor):
        await clock.run('a', lambda: None, Work('x', 3, size={'rows': 5}))
        await clock.run('a', lambda: None, Work('y', 3, size={'rows': 5}))
        await clock.run('b', lambda: None, Work('x', 3, size={'rows': 5}))
        return clock.now()

    clock = virtual(prices)
    assert execute(clock, program) == 51.0
    assert all('rows' not in event for event in clock.log.events)  # it is not logged


@pytest.mark.parametrize('make', [real, virtual])
def test_a_lane_that_waits_keeps_nothing_of_the_work_before(make):
    class Weights:
        pass

    async def program(clock, supervisor):
        weights = Weights()
        seen = weakref.ref(weights)
        await clock.run('a', lambda kept=weights: kept, Work('x', 1))
        del weights
        while seen() is not None and clock.now() < 5:  # the thread of the lane lets go a moment later
            await clock.run('b', lambda: None, Work('x', 0.01))
        return seen() is None

    assert execute(make(), program)
