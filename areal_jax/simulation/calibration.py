"""Prices that are fitted to the logs of runs: seconds of work by its size, and how lanes that share cores slow down.

Work of a kind takes

    seconds = base + Σ coefficient * size + share * overlap

where `overlap` are the seconds in which another lane of engines and learner was busy, and `share` is one number for all
of them: with c = 1 / (1 - share) work takes c times as long while two lanes are busy, which is `contention` of
shared_cores.py. Coefficients are at least 0.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from areal_jax import files
from areal_jax.config.ranges import ConfigError
from areal_jax.control.clocks.virtual import Price
from areal_jax.events.schema import DecodeEvent, Event, PrefillEvent
from areal_jax.lanes import LEARNER, is_engine_lane
from areal_jax.report.lane_intervals import LaneInterval, event_intervals, lane_intervals
from areal_jax.types import Work

BASE, FORMAT = 'base', 1
# sizes that the price of a kind depends on besides the base
SIZES: Mapping[str, tuple[str, ...]] = {
    'decode': ('steps', 'row_steps', 'positions'),
    'prefill': ('bucket', 'tokens'),
    'train': ('tokens',),
    'snapshot': (), 'publish': (), 'load': (), 'reward': (), 'save': (), 'compile': (),
}  # fmt: skip
_SHARED = ('decode', 'prefill', 'train', 'snapshot')  # kinds whose lanes share cores
_MOST_SHARE = 0.9
_LEAST = 2  # pieces of work of a kind, without which nothing is fitted
_SHORT = 0.25  # of the mean of its kind: the error of shorter work is held against that
_HOST = ('decode', 'prefill')  # kinds after which an engine's gap is the host's


class Sample(NamedTuple):
    """One piece of work of a log."""

    kind: str
    sizes: tuple[float, ...]  # as in SIZES
    seconds: float
    overlap_s: float


@dataclasses.dataclass(frozen=True)
class Table:
    """Fitted prices, as their file has them."""

    prices: Mapping[str, Mapping[str, float]]  # kind -> BASE and coefficients
    contention: float
    host: Mapping[str, float]  # seconds of the host's loop for a completion, by kind
    residuals: Mapping[str, Mapping[str, float]]  # kind -> 'n', 'mean_s', 'median_error', 'total' (shares)
    runs: tuple[str, ...]

    def by_kind(self) -> dict[str, Price]:
        """For a clock."""
        return {kind: _price(kind, coefficients) for kind, coefficients in self.prices.items()}


def calibrate(logs: Sequence[tuple[str, Sequence[Event]]]) -> Table:
    """Fits the prices of all kinds to several logs: (name, events) each.

    Raises ConfigError where a kind that every run has occurs less than twice: one point gives no slope.
    """
    samples = [sample for _, events in logs for sample in read_samples(events)]
    found = collections.Counter(sample.kind for sample in samples)
    for kind in _SHARED:
        if found[kind] < _LEAST:
            raise ConfigError(
                f'--calibrate: the logs of {", ".join(name for name, _ in logs)} have {found[kind]} pieces of the '
                f'work {kind!r}, and a price needs {_LEAST} or more: name longer runs'
            )
    share, prices = _fit_shared([sample for sample in samples if sample.kind in _SHARED])
    for kind in SIZES:
        if kind not in _SHARED:
            of_kind = [sample.seconds for sample in samples if sample.kind == kind]
            prices[kind] = {BASE: float(np.mean(of_kind)) if of_kind else 0.0}
    residuals = {kind: _residuals(prices[kind], share, samples, kind) for kind in SIZES if found[kind]}
    host = _fit_host([gap for _, events in logs for gap in read_gaps(events)])
    return Table(prices, 1 / (1 - share), host, residuals, tuple(name for name, _ in logs))


def write_table(table: Table, path: pathlib.Path) -> None:
    files.write_json(path, {'format': FORMAT, **dataclasses.asdict(table)})


def read_table(path: pathlib.Path) -> Table:
    """Raises FileError for a file that is not whole, ConfigError for one of another form."""
    values = files.read_json(path, 'make it with areal-simulate --calibrate')
    names = {field.name for field in dataclasses.fields(Table)}
    if values.get('format') != FORMAT or values.keys() != names | {'format'}:
        raise ConfigError(
            f'simulation.prices={str(path)!r} is no table of prices of format {FORMAT}: make it with areal-simulate '
            '--calibrate'
        )
    return Table(**{name: values[name] for name in names} | {'runs': tuple(values['runs'])})


def read_samples(events: Sequence[Event]) -> list[Sample]:
    """The pieces of work of one log that ended, evaluations left out."""
    intervals = lane_intervals(events)
    busy = _Busy(intervals)
    samples = [
        Sample(one.work, (one.amount,) if one.work == 'train' else (), one.end - one.start, busy.beside(one))
        for one in intervals
        if one.work in SIZES and one.work not in ('decode', 'prefill')
    ]
    for event, one in event_intervals(events, 'decode'):
        samples.append(Sample('decode', _size_decode(event), one.end - one.start, busy.beside(one)))  # type: ignore[arg-type]
    for event, one in event_intervals(events, 'prefill'):
        samples.append(Sample('prefill', _size_prefill(event), one.end - one.start, busy.beside(one)))  # type: ignore[arg-type]
    return samples


def read_gaps(events: Iterable[Event]) -> list[tuple[str, float]]:
    """(kind, seconds) between a dispatch of an engine and the next one that it was ready for."""
    last: dict[str, LaneInterval] = {}
    gaps = []
    for one in lane_intervals(events):
        if is_engine_lane(one.lane) and one.work in _HOST:
            before = last.get(one.lane)
            if before is not None:
                gaps.append((before.work, one.start - before.end))
            last[one.lane] = one
    return gaps


class _Busy:
    """When lanes of engines and learner were busy."""

    def __init__(self, intervals: Iterable[LaneInterval]):
        self._lanes: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        for one in intervals:
            if is_engine_lane(one.lane) or one.lane == LEARNER:
                self._lanes[one.lane].append((one.start, one.end))
        for spans in self._lanes.values():
            spans.sort()

    def beside(self, one: LaneInterval) -> float:
        """Seconds of the interval in which another of the lanes was busy."""
        if one.lane not in self._lanes:
            return 0.0
        spans = sorted(
            (max(low, one.start), min(high, one.end))
            for lane, spans in self._lanes.items()
            if lane != one.lane
            for low, high in _near(spans, one)
        )
        covered, reached = 0.0, one.start
        for low, high in spans:
            covered += max(0.0, high - max(low, reached))
            reached = max(reached, high)
        return covered


def _near(spans: Sequence[tuple[float, float]], one: LaneInterval) -> Sequence[tuple[float, float]]:
    """Those of a lane that overlap the interval: a lane does one piece of work at a time."""
    first = max(0, bisect.bisect_left(spans, (one.start, 0.0)) - 1)
    return [span for span in spans[first : bisect.bisect_left(spans, (one.end, 0.0))] if span[1] > one.start]


def _size_decode(event: DecodeEvent) -> tuple[float, ...]:
    rows = sum(slot is not None for slot in event['slots'])
    return float(event['steps']), float(event['steps'] * rows), float(event['positions'])


def _size_prefill(event: PrefillEvent) -> tuple[float, ...]:
    return float(event['bucket']), float(event['tokens'])


def _fit_shared(samples: Sequence[Sample]) -> tuple[float, dict[str, dict[str, float]]]:
    """(share, prices): least squares of the relative error, then the prices of a kind scaled to its seconds in all.

    Without the scale a few long pieces of work would be lost; without relative errors they alone would decide.
    """
    from scipy.optimize import lsq_linear

    columns = [(kind, name) for kind in _SHARED for name in (BASE, *SIZES[kind])]
    place = {column: index for index, column in enumerate(columns)}
    matrix = np.zeros((len(samples), len(columns) + 1))
    seconds = np.array([max(sample.seconds, 1e-6) for sample in samples])
    for row, sample in enumerate(samples):
        matrix[row, place[sample.kind, BASE]] = 1.0
        for name, size in zip(SIZES[sample.kind], sample.sizes, strict=True):
            matrix[row, place[sample.kind, name]] = size
        matrix[row, -1] = sample.overlap_s
    counts = collections.Counter(sample.kind for sample in samples)
    totals = collections.Counter[str]()
    for sample in samples:
        totals[sample.kind] += sample.seconds  # type: ignore[assignment]
    means = np.array([totals[sample.kind] / counts[sample.kind] for sample in samples])
    weights = np.array([counts[sample.kind] ** -0.5 for sample in samples]) / np.maximum(seconds, _SHORT * means)
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-12)
    upper = np.full(len(columns) + 1, np.inf)
    upper[-1] = _MOST_SHARE * scale[-1]
    found = lsq_linear(matrix / scale * weights[:, None], seconds * weights, (0.0, upper)).x / scale
    share, prices = float(found[-1]), collections.defaultdict[str, dict[str, float]](dict)
    of_kind = {kind: np.array([sample.kind == kind for sample in samples]) for kind in _SHARED}
    alone = matrix[:, :-1] @ found[:-1]
    for (kind, name), index in place.items():
        rows = of_kind[kind]
        left_s = max(0.0, float((seconds - share * matrix[:, -1])[rows].sum()))
        prices[kind][name] = float(found[index]) * left_s / max(float(alone[rows].sum()), 1e-12)
    return share, dict(prices)


def _residuals(price: Mapping[str, float], share: float, samples: Sequence[Sample], kind: str) -> Mapping[str, float]:
    own = [sample for sample in samples if sample.kind == kind]
    predicted = np.array([
        price[BASE]
        + sum(price[name] * size for name, size in zip(SIZES[kind], one.sizes, strict=True))
        + (share * one.overlap_s if kind in _SHARED else 0.0)
        for one in own
    ])  # fmt: skip
    seconds = np.array([one.seconds for one in own])
    errors = np.abs(predicted - seconds) / np.maximum(seconds, _SHORT * seconds.mean())
    return {
        'n': len(own),
        'mean_s': float(seconds.mean()),
        'median_error': float(np.median(errors)),
        'total': float(predicted.sum() / max(seconds.sum(), 1e-9)),
    }


def _fit_host(gaps: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The median gap by kind; an engine without requests waits for longer."""
    by_kind: dict[str, list[float]] = collections.defaultdict(list)
    for kind, seconds in gaps:
        by_kind[kind].append(seconds)
    return {kind: max(0.0, float(np.median(found))) for kind, found in sorted(by_kind.items())}


def _price(kind: str, coefficients: Mapping[str, float]) -> Price:
    base, further = coefficients[BASE], [coefficients[name] for name in SIZES[kind]]

    def decode(lane: str, work: Work) -> float:
        rows, steps = work.size['rows'], work.amount
        positions = steps * (work.size['positions'] + rows * (steps - 1) / 2)
        return base + further[0] * steps + further[1] * steps * rows + further[2] * positions

    def by_amount(lane: str, work: Work) -> float:
        return base + (further[0] * work.amount if further else 0.0)

    def prefill(lane: str, work: Work) -> float:
        return base + further[0] * work.amount + further[1] * work.size['tokens']

    return {'decode': decode, 'prefill': prefill}.get(kind, by_amount)
