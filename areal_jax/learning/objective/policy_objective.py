"""Policy objectives: a combination of choices as an Objective. config/objectives.py names the methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from areal_jax.config.declarations import FIELDS, require_allowed
from areal_jax.config.objectives import describe, select_used
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.advantages import CONTRASTS, Estimator, make_estimator
from areal_jax.learning.objective.objective import (
    CLAMPED_ENTROPY,
    COLLISION,
    END_VALUES,
    POLICY,
    PROXIMAL,
    REFERENCE,
    VALUES,
    LossTokens,
    Metrics,
    Objective,
    TokenAdvantages,
)
from areal_jax.learning.objective.packed_advantages import is_kl_in_reward, packed_advantages
from areal_jax.learning.objective.penalties import kl_penalty
from areal_jax.learning.objective.policy_loss import finalize_policy_metrics, policy_loss, prepared_names
from areal_jax.learning.objective.prepared import keep_second_moment, keep_share, uniform_numbers
from areal_jax.learning.objective.proximal import proximal_logprobs
from areal_jax.learning.objective.value_loss import finalize_critic_metrics, value_loss
from areal_jax.plugins import is_own
from areal_jax.types import PackedBatch, TrajectoryGroup


@dataclasses.dataclass(frozen=True)
class PolicyObjective(Objective):
    """The objective of a combination.

    Raises ConfigError for a value that its field may not hold, UserError for an own advantage that cannot be loaded.
    """

    choices: PolicyChoices
    estimate: Estimator = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        values = {f'loss.{name}': value for name, value in dataclasses.asdict(self.choices).items()}
        require_allowed({path: value for path, value in values.items() if path in FIELDS})
        for name, value in _derive(self.choices).items():
            object.__setattr__(self, name, value)

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
        return self.estimate(groups, None)

    def token_advantages(
        self,
        groups: Sequence[TrajectoryGroup],
        batches: Sequence[PackedBatch],
        passed: Sequence[Mapping[str, np.ndarray]],
    ) -> list[TokenAdvantages]:
        return packed_advantages(self.choices, self.estimate, groups, batches, passed)

    def prepare(self, batch: PackedBatch, policy_logprobs: np.ndarray | None) -> Mapping[str, np.ndarray]:
        """'gate': 1 at the tokens that are trained; 'uniform': a number in [0, 1) for each token."""
        names, choices = self.prepares, self.choices
        if 'uniform' in names:
            return {'uniform': uniform_numbers(batch, choices.seed)}
        if 'gate' not in names:
            return {}
        assert policy_logprobs is not None, 'a gate over a minibatch needs its log-probs'
        if choices.gate == 'second_moment':
            return {'gate': keep_second_moment(batch, policy_logprobs, choices.gate_threshold)}
        return {'gate': keep_share(batch, -batch.advantages * policy_logprobs, choices.delight_share)}

    def loss(self, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
        choices = self.choices
        loss, metrics = policy_loss(choices, tokens, self._proximal(tokens))
        if choices.entropy_coefficient:
            entropy = tokens.statistic(CLAMPED_ENTROPY) if choices.entropy_clamp else tokens.entropy
            loss = loss - choices.entropy_coefficient * tokens.mean(entropy)
            if choices.entropy_clamp:
                metrics = metrics | {'clamped_entropy_sum': jax.lax.stop_gradient(tokens.total(entropy))}
        if choices.kl_coefficient:
            normalizer = (tokens.loss_mask, tokens.denominator, tokens.token_weights)
            penalty, kl_metrics = kl_penalty(
                tokens.policy_logprobs,
                tokens.read(REFERENCE),
                *normalizer,
                estimator=choices.kl_estimator,
                behavior_logprobs=tokens.behavior_logprobs,
            )
            metrics = metrics | kl_metrics
            if not is_kl_in_reward(choices):
                loss = loss + choices.kl_coefficient * penalty
        if VALUES in self.reads:
            of_critic, critic_metrics = value_loss(tokens, choices.value_clip)
            loss, metrics = loss + of_critic, metrics | critic_metrics
        return loss, metrics

    def _proximal(self, tokens: LossTokens) -> jax.Array:
        """log π_prox; the behavior log-probs where the combination has no use for it."""
        kind = self.choices.proximal if self.choices.uses_proximal else 'behavior'
        if PROXIMAL in self.reads:
            return tokens.read(PROXIMAL)
        policy, behavior = tokens.policy_logprobs, tokens.behavior_logprobs
        return proximal_logprobs(kind, policy, behavior, tokens.policy_versions, tokens.version)

    def metrics(self, merged: Mapping[str, float]) -> dict[str, float]:
        return finalize_policy_metrics(merged) | finalize_critic_metrics(merged)

    def describe(self) -> str:
        used = select_used(lambda name: getattr(self.choices, name))
        return describe(used | ({'proximal': self.choices.proximal} if self.choices.uses_proximal else {}))


def _derive(choices: PolicyChoices) -> dict[str, object]:
    """The attributes of an Objective that the combination decides."""
    prepares = prepared_names(choices)
    reads = {
        PROXIMAL: choices.uses_proximal and choices.proximal == 'recompute',
        REFERENCE: bool(choices.kl_coefficient),
        COLLISION: choices.advantage == 'optimal_baseline',
        POLICY: 'gate' in prepares,
        CLAMPED_ENTROPY: bool(choices.entropy_coefficient and choices.entropy_clamp),
        VALUES: choices.advantage == 'gae',
        END_VALUES: choices.advantage == 'gae' and choices.truncated_value == 'last',
    }
    alone = choices.whiten == 'none' and not choices.overlong_tokens and not is_kl_in_reward(choices)
    return {
        'reads': frozenset(name for name, is_read in reads.items() if is_read),
        'prepares': prepares,
        'entropy_clamp': choices.entropy_clamp,
        'aggregation': choices.aggregation,
        'length_constant': choices.length_constant,
        'masks_truncated': choices.truncated_answers == 'masked',
        'contrasts': alone and (choices.advantage in CONTRASTS or is_own(choices.advantage)),
        'replaces_advantages': choices.whiten != 'none'
        or choices.advantage in ('optimal_baseline', 'gae')
        or is_kl_in_reward(choices),
        'estimate': make_estimator(choices),
    }
