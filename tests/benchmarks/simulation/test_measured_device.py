"""The predictions for one H200, by hand."""

import json

import pytest

from benchmarks.simulation.measured_device import MEASURED, predict


def test_predictions_are_operations_and_bytes_over_the_shares_of_the_peaks():
    rows = {row['what']: row for row in predict(json.loads(MEASURED.read_text()))}
    # Qwen2.5-1.5B: 1.5437e9 parameters; 28 layers of 2 * 2 heads of 128 in 16 bits are 28,672 bytes a position
    step = rows['decode step, 64 rows of 1,024 positions']
    read_s = (2 * 1.5435e9 + 64 * 1023.5 * 28672) / (0.6 * 4.8e12)
    # a step of one row reads at 0.34 of the bandwidth, 0.6 is counted above; Qwen3-8B has 36 layers
    overhead_s = 28 / 36 * 2 * 7.57e9 / 4.8e12 * (1 / 0.3402 - 1 / 0.6)
    assert step['predicted_s'] == pytest.approx(read_s + overhead_s, rel=0.01)
    update = rows['update of 16,308 tokens']
    # 6 flops of a parameter and token, and 12 * 1,536 of a layer and visible pair; 28 bytes of a parameter once
    pairs = 28 * 12 * 1536 * 11.9e6
    assert update['predicted_s'] == pytest.approx((6 * 1.5435e9 * 16308 + pairs) / (0.4 * 989e12) + 0.009, rel=0.01)
    assert update['error'] == pytest.approx(update['predicted_s'] / update['measured_s'] - 1)
