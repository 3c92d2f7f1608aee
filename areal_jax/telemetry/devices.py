"""What devices can do at most, and what part of it a run uses.

Peaks hold for dense matrices (no structured sparsity) with products of bfloat16 or float16 summed in float32. Where
a run computes in float32, jax multiplies in TF32 on NVIDIA GPUs and in one pass of bfloat16 on TPUs by default
(docs.jax.dev, "Matmul precision"), and the second column is that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, number


@dataclasses.dataclass(frozen=True)
class Peak:
    """Floating-point operations per second of one device, as jax counts devices."""

    bfloat16: float
    float32: float
    source: str


_TERA = 1e12
_H100, _H200 = 'NVIDIA H100 data sheet (2024); half of what it gives with sparsity', 'NVIDIA H200 data sheet'
_A100, _CLOUD = 'NVIDIA A100 data sheet (2021)', 'cloud.google.com/tpu/docs'


def _gpu(bfloat16: float, tf32: float, source: str) -> Peak:
    return Peak(bfloat16 * _TERA, tf32 * _TERA, source)


def _tpu(bfloat16: float, page: str) -> Peak:
    return Peak(bfloat16 * _TERA, bfloat16 * _TERA, f'{_CLOUD}/{page}')


# by jax.Device.device_kind; a GPU's is the name that the driver reports
PEAKS: Mapping[str, Peak] = {
    'NVIDIA H100 80GB HBM3': _gpu(989.4, 494.7, f'{_H100}: SXM'),
    'NVIDIA H100 PCIe': _gpu(756.5, 378.0, 'NVIDIA H100 data sheet (2023); half of what it gives with sparsity: PCIe'),
    'NVIDIA H100 NVL': _gpu(835.5, 417.5, f'{_H100}: NVL'),
    'NVIDIA H200': _gpu(989.4, 494.7, f'{_H200}: SXM'),
    'NVIDIA H200 NVL': _gpu(835.5, 417.5, f'{_H200}: NVL'),
    'NVIDIA A100-SXM4-40GB': _gpu(312.0, 156.0, _A100),
    'NVIDIA A100-SXM4-80GB': _gpu(312.0, 156.0, _A100),
    'NVIDIA A100-PCIE-40GB': _gpu(312.0, 156.0, _A100),
    'NVIDIA A100 80GB PCIe': _gpu(312.0, 156.0, _A100),
    'NVIDIA B200': _gpu(2250.0, 1100.0, 'NVIDIA HGX B200 data sheet; an eighth of the board, half without sparsity'),
    'NVIDIA L40S': _gpu(362.05, 183.0, 'NVIDIA L40S data sheet'),
    'NVIDIA A10G': _gpu(70.0, 35.0, 'NVIDIA A10G data sheet, as for Amazon EC2 G5'),
    'NVIDIA GeForce RTX 4090': _gpu(165.2, 82.6, 'NVIDIA Ada GPU architecture, appendix A: sums in float32'),
    'TPU v4': _tpu(275.0, 'v4'),
    'TPU v5 lite': _tpu(197.0, 'v5e'),
    'TPU v5e': _tpu(197.0, 'v5e'),
    'TPU v5': _tpu(459.0, 'v5p'),
    'TPU v5p': _tpu(459.0, 'v5p'),
    'TPU v6 lite': _tpu(918.0, 'v6e'),
    'TPU v6e': _tpu(918.0, 'v6e'),
}


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Operations per second of one device for a run that computes in `dtype`; None on a CPU or an unknown device."""
    peak = PEAKS.get(device_kind)
    if peak is None:
        return None
    return peak.float32 if dtype == 'float32' else peak.bfloat16


@dataclasses.dataclass(frozen=True)
class DeviceRates:
    """Rates per device of one run.

    Args:
      learner: devices of the learner's mesh, over all processes.
      engines: different devices that engines decode on; 0 for supervised training.
      peak_flops: of one of the learner's devices; None where it is unknown, or where time is modelled.
    """

    learner: int
    engines: int
    peak_flops: float | None

    def of_learner(self, metrics: Line, seconds: float) -> dict[str, float]:
        """Of one update that took `seconds`, from the learner's metrics; nothing for an update without tokens."""
        tokens, flops = number(metrics, names.READ_TOKENS), number(metrics, names.MODEL_FLOPS)
        if not tokens or not flops or seconds <= 0:
            return {}
        rates: dict[str, float] = {names.LEARNER_RATE_PER_DEVICE: tokens / seconds / self.learner}
        if self.peak_flops:
            rates[names.MFU] = flops / seconds / self.learner / self.peak_flops
        return rates

    def of_engines(self, tokens_per_second: float) -> dict[str, float]:
        """Of generation, from the tokens per second of all engines."""
        return {names.GENERATE_RATE_PER_DEVICE: tokens_per_second / self.engines} if self.engines else {}
