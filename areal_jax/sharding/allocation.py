"""Which devices are the learner's and which each engine's, as `cluster.learner` and `cluster.engines` say.

app/ hands the mesh to the learner and its devices to each engine; config/cluster.py has the sizes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TypeAlias

import jax
from jax.sharding import Mesh

from areal_jax.config.cluster import ENGINES, EnginesLayout, LearnerLayout, require_fit
from areal_jax.config.ranges import ConfigError
from areal_jax.lanes import engine_lane
from areal_jax.sharding.rules import make_mesh, mesh_of

EngineDevices: TypeAlias = tuple[jax.Device, ...]  # of one engine and of this process, one or more


@dataclasses.dataclass(frozen=True)
class Allocation:
    """The devices of a run, by who uses them."""

    learner: Mesh  # data x fsdp x expert x context x tensor, over all processes
    engines: tuple[EngineDevices, ...]  # by engine

    def engine_shares(self, index: int) -> bool:
        """Whether another engine, or the learner, computes on the devices of this engine."""
        devices = self.engines[index]
        return not {*devices}.isdisjoint(self.learner.devices.flat) or self.engines.count(devices) > 1

    @property
    def lanes_own_devices(self) -> bool:
        """Whether the learner and every engine have accelerators of their own; virtual CPU devices share the cores."""
        shared = any(self.engine_shares(index) for index in range(len(self.engines)))
        used = (*self.learner.devices.flat, *itertools.chain(*self.engines))
        return not shared and all(device.platform != 'cpu' for device in used)

    def by_devices(self) -> dict[EngineDevices, list[int]]:
        """The engines on each set of devices; two sets have no device in common."""
        found: dict[EngineDevices, list[int]] = {}
        for index, devices in enumerate(self.engines):
            found.setdefault(devices, []).append(index)
        return found

    def describe(self) -> dict[str, list[int] | dict[str, list[int]]]:
        """{'learner': ids, 'engines': {'engine/0': ids}}, for the report."""
        engines = {engine_lane(index): [device.id for device in devices] for index, devices in enumerate(self.engines)}
        return {'learner': [device.id for device in self.learner.devices.flat], 'engines': engines}


def allocate(learner: LearnerLayout, engines: EnginesLayout, *, from_end: bool = False) -> Allocation:
    """The learner's mesh over the first devices, and the devices of the engines.

    An engine of its own devices has them after the learner's; engines that share decode on the first local device.
    With `from_end` the first engine has the last devices: where engines come and go, those that stay keep theirs.

    Raises ConfigError where there are too few devices, or where engines would have their own in a run of several
    processes, which is not built yet.
    """
    available = jax.devices()
    if engines.devices and jax.process_count() > 1:
        raise ConfigError(
            f'{ENGINES}={str(engines)!r}: devices of their own for engines of a learner over {jax.process_count()} '
            f"processes (hosts) are not built yet; use '{engines.count} x shared'"
        )
    require_fit(learner, engines, len(available), available[0].platform)
    mesh = mesh_of(learner)
    if engines.shared:
        return Allocation(mesh, ((jax.local_devices()[0],),) * engines.count)
    if from_end:
        return Allocation(mesh, tuple(devices[::-1] for devices in _share_out(available[::-1], engines)))
    return Allocation(mesh, _share_out(available[learner.devices :], engines))


def allocate_engines(engines: EnginesLayout) -> Allocation:
    """The devices of engines without a learner, the first ones; the mesh is the first engine's device.

    Raises ConfigError where there are too few devices.
    """
    devices = jax.local_devices()
    needed = 1 if engines.shared else engines.devices
    if needed > len(devices):
        platform = devices[0].platform
        more = f', or set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before jax is imported'
        raise ConfigError(
            f'{ENGINES}={str(engines)!r} needs {needed} devices; the platform {platform!r} has {len(devices)}: lower a '
            f"number, or use '{engines.count} x shared'{more if platform == 'cpu' else ''}"
        )
    chosen = ((devices[0],),) * engines.count if engines.shared else _share_out(devices, engines)
    return Allocation(make_mesh(devices=devices[:1]), chosen)


def describe_hardware(devices: EngineDevices) -> str:
    """Number and kind, '2 x NVIDIA H100': engines of equal hardware are of one class."""
    return f'{len(devices)} x {devices[0].device_kind}'


def _share_out(devices: Sequence[jax.Device], engines: EnginesLayout) -> tuple[EngineDevices, ...]:
    """The devices of each engine, one engine after the other."""
    return tuple(tuple(devices[number] for number in numbers) for numbers in engines.place())
