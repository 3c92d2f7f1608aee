"""Lock-step admission, for study: each batch is generated wholly with the version that a schedule names (lock_step.py).

The controller uses it in place of Admission.run where `staleness.schedule` is not 'natural'.
"""

from __future__ import annotations

from areal_jax.control.gate import Admission, StalenessGate
from areal_jax.control.lock_step import VersionRing
from areal_jax.lanes import publish_lane
from areal_jax.protocols import Clock, Pool
from areal_jax.types import PublishedWeights, Weights, Work


class LockStep:
    """Admits the groups of one update after another, each after the engines have loaded its version."""

    def __init__(self, clock: Clock, pool: Pool, gate: StalenessGate, admission: Admission, ring: VersionRing):
        self._clock, self._pool, self._gate, self._admission = clock, pool, gate, admission
        self._ring = ring
        self._loading = False
        self._load_ended = clock.event('a load for the next batch')
        self.generated_update: int | None = None  # the update whose batch the engines generate

    async def run(self, first_update: int, updates: int, groups_per_update: int) -> None:
        """Admits the batches of updates `first_update` to `updates` - 1."""
        resumed = self.generated_update  # the engines hold its version already
        for update in range(first_update if resumed is None else resumed, updates):
            if update != resumed:
                await self._load_for(update)
            await self._admit_batch((update + 1) * groups_per_update)
        self._admission.note_bound('steps')

    async def _admit_batch(self, wanted: int) -> None:
        """Returns when `wanted` groups are admitted in all and none runs; a failed group leaves the count: refilled."""
        while self._gate.running or self._gate.admitted < wanted:
            bound = self._admission.closed_by() if self._gate.admitted < wanted else 'schedule'
            if bound is None:
                self._admission.start_group()
            else:
                await self._admission.wait(bound)

    async def _load_for(self, update: int) -> None:
        """Every engine loads the version that the batch of this update is generated with."""
        version = self._ring.version_for(update)
        while self._admission.is_closed or self._gate.version < version:
            await self._admission.wait('schedule')
        self._admission.note_bound('schedule')
        self._loading = True
        await self._pool.load_weights(self._ring.weights(version))
        self._loading, self.generated_update = False, update
        self._load_ended.set()

    async def load_newest(self, version: int) -> None:
        """Every engine loads the version trained last: an evaluation follows."""
        await self._pool.load_weights(self._ring.weights(version))

    async def wait_loaded(self) -> None:
        """Returns when no load is under way."""
        while self._loading:
            self._load_ended.clear()
            await self._clock.wait(self._load_ended)

    def add(self, published: PublishedWeights) -> int:
        """Keeps the version for later batches; returns the lowest one that is still needed."""
        return self._ring.add(published)

    async def copy_earlier_versions(self) -> dict[int, Weights]:
        """The weights of the ring by version, but the newest: a checkpoint has those from the learner."""
        held = self._ring.earlier()
        if not held:
            return {}
        copy = lambda: {published.version: self._ring.copy(published) for published in held}
        return await self._clock.run(publish_lane(0), copy, Work('snapshot', len(held)))
