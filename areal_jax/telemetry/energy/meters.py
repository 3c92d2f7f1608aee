"""Energy counters of GPUs (NVML) and of CPU packages (RAPL)."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

NVML, RAPL = 'nvml', 'rapl'  # names of meters, as the metrics have them
POWERCAP = pathlib.Path('/sys/class/powercap')


class MeterError(RuntimeError):
    """A counter that is not there or cannot be read; the message says why."""


class Meter(Protocol):
    """A counter of joules."""

    name: str  # NVML, RAPL
    devices: str  # what it measures, in words

    def read(self) -> float:
        """Joules since it was opened, as of now. Raises MeterError."""
        ...

    def close(self) -> None: ...


class NvmlMeter:
    """The total energy counters of GPUs, in millijoules since the driver was loaded. They move every 100 ms or so.

    Args:
      library: the module pynvml, initialized.
      handles: of the GPUs.
      devices: these GPUs in words.
    """

    name = NVML

    def __init__(self, library: Any, handles: Sequence[Any], devices: str):
        self._library, self._handles, self.devices = library, handles, devices
        self._first = self._count()

    def read(self) -> float:
        now = self._count()
        if any(new < old for new, old in zip(now, self._first, strict=True)):
            raise MeterError('a counter went back, as it does when the driver is loaded again')
        return (sum(now) - sum(self._first)) / 1000

    def close(self) -> None:
        try:
            self._library.nvmlShutdown()
        except self._library.NVMLError:
            return

    def _count(self) -> list[int]:
        try:
            return [int(self._library.nvmlDeviceGetTotalEnergyConsumption(handle)) for handle in self._handles]
        except self._library.NVMLError as error:
            raise MeterError(f'nvmlDeviceGetTotalEnergyConsumption: {error}') from error


def open_nvml(library: Any, gpus: Sequence[tuple[int, str]], visible: str | None) -> NvmlMeter:
    """The counters of GPUs of this process; shuts NVML down where it fails.

    Args:
      library: the module pynvml.
      gpus: CUDA's number and name of each.
      visible: the environment variable CUDA_VISIBLE_DEVICES.

    Raises MeterError without a driver, for a GPU without a counter, for a slice of a GPU (MIG), which has no counter of
    its own, and where NVML and CUDA number GPUs differently.
    """
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise MeterError(f'NVML: {error}') from error
    try:
        handles = [_find_handle(library, ordinal, visible) for ordinal, _ in gpus]
        for handle, (_, kind) in zip(handles, gpus, strict=True):
            if (named := _text(library.nvmlDeviceGetName(handle))) != kind:
                raise MeterError(
                    f'NVML has {named!r} in the place of {kind!r}: set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that CUDA and '
                    'NVML number GPUs alike'
                )
        counts = collections.Counter(kind for _, kind in gpus)
        return NvmlMeter(library, handles, ', '.join(f'{count} x {kind}' for kind, count in sorted(counts.items())))
    except (library.NVMLError, MeterError) as error:
        library.nvmlShutdown()
        raise MeterError(f'NVML: {error}') from error


def _find_handle(library: Any, ordinal: int, visible: str | None) -> Any:
    if visible is None:
        return library.nvmlDeviceGetHandleByIndex(ordinal)
    entries = [entry.strip() for entry in visible.split(',')]
    entry = entries[ordinal] if ordinal < len(entries) else ''
    if entry.isdigit():
        return library.nvmlDeviceGetHandleByIndex(int(entry))
    for index in range(library.nvmlDeviceGetCount()):
        handle = library.nvmlDeviceGetHandleByIndex(index)
        if entry and _text(library.nvmlDeviceGetUUID(handle)).startswith(entry):  # CUDA takes the first characters too
            return handle
    raise MeterError(f'CUDA_VISIBLE_DEVICES={visible!r} names no whole GPU for device {ordinal}')


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # of versions before 11.5


class RaplMeter:
    """The energy counters of all CPU packages of this machine, with whatever runs on them; without DRAM.

    A counter starts again at 0 after `max_energy_range_uj` microjoules. A read sees one such wrap since the read
    before; a second one in between cannot be told, and its range would be missing.

    Raises MeterError where there is no package, or one cannot be read.
    """

    name = RAPL

    def __init__(self, root: pathlib.Path = POWERCAP):
        self._zones = sorted(zone for zone in root.glob('intel-rapl:*') if _is_package(zone))
        if not self._zones:
            raise MeterError(f'RAPL: {root} has no CPU package, as in most virtual machines')
        self._ranges = [_read_number(zone / 'max_energy_range_uj') for zone in self._zones]
        self._last = [_read_number(zone / 'energy_uj') for zone in self._zones]
        self._total = 0  # microjoules
        self.devices = f'{len(self._zones)} CPU package{"s" if len(self._zones) > 1 else ""}'

    def read(self) -> float:
        now = [_read_number(zone / 'energy_uj') for zone in self._zones]
        for new, old, wraps_at in zip(now, self._last, self._ranges, strict=True):
            self._total += new - old if new >= old else wraps_at - old + new
        self._last = now
        return self._total / 1e6

    def close(self) -> None:
        """Nothing is held."""


def _is_package(zone: pathlib.Path) -> bool:
    """Not a part of a package, such as its cores or DRAM, and not the platform, which holds the packages."""
    try:
        return (zone / 'name').read_text().startswith('package')
    except OSError:
        return False


def _read_number(path: pathlib.Path) -> int:
    try:
        return int(path.read_text())
    except PermissionError as error:
        raise MeterError(f'RAPL: {path} is readable by root only, as Linux has it since version 5.10') from error
    except (OSError, ValueError) as error:
        raise MeterError(f'RAPL: {path}: {error}') from error
