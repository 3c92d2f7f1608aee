"""The energy account of a run: joules and seconds of devices since the last update, from meters and from events.

app/run/observer.py feeds it. An update trains tokens that were generated earlier, so an account covers the time
between two updates and not the tokens of one update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

from areal_jax.events.schema import Event
from areal_jax.telemetry import names
from areal_jax.telemetry.energy_meters import (
    DECODE,
    IDLE,
    NVML,
    POWER,
    PREFILL,
    RAPL,
    STATES,
    TRAIN,
    ChipPower,
    DeviceSet,
    Energy,
    EnergyFacts,
    Meter,
    MeterError,
    Occupation,
    Phase,
    decode_activity,
    describe_sources,
    describe_unknown,
    describe_watts,
    find_phases,
    joules,
)
from areal_jax.telemetry.metrics import Line, Value, number

# Work of a lane -> state. Copies of weights and compilations have no published watts: they count as idle.
STATE_OF: Mapping[str, str] = {
    'train': TRAIN,
    'prefill': PREFILL,
    'evaluation_prefill': PREFILL,
    'decode': DECODE,
    'evaluation_decode': DECODE,
}


class LaneWatch:
    """Collects occupations since the last `take`, including running ones."""

    def __init__(self) -> None:
        self._running: dict[int, Occupation] = {}  # by run; `end` is not known yet
        self._ended: list[Occupation] = []
        self._active: dict[str, list[float]] = {}  # lane -> [Σ activity · steps, Σ steps] of its dispatches
        self.activity: dict[str, float] = {}  # of each lane at the last `take`

    def apply(self, event: Event) -> None:
        """Takes the next event of the log."""
        if event['kind'] == 'run_start' and event['work'] in STATE_OF:
            start = event['time']
            self._running[event['run']] = Occupation(event['lane'] or '', STATE_OF[event['work']], start, start)
        elif event['kind'] == 'run_done' and event['work'] in STATE_OF:
            self._running.pop(event['run'], None)
            begun = event['started']
            ended = Occupation(event['lane'] or '', STATE_OF[event['work']], begun, begun + event['seconds'])
            self._ended.append(ended)
        elif event['kind'] == 'decode' or event['kind'] == 'evaluation_decode':
            rows, steps = sum(request is not None for request in event['slots']), event['steps']
            sums = self._active.setdefault(event['engine'], [0.0, 0.0])
            sums[0] += decode_activity(rows) * steps
            sums[1] += steps

    def take(self, end: float) -> list[Occupation]:
        """Returns the occupations up to `end`, and sets `activity` to the mean activity of the dispatches meanwhile.

        A lane that logged no dispatch meanwhile keeps its activity. Running work counts from its run_start, although
        its lane may have begun some milliseconds later: the exact time is known only when the work has ended.
        """
        going_on = [Occupation(o.lane, o.state, o.start, end) for o in self._running.values()]
        taken = [*self._ended, *going_on]
        self._ended = [occupation for occupation in self._ended if occupation.end > end]
        self.activity |= {lane: total / steps for lane, (total, steps) in self._active.items() if steps}
        self._active = {}
        return taken


READ_S = 30.0  # longest time between reads while events come, so that RAPL does not wrap twice unseen
CPU = 'cpu'  # device_kind of devices that compute in CPU packages
METERS = {NVML: names.ENERGY_NVML, RAPL: names.ENERGY_RAPL}
_PER_TOKEN = {
    names.ENERGY_PER_GENERATED: names.TOKENS_GENERATED,
    names.ENERGY_PER_TRAINED: names.TOKENS_TRAINED,
    names.ENERGY_PER_USEFUL: names.USEFUL_TOKENS,
}


class EnergyState(TypedDict):
    """The part of an account that a checkpoint keeps: sums since the last update."""

    joules: dict[str, float | None]  # by meter
    modelled: list[float] | None
    idle: list[float] | None
    seconds: dict[str, float]
    activity: float


@dataclasses.dataclass
class _Sums:
    """Sums since the last update; None for a sum of which some part is missing."""

    joules: dict[str, float | None]
    modelled: Energy | None
    idle: Energy | None  # of the idle seconds, modelled
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(STATES, 0.0))  # of devices
    activity: float = 0.0  # Σ activity · seconds of decoding devices


class EnergyAccount:
    """Sums of one run, since its last update.

    Args:
      sets: the devices of learner and engines; no device is in two of them.
      meters: NVML, if present, measures all of these devices. RAPL measures them if they are CPUs, else only the host.
      warn: called with one sentence for each meter that fails.
      reasons: why other meters cannot be read here.
      note: why nothing is known of the devices; then `sets` is empty.
    """

    def __init__(
        self,
        sets: Sequence[DeviceSet],
        meters: Sequence[Meter],
        warn: Callable[[str], None],
        *,
        reasons: Sequence[str] = (),
        note: str = '',
    ):
        self._sets, self._warn, self._lost = sets, warn, list[str]()
        self._meters = {meter.name: meter for meter in meters}
        self._last: dict[str, float] = {}  # the last read of each meter
        self._powers = find_powers(sets)
        self._models = self._powers is not None and NVML not in self._meters
        measured = NVML in self._meters or (RAPL in self._meters and all(found.kind == CPU for found in sets))
        self._is_covered = self._models or measured  # whether joules are known of all devices of the run
        self._known = tuple(self._meters)  # meters present at the start
        self._facts: EnergyFacts = {
            'sources': describe_sources(sets, meters, self._models),
            'watts': describe_watts(sets),
            'note': note or ('' if self._is_covered else describe_unknown(sets, meters, reasons)),
            'lost': self._lost,
        }
        self._watch = LaneWatch()
        self._evaluates = False
        self._since: float | None = None  # clock seconds that the sums reach; None: not accounting
        self._read_s = self._now = 0.0
        self._sums = self._empty()
        self._is_partial = False  # a part of the time since the last update was not accounted

    def facts(self) -> EnergyFacts:
        """The account's entry in facts.json, for the end of the run."""
        return self._facts

    def close(self) -> None:
        for meter in self._meters.values():
            meter.close()

    def apply(self, event: Event) -> None:
        """Takes the next event of the log. Evaluations before and after training are left out."""
        self._now = event['time']
        self._watch.apply(event)
        if event['kind'] == 'evaluate':
            self._advance()
            self._evaluates, self._since = event['mode'] == 'start', None
        elif self._evaluates:
            return
        elif self._since is None and event['kind'] in ('admit', 'arrive'):
            self._watch.take(self._now)
            self._since = self._now
            for meter in self._known:
                self._count(meter)
        elif self._since is not None and self._now - self._read_s >= READ_S:
            self._advance()

    def take(self, time_s: float, metrics: Line) -> dict[str, Value]:
        """Returns the energy metrics of an update published at `time_s` and begins new sums; `metrics`: its tokens."""
        self._now = time_s
        self._advance()
        sums, self._sums = self._sums, self._empty()
        if self._is_partial:
            self._is_partial = False
            return {}
        if not self._sets:
            return {}
        values: dict[str, Value] = {
            METERS[name]: measured for name, measured in sums.joules.items() if measured is not None
        }
        if sums.modelled:
            values |= _interval(names.ENERGY_MODELLED, sums.modelled)
        if sums.idle:
            values |= _interval(names.ENERGY_IDLE, sums.idle)
        values |= {f'{names.ENERGY_SECONDS}{state}': sums.seconds[state] for state in STATES}
        if sums.seconds[DECODE]:
            values[names.ENERGY_ACTIVITY] = sums.activity / sums.seconds[DECODE]
        return {**values, **self._total(sums, metrics)}

    def _total(self, sums: _Sums, metrics: Line) -> dict[str, Value]:
        """Total joules, also per token; {} if a part is missing."""
        parts = list(sums.joules.values())
        if self._models:
            parts.append(None if sums.modelled is None else sums.modelled.mid)
        known = [part for part in parts if part is not None]
        if not self._is_covered or len(known) < len(parts):
            return {}
        values: dict[str, Value] = {names.ENERGY: sum(known)}
        for name, tokens in _PER_TOKEN.items():
            if count := number(metrics, tokens):
                values[name] = sum(known) / count
        return values

    def state(self) -> EnergyState:
        """A copy of the sums as of the newest event; the run may continue while it is written."""
        self._advance()
        sums = self._sums
        return {
            'joules': dict(sums.joules),
            'modelled': list(dataclasses.astuple(sums.modelled)) if sums.modelled else None,
            'idle': list(dataclasses.astuple(sums.idle)) if sums.idle else None,
            'seconds': dict(sums.seconds),
            'activity': sums.activity,
        }

    def restore(self, state: EnergyState | None) -> None:
        """Continues from the state in a checkpoint; None: the earlier part had no account.

        The metrics of the next update then lack the parts that were not accounted: all of them if there was no
        account, else the joules of each meter that was absent.
        """
        if state is None:
            self._is_partial = True
            return
        modelled, idle = state['modelled'], state['idle']
        self._sums = _Sums(
            {name: state['joules'].get(name) for name in self._known},
            Energy(*modelled) if modelled and self._models else None,
            Energy(*idle) if idle and self._powers else None,
            {**dict.fromkeys(STATES, 0.0), **state['seconds']},
            state['activity'],
        )

    def _advance(self) -> None:
        """Adds joules and seconds since the last call."""
        if self._since is None:
            return
        sums = self._sums
        for name in self._known:
            spent = self._count(name)
            counted = sums.joules[name]
            sums.joules[name] = None if counted is None or spent is None else counted + spent
        occupations = self._watch.take(self._now)
        for found in self._sets:
            phases = find_phases(occupations, found.lanes, self._since, self._now, self._watch.activity)
            for phase in phases:
                sums.seconds[phase.state] += phase.seconds * found.devices
                sums.activity += phase.activity * phase.seconds * found.devices
            self._model(found, phases)
        self._since = self._now

    def _model(self, found: DeviceSet, phases: Sequence[Phase]) -> None:
        if self._powers is None:
            return
        power, sums = self._powers[found.kind], self._sums
        if sums.modelled is not None:
            sums.modelled += joules(phases, power, found.devices)
        if sums.idle is not None:
            sums.idle += joules([phase for phase in phases if phase.state == IDLE], power, found.devices)

    def _count(self, name: str) -> float | None:
        """Joules of a meter since its last read; None after its first failure."""
        self._read_s = self._now
        meter = self._meters.get(name)
        if meter is None:
            return None
        try:
            now = meter.read()
        except MeterError as error:
            del self._meters[name]
            sentence = f"telemetry.energy='auto': {error}: no joules of {meter.devices} from here on"
            self._lost.append(sentence)
            self._warn(sentence)
            return None
        spent = now - self._last.get(name, now)
        self._last[name] = now
        return spent

    def _empty(self) -> _Sums:
        joules_of: dict[str, float | None] = {name: 0.0 if name in self._meters else None for name in self._known}
        return _Sums(joules_of, Energy() if self._models else None, Energy() if self._powers else None)


def find_powers(sets: Sequence[DeviceSet]) -> Mapping[str, ChipPower] | None:
    """Watts by kind of device; None if the watts of a kind are not published."""
    kinds = {found.kind for found in sets}
    return {kind: POWER[kind] for kind in kinds} if kinds and kinds <= POWER.keys() else None


def _interval(name: str, energy: Energy) -> dict[str, Value]:
    return {name: energy.mid, f'{name}_low': energy.low, f'{name}_high': energy.high}
