"""The trajectory buffer: whole groups, lowest draw first, each used once; too old groups are dropped with a reason.

The controller fills it and forms batches from it.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from areal_jax.errors import UserError
from areal_jax.protocols import Clock
from areal_jax.types import Dropped, TrajectoryGroup

Item = TypeVar('Item')


class BoundedQueue(Generic[Item]):
    """First in, first out; `put` waits while the queue holds `capacity` items."""

    def __init__(self, clock: Clock, edge: str, capacity: int):
        if capacity < 1:
            raise ValueError(f'queue {edge!r} needs capacity >= 1, got {capacity}')
        self._clock, self._capacity = clock, capacity
        self._items: collections.deque[Item] = collections.deque()
        self._filled = clock.event(f'{edge} (queue empty)')
        self._freed = clock.event(f'{edge} (queue full)')

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: Item) -> None:
        while len(self._items) >= self._capacity:
            self._freed.clear()
            await self._clock.wait(self._freed)
        self._items.append(item)
        self._filled.set()

    async def get(self) -> Item:
        while not self._items:
            self._filled.clear()
            await self._clock.wait(self._filled)
        item = self._items.popleft()
        self._freed.set()
        return item


# The filter of finished groups: a group without a signal is dropped before it reaches the buffer, and replaced.
#
# Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2); `task.filter` selects the rule.
# `learner.filter_equal_rewards` is the other filter: it leaves a group out of a batch in which it has used a place.


# reasons of a drop, which are also the names of the rules
EQUAL_REWARDS = 'equal_rewards'
SUCCESS_RATE = 'success_rate'
BY_REWARD = (EQUAL_REWARDS, SUCCESS_RATE)


class NoSignalError(UserError, RuntimeError):
    """Every group was filtered for too long; the message names the last group and the fields."""


@dataclasses.dataclass(frozen=True)
class FilterRule:
    """A rule that decides which finished groups are dropped."""

    name: str  # one of BY_REWARD
    drops: Callable[[TrajectoryGroup], bool]


def equal_rewards() -> FilterRule:
    """Drops groups whose rewards are all equal, as the filter inside the batch does (`has_equal_rewards`)."""
    return FilterRule(EQUAL_REWARDS, TrajectoryGroup.has_equal_rewards)


def success_rate(low: float, high: float) -> FilterRule:
    """Drops groups whose share of answers with a reward above 0 lies outside [low, high]."""

    def drops(group: TrajectoryGroup) -> bool:
        rewards = [trajectory.reward for trajectory in group.heads]
        return not low <= sum(reward > 0 for reward in rewards) / len(rewards) <= high

    return FilterRule(SUCCESS_RATE, drops)


def describe_drop(reason: str, rewards: Sequence[float]) -> str:
    """The detail of a drop, from the rewards of the group's answers in the order of the samples."""
    if reason == EQUAL_REWARDS:
        return ', '.join({f'{len(rewards)} rewards of {reward:g}': None for reward in rewards})
    return f'{sum(reward > 0 for reward in rewards)} of {len(rewards)} rewards above 0'


class GroupFilter:
    """Applies a rule to finished groups.

    If some answers of a group could not be verified, the others decide. `limit` dropped groups in a row end the run:
    the engines would generate for nothing.
    """

    def __init__(self, rule: FilterRule, limit: int):
        self._rule, self._limit = rule, limit
        self._kept = self._dropped = 0  # groups since the last `take_rate`
        self._in_a_row = 0

    def judge(self, group: TrajectoryGroup) -> Dropped | None:
        """Returns the drop of the group, or None if it is kept."""
        if not self._rule.drops(group):
            self._kept, self._in_a_row = self._kept + 1, 0
            return None
        self._dropped, self._in_a_row = self._dropped + 1, self._in_a_row + 1
        rewards = [trajectory.reward for trajectory in group.heads]
        return Dropped(group.draw, self._rule.name, describe_drop(self._rule.name, rewards))

    def require_signal(self, last: Dropped) -> None:
        """Raises NoSignalError, which names the last drop, after `limit` drops in a row."""
        if self._in_a_row >= self._limit:
            raise NoSignalError(
                f"{self._in_a_row} groups in a row (task.max_filtered_groups) were dropped by task.filter='"
                f"{self._rule.name}', the last, draw {last.draw}, with {last.detail}: look at answers and verdicts, "
                'take easier or harder problems, raise rollout.group_size or task.max_filtered_groups, or start anew '
                "with task.filter='none'"
            )

    def take_rate(self) -> float | None:
        """The dropped share of the groups judged since the last call; None if no group was judged."""
        judged, dropped = self._kept + self._dropped, self._dropped
        self._kept = self._dropped = 0
        return dropped / judged if judged else None

    def state(self) -> dict[str, int]:
        return {'kept': self._kept, 'dropped': self._dropped, 'in_a_row': self._in_a_row}

    def restore(self, state: Mapping[str, int]) -> None:
        self._kept, self._dropped, self._in_a_row = state['kept'], state['dropped'], state['in_a_row']


OVER_AGE = 'over_age'  # reason of the drops by `drop_over_age`

_SLACK = 64  # number of stale entries of `_ages` that triggers their removal


class TrajectoryBuffer:
    """Finished groups in the order of their draws; every change costs O(log groups)."""

    def __init__(self) -> None:
        self._groups: dict[int, TrajectoryGroup] = {}  # by draw
        self._draws: list[int] = []  # heap; a draw that is no longer in `_groups` was dropped
        self._ages: list[tuple[int, int]] = []  # heap of (oldest version, draw), including taken groups

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
        """Removes and returns the `count` groups with the lowest draws."""
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
    """{'positions'} that the tokens of prompts and answers see: each token sees itself and all before it."""
    rows = [row for group in groups for row in group.trajectories]
    lengths = [len(row.prompt.tokens) + sum(len(s.tokens) for s in row.segments) for row in rows]
    return {'positions': sum(length * (length + 1) // 2 for length in lengths)}
