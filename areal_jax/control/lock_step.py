"""Lock-step admission, for study: a schedule names the version with which each batch is wholly generated.

The controller uses it in place of Admission.run if `staleness.schedule` is not 'natural'.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Callable

from areal_jax.config.fields import ConfigError
from areal_jax.control.gate import Admission, StalenessGate
from areal_jax.lanes import publish_lane
from areal_jax.protocols import Clock, Pool
from areal_jax.types import PublishedWeights, Weights, Work

CopyVersion = Callable[[PublishedWeights], Weights]  # gives weights that a checkpoint can hold; on lane `publish/0`


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Lock-step: the batch of update v -> v+1 is generated wholly with version max(0, v - delay(v))."""

    delay: Callable[[int], int]  # versions, by update
    longest: int  # the largest delay: the ring holds at most longest + 1 versions


def parse_schedule(text: str, seed: int) -> Schedule | None:
    """Parses 'fixed(k)', 'every(L)', 'uniform(0,k)' (drawn per batch) or 'trace(file)'; None for 'natural'.

    'every(L)' has the delays 0 to L - 1 in turn: engines take the newest weights every L updates (OAPL, arXiv
    2602.19362, algorithm 1). A file of 'trace' has one integer per line.

    Raises ValueError that names the text and the known forms.
    """
    if text == 'natural':
        return None
    if match := re.fullmatch(r'fixed\((\d+)\)', text):
        fixed = int(match[1])
        return Schedule(lambda update: fixed, fixed)
    if match := re.fullmatch(r'every\(([1-9]\d*)\)', text):
        period = int(match[1])
        return Schedule(lambda update: update % period, period - 1)
    if match := re.fullmatch(r'uniform\(0, ?(\d+)\)', text):
        longest = int(match[1])
        return Schedule(lambda update: _uniform(seed, update, longest), longest)
    if match := re.fullmatch(r'trace\((.+)\)', text):
        words = pathlib.Path(match[1]).read_text().split()
        if wrong := [word for word in words if not word.isdecimal()] or (not words and ['an empty file']):
            raise ConfigError(
                f'staleness.schedule={text!r}: the file needs integers >= 0, one a line, not {wrong[0]!r}'
            )
        delays = [int(word) for word in words]
        return Schedule(lambda update: delays[update % len(delays)], max(delays))
    raise ConfigError(
        f'staleness.schedule={text!r} is not known; use natural, fixed(k), every(L), uniform(0,k) or trace(file), e.g. '
        'fixed(4)'
    )


class VersionRing:
    """The published versions that a later batch may still ask for."""

    def __init__(self, schedule: Schedule, copy: CopyVersion):
        self._schedule, self.copy = schedule, copy
        self._weights: dict[int, PublishedWeights] = {}

    def version_for(self, update: int) -> int:
        return max(0, update - self._schedule.delay(update))

    def needed(self, newest: int) -> set[int]:
        """The newest version, and the earlier versions that an untrained batch still asks for."""
        later = range(newest, newest + self._schedule.longest + 1)
        return {newest} | {version for version in map(self.version_for, later) if version <= newest}

    def add(self, published: PublishedWeights) -> int:
        """Keeps the version; returns the lowest version still needed. Versions come in ascending order."""
        self._weights[published.version] = published
        needed = self.needed(published.version)
        self._weights = {version: weights for version, weights in self._weights.items() if version in needed}
        return min(needed)

    def weights(self, version: int) -> PublishedWeights:
        """The weights of a version; raises ConfigError if it is not held, because the trace was changed."""
        if version not in self._weights:
            raise ConfigError(
                f'staleness.schedule asks for version {version}, and the run holds {sorted(self._weights)}: its trace '
                'file was changed since the checkpoint; bring the old one back, or start anew in another --workdir'
            )
        return self._weights[version]

    def in_use(self, generated_update: int | None) -> PublishedWeights:
        """The weights that engines begin with: for the batch they generate, or the newest if there is no batch."""
        newest = max(self._weights)
        if generated_update is None or generated_update < newest:  # no batch yet, or it is trained
            return self.weights(newest)
        return self.weights(self.version_for(generated_update))

    def earlier(self) -> list[PublishedWeights]:
        """All held versions except the newest, ascending, which a checkpoint needs besides the learner's weights."""
        return [self._weights[version] for version in sorted(self._weights)[:-1]]


def _uniform(seed: int, update: int, longest: int) -> int:
    """An integer in 0..longest that depends only on seed and update."""
    digest = hashlib.sha256(f'{seed}/{update}'.encode()).digest()
    return int.from_bytes(digest[:8], 'big') % (longest + 1)


class LockStep:
    """Admits the groups update by update, each time after the engines have loaded the update's version."""

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
        """Returns when `wanted` groups in all are admitted and no group runs; replaces failed groups."""
        while self._gate.running or self._gate.admitted < wanted:
            bound = self._admission.closed_by() if self._gate.admitted < wanted else 'schedule'
            if bound is None:
                self._admission.start_group()
            else:
                await self._admission.wait(bound)

    async def _load_for(self, update: int) -> None:
        """Loads the version for this update's batch on every engine."""
        version = self._ring.version_for(update)
        while self._admission.is_closed or self._gate.version < version:
            await self._admission.wait('schedule')
        self._admission.note_bound('schedule')
        self._loading = True
        await self._pool.load_weights(self._ring.weights(version))
        self._loading, self.generated_update = False, update
        self._load_ended.set()

    async def load_newest(self, version: int) -> None:
        """Loads the last trained version on every engine, for the evaluation that follows."""
        await self._pool.load_weights(self._ring.weights(version))

    async def wait_loaded(self) -> None:
        """Returns when no load is under way."""
        while self._loading:
            self._load_ended.clear()
            await self._clock.wait(self._load_ended)

    def add(self, published: PublishedWeights) -> int:
        """Keeps the version for later batches; returns the lowest version still needed."""
        return self._ring.add(published)

    async def copy_earlier_versions(self) -> dict[int, Weights]:
        """Copies the ring's weights by version, except the newest: a checkpoint has these from the learner."""
        held = self._ring.earlier()
        if not held:
            return {}
        copy = lambda: {published.version: self._ring.copy(published) for published in held}
        return await self._clock.run(publish_lane(0), copy, Work('snapshot', len(held)))
