"""Generalized advantage estimation over packed loss tokens. numpy only."""

from __future__ import annotations

import numpy as np


def generalized_advantages(
    values: np.ndarray,
    token_rewards: np.ndarray,
    last_rewards: np.ndarray,
    last_values: np.ndarray,
    loss_mask: np.ndarray,
    trajectory_ids: np.ndarray,
    *,
    discount: float,
    decay: float,
) -> np.ndarray:
    """A_t = δ_t + γλ A_{t+1} with δ_t = r_t + γ V_{t+1} - V_t over the trained tokens of each answer.

    Schulman et al., arXiv 1506.02438, equations 11 and 16. Tokens that are not trained are no steps: A and V of the
    next trained one pass over them, so that no reward is lost. Nothing passes from one answer to another.

    Args:
      values: V, [..., N], of the state before each token.
      token_rewards: [..., N].
      last_rewards: [..., N], of which the one at the last trained token of an answer is added to its reward.
      last_values: [..., N], of which the one there is the value behind it: 0 where the answer has ended.
      loss_mask: bool [..., N].
      trajectory_ids: int [..., N]; the tokens of an answer stand side by side.
      discount: γ.
      decay: λ.

    Returns:
      float64 [..., N]; 0 where the mask is.
    """
    rows = lambda x, dtype=np.float64: np.where(loss_mask, x, 0).reshape(-1, loss_mask.shape[-1]).astype(dtype)
    v, r, ends, behind = map(rows, (values, token_rewards, last_rewards, last_values))
    mask, ids = loss_mask.reshape(v.shape), rows(trajectory_ids, np.int64)
    advantages = np.zeros_like(v)
    next_value, next_advantage, next_id = np.zeros(len(v)), np.zeros(len(v)), np.full(len(v), -1)
    for t in reversed(range(v.shape[-1])):
        trained, is_last = mask[:, t], ids[:, t] != next_id
        reward = r[:, t] + np.where(is_last, ends[:, t], 0.0)
        value = np.where(is_last, behind[:, t], next_value)
        advantage = reward + discount * value - v[:, t]
        advantage += discount * decay * np.where(is_last, 0.0, next_advantage)
        advantages[:, t] = np.where(trained, advantage, 0.0)
        next_value = np.where(trained, v[:, t], next_value)
        next_advantage = np.where(trained, advantage, next_advantage)
        next_id = np.where(trained, ids[:, t], next_id)
    return advantages.reshape(values.shape)
