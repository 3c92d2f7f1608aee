"""Divergence, effective sample size and share of the ratio, against the formulas by hand."""

import math

import numpy as np
import pytest

from areal_jax.learning.diagnostics.quantized_policy import quantization_metrics
from areal_jax.learning.packing.rows import PADDING
from areal_jax.telemetry import names
from areal_jax.types import PackedBatch


def batch_of(versions, behavior, ids):
    """A batch of one row with what is read here."""
    fields = dict.fromkeys(PackedBatch.__dataclass_fields__)
    shape = lambda values, dtype: np.array(values, dtype)[None, None]
    fields |= {
        'policy_versions': shape(versions, np.int32),
        'behavior_logprobs': shape(behavior, np.float32),
        'trajectory_ids': shape(ids, np.int32),
    }
    return PackedBatch(**fields)


def test_the_numbers_are_those_of_the_formulas():
    batch = batch_of([4, 4, 3, 4], [-1.0, -2.0, -1.0, -9.0], [0, 0, 1, PADDING])
    learned = np.array([[[-0.5, -2.25, -2.0, 0.0]]], np.float32)
    found = quantization_metrics([batch], [learned], 4)
    a, b = 0.5, -0.25  # tokens of version 4; that of version 3 has -1
    assert found[names.MISMATCH_KL] == pytest.approx((math.exp(a) - 1 - a + math.exp(b) - 1 - b) / 2)
    weights = math.exp(a), math.exp(b)
    assert found[names.MISMATCH_SAMPLE_SIZE] == pytest.approx(sum(weights) ** 2 / (2 * sum(w * w for w in weights)))
    assert found[names.MISMATCH_RATIO_SHARE] == pytest.approx((a * a + b * b) / 2 / ((a * a + b * b + 1) / 3))


def test_equal_policies_lose_no_sample_and_have_no_share():
    batch = batch_of([4, 4], [-1.0, -2.0], [0, 0])
    found = quantization_metrics([batch], [batch.behavior_logprobs], 4)
    assert found == {names.MISMATCH_KL: 0.0, names.MISMATCH_SAMPLE_SIZE: 1.0, names.MISMATCH_RATIO_SHARE: 0.0}


def test_nothing_is_said_of_an_update_without_tokens_of_its_version():
    batch = batch_of([3], [-1.0], [0])
    assert quantization_metrics([batch], [batch.behavior_logprobs], 4) == {}
    assert quantization_metrics([], [], 4) == {}
