"""The objective of supervised training: the negative log-likelihood of given answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax

from areal_jax.learning.objective.objective import LossTokens, Metrics, Objective


@dataclasses.dataclass(frozen=True)
class Likelihood(Objective):
    """-Σₜ mₜ uₜ log π_θ(yₜ|sₜ) / N of given answers, over the same denominators as the policy losses."""

    aggregation: str = 'token_mean'
    learns_from_answers: ClassVar[bool] = False

    def loss(self, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
        loss = -tokens.mean(tokens.policy_logprobs)
        metrics = {'token_count': tokens.count(), 'nll_sum': -tokens.total(tokens.policy_logprobs)}
        return loss, jax.lax.stop_gradient(metrics)

    def metrics(self, merged: Mapping[str, float]) -> dict[str, float]:
        """Per trained token of the update, in nats; nothing for no token."""
        n = merged.get('token_count', 0.0)
        if not n:
            return {}
        nll = merged['nll_sum'] / n
        perplexity = math.exp(nll) if nll < 700 else math.inf
        return {'loss/nll': nll, 'loss/perplexity': perplexity, 'loss/entropy': merged['entropy_sum'] / n}
