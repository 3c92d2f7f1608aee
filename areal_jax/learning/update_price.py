"""What an update costs before it is made, in tokens. numpy only: a controller without a learner counts too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from areal_jax.learning.objective.rewards import has_signal
from areal_jax.learning.packing.packing import count_tokens
from areal_jax.types import TrajectoryGroup


class UpdatePrice(NamedTuple):
    """How the tokens of an update are counted."""

    packing: str  # 'shared_prompt' | 'ordinary', as the attention of the learner allows
    epochs: int
    filters: bool  # groups of equal rewards are left out
    masks_truncated: bool = False  # answers that ended at their limit are

    def tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Tokens that an update of these groups would read."""
        return count_tokens(self.read(self.kept(groups)), self.packing) * self.epochs

    def kept(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """The groups that an update trains on."""
        return [group for group in groups if not self.filters or has_signal(group)]

    def read(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """The groups with the rows that an update reads of them; those without any are left out."""
        if not self.masks_truncated:
            return list(groups)
        rows = [(group, tuple(t for t in group.trajectories if t.finish_reason != 'length')) for group in groups]
        return [dataclasses.replace(group, trajectories=own) for group, own in rows if own]
