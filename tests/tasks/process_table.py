"""What the operating system says of a process."""

from __future__ import annotations

import pathlib
import time

from checks.processes import is_alive


def all_end(pids: list[int], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def read_pids(path: pathlib.Path, n: int, within_s: float = 10.0) -> list[int]:
    """The first n numbers that processes have written into the file."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        numbers = path.read_text().split() if path.exists() else []
        if len(numbers) >= n:
            return [int(number) for number in numbers[:n]]
        time.sleep(0.02)
    raise AssertionError(f'{path} has fewer than {n} numbers')
