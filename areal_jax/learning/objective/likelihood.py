"""The objective of supervised training: the negative log-likelihood of given answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import numpy as np

from areal_jax.learning.objective.objective import LossTokens, Metrics, Objective
from areal_jax.learning.weights.finiteness import NonFiniteError


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


def held_out_likelihood(logprobs: np.ndarray) -> dict[str, float]:
    """{'nll': nats per token, 'tokens': their number} from log-probs float32 [tokens].

    Raises NonFiniteError if the likelihood is NaN or infinite.
    """
    nll = -float(logprobs.mean(dtype=np.float64))
    if not math.isfinite(nll):
        raise NonFiniteError(
            f'the held-out likelihood is {nll} nats a token: lower optimizer.learning_rate, or use '
            "learner.dtype='float32'"
        )
    return {'nll': nll, 'tokens': float(logprobs.size)}
