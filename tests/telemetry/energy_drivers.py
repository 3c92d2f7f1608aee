"""Counters as drivers show them: a directory of powercap, a module like pynvml."""

from __future__ import annotations

import pathlib

MICRO = 10**6


def write_zone(root: pathlib.Path, zone: str, name: str, microjoules: int, wraps_at: int = 262143328850) -> None:
    """As Linux writes /sys/class/powercap/intel-rapl:0: numbers with a line end."""
    folder = root / zone
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'name').write_text(f'{name}\n')
    (folder / 'energy_uj').write_text(f'{microjoules}\n')
    (folder / 'max_energy_range_uj').write_text(f'{wraps_at}\n')


class FakeNvml:
    """What NvmlMeter calls of pynvml; a handle is an index. `millijoules` is None for a GPU without a counter."""

    class NVMLError(Exception):
        pass

    def __init__(self, **millijoules_by_name: int | None):
        self.names = [name.replace('_', ' ') for name in millijoules_by_name]
        self.millijoules: list[int | None] = list(millijoules_by_name.values())
        self.has_driver, self.open = True, 0

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError('Driver Not Loaded')
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f'GPU-{handle}b1c'

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self.names[handle].encode()

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        found = self.millijoules[handle]
        if found is None:
            raise self.NVMLError('Not Supported')
        return found
