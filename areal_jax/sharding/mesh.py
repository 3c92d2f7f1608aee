"""Under arrow 7: the device mesh of the learner."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from areal_jax.ranges import ConfigError

# replicas, shards of weights and rows, slices of a row's tokens, slices of heads, MLP and vocabulary; neighbouring
# devices lie along the last axis, whose traffic is heaviest
AXES = ('data', 'fsdp', 'context', 'tensor')
ROW_AXES = ('data', 'fsdp')  # rows of a batch lie over both
TOKEN_AXES = ('data', 'fsdp', 'context')  # the flat stream of tokens lies over all three


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    *,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of data x fsdp x context x tensor devices, the first of `devices` (default: all, of all processes).

    Raises ValueError where the mesh needs more devices than there are, or fewer than a run of several processes has.
    """
    shape = (data, fsdp, context, tensor)
    for axis, size in zip(AXES, shape, strict=True):
        if size < 1:
            raise ConfigError(f'mesh.{axis}={size} must be at least 1')
    available = jax.devices() if devices is None else list(devices)
    needed = math.prod(shape)
    product = ' x '.join(f'mesh.{axis}={size}' for axis, size in zip(AXES, shape, strict=True))
    if needed > len(available):
        raise ConfigError(
            f'{product} needs {needed} devices, {len(available)} are available; lower '
            'one of them, or on CPU set XLA_FLAGS=--xla_force_host_platform_device_count before jax is imported'
        )
    if devices is None and jax.process_count() > 1 and needed < len(available):
        raise ConfigError(
            f'{product} takes {needed} of the {len(available)} devices of {jax.process_count()} processes; every '
            'process must take part: raise one of them to use all devices'
        )
    grid = mesh_utils.create_device_mesh(shape, available[:needed], allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
