"""The publisher: what the log says of a version."""

import pytest

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.controller import Publisher, Update
from areal_jax.control.event_writer import EventLog, check_types
from areal_jax.control.supervisor import Supervisor
from areal_jax.types import PublicationSize, PublishedWeights

SIZES = [
    (None, {}),
    (PublicationSize('files', 'whole', 100), {'channel': 'files', 'record': 'whole', 'bytes': 100}),
    (
        PublicationSize('files', 'delta', 7, 0.03),
        {'channel': 'files', 'record': 'delta', 'bytes': 7, 'changed': 0.03},
    ),
]


class SizedChannel:
    def __init__(self, size):
        self._size, self.released = size, []

    def transfer(self, version, copy):
        return PublishedWeights(version, 'm', copy, self._size)

    def release(self, version, pinned=()):
        self.released.append((version, tuple(pinned)))


@pytest.mark.parametrize(('size', 'fields'), SIZES)
def test_the_log_says_what_the_channel_says_of_a_version(size, fields):
    log, channel = EventLog(), SizedChannel(size)
    log.listeners.append(check_types)
    clock = VirtualClock({'publish/0': 1}, log, {'publish': 2.0})
    supervisor, done = Supervisor(clock), clock.event('published')

    async def install(published):
        return published.version, 0.5

    publisher = Publisher(
        clock, log, channel, install, lambda update, pause_s: done.set(), pinned=lambda: (1,)
    )  # fmt: skip

    async def program():
        supervisor.start('publisher', publisher.run())
        await publisher.put(Update(3, [], {}, 'copy'))
        await clock.wait(done)

    clock.execute(supervisor.run(program()))
    (event,) = [event for event in log.events if event['kind'] == 'publish']
    assert {name: event[name] for name in event.keys() - {'seq', 'time', 'lane', 'kind'}} == {
        'version': 3, 'manifest': 'm', **fields,
    }  # fmt: skip
    assert event['time'] == 2.0
    assert channel.released == [(3, (1,))]
