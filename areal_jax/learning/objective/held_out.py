"""Measures of data that is not trained on. numpy only."""

from __future__ import annotations

import math

import numpy as np

from areal_jax.learning.weights.finiteness import NonFiniteError


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
