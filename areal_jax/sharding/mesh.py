"""The device mesh of the learner.

config/cluster.py declares its axes and parses its sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from areal_jax.config.cluster import AXES, LEARNER, EnginesLayout, LearnerLayout, require_fit
from areal_jax.config.ranges import ConfigError

# Neighbouring devices differ in the last axis of AXES, which has the heaviest traffic.
ROW_AXES = ('data', 'fsdp', 'expert')  # the rows of a batch are sharded over all three
TOKEN_AXES = (*ROW_AXES, 'context')  # and the flat stream of tokens over these


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    *,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """`mesh_of` these sizes."""
    return mesh_of(LearnerLayout(data, fsdp, expert, context, tensor), devices)


def mesh_of(layout: LearnerLayout, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the sizes of the layout, over the first of `devices` (default: all, of all processes).

    On CPU and GPU devices are in row-major order; on TPU jax orders them by their links.

    Raises ConfigError where the mesh needs more devices than there are, or fewer than a run of several processes has.
    """
    available = jax.devices() if devices is None else list(devices)
    require_fit(layout, EnginesLayout(), len(available), available[0].platform)
    if devices is None and jax.process_count() > 1 and layout.devices < len(available):
        raise ConfigError(
            f'{LEARNER}={str(layout)!r} takes {layout.devices} of the {len(available)} devices of '
            f'{jax.process_count()} processes; every process must take part: raise a size to use all devices'
        )
    grid = mesh_utils.create_device_mesh(layout.sizes, available[: layout.devices], allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
