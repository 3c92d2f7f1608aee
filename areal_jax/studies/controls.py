"""Parts of the controls of a study that a config can name."""

from __future__ import annotations

import numpy as np

from areal_jax.learning.objective.advantages import group_normalized


def shuffled_advantages(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Advantages [n] of answers with each other's rewards [n]: within a group, rewards are shifted by one answer.

    The answers of a group are drawn independently, so what one gets says nothing about it.
    """
    advantages = np.zeros(len(rewards))
    for group in np.unique(groups):
        places = np.flatnonzero(groups == group)
        advantages[places] = np.roll(group_normalized(rewards[places]), 1)
    return advantages
