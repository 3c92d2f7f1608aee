"""Logits of tiny checkpoints against what transformers said of them, recorded in tests/models/data/parity.npz."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.models import parity
from tests.models.test_parity import logits_of, recorded

CHECKPOINTS = ('qwen3_moe', 'qwen3_moe_mixed', 'mixtral', 'olmoe')
MOST = 1e-5  # of the range of the logits


def measure_parity(options: Any) -> dict[str, Any]:
    """The largest difference of a logit of each checkpoint, over the range of its logits; each text alone."""
    found = {name: _compare(name) for name in CHECKPOINTS}
    return {'value': found, 'met': max(found.values()) <= MOST}


def _compare(name: str) -> float:
    differences = []
    for number, text in enumerate(parity.texts(name)):
        expected = recorded()[f'{name}/{number}/logits']
        actual = logits_of(name, 'list', [text])[0]
        differences.append(float(np.abs(actual - expected).max() / np.ptp(expected)))
    return max(differences)
