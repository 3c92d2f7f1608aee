"""Under arrow 7: the device mesh of the learner."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ('data', 'fsdp')  # replicas, shards; rows of a batch lie over both


def make_mesh(data: int = 1, fsdp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `data` x `fsdp` devices, the first of `devices` (default: all of this process's platform).

    Raises ValueError where the mesh needs more devices than there are.
    """
    for axis, size in zip(AXES, (data, fsdp), strict=True):
        if size < 1:
            raise ValueError(f'mesh.{axis}={size} must be at least 1')
    available = jax.devices() if devices is None else list(devices)
    if data * fsdp > len(available):
        raise ValueError(
            f'mesh.data={data} x mesh.fsdp={fsdp} needs {data * fsdp} devices, {len(available)} are available; lower '
            'one of them, or on CPU set XLA_FLAGS=--xla_force_host_platform_device_count before jax is imported'
        )
    grid = np.array(available[: data * fsdp]).reshape(data, fsdp)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
