"""The work that the comparisons share: prompts and answers of the quickstart's shape, from a seed. numpy only."""

from __future__ import annotations

import numpy as np

GROUPS, GROUP_SIZE, PROMPT_TOKENS = 8, 8, 44
NEW_TOKENS, SLOTS = 64, 8
VOCABULARY = 49152


def prompts(seed: int, count: int) -> np.ndarray:
    """int32 [count, PROMPT_TOKENS]."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, (count, PROMPT_TOKENS)).astype(np.int32)


def answers(seed: int, lengths: str) -> list[list[np.ndarray]]:
    """GROUPS x GROUP_SIZE answers: 'equal' = 16 tokens each, 'lognormal' = median 16, sigma 0.7, at most 64."""
    rng = np.random.default_rng(seed + 1)
    count = GROUPS * GROUP_SIZE
    drawn = np.full(count, 16) if lengths == 'equal' else np.clip(rng.lognormal(np.log(16), 0.7, count), 1, 64)
    tokens = [rng.integers(3, VOCABULARY, int(n)).astype(np.int32) for n in drawn]
    return [tokens[i * GROUP_SIZE : (i + 1) * GROUP_SIZE] for i in range(GROUPS)]
