"""Energy counters of GPUs (NVML) and of CPU packages (RAPL)."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypedDict

NVML, RAPL = 'nvml', 'rapl'  # names of meters, as in the metrics
POWERCAP = pathlib.Path('/sys/class/powercap')


class MeterError(RuntimeError):
    """A counter is missing or cannot be read; the message says why."""


class Meter(Protocol):
    """A counter of joules."""

    name: str  # NVML, RAPL
    devices: str  # the measured devices, in words

    def read(self) -> float:
        """Joules from opening until now. Raises MeterError."""
        ...

    def close(self) -> None: ...


class NvmlMeter:
    """The total energy counters of GPUs, in millijoules since the driver was loaded. They change about every 100 ms.

    Args:
      library: the module pynvml, initialized.
      handles: NVML's handles of the GPUs.
      devices: the GPUs in words.
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
    """Opens the counters of this process's GPUs; shuts NVML down on failure.

    Args:
      library: the module pynvml.
      gpus: CUDA's number and name of each GPU.
      visible: the environment variable CUDA_VISIBLE_DEVICES.

    Raises MeterError without a driver, for a GPU without a counter, for a slice of a GPU (MIG), which has no separate
    counter, and if NVML and CUDA number GPUs differently.
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
        if entry and _text(library.nvmlDeviceGetUUID(handle)).startswith(entry):  # CUDA accepts a prefix too
            return handle
    raise MeterError(f'CUDA_VISIBLE_DEVICES={visible!r} names no whole GPU for device {ordinal}')


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes before version 11.5


class RaplMeter:
    """The energy counters of all CPU packages of this machine, including other processes on them; without DRAM.

    A counter restarts at 0 after `max_energy_range_uj` microjoules. A read detects one such wrap since the last read;
    a second wrap in between goes unnoticed, and its range is missing.

    Raises MeterError if there is no package or one cannot be read.
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
        """Does nothing: there is nothing to release."""


def _is_package(zone: pathlib.Path) -> bool:
    """Whether the zone is a package: not a part such as cores or DRAM, nor the platform, which holds the packages."""
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


# Published measurements of the watts of chips by state.
#
# Values are for the board of a GPU, as NVML measures, or for a TPU with its memory. They include no share of the host,
# the network or the cooling. No watts are published for TPU v5 and later, so these chips have no row.


TRAIN, PREFILL, DECODE, IDLE = 'train', 'prefill', 'decode', 'idle'
STATES = (TRAIN, PREFILL, DECODE, IDLE)  # of a device; if several apply at once, the first counts
FULL_ROWS = 128  # largest batch of decoding whose watts are published


@dataclasses.dataclass(frozen=True)
class Watts:
    """The lowest and the highest published value of one state, with their `source`."""

    low: float
    high: float
    source: str = ''

    @property
    def mid(self) -> float:
        """The mean of low and high; no source says where between them a chip is."""
        return (self.low + self.high) / 2


@dataclasses.dataclass(frozen=True)
class ChipPower:
    """Watts of one device, as jax counts devices."""

    idle: Watts  # a program is loaded, and nothing runs
    decode_one: Watts  # decoding of one row
    decode_full: Watts  # decoding of FULL_ROWS rows or more
    prefill: Watts
    train: Watts

    def draw(self, state: str, activity: float = 0.0) -> Watts:
        """Watts in a state; raises KeyError for a state that is not in STATES.

        Args:
          activity: for DECODE, from 0 (one row) to 1 (FULL_ROWS), see `decode_activity`. Watts are linear in it.
        """
        if state == DECODE:
            one, full = self.decode_one, self.decode_full
            return Watts(one.low + (full.low - one.low) * activity, one.high + (full.high - one.high) * activity)
        return {TRAIN: self.train, PREFILL: self.prefill, IDLE: self.idle}[state]

    @property
    def sources(self) -> dict[str, str]:
        """By state: the published values and their source, as text."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: f'{watts.low:g} to {watts.high:g} W: {watts.source}' for name, watts in values.items()}


def decode_activity(rows: float) -> float:
    """log₂ rows / log₂ FULL_ROWS, within [0, 1]: watts of decoding are about linear in the log of the batch size.

    This holds between the two published batches of an H100, 300 W with 1 row and 600 W with 128 (power model of the
    fleet simulator of the vLLM semantic router, after the ML.ENERGY benchmark v3).
    """
    return min(1.0, max(0.0, math.log2(max(rows, 1.0)) / math.log2(FULL_ROWS)))


_ERLANGEN = 'arXiv 2605.11999 (decoding on an H200: 137 to 300 W)'
_FLEET = 'power model of the vLLM fleet simulator (H100 SXM: 300 W with 1 row, 600 W with 128)'
_EIGHT = 'ML.ENERGY benchmark (8 models on an H100 with 1 to 128 rows: 267 to 680 W)'
_LIMIT = 'NVIDIA data sheet (limit of the board: 700 W)'
_CONTEXT = 'arXiv 2605.23918 (a CUDA context draws up to 50 W more than a board without one)'
_MEASURED = 'benchmarks/results/gpu_h200.json'
_TRAINING = f'arXiv 2506.14551 (training reaches 76% of the rated power, 532 of 700 W) to {_LIMIT}'

_H100 = ChipPower(
    idle=Watts(70, 120, f'70 W by nvidia-smi without a context, and {_CONTEXT}'),
    decode_one=Watts(267, 300, f'{_EIGHT}; {_FLEET}'),
    decode_full=Watts(300, 680, f'{_ERLANGEN}; {_EIGHT}'),
    prefill=Watts(600, 700, f'no value of its own: between decoding with 128 rows, {_FLEET}, and {_LIMIT}'),
    train=Watts(532, 700, _TRAINING),
)
_H200 = ChipPower(
    idle=Watts(80, 134, f'80 W by NVML without a context, and {_CONTEXT}; 130 to 134 W measured, {_MEASURED}'),
    decode_one=Watts(137, 300, f'{_ERLANGEN}; {_FLEET}'),
    decode_full=Watts(300, 593, f'{_ERLANGEN}; ML.ENERGY benchmark (at most 593 W on an H200)'),
    prefill=Watts(593, 700, f'no value of its own: between the most in decoding, 593 W, and {_LIMIT}'),
    train=Watts(532, 700, f'as an H100, whose limit is the same: {_TRAINING}'),
)
_V4 = 'arXiv 2304.01433, table 4 (programs in production: at least 121 W, 170 W on average, at most 192 W)'
_TPU_V4 = ChipPower(
    idle=Watts(90, 90, 'arXiv 2304.01433, table 4'),
    decode_one=Watts(121, 170, f'no value of its own: {_V4}'),
    decode_full=Watts(121, 192, f'no value of its own: {_V4}'),
    prefill=Watts(170, 192, f'no value of its own: {_V4}'),
    train=Watts(170, 192, f'no value of its own: {_V4}'),
)

# by jax.Device.device_kind (for a GPU, the driver's name of it); then by name of a chip in a simulation
POWER: Mapping[str, ChipPower] = {
    'NVIDIA H100 80GB HBM3': _H100,
    'NVIDIA H200': _H200,
    'TPU v4': _TPU_V4,
    'H100 SXM': _H100,
    'H200 SXM': _H200,
}


# The energy model: occupations of lanes -> seconds of devices by state -> joules. Pure functions.
#
# E = Σ over devices ∫ P(state, activity) dt. `joules` takes seconds by state, from a real or a simulated run.


@dataclasses.dataclass(frozen=True)
class Energy:
    """Joules at the low, middle and high published watts; all three are equal if measured by a meter."""

    low: float = 0.0
    mid: float = 0.0
    high: float = 0.0

    def __add__(self, other: Energy) -> Energy:
        return Energy(self.low + other.low, self.mid + other.mid, self.high + other.high)


@dataclasses.dataclass(frozen=True)
class Phase:
    """Seconds in one state of every device of a set."""

    state: str  # of STATES
    seconds: float
    activity: float = 0.0  # of decoding, see decode_activity


@dataclasses.dataclass(frozen=True)
class Occupation:
    """A lane was in a state from `start` to `end`, clock seconds."""

    lane: str
    state: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class DeviceSet:
    """Devices of one kind on which the same lanes compute."""

    kind: str  # jax.Device.device_kind
    lanes: frozenset[str]
    devices: int


def joules(phases: Iterable[Phase], power: ChipPower, devices: int = 1) -> Energy:
    """Joules of `devices` devices that all go through these phases."""
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
    """The phases of the devices of `lanes` from `start` to `end`; their seconds add up to the whole span.

    If lanes overlap, the first of their STATES counts, and among decoding lanes the most active: programs of one
    device take turns, so their watts do not add up. A device without an occupied lane is idle.

    Args:
      activity: activity of decoding in the span, by lane; 0 for other lanes.
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


# A run's account of its joules: which are measured, with which meter, which are modelled, and for which devices.


MODELLED = 'modelled'  # in place of the name of a meter


class EnergySource(TypedDict):
    """A source of joules."""

    meter: str  # NVML, RAPL or MODELLED
    devices: str  # its devices, in words
    sentence: str


class EnergyFacts(TypedDict):
    """The entry of facts.json on the energy account of a run."""

    sources: list[EnergySource]
    watts: Mapping[str, str]  # of modelled joules: chip and state -> published values and their source
    note: str  # what is not known, and why; '' if all is known
    lost: list[str]  # meters that failed in the run, a sentence each


def describe_sources(sets: Sequence[DeviceSet], meters: Collection[Meter], models: bool) -> list[EnergySource]:
    """One entry per meter, and one for the model if it is used."""
    sentences = {
        NVML: 'Measured with the total energy counters of NVML: whole boards, whoever uses them.',
        RAPL: 'Measured with RAPL: whole packages without DRAM, with all that runs on this machine.',
    }
    found: list[EnergySource] = [
        {'meter': meter.name, 'devices': meter.devices, 'sentence': sentences[meter.name]} for meter in meters
    ]
    if models:
        sentence = 'Modelled: seconds by state times the lowest and the highest published watts.'
        found.append({'meter': MODELLED, 'devices': describe_devices(sets), 'sentence': sentence})
    return found


def describe_watts(sets: Sequence[DeviceSet]) -> dict[str, str]:
    """Maps 'NVIDIA H200, idle' to '80 to 130 W: ...'; chips whose watts are not published are left out."""
    kinds = sorted({found.kind for found in sets} & POWER.keys())
    return {f'{kind}, {state.replace("_", " ")}': text for kind in kinds for state, text in POWER[kind].sources.items()}


def describe_devices(sets: Sequence[DeviceSet]) -> str:
    """'2 x NVIDIA H200, 1 x NVIDIA L4'."""
    counts: collections.Counter[str] = collections.Counter()
    for found in sets:
        counts[found.kind] += found.devices
    return ', '.join(f'{count} x {kind}' for kind, count in sorted(counts.items()))


def describe_unknown(sets: Sequence[DeviceSet], meters: Collection[Meter], reasons: Sequence[str]) -> str:
    """The sentence on devices that have neither a meter nor published watts.

    Args:
      meters: meters of other devices.
      reasons: why other meters cannot be read.
    """
    others = ''.join(f'; only those of {meter.devices} are measured' for meter in meters)
    kinds = ', '.join(sorted({repr(found.kind) for found in sets}))
    because = ''.join(f'{reason}; ' for reason in reasons)
    return f'No joules of {describe_devices(sets)} are known ({because}no watts of {kinds} are in the table){others}.'
