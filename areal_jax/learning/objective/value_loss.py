"""The loss of a critic, and what is measured of it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from areal_jax.learning.objective.objective import RETURNS, VALUES, LossTokens, Metrics


def value_loss(tokens: LossTokens, clip: float) -> tuple[jax.Array, Metrics]:
    """(loss, metrics): the mean of ½ max((V - R)², (clip(V, V₀ - ε, V₀ + ε) - R)²) with the aggregation of the policy.

    V₀ are the values before the update, R the returns; ε = 0 leaves the second term out. PPO, arXiv 1707.06347, as its
    published code clips values. At V = V₀ ± ε the gradient is that of the unclipped term.
    """
    assert tokens.values is not None, 'the learner gives values to an objective that reads them'
    mask = tokens.loss_mask
    values, before, returns = (
        jnp.where(mask, x, 0.0).astype(jnp.float32) for x in (tokens.values, tokens.read(VALUES), tokens.read(RETURNS))
    )
    squares, moved = (values - returns) ** 2, jax.lax.stop_gradient(values - before)
    clipped = jnp.zeros_like(squares, bool)
    if clip:
        at_edge = (before + jnp.clip(moved, -clip, clip) - returns) ** 2  # constant
        clipped = (jnp.abs(moved) > clip) & (at_edge > squares)
        squares = jnp.where(clipped, at_edge, squares)
    error = returns - before
    sums = {'value': before, 'return': returns, 'return_sq': returns**2, 'error': error, 'error_sq': error**2}
    metrics = {f'critic_{name}_sum': tokens.total(x) for name, x in sums.items()}
    metrics |= {'critic_clip_count': tokens.total(clipped), 'critic_loss_sum': tokens.total(squares) / 2}
    return tokens.mean(squares) / 2, jax.lax.stop_gradient(metrics)


def finalize_critic_metrics(merged: Mapping[str, float]) -> dict[str, float]:
    """Per trained token of the update; nothing without a critic, or for no token.

    'critic/explained_variance' is 1 - Var(R - V₀) / Var(R): 1 for values that predict every return, 0 for a constant.
    """
    n = merged.get('token_count', 0.0)
    if not n or 'critic_loss_sum' not in merged:
        return {}
    mean = lambda name: merged[f'critic_{name}_sum'] / n
    variance = mean('return_sq') - mean('return') ** 2
    unexplained = mean('error_sq') - mean('error') ** 2
    # sums are float32: what rounding leaves of equal returns is no variance
    explained = {'critic/explained_variance': 1 - unexplained / variance} if variance > 1e-6 * mean('return_sq') else {}
    return explained | {
        'critic/loss': mean('loss'),
        'critic/value_mean': mean('value'),
        'critic/return_mean': mean('return'),
        'critic/clip_fraction': merged['critic_clip_count'] / n,
    }
