from __future__ import annotations

import mmap
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from areal_jax.telemetry.devices import ResourceSampler, cpu_seconds, resident_bytes

MIB = 2**20


def test_the_peak_outlives_the_memory():
    before = resident_bytes()
    with ResourceSampler(interval_s=0.01) as sampler:
        # Mapped, because malloc may hand out pages that a freed block left resident, and then nothing grows.
        with mmap.mmap(-1, 96 * MIB) as block:
            block.write(bytes(96 * MIB))  # touched, so resident
            held = resident_bytes()
            _wait(lambda: sampler.peak_bytes > before + 80 * MIB)
        after = resident_bytes()
    assert after < held - 80 * MIB
    assert sampler.peak_bytes > before + 80 * MIB


def test_the_peak_counts_workers():
    hold = f"x = bytearray(b'x') * {64 * MIB}; print('held', flush=True); input()"
    with ResourceSampler(interval_s=0.01) as sampler:
        alone = resident_bytes()
        shell = ['sh', '-c', '"$0" -c "$1"; true', sys.executable, hold]  # the worker is a child of a child
        worker = subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert worker.stdout is not None
        worker.stdout.readline()
        _wait(lambda: sampler.peak_bytes > alone + 60 * MIB)
        worker.communicate(b'\n')
    assert sampler.peak_bytes > alone + 60 * MIB


@pytest.mark.skipif(sys.platform == 'darwin', reason='macOS does not report the time of processes that have ended')
def test_processor_seconds_keep_those_of_an_ended_worker():
    burn = 'import time\nwhile time.process_time() < 0.3: pass'
    before = cpu_seconds()
    subprocess.run([sys.executable, '-c', burn], check=True)
    assert 0.25 < cpu_seconds() - before < 2.0


def test_processor_seconds_of_this_process():
    sampler = ResourceSampler()
    before, start = sampler.cpu_seconds(), time.process_time()
    while time.process_time() - start < 0.2:
        pass
    assert 0.1 < sampler.cpu_seconds() - before < 1.0  # counted in ticks of 10 ms


def _wait(reached: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """Give the sampler's thread the time it needs on a busy machine."""
    end = time.monotonic() + deadline_s
    while not reached() and time.monotonic() < end:
        time.sleep(0.01)
