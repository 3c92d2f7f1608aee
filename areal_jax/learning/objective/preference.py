"""The objectives of pairs: the chosen answer should have a higher score than the rejected one."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config.declarations import require_allowed
from areal_jax.learning.objective.counting import find_starts
from areal_jax.learning.objective.objective import POLICY, REFERENCE, VALUES, LossTokens, Metrics, Objective
from areal_jax.learning.objective.ratios import Array, masked_sum, sequence_sums
from areal_jax.learning.weights.finiteness import NonFiniteError
from areal_jax.types import PackedBatch, TrajectoryGroup

_PAIR_STARTS = 'pair_starts'  # the place in the row of the first loss token of the same pair
_ENDS = 'ends'  # 1 at the last loss token of an answer, else 0
_CHOSEN, _REJECTED = 1.0, -1.0  # used as the advantages


class PairObjective(Objective):
    """The mean over the pairs of -log σ(score of the chosen answer - score of the rejected one).

    A group is a pair, the chosen answer first, and is packed into one row, so that the loss of a micro-batch is exact.
    """

    prepares: ClassVar[tuple[str, ...]] = (_PAIR_STARTS,)  # type: ignore[misc]
    aggregation: ClassVar[str] = 'sequence_mean'  # type: ignore[misc]  # both answers have the loss of their pair
    keeps_groups: ClassVar[bool] = True  # type: ignore[misc]
    learns_from_answers: ClassVar[bool] = False

    @abc.abstractmethod
    def score_tokens(self, tokens: LossTokens) -> jax.Array:
        """[R, N]: the sum over an answer is its score."""

    @abc.abstractmethod
    def score_held_out(self, passed: Mapping[str, np.ndarray], ends: np.ndarray) -> np.ndarray:
        """[M, R, N]: as `score_tokens`, from the passes over a batch; `ends` is 1 at an answer's last loss token."""

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
        """1 for the chosen answer, -1 for the rejected one; raises ValueError for a group that is not a pair."""
        if sizes := {len(group.trajectories) for group in groups} - {2}:
            raise ValueError(f'a group of {sizes.pop()} answers is no pair of a chosen and a rejected one')
        return [np.array([_CHOSEN, _REJECTED], np.float32) for _ in groups]

    def prepare(self, batch: PackedBatch, policy_logprobs: np.ndarray | None) -> Mapping[str, np.ndarray]:
        return {_PAIR_STARTS: find_starts(batch.trajectory_ids // 2).astype(np.float32)}  # ids count in pairs

    def loss(self, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
        starts = tokens.read(_PAIR_STARTS).astype(jnp.int32)
        mask, signs = tokens.loss_mask, tokens.advantages
        scores = jnp.where(mask, self.score_tokens(tokens), 0.0)
        margin = sequence_sums(signs * scores, mask, starts)  # the same at all tokens of a pair
        loss = tokens.mean(-jax.nn.log_sigmoid(margin))
        per_answer = lambda values: masked_sum(values, mask, tokens.token_weights)
        metrics = {
            'answer_count': per_answer(jnp.ones_like(margin)),
            'token_count': tokens.count(),
            'margin_sum': per_answer(margin),
            'accuracy_sum': per_answer((1.0 + jnp.sign(margin)) / 2),
            'chosen_sum': tokens.total(jnp.where(signs > 0, scores, 0.0)),
            'rejected_sum': tokens.total(jnp.where(signs < 0, scores, 0.0)),
        }
        return loss, jax.lax.stop_gradient(metrics)

    def metrics(self, merged: Mapping[str, float]) -> dict[str, float]:
        """Means over the pairs of the update; {} without any. A pair with equal scores counts as half right."""
        n = merged.get('answer_count', 0.0)
        if not n:
            return {}
        entropy = {} if self.scores_answers else {'loss/entropy': merged['entropy_sum'] / merged['token_count']}
        return entropy | {
            'loss/margin': merged['margin_sum'] / n,
            'loss/pair_accuracy': merged['accuracy_sum'] / n,
            'loss/chosen_reward': merged['chosen_sum'] / (n / 2),
            'loss/rejected_reward': merged['rejected_sum'] / (n / 2),
        }

    def measure_held_out(self, batch: PackedBatch, passed: Mapping[str, np.ndarray]) -> dict[str, float]:
        """{'preference_loss', 'margin', 'pair_accuracy', 'pairs'}.

        The margin is the mean of Δ, the score of the chosen answer minus the rejected answer's; the accuracy is the
        share with Δ > 0, where Δ = 0 counts half.
        """
        mask = batch.loss_mask
        scores = self.score_held_out(passed, _find_ends(batch))[mask].astype(np.float64)
        margins = np.bincount(batch.trajectory_ids[mask] // 2, batch.advantages[mask] * scores)
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


@dataclasses.dataclass(frozen=True)
class DirectPreference(PairObjective):
    """DPO: the score of an answer is β (log π_θ(y|x) - log π_ref(y|x)), log-probs summed over all its tokens.

    Rafailov et al., arXiv 2305.18290, equation 7. Raises ConfigError for a β that is not above 0.
    """

    beta: float
    reads: ClassVar[frozenset[str]] = frozenset({REFERENCE})  # type: ignore[misc]

    def __post_init__(self) -> None:
        require_allowed({'loss.dpo_beta': self.beta})

    def score_tokens(self, tokens: LossTokens) -> jax.Array:
        return self.beta * (tokens.policy_logprobs - tokens.read(REFERENCE))

    def score_held_out(self, passed: Mapping[str, np.ndarray], ends: np.ndarray) -> np.ndarray:
        return self.beta * (passed[POLICY].astype(np.float64) - passed[REFERENCE])

    def describe(self) -> str:
        return f'DPO, beta {self.beta:g}'


@dataclasses.dataclass(frozen=True)
class RewardModel(PairObjective):
    """The score of an answer is the value of the state before its last token, which has read all earlier tokens.

    Bradley and Terry's model, as Ouyang et al., arXiv 2203.02155, equation 1, train it on pairs.
    """

    scores_answers: ClassVar[bool] = True
    prepares: ClassVar[tuple[str, ...]] = (_PAIR_STARTS, _ENDS)  # type: ignore[misc]

    def prepare(self, batch: PackedBatch, policy_logprobs: np.ndarray | None) -> Mapping[str, np.ndarray]:
        return {**super().prepare(batch, policy_logprobs), _ENDS: _find_ends(batch)}

    def score_tokens(self, tokens: LossTokens) -> jax.Array:
        assert tokens.values is not None, 'the learner gives values to an objective that trains them'
        return tokens.read(_ENDS) * tokens.values

    def score_held_out(self, passed: Mapping[str, np.ndarray], ends: np.ndarray) -> np.ndarray:
        return ends * passed[VALUES]

    def describe(self) -> str:
        return 'reward model of pairs, Bradley-Terry'


def _find_ends(batch: PackedBatch) -> np.ndarray:
    """float32 [M, R, N]: 1 at the last loss token of each answer."""
    ids: Array = np.where(batch.loss_mask, batch.trajectory_ids, -1)
    later = np.concatenate([ids[..., 1:], np.full_like(ids[..., :1], -1)], axis=-1)
    return ((ids != later) & batch.loss_mask).astype(np.float32)
