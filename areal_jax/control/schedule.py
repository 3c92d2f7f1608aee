"""Schedules of controlled staleness, for study: which version generates the batch of each update."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Callable

from areal_jax.config.ranges import ConfigError
from areal_jax.types import PublishedWeights, Weights

CopyVersion = Callable[[PublishedWeights], Weights]  # the weights as a checkpoint can hold them; on lane `publish/0`


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Lock-step: the batch of update v -> v+1 is generated wholly with version max(0, v - delay(v))."""

    delay: Callable[[int], int]  # versions, by update
    longest: int  # the largest delay: the ring holds longest + 1 versions at most


def parse_schedule(text: str, seed: int) -> Schedule | None:
    """None for 'natural'; else 'fixed(k)', 'every(L)', 'uniform(0,k)' (drawn per batch) or 'trace(file)'.

    'every(L)' has the delays 0 to L - 1 in turn: engines take the newest weights every L updates (OAPL, arXiv
    2602.19362, algorithm 1). A file of 'trace' has an integer a line.

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
        """The newest version, and those before it that a batch not yet trained asks for."""
        later = range(newest, newest + self._schedule.longest + 1)
        return {newest} | {version for version in map(self.version_for, later) if version <= newest}

    def add(self, published: PublishedWeights) -> int:
        """Keep the version; returns the lowest one that is still needed. Versions come in ascending order."""
        self._weights[published.version] = published
        needed = self.needed(published.version)
        self._weights = {version: weights for version, weights in self._weights.items() if version in needed}
        return min(needed)

    def weights(self, version: int) -> PublishedWeights:
        """Raises ConfigError for a version that is not held: the trace differs from the one of the checkpoint."""
        if version not in self._weights:
            raise ConfigError(
                f'staleness.schedule asks for version {version}, and the run holds {sorted(self._weights)}: its trace '
                'file was changed since the checkpoint; bring the old one back, or start anew in another --workdir'
            )
        return self._weights[version]

    def in_use(self, generated_update: int | None) -> PublishedWeights:
        """What the engines begin with: the version of the batch they generate; the newest where none is unfinished."""
        newest = max(self._weights)
        if generated_update is None or generated_update < newest:  # none yet, or it is trained
            return self.weights(newest)
        return self.weights(self.version_for(generated_update))

    def earlier(self) -> list[PublishedWeights]:
        """All versions held but the newest, ascending: what a checkpoint needs besides the learner's weights."""
        return [self._weights[version] for version in sorted(self._weights)[:-1]]


def _uniform(seed: int, update: int, longest: int) -> int:
    """An integer in 0..longest, a function of seed and update alone."""
    digest = hashlib.sha256(f'{seed}/{update}'.encode()).digest()
    return int.from_bytes(digest[:8], 'big') % (longest + 1)
