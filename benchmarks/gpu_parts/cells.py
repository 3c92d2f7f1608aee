"""The numbers of one part: kept on disk as soon as they are there, with the error of what fails."""

from __future__ import annotations

import pathlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from areal_jax import files

Timing = dict[str, Any]  # median_s, quartiles_s, n


class Cells:
    """Named numbers, written to a file after each change, so that a part which is ended leaves what it had."""

    def __init__(self, out: pathlib.Path):
        self._out, self.values, self.failed = out, dict[str, Any](), list[str]()

    def add(self, name: str, value: Any) -> None:
        self.values[name] = value
        files.write_json(self._out, self.values, allow_nan=True)

    def attempt(self, name: str, measure: Callable[[], Any]) -> Any:
        """Adds what `measure` returns and returns it; adds {'error': text} and returns None where it raises."""
        try:
            value = measure()
        except Exception as error:
            print(f'{name}:', file=sys.stderr)
            traceback.print_exc()
            self.failed.append(name)
            self.add(name, {'error': f'{type(error).__name__}: {error}'[:2000]})
            return None
        self.add(name, value)
        return value


def run_part(measure: Callable[..., None]) -> None:
    """The main of a part: `measure(cells, *arguments, tiny=...)` of the command line `ARGUMENT... [--tiny] OUT`."""
    *arguments, out = sys.argv[1:]
    if '--tiny' not in arguments and (platform := jax.default_backend()) != 'gpu':
        sys.exit(f"the default device is a {platform}: use a Python with jax for CUDA ('areal_jax[cuda13]'), or --tiny")
    cells = Cells(pathlib.Path(out))
    measure(cells, *(argument for argument in arguments if argument != '--tiny'), tiny='--tiny' in arguments)
    cells.add('device_memory', device_memory())
    if cells.failed:
        sys.exit(f'failed: {", ".join(cells.failed)}')


def measure_time(call: Callable[[], Any], repeats: int, warm_up: int = 1, calls: int = 1) -> Timing:
    """Seconds of a call until its results are there: the median and the quartiles of `repeats` measurements.

    With several `calls` in a measurement the device runs one behind the other, without the host's part in between.
    """
    for _ in range(warm_up):
        jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)][-1])
        seconds.append((time.perf_counter() - began) / calls)
    return summarize(seconds)


def summarize(seconds: list[float]) -> Timing:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return {'median_s': statistics.median(seconds), 'quartiles_s': [low, high], 'n': len(seconds)}


def device_memory() -> dict[str, int] | None:
    """Bytes of the first device: the most in use so far, and what jax may use; None on a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats:
        return None
    wanted = {'peak_bytes_in_use': 'peak_bytes', 'bytes_in_use': 'bytes', 'bytes_limit': 'limit_bytes'}
    return {ours: int(stats[theirs]) for theirs, ours in wanted.items() if theirs in stats}
