"""Whether memory grows: resident bytes of processes over time, and the slope of their medians."""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Sequence

WINDOW_S = 30.0
MEGABYTE = 1e6
Sample = tuple[float, float]  # (seconds, bytes)


def slope(points: Sequence[Sample]) -> float | None:
    """Theil and Sen's: the median of the slopes of all pairs, in bytes a second; None for fewer than two points."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if b[0] != a[0]]
    return statistics.median(slopes) if slopes else None


def window_medians(samples: Sequence[Sample], window_s: float = WINDOW_S) -> list[Sample]:
    """(middle of a window, median of its bytes) by time."""
    windows: dict[int, list[float]] = collections.defaultdict(list)
    for time_s, size in samples:
        windows[int(time_s // window_s)].append(size)
    return [((index + 0.5) * window_s, statistics.median(sizes)) for index, sizes in sorted(windows.items())]


class MemoryTrack:
    """Samples of processes by name; a process that was started again is another one."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Sample]] = {}

    def add(self, name: str, time_s: float, size: float) -> None:
        self._samples.setdefault(name, []).append((time_s, size))

    def megabytes_a_minute(self, from_s: float, window_s: float = WINDOW_S) -> dict[str, float | None]:
        """Of the processes that lived at the end, over their samples from then on; None: too few windows."""
        end_s = max((samples[-1][0] for samples in self._samples.values()), default=0.0)
        alive = {name: samples for name, samples in self._samples.items() if samples[-1][0] > end_s - 2 * WINDOW_S}
        found: dict[str, float | None] = {}
        for name, samples in alive.items():
            per_s = slope(window_medians([one for one in samples if one[0] >= from_s], window_s))
            found[name] = None if per_s is None else 60 * per_s / MEGABYTE
        return found
