"""The objective of preference training: of two answers the chosen one becomes likelier than the rejected one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config.declarations import require_allowed
from areal_jax.learning.objective.objective import REFERENCE, LossTokens, Metrics, Objective
from areal_jax.learning.objective.sums import find_starts, masked_sum, sequence_sums
from areal_jax.learning.weights.finiteness import NonFiniteError
from areal_jax.types import PackedBatch, TrajectoryGroup

_PAIR_STARTS = 'pair_starts'  # the place in the row of the first loss token of the same pair
_CHOSEN, _REJECTED = 1.0, -1.0  # what stands in the place of the advantages


@dataclasses.dataclass(frozen=True)
class DirectPreference(Objective):
    """DPO: the mean over the pairs of -log σ(β (ℓ(chosen) - ℓ(rejected))) with ℓ(y) = log π_θ(y|x) - log π_ref(y|x).

    Rafailov et al., arXiv 2305.18290, equation 7; log-probs are sums over all tokens of an answer. A group is a pair,
    the chosen answer first, and lies in one row, so that the loss of a micro-batch is exact.

    Raises ConfigError for a β that is not above 0.
    """

    beta: float
    reads: ClassVar[frozenset[str]] = frozenset({REFERENCE})  # type: ignore[misc]
    prepares: ClassVar[tuple[str, ...]] = (_PAIR_STARTS,)  # type: ignore[misc]
    aggregation: ClassVar[str] = 'sequence_mean'  # type: ignore[misc]  # both answers have the loss of their pair
    keeps_groups: ClassVar[bool] = True  # type: ignore[misc]
    learns_from_answers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_allowed({'loss.dpo_beta': self.beta})

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
        """1 for the chosen answer, -1 for the rejected one; raises ValueError for a group that is no pair."""
        if sizes := {len(group.trajectories) for group in groups} - {2}:
            raise ValueError(f'a group of {sizes.pop()} answers is no pair of a chosen and a rejected one')
        return [np.array([_CHOSEN, _REJECTED], np.float32) for _ in groups]

    def prepare(self, batch: PackedBatch, policy_logprobs: np.ndarray | None) -> Mapping[str, np.ndarray]:
        return {_PAIR_STARTS: find_starts(batch.trajectory_ids // 2).astype(np.float32)}  # ids count in pairs

    def loss(self, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
        starts = tokens.read(_PAIR_STARTS).astype(jnp.int32)
        mask, signs = tokens.loss_mask, tokens.advantages
        log_ratio = jnp.where(mask, tokens.policy_logprobs - tokens.read(REFERENCE), 0.0)
        margin = self.beta * sequence_sums(signs * log_ratio, mask, starts)  # the same at all tokens of a pair
        loss = tokens.mean(-jax.nn.log_sigmoid(margin))
        per_answer = lambda values: masked_sum(values, mask, tokens.token_weights)
        metrics = {
            'answer_count': per_answer(jnp.ones_like(margin)),
            'token_count': tokens.count(),
            'margin_sum': per_answer(margin),
            'accuracy_sum': per_answer((1.0 + jnp.sign(margin)) / 2),
            'chosen_sum': self.beta * tokens.total(jnp.where(signs > 0, log_ratio, 0.0)),
            'rejected_sum': self.beta * tokens.total(jnp.where(signs < 0, log_ratio, 0.0)),
        }
        return loss, jax.lax.stop_gradient(metrics)

    def metrics(self, merged: Mapping[str, float]) -> dict[str, float]:
        """Means over the pairs of the update; nothing for no pair. An equal pair counts as half right."""
        n = merged.get('answer_count', 0.0)
        if not n:
            return {}
        return {
            'loss/margin': merged['margin_sum'] / n,
            'loss/pair_accuracy': merged['accuracy_sum'] / n,
            'loss/chosen_reward': merged['chosen_sum'] / (n / 2),
            'loss/rejected_reward': merged['rejected_sum'] / (n / 2),
            'loss/entropy': merged['entropy_sum'] / merged['token_count'],
        }

    def measure_held_out(
        self, batch: PackedBatch, policy_logprobs: np.ndarray, reference_logprobs: np.ndarray | None
    ) -> dict[str, float]:
        """{'preference_loss', 'margin': β Δ, 'pair_accuracy': share with Δ > 0, where Δ = 0 counts half, 'pairs'}."""
        assert reference_logprobs is not None, 'the objective reads the reference'
        mask = batch.loss_mask
        log_ratio = policy_logprobs[mask].astype(np.float64) - reference_logprobs[mask]
        pairs = batch.trajectory_ids[mask] // 2
        margins = self.beta * np.bincount(pairs, batch.advantages[mask] * log_ratio)
        with np.errstate(invalid='ignore'):
            loss = float(np.logaddexp(0.0, -margins).mean())
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"the held-out preference loss is {loss}: lower optimizer.learning_rate, or use learner.dtype='float32'"
            )
        return {
            'preference_loss': loss,
            'margin': float(margins.mean()),
            'pair_accuracy': float((1 + np.sign(margins)).mean() / 2),
            'pairs': float(len(margins)),
        }

    def describe(self) -> str:
        return f'DPO, beta {self.beta:g}'
