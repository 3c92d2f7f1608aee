"""The trajectory buffer: whole groups, lowest draw first, each used once; a group that is too old leaves with a reason.

The controller fills it and forms batches from it.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from areal_jax.types import Dropped, TrajectoryGroup

OVER_AGE = 'over_age'  # reason of groups that `drop_over_age` removes

_SLACK = 64  # entries of groups that left, beyond which they are cleared away


class TrajectoryBuffer:
    """Finished groups in the order of their draws; every change costs O(log groups)."""

    def __init__(self) -> None:
        self._groups: dict[int, TrajectoryGroup] = {}  # by draw
        self._draws: list[int] = []  # heap; a draw that is not in `_groups` any more was dropped
        self._ages: list[tuple[int, int]] = []  # heap of (oldest version, draw); also of groups that were taken

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: TrajectoryGroup) -> None:
        if group.draw in self._groups:
            raise ValueError(f'draw {group.draw} is in the buffer already')
        self._groups[group.draw] = group
        heapq.heappush(self._draws, group.draw)
        heapq.heappush(self._ages, (group.oldest_version(), group.draw))
        if len(self._ages) > 2 * len(self._groups) + _SLACK:
            self._ages = [entry for entry in self._ages if entry[1] in self._groups]
            heapq.heapify(self._ages)

    def take(self, count: int) -> list[TrajectoryGroup]:
        """The `count` groups with the lowest draws; each is handed out once."""
        if count > len(self._groups):
            raise ValueError(f'{count} groups asked for, {len(self._groups)} buffered')
        taken: list[TrajectoryGroup] = []
        while len(taken) < count:
            group = self._groups.pop(heapq.heappop(self._draws), None)
            if group is not None:
                taken.append(group)
        return taken

    def drop_over_age(self, version: int, max_token_age: int) -> list[Dropped]:
        """Removes the groups with a token older than `max_token_age` versions at `version`; lowest draw first."""
        ages: dict[int, int] = {}  # by draw
        while self._ages and version - self._ages[0][0] > max_token_age:
            oldest, draw = heapq.heappop(self._ages)
            if self._groups.pop(draw, None) is not None:
                ages[draw] = version - oldest
        return [Dropped(draw, OVER_AGE, f'age {ages[draw]} > {max_token_age}') for draw in sorted(ages)]

    def groups(self) -> list[TrajectoryGroup]:
        """The content, lowest draw first."""
        return [self._groups[draw] for draw in sorted(self._groups)]


def stamp_consumed(group: TrajectoryGroup, now: float) -> TrajectoryGroup:
    """The group with the time at which a batch took it, in clock seconds."""
    stamped = tuple(dataclasses.replace(trajectory, consumed_s=now) for trajectory in group.trajectories)
    return dataclasses.replace(group, trajectories=stamped)


def count_positions(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """{'positions'} that the tokens of prompts and answers see: each token itself and those before it."""
    rows = [row for group in groups for row in group.trajectories]
    lengths = [len(row.prompt.tokens) + sum(len(s.tokens) for s in row.segments) for row in rows]
    return {'positions': sum(length * (length + 1) // 2 for length in lengths)}
