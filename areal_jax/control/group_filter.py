"""The filter of finished groups: one that teaches nothing is dropped before it reaches the buffer, and refilled.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2); `task.filter` selects it.
`learner.filter_equal_rewards` is the other filter: it leaves a group out of a batch whose place it has used.
"""

from __future__ import annotations

from collections.abc import Mapping

from areal_jax.errors import UserError
from areal_jax.types import Dropped, TrajectoryGroup

EQUAL_REWARDS = 'equal_rewards'  # the reason of a drop, and the name of the filter


class NoSignalError(UserError, RuntimeError):
    """Every group was filtered for too long; names the last one and the fields."""


class EqualRewardsFilter:
    """Drops each group whose rewards are all equal, by the rule of the filter inside the batch (`has_equal_rewards`).

    A group of which some answers could not be verified is decided by the others; a group with one answer left is
    dropped. `limit` dropped groups in a row end the run: the engines would generate for nothing.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._kept = self._dropped = 0  # groups since the last `take_rate`
        self._in_a_row = 0

    def judge(self, group: TrajectoryGroup) -> Dropped | None:
        """None where the group is kept."""
        if not group.has_equal_rewards():
            self._kept, self._in_a_row = self._kept + 1, 0
            return None
        self._dropped, self._in_a_row = self._dropped + 1, self._in_a_row + 1
        detail = f'{len(group.trajectories)} rewards of {group.trajectories[0].reward:g}'
        return Dropped(group.draw, EQUAL_REWARDS, detail)

    def require_signal(self, last: Dropped) -> None:
        """Raises NoSignalError, which names the last drop, after `limit` of them in a row."""
        if self._in_a_row >= self._limit:
            raise NoSignalError(
                f"{self._in_a_row} groups in a row (task.max_filtered_groups) were dropped by task.filter='"
                f"{EQUAL_REWARDS}', the last, draw {last.draw}, with {last.detail}: look at answers and verdicts, take "
                'easier or harder problems, raise rollout.group_size or task.max_filtered_groups, or start anew with '
                "task.filter='none'"
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
