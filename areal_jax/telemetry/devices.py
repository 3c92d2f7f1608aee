"""Peak FLOP/s of devices, the share of it that a run uses, and the host resources of a run.

Peaks hold for dense matrices (no structured sparsity) with products of bfloat16 or float16 summed in float32. If a
run computes in float32, jax by default multiplies in TF32 on NVIDIA GPUs and in one pass of bfloat16 on TPUs
(docs.jax.dev, "Matmul precision"): that is the second column.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, Value, counts, number

if TYPE_CHECKING:
    import psutil


class OptimizerAges:
    """Counts the optimizer steps that were applied up to each version."""

    def __init__(self, steps: Sequence[float] = (0.0,)):
        """`steps`: steps applied before version 0, 1, ..., as `state` returns them."""
        self._steps = list(steps)

    def note_update(self, update: int, metrics: Line) -> dict[str, Value]:
        """Metrics of update number `update`; {} if it trained no token or earlier updates are unknown."""
        if len(self._steps) != update:
            return {}
        before = self._steps
        histogram = counts(metrics, names.TOKEN_AGE_HISTOGRAM)
        ages = [before[-1] - before[-1 - age] for age in range(min(len(histogram), len(before)))]
        before.append(before[-1] + (number(metrics, names.OPTIMIZER_STEPS) or 0.0))
        tokens = sum(histogram)
        inside = number(metrics, names.STEPS_INSIDE_MEAN), number(metrics, names.STEPS_INSIDE_MAX)
        if not tokens or inside[0] is None or inside[1] is None or len(ages) < len(histogram):
            return {}
        mean = sum(age * count for age, count in zip(ages, histogram, strict=True)) / tokens
        return {names.STEP_AGE_MEAN: mean + inside[0], names.STEP_AGE_MAX: max(ages) + inside[1]}

    def state(self) -> list[float]:
        return list(self._steps)


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
      learner: number of devices of the learner's mesh, over all processes.
      engines: number of distinct devices that engines decode on; 0 for supervised training.
      peak_flops: peak of one of the learner's devices; None if it is unknown or time is modelled.
    """

    learner: int
    engines: int
    peak_flops: float | None

    def of_learner(self, metrics: Line, seconds: float) -> dict[str, float]:
        """Rates of one update that took `seconds`, from the learner's metrics; {} for an update without tokens."""
        tokens, flops = number(metrics, names.READ_TOKENS), number(metrics, names.MODEL_FLOPS)
        if not tokens or not flops or seconds <= 0:
            return {}
        rates: dict[str, float] = {names.LEARNER_RATE_PER_DEVICE: tokens / seconds / self.learner}
        if self.peak_flops:
            rates[names.MFU] = flops / seconds / self.learner / self.peak_flops
        return rates

    def of_engines(self, tokens_per_second: float) -> dict[str, float]:
        """The rate of generation per device, from the tokens per second of all engines."""
        return {names.GENERATE_RATE_PER_DEVICE: tokens_per_second / self.engines} if self.engines else {}


# Memory and processor time of the process and its workers, measured while the run runs.


INTERVAL_S = 0.5

Quantity = TypeVar('Quantity', int, float)


class ResourceSampler:
    """A daemon thread that tracks the peak of resident memory, summed over the process tree.

    Shared pages count once for each process that shares them, so the sum is an upper bound. A context manager; `stop`
    ends the measurement before the context does.
    """

    def __init__(self, interval_s: float = INTERVAL_S):
        self._interval_s = interval_s
        self.peak_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name='resources', daemon=True)

    def __enter__(self) -> ResourceSampler:
        self._measure()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Takes a last sample and ends the thread."""
        self._stopped.set()
        self._thread.join()
        self._measure()

    def cpu_seconds(self) -> float:
        """Processor seconds (user and system) of the tree so far; a difference of two calls measures a window."""
        return cpu_seconds()

    def _sample(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._measure()

    def _measure(self) -> None:
        self.peak_bytes = max(self.peak_bytes, resident_bytes())


def resident_bytes(pid: int | None = None) -> int:
    """Sum of resident memory over a process (None: this one) and its descendants."""
    return sum(_each(lambda process: int(process.memory_info().rss), pid))


def cpu_seconds(pid: int | None = None) -> float:
    """Processor seconds of a process (None: this one), its living descendants and (not on macOS) its ended ones."""

    def spent(process: psutil.Process) -> float:
        times = process.cpu_times()
        ended = getattr(times, 'children_user', 0.0) + getattr(times, 'children_system', 0.0)
        return float(times.user + times.system + ended)

    return sum(_each(spent, pid))


def _each(measure: Callable[[psutil.Process], Quantity], pid: int | None) -> Iterator[Quantity]:
    """Yields `measure` of every process of the tree that still exists."""
    import psutil

    this = psutil.Process(pid)
    yield measure(this)
    for process in this.children(recursive=True):
        try:
            yield measure(process)
        except psutil.Error:  # it has ended, or belongs to another user
            continue
