"""Facts of the device and of the software, and what the device reaches on the two plainest programs.

python -m benchmarks.gpu_parts.facts [--tiny] OUT
"""

from __future__ import annotations

import importlib
import os
import subprocess
from typing import Any

import jax
import jax.numpy as jnp

from areal_jax.app.workdir.environment import hardware, package_versions
from benchmarks.gpu_parts.cells import Cells, device_memory, measure_time, run_part
from benchmarks.gpu_parts.shapes import find_peak

_QUERY = 'name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit,compute_mode'
_VARIABLES = ('XLA_', 'JAX_', 'CUDA_', 'NVIDIA_')
_REPEATS, _CALLS = 10, 20


def measure(cells: Cells, *, tiny: bool) -> None:
    device = jax.local_devices()[0]
    peak = find_peak(device.device_kind)
    cells.add(
        'device',
        {
            'platform': device.platform,
            'kind': device.device_kind,
            'count': jax.local_device_count(),
            'compute_capability': str(getattr(device, 'compute_capability', '')) or None,
            'memory': device_memory(),
            'peak_bfloat16_flops': peak and peak.bfloat16_flops,
            'peak_bytes_per_second': peak and peak.bytes_per_second,
        },
    )
    cells.add('versions', package_versions())
    cells.add('hardware', hardware())
    cells.add('environment', {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)})
    cells.add('nvidia_smi', _nvidia_smi())
    cells.add('cuda', _cuda_versions())
    cells.attempt('matrix_product', lambda: _matrix_product(256 if tiny else 8192))
    cells.attempt('copy', lambda: _copy(2**20 if tiny else 2**30))


def _matrix_product(size: int) -> dict[str, Any]:
    """Of two bfloat16 matrices of random numbers."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: a @ b)
    time = measure_time(lambda: product(a, b), _REPEATS, warm_up=3, calls=_CALLS)
    return {**time, 'size': size, 'flops_per_second': 2 * size**3 / time['median_s']}


def _copy(elements: int) -> dict[str, Any]:
    """Of bfloat16 numbers on the device; bytes read and bytes written are both counted."""
    x = jax.random.normal(jax.random.key(0), (elements,), jnp.bfloat16)
    shift = jax.jit(lambda x: x + 1)
    time = measure_time(lambda: shift(x), _REPEATS, warm_up=3, calls=_CALLS)
    return {**time, 'bytes': 2 * x.nbytes, 'bytes_per_second': 2 * x.nbytes / time['median_s']}


def _nvidia_smi() -> dict[str, str] | None:
    """What the driver says of the first GPU; None without one."""
    command = ['nvidia-smi', f'--query-gpu={_QUERY}', '--format=csv,noheader', '--id=0']
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(_QUERY.split(','), (value.strip() for value in done.stdout.split(',')), strict=False))


def _cuda_versions() -> dict[str, Any] | None:
    """What jax's CUDA plugin has loaded; None without one."""
    for plugin in ('jax_cuda13_plugin', 'jax_cuda12_plugin'):
        try:
            module = importlib.import_module(f'{plugin}._versions')
        except ImportError:
            continue
        return {'plugin': plugin} | {
            name.removesuffix('_get_version'): _call(getattr(module, name))
            for name in dir(module)
            if name.endswith('_get_version')
        }
    return None


def _call(get_version: Any) -> int | str:
    try:
        return int(get_version())
    except Exception as error:  # of a library that is not there
        return str(error)


if __name__ == '__main__':
    run_part(measure)
