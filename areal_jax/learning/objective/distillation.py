"""The objectives of distillation: move the policy towards a teacher on tokens that the policy sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from areal_jax.config.declarations import require_allowed
from areal_jax.learning.objective.objective import (
    DIVERGENCES,
    FORWARD_KL,
    REVERSE_KL,
    TEACHER,
    LossTokens,
    Metrics,
    Objective,
)
from areal_jax.learning.objective.ratios import bounded_exp, kl_term


@dataclasses.dataclass(frozen=True)
class SampledDistillation(Objective):
    """KL(π_θ ‖ π_teacher) of each next token, by the policy gradient of tokens that the policy sampled.

      L(θ) = -Σₜ mₜ uₜ wₜ Aₜ log π_θ(yₜ|sₜ) / N,   Aₜ = log π_teacher(yₜ|sₜ) - log π_θ(yₜ|sₜ),   wₜ = π_θ / π_behav

    A and w are constant. With y drawn from π_behav, the expected gradient at a state is the gradient of the divergence:
    Σ_y π_θ(y) (log π_θ(y) - log π_teacher(y)) ∇ log π_θ(y). States keep the weight with which they were visited.
    Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649, section 3, with the reverse
    divergence: no gradient goes through the sampling of states. Rewards are not read; log w is clamped to ±20.

    Raises ConfigError for a value that its field may not hold.
    """

    behavior_weight_cap: float | None = None  # the upper bound of w
    aggregation: str = 'token_mean'
    length_constant: int = 1
    reads: ClassVar[frozenset[str]] = frozenset({TEACHER})  # type: ignore[misc]

    def __post_init__(self) -> None:
        require_allowed({'loss.behavior_weight_cap': self.behavior_weight_cap})

    def loss(self, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
        mask = tokens.loss_mask
        policy, behavior, teacher = (
            jnp.where(mask, x, 0.0) for x in (tokens.policy_logprobs, tokens.behavior_logprobs, tokens.read(TEACHER))
        )
        now = jax.lax.stop_gradient(policy)
        moved, advantage = now - behavior, teacher - now
        ratio = bounded_exp(moved)
        weight = ratio if self.behavior_weight_cap is None else jnp.minimum(ratio, self.behavior_weight_cap)
        metrics = {
            'token_count': tokens.count(),
            'weight_sum': tokens.total(weight),
            'weight_sq_sum': tokens.total(weight**2),
            'weight_max': jnp.max(jnp.where(mask, weight, 0.0), initial=0.0),
            'kl_sum': tokens.total(kl_term(moved)),
            'teacher_kl_sum': tokens.total(weight * kl_term(advantage)),
        }
        return tokens.mean(-weight * advantage * policy), jax.lax.stop_gradient(metrics)

    def metrics(self, merged: Mapping[str, float]) -> dict[str, float]:
        """Metrics per trained token of the update; {} without any.

        'loss/teacher_kl' estimates KL(π_θ ‖ π_teacher) of a token, nats, by w (e^A - 1 - A): every term is at least 0.
        """
        n = merged.get('token_count', 0.0)
        if not n:
            return {}
        total, squares = merged['weight_sum'], merged['weight_sq_sum']
        return {
            'loss/teacher_kl': merged['teacher_kl_sum'] / n,
            'loss/behavior_weight_mean': total / n,
            'loss/behavior_weight_max': merged['weight_max'],
            'loss/effective_sample_size': total**2 / (n * squares) if squares else 0.0,
            'loss/approx_kl': merged['kl_sum'] / n,
            'loss/entropy': merged['entropy_sum'] / n,
        }

    def describe(self) -> str:
        cap = '' if self.behavior_weight_cap is None else f', weights of at most {self.behavior_weight_cap:g}'
        return f'reverse KL to the teacher on sampled tokens{cap}'


@dataclasses.dataclass(frozen=True)
class VocabularyDistillation(Objective):
    """A divergence of each next token over the whole vocabulary, differentiated itself, at the states visited.

      L(θ) = Σₜ mₜ uₜ Dₜ / N,   'reverse': D = KL(π_θ ‖ π_teacher)   'forward': D = KL(π_teacher ‖ π_θ)

    Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649, section 3: no gradient goes through
    the sampling of states. D is not estimated from the token drawn, so it has no importance weight; states keep the
    weight with which the sampling policy visited them. Rewards are not read. `aggregation`: see Objective.

    Raises ConfigError for an unknown divergence.
    """

    divergence: str = 'reverse'
    aggregation: str = 'token_mean'
    length_constant: int = 1
    reads: ClassVar[frozenset[str]] = DIVERGENCES  # type: ignore[misc]

    def __post_init__(self) -> None:
        require_allowed({'loss.divergence': self.divergence})

    def loss(self, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
        reverse, forward = tokens.statistic(REVERSE_KL), tokens.statistic(FORWARD_KL)
        moved = jnp.where(tokens.loss_mask, tokens.policy_logprobs - tokens.behavior_logprobs, 0.0)
        metrics = {
            'token_count': tokens.count(),
            'kl_sum': tokens.total(kl_term(moved)),
            'teacher_kl_sum': tokens.total(reverse),
            'teacher_forward_kl_sum': tokens.total(forward),
        }
        loss = tokens.mean(forward if self.divergence == 'forward' else reverse)
        return loss, jax.lax.stop_gradient(metrics)

    def metrics(self, merged: Mapping[str, float]) -> dict[str, float]:
        """Metrics per trained token of the update, nats; {} without any. 'loss/teacher_kl' is KL(π_θ ‖ π_teacher)."""
        n = merged.get('token_count', 0.0)
        if not n:
            return {}
        return {
            'loss/teacher_kl': merged['teacher_kl_sum'] / n,
            'loss/teacher_forward_kl': merged['teacher_forward_kl_sum'] / n,
            'loss/approx_kl': merged['kl_sum'] / n,
            'loss/entropy': merged['entropy_sum'] / n,
        }

    def describe(self) -> str:
        return f'{self.divergence} KL between policy and teacher over the vocabulary'
