"""How far a policy in 8 bits, which generated, is from the one whose weights were published. numpy only.

μ is the policy of the engines, whose log-probs answers carry; π_u is the learner's policy of the same version u.
Tokens of the version n that is trained have log π_n from the passes of the update, so that nothing is computed for
this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.learning.packing.rows import PADDING
from areal_jax.telemetry import names
from areal_jax.types import PackedBatch, concatenate


def quantization_metrics(
    batches: Sequence[PackedBatch], logprobs: Sequence[np.ndarray], version: int
) -> dict[str, float]:
    """Divergence, effective sample size and share of the importance ratio, {} without tokens of the version.

    The share is the mean square of log π_n - log μ over tokens of version n, divided by the mean square over all
    generated tokens: the part of the behavior-to-proximal ratio that existed before any update moved the weights.

    Args:
      logprobs: per batch float32 [M, R, N] of the weights of `version`.
    """
    generated = [batch.policy_versions[batch.trajectory_ids != PADDING] for batch in batches]
    versions = concatenate(generated, np.int64)
    log_ratios = concatenate(
        [
            (learned.astype(np.float64) - batch.behavior_logprobs)[batch.trajectory_ids != PADDING]
            for batch, learned in zip(batches, logprobs, strict=True)
        ],
        np.float64,
    )
    own = log_ratios[versions == version]
    if not len(own):
        return {}
    weights = np.exp(own)
    square = float(np.mean(log_ratios**2))
    return {
        str(names.MISMATCH_KL): float(np.mean(weights - 1 - own)),
        str(names.MISMATCH_SAMPLE_SIZE): float(weights.sum() ** 2 / (len(own) * np.sum(weights**2))),
        str(names.MISMATCH_RATIO_SHARE): float(np.mean(own**2)) / square if square else 0.0,
    }
