"""Publication: carries the copy of each update to the engines while the learner trains the next one.

The controller puts updates in and learns through a callback when the engines decode with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from areal_jax.control.buffer import BoundedQueue
from areal_jax.control.event_writer import EventLog
from areal_jax.lanes import publish_lane
from areal_jax.protocols import Channel, Clock
from areal_jax.types import PublishedWeights, TrajectoryGroup, Weights, Work


@dataclasses.dataclass
class Update:
    """An update on its way from the learner to the engines."""

    version: int
    groups: list[TrajectoryGroup]
    metrics: Mapping[str, float]
    copy: Weights  # None once the channel has it
    frictions: Mapping[str, float] = dataclasses.field(default_factory=dict)  # see StepRecord


class Publisher:
    """Publishes one update after another.

    Args:
      install: brings published weights to the engines; returns the lowest version still needed and the longest pause
        of decoding in seconds (None: the engines do not load it now).
      published: called with the update and that pause when its version is published.
      pinned: versions that the channel must not drop yet.
    """

    def __init__(
        self,
        clock: Clock,
        log: EventLog,
        channel: Channel,
        install: Callable[[PublishedWeights], Awaitable[tuple[int, float | None]]],
        published: Callable[[Update, float | None], None],
        pinned: Callable[[], Collection[int]],
    ):
        self._clock, self._log, self._channel = clock, log, channel
        self._install, self._published, self._pinned = install, published, pinned
        self._updates: BoundedQueue[Update] = BoundedQueue(clock, 'updates to publication', 1)

    async def put(self, update: Update) -> None:
        """Hands the update over; waits while another one waits."""
        await self._updates.put(update)

    async def run(self) -> None:
        """Publishes for ever. The transfer shares the lane of engine 0's fetch, which only starts when it is done."""
        while True:
            update = await self._updates.get()
            published = await self._transfer(update)
            size = _describe_size(published)
            self._log.write('publish', version=update.version, manifest=published.manifest_hash, **size)
            lowest, pause_s = await self._install(published)
            self._channel.release(lowest, self._pinned())
            self._published(update, pause_s)

    async def _transfer(self, update: Update) -> PublishedWeights:
        copy, update.copy = update.copy, None  # the last reference goes when the channel has its own
        work = Work('publish', 1, {'version': update.version})
        return await self._clock.run(publish_lane(0), lambda: self._channel.transfer(update.version, copy), work)


def _describe_size(published: PublishedWeights) -> dict[str, Any]:
    """The fields of the event; none where the channel does not say."""
    if (size := published.size) is None:
        return {}
    changed = {} if size.changed is None else {'changed': size.changed}
    return {'channel': size.channel, 'record': size.record, 'bytes': size.nbytes, **changed}
