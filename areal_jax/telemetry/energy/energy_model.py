"""The energy model: what lanes did -> seconds of devices by state -> joules. Pure functions.

E = Σ over devices ∫ P(state, activity) dt. `joules` takes seconds by state from anywhere, a run or a simulated one.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping

from areal_jax.telemetry.energy.meters import DECODE, IDLE, PREFILL, STATES, TRAIN, ChipPower


@dataclasses.dataclass(frozen=True)
class Energy:
    """Joules with the low, the middle and the high published watts; of a meter all three are equal."""

    low: float = 0.0
    mid: float = 0.0
    high: float = 0.0

    def __add__(self, other: Energy) -> Energy:
        return Energy(self.low + other.low, self.mid + other.mid, self.high + other.high)


@dataclasses.dataclass(frozen=True)
class Phase:
    """Seconds in one state of every device of a set."""

    state: str  # of power_table.STATES
    seconds: float
    activity: float = 0.0  # of decoding, see power_table.decode_activity


@dataclasses.dataclass(frozen=True)
class Occupation:
    """A lane was in a state from `start` to `end`, clock seconds."""

    lane: str
    state: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class DeviceSet:
    """Devices of one kind that the same lanes compute on."""

    kind: str  # jax.Device.device_kind
    lanes: frozenset[str]
    devices: int


def joules(phases: Iterable[Phase], power: ChipPower, devices: int = 1) -> Energy:
    """Joules of `devices` that go through these phases together."""
    total = Energy()
    for phase in phases:
        watts, seconds = power.draw(phase.state, phase.activity), phase.seconds * devices
        total += Energy(watts.low * seconds, watts.mid * seconds, watts.high * seconds)
    return total


def find_phases(
    occupations: Iterable[Occupation],
    lanes: Collection[str],
    start: float,
    end: float,
    activity: Mapping[str, float],
) -> list[Phase]:
    """What devices did from `start` to `end` that the `lanes` compute on; the seconds add up to the whole span.

    Where lanes overlap, the first of their STATES counts, and of decoding the most active lane: programs of one device
    take turns, and their watts do not add up. A device without an occupied lane is idle.

    Args:
      activity: of the decoding of each lane in the span; 0 for others.
    """
    changes = []
    for found in occupations:
        low, high = max(found.start, start), min(found.end, end)
        if found.lane in lanes and high > low:
            changes += [(low, 1, found.state, found.lane), (high, -1, found.state, found.lane)]
    running: dict[str, collections.Counter[str]] = {state: collections.Counter() for state in STATES}
    seconds: dict[tuple[str, float], float] = collections.defaultdict(float)
    reached = start
    for time, change, state, lane in [*sorted(changes), (end, 0, IDLE, '')]:
        if time > reached:
            seconds[_state_of(running, activity)] += time - reached
            reached = time
        running[state][lane] += change
    return [Phase(state, spent, active) for (state, active), spent in sorted(seconds.items())]


def _state_of(running: Mapping[str, Mapping[str, int]], activity: Mapping[str, float]) -> tuple[str, float]:
    for state in (TRAIN, PREFILL):
        if any(count > 0 for count in running[state].values()):
            return state, 0.0
    decoding = [activity.get(lane, 0.0) for lane, count in running[DECODE].items() if count > 0]
    return (DECODE, max(decoding)) if decoding else (IDLE, 0.0)
