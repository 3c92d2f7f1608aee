"""The filter of finished groups: one that teaches nothing is dropped before it reaches the buffer, and refilled.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2); `task.filter` selects the rule.
`learner.filter_equal_rewards` is the other filter: it leaves a group out of a batch whose place it has used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from areal_jax.errors import UserError
from areal_jax.types import Dropped, TrajectoryGroup

# the reasons of a drop, and the names of the rules
EQUAL_REWARDS = 'equal_rewards'
SUCCESS_RATE = 'success_rate'
BY_REWARD = (EQUAL_REWARDS, SUCCESS_RATE)


class NoSignalError(UserError, RuntimeError):
    """Every group was filtered for too long; names the last one and the fields."""


@dataclasses.dataclass(frozen=True)
class FilterRule:
    """Which finished groups are dropped."""

    name: str  # one of BY_REWARD
    drops: Callable[[TrajectoryGroup], bool]


def equal_rewards() -> FilterRule:
    """All rewards are equal, by the rule of the filter inside the batch (`has_equal_rewards`)."""
    return FilterRule(EQUAL_REWARDS, TrajectoryGroup.has_equal_rewards)


def success_rate(low: float, high: float) -> FilterRule:
    """The share of the answers whose reward is above 0 lies outside [low, high]."""

    def drops(group: TrajectoryGroup) -> bool:
        rewards = [trajectory.reward for trajectory in group.heads]
        return not low <= sum(reward > 0 for reward in rewards) / len(rewards) <= high

    return FilterRule(SUCCESS_RATE, drops)


def describe_drop(reason: str, rewards: Sequence[float]) -> str:
    """The detail of a drop, from the rewards of its answers in the order of the samples."""
    if reason == EQUAL_REWARDS:
        return ', '.join({f'{len(rewards)} rewards of {reward:g}': None for reward in rewards})
    return f'{sum(reward > 0 for reward in rewards)} of {len(rewards)} rewards above 0'


class GroupFilter:
    """Drops each group that a rule drops.

    A group of which some answers could not be verified is decided by the others. `limit` dropped groups in a row end
    the run: the engines would generate for nothing.
    """

    def __init__(self, rule: FilterRule, limit: int):
        self._rule, self._limit = rule, limit
        self._kept = self._dropped = 0  # groups since the last `take_rate`
        self._in_a_row = 0

    def judge(self, group: TrajectoryGroup) -> Dropped | None:
        """None where the group is kept."""
        if not self._rule.drops(group):
            self._kept, self._in_a_row = self._kept + 1, 0
            return None
        self._dropped, self._in_a_row = self._dropped + 1, self._in_a_row + 1
        rewards = [trajectory.reward for trajectory in group.heads]
        return Dropped(group.draw, self._rule.name, describe_drop(self._rule.name, rewards))

    def require_signal(self, last: Dropped) -> None:
        """Raises NoSignalError, which names the last drop, after `limit` of them in a row."""
        if self._in_a_row >= self._limit:
            raise NoSignalError(
                f"{self._in_a_row} groups in a row (task.max_filtered_groups) were dropped by task.filter='"
                f"{self._rule.name}', the last, draw {last.draw}, with {last.detail}: look at answers and verdicts, "
                'take easier or harder problems, raise rollout.group_size or task.max_filtered_groups, or start anew '
                "with task.filter='none'"
            )

    def take_rate(self) -> float | None:
        """Share of the groups judged since the last call that were dropped; None without any."""
        judged, dropped = self._kept + self._dropped, self._dropped
        self._kept = self._dropped = 0
        return dropped / judged if judged else None

    def state(self) -> dict[str, int]:
        return {'kept': self._kept, 'dropped': self._dropped, 'in_a_row': self._in_a_row}

    def restore(self, state: Mapping[str, int]) -> None:
        self._kept, self._dropped, self._in_a_row = state['kept'], state['dropped'], state['in_a_row']
