"""Rates per device and the part of its peak, by arithmetic."""

from __future__ import annotations

import pytest

from areal_jax.telemetry.devices import PEAKS, DeviceRates, peak_flops


def test_rates_of_an_update_by_hand():
    # 3000 tokens in 2 s on 3 devices: 500 a second and device
    # 6e12 operations in 2 s on 3 devices of 4e12 a second: 6e12 / (2 * 3 * 4e12) = 1/4 of the peak
    rates = DeviceRates(learner=3, engines=2, peak_flops=4e12)
    update = {'train/read_tokens': 3000.0, 'train/model_flops': 6e12}
    assert rates.of_learner(update, 2.0) == {'learner/tokens_per_second_per_device': 500.0, 'learner/mfu': 0.25}
    assert rates.of_engines(90.0) == {'rollout/tokens_per_second_per_device': 45.0}


@pytest.mark.parametrize(
    ('update', 'seconds'),
    [({}, 2.0), ({'train/read_tokens': 0.0, 'train/model_flops': 0.0}, 2.0)],  # all groups were filtered
)
def test_an_update_without_tokens_has_no_rate(update: dict[str, float], seconds: float):
    assert DeviceRates(1, 1, 1e12).of_learner(update, seconds) == {}


def test_what_is_unknown_is_absent_and_not_0():
    update = {'train/read_tokens': 10.0, 'train/model_flops': 1e6}
    assert DeviceRates(1, 1, None).of_learner(update, 1.0) == {'learner/tokens_per_second_per_device': 10.0}
    assert DeviceRates(1, 1, 1e12).of_learner(update, 0.0) == {}
    assert DeviceRates(1, 0, None).of_engines(5.0) == {}  # supervised training
    assert peak_flops('cpu', 'float32') is None
    assert peak_flops('NVIDIA H1000', 'bfloat16') is None


def test_peaks_by_dtype():
    # dense TF32 is half of dense bfloat16 on the tensor cores of a GPU; a TPU multiplies float32 as bfloat16
    assert peak_flops('NVIDIA H100 80GB HBM3', 'bfloat16') == 989.4e12 == peak_flops('NVIDIA H100 80GB HBM3', 'float16')
    assert peak_flops('NVIDIA H100 80GB HBM3', 'float32') == 494.7e12
    assert peak_flops('TPU v5 lite', 'float32') == peak_flops('TPU v5 lite', 'bfloat16') == 197e12


def test_every_row_of_the_table_is_plausible_and_names_its_source():
    for kind, peak in PEAKS.items():
        assert 10e12 < peak.float32 <= peak.bfloat16 < 3000e12, kind
        assert kind.startswith('TPU') or peak.bfloat16 / peak.float32 == pytest.approx(2, rel=0.03), kind
        assert peak.source
