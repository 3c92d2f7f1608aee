"""Writes checkpoints, one at a time, on the lane `disk` while the loop goes on."""

from __future__ import annotations

from collections.abc import Callable

from areal_jax import lanes
from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import Clock
from areal_jax.types import Work


class CheckpointWriter:
    """Knows whether a checkpoint is being written."""

    def __init__(self, clock: Clock, supervisor: Supervisor):
        self._clock, self._supervisor = clock, supervisor
        self._writing = False
        self._written = clock.event('the checkpoint before')

    def start(self, update: int, write: Callable[[], None]) -> None:
        """Starts to write the checkpoint taken after `update`."""
        self._writing = True
        self._supervisor.start('save', self._write(update, write))

    async def wait(self) -> None:
        """Returns when nothing is being written."""
        while self._writing:
            self._written.clear()
            await self._clock.wait(self._written)

    async def _write(self, update: int, write: Callable[[], None]) -> None:
        await self._clock.run(lanes.DISK, write, Work('save', 1, {'update': update}))
        self._writing = False
        self._written.set()
