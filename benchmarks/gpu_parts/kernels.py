"""Which kernels a call spends its time in, from a trace of the profiler."""

from __future__ import annotations

import collections
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.profiler import ProfileData

_SHOWN = 40


def trace_kernels(call: Callable[[], Any], calls: int = 2) -> dict[str, Any]:
    """The longest kernels of so many calls, without a call before that compiles.

    Returns:
      busy_s: seconds of the call in which the device ran a kernel or a copy.
      kernels: [{name, seconds, count}] a call, the longest first; empty on a device that the profiler does not see.
    """
    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(call())
        [path] = pathlib.Path(folder).rglob('*.xplane.pb')
        data = ProfileData.from_file(str(path))
    events = [
        (event.name, event.start_ns, event.duration_ns)
        for plane in data.planes
        if plane.name.startswith('/device:GPU')
        for line in plane.lines
        if line.name.startswith('Stream')
        for event in line.events
    ]
    seconds, counts = collections.Counter[str](), collections.Counter[str]()
    for name, _, duration_ns in events:
        seconds[name] += duration_ns / 1e9
        counts[name] += 1
    return {
        'busy_s': covered((start, start + duration) for _, start, duration in events) / 1e9 / calls,
        'kernels': [
            {'name': name[:120], 'seconds': spent / calls, 'count': counts[name] / calls}
            for name, spent in seconds.most_common(_SHOWN)
        ],
    }


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, end)."""
    total, reached = 0.0, float('-inf')
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
