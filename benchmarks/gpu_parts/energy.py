"""The GPU's energy counter: what the driver answers, how often it moves, and joules against the power that it states.

    python -m benchmarks.gpu_parts.energy [--tiny] OUT

`answers` is kept as the fixture of tests/telemetry/test_energy_meters.py.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp

from areal_jax.telemetry.energy_meters import MeterError, open_nvml
from benchmarks.gpu_parts.cells import Cells, run_part

_BUSY_S, _IDLE_S, _EVERY_S = 4.0, 2.0, 0.01


def measure(cells: Cells, *, tiny: bool) -> None:
    try:
        import pynvml
    except ImportError as error:
        cells.add('refused', str(error))
        return
    device = jax.local_devices()[0]
    gpus = [(int(device.local_hardware_id or 0), device.device_kind)]
    try:
        meter = open_nvml(pynvml, gpus, None)
    except MeterError as error:
        cells.add('refused', str(error))
        return
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpus[0][0])
    cells.add('answers', _answers(pynvml, handle))
    samples = _Samples(pynvml, handle)
    with samples:
        first = meter.read()
        time.sleep(_IDLE_S)
        at_busy = meter.read()
        products = _multiply(256 if tiny else 8192, _BUSY_S)
        at_idle = meter.read()
        time.sleep(_IDLE_S)
    cells.add('samples', samples.rows)
    cells.add(
        'joules',
        {
            'idle': at_busy - first,
            'busy': at_idle - at_busy,
            'busy_products': products,
            'power_times_seconds': samples.integrate(),
            'counter': samples.count(),
            'counter_moves_every_s': samples.period(),
        },
    )
    meter.close()


def _answers(pynvml: Any, handle: Any) -> dict[str, Any]:
    """What each call of meters.open_nvml returns, with its type; of the UUID only the form."""
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    counter = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    return {
        'driver': str(pynvml.nvmlSystemGetDriverVersion()),
        'nvml': str(pynvml.nvmlSystemGetNVMLVersion()),
        'count': pynvml.nvmlDeviceGetCount(),
        'name': str(name),
        'uuid_form': ''.join('x' if c in '0123456789abcdef' else c for c in str(uuid)),
        'millijoules': counter,
        'types': {'name': type(name).__name__, 'uuid': type(uuid).__name__, 'millijoules': type(counter).__name__},
    }


class _Samples:
    """[seconds, millijoules, milliwatts] every 10 ms, read by a thread."""

    def __init__(self, pynvml: Any, handle: Any):
        self.rows: list[tuple[float, int, int]] = []
        self._pynvml, self._handle, self._done = pynvml, handle, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(_EVERY_S):
            millijoules = self._pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            milliwatts = self._pynvml.nvmlDeviceGetPowerUsage(self._handle)
            self.rows.append((time.monotonic(), int(millijoules), int(milliwatts)))

    def integrate(self) -> float:
        """Joules by the stated power, which lags behind: up to the end of the idle seconds."""
        return sum((b[0] - a[0]) * (a[2] + b[2]) / 2e3 for a, b in itertools.pairwise(self.rows))

    def count(self) -> float:
        """Joules by the counter, of the same seconds."""
        return (self.rows[-1][1] - self.rows[0][1]) / 1e3

    def period(self) -> float | None:
        """The median of the seconds between two changes of the counter."""
        moved = [b[0] for a, b in itertools.pairwise(self.rows) if b[1] != a[1]]
        gaps = [b - a for a, b in itertools.pairwise(moved)]
        return statistics.median(gaps) if gaps else None


def _multiply(size: int, seconds: float) -> int:
    """How many products of two bfloat16 matrices the device made in so many seconds."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product, made = jax.jit(lambda a, b: a @ b), 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(10):
            out = product(a, a)
        jax.block_until_ready(out)
        made += 10
    return made


if __name__ == '__main__':
    run_part(measure)
