"""The energy account of a run, from telemetry.energy and from what the run computes on. Imports no jax."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from areal_jax.config import TrackedConfig
from areal_jax.installation import describe_install
from areal_jax.lanes import LEARNER, engine_lane
from areal_jax.telemetry.energy.accounting import EnergyAccount
from areal_jax.telemetry.energy.meters import POWERCAP, DeviceSet, Meter, MeterError, RaplMeter, open_nvml

if TYPE_CHECKING:
    from areal_jax.sharding.rules import Allocation

_VIRTUAL = "No joules: run.clock='virtual' models the seconds of a run, and no meter measures modelled seconds."
_ELSEWHERE = (
    'No joules: learner or engines compute in other processes, and their devices are neither measured nor modelled '
    'from here.'
)


_NO_CHIP = 'No joules: the prices of this simulation name no chip.'


@dataclasses.dataclass(frozen=True)
class UsedDevices:
    """The devices of learner and engines."""

    sets: tuple[DeviceSet, ...]
    has_counters: bool = False  # they are GPUs, which NVML may know
    gpus: tuple[tuple[int, str], ...] | None = None  # CUDA's number and name; None: some are of another process
    simulated: bool = False  # nothing can be measured, and modelled joules are of modelled seconds


def group_devices(uses: Iterable[tuple[Hashable, str, str]]) -> tuple[DeviceSet, ...]:
    """The sets of (device, kind, lane that uses it)."""
    lanes: dict[tuple[Hashable, str], set[str]] = collections.defaultdict(set)
    for device, kind, lane in uses:
        lanes[device, kind].add(lane)
    counts = collections.Counter((kind, frozenset(own)) for (_, kind), own in lanes.items())
    return tuple(DeviceSet(*key, count) for key, count in counts.items())


def list_devices(allocation: Allocation, process: int) -> UsedDevices:
    """The devices of a run whose learner and engines are in this process, which jax numbers `process`."""
    uses = [(device, LEARNER) for device in allocation.learner.devices.flat]
    uses += [(device, engine_lane(index)) for index, own in enumerate(allocation.engines) for device in own]
    used = dict.fromkeys(device for device, _ in uses)
    has_counters = all(device.platform not in ('cpu', 'tpu') for device in used)
    gpus: tuple[tuple[int, str], ...] | None = None
    if has_counters and all(device.process_index == process for device in used):
        gpus = tuple((int(device.local_hardware_id or 0), device.device_kind) for device in used)
    sets = group_devices((device, device.device_kind, lane) for device, lane in uses)
    return UsedDevices(sets, has_counters, gpus)


def build_energy(
    config: TrackedConfig, list_used: Callable[[], UsedDevices | None], powercap: pathlib.Path | None = None
) -> EnergyAccount | None:
    """None where telemetry.energy is 'off'.

    Args:
      list_used: the devices of the run; None where learner or engines are in other processes.
      powercap: in place of POWERCAP.
    """
    if config.telemetry.energy == 'off':
        return None
    if (used := list_used()) is None:
        return EnergyAccount((), (), _warn, note=_ELSEWHERE)
    if used.simulated:
        return EnergyAccount(used.sets, (), _warn, note='' if used.sets else _NO_CHIP)
    if config.run.clock == 'virtual':
        return EnergyAccount((), (), _warn, note=_VIRTUAL)
    meters, reasons = open_meters(used, powercap or POWERCAP)
    return EnergyAccount(used.sets, meters, _warn, reasons=reasons)


def open_meters(used: UsedDevices, powercap: pathlib.Path) -> tuple[list[Meter], list[str]]:
    """(the meters that can be read here, why each of the others cannot)."""
    meters: list[Meter] = []
    reasons: list[str] = []
    if used.has_counters:
        try:
            meters.append(_open_nvml(used.gpus))
        except MeterError as error:
            reasons.append(str(error))
    try:
        meters.append(RaplMeter(powercap))
    except MeterError as error:
        reasons.append(str(error))
    return meters, reasons


def _open_nvml(gpus: Sequence[tuple[int, str]] | None) -> Meter:
    if gpus is None:
        raise MeterError('NVML: some GPUs belong to other processes')
    try:
        library: Any = importlib.import_module('pynvml')
    except ImportError as error:
        raise MeterError(f'NVML: the package nvidia-ml-py is not installed, {describe_install("energy")}') from error
    return open_nvml(library, gpus, os.environ.get('CUDA_VISIBLE_DEVICES'))


def _warn(sentence: str) -> None:
    print(f'warning: {sentence}', file=sys.stderr, flush=True)
