"""The parts of a study's controls that a config can name."""

from __future__ import annotations

import numpy as np

from areal_jax.learning.objective.advantages import group_normalized


def shuffled_advantages(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Advantages [n] from rewards [n] that are shifted by one answer within each group.

    The answers of a group are drawn independently, so an answer's shifted reward says nothing about it.
    """
    advantages = np.zeros(len(rewards))
    for group in np.unique(groups):
        places = np.flatnonzero(groups == group)
        advantages[places] = np.roll(group_normalized(rewards[places]), 1)
    return advantages
