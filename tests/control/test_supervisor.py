"""The start and the end of every coroutine of a run."""

import asyncio

import pytest

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.types import Work


def run(program):
    clock = VirtualClock({'time': 9}, EventLog(), {'time': 1.0})
    supervisor = Supervisor(clock)

    async def pass_time(seconds):
        await clock.run('time', lambda: None, Work('time', seconds))

    return clock.execute(supervisor.run(program(supervisor, pass_time)))


def test_what_still_runs_at_the_end_is_cancelled_newest_first():
    cancelled = []

    async def program(supervisor, pass_time):
        async def one(index):
            try:
                await pass_time(index)
            except asyncio.CancelledError:
                cancelled.append(index)
                raise

        for index in (9, 1, 8, 2, 7):  # 1 and 2 end by themselves, between the others
            supervisor.start(f'{index}', one(index))
        await pass_time(3)
        return 'done'

    assert run(program) == 'done'
    assert cancelled == [7, 8, 9]


def test_the_first_error_ends_the_run():
    async def program(supervisor, pass_time):
        async def fail(index):
            await pass_time(index)
            raise ValueError(f'error {index}')

        for index in (3, 2):
            supervisor.start(f'{index}', fail(index))
        await pass_time(9)

    with pytest.raises(ValueError, match='error 2'):
        run(program)
