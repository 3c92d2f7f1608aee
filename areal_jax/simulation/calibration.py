"""Fits prices to the logs of runs: the seconds of work by its size, and the slowdown of lanes that share cores.

Work of a kind takes

    seconds = (base + Σ coefficient * size) / (1 - share * overlap)

where `overlap` is the part of the seconds in which another lane of engines and learner was busy, and `share` is one
number for the learner and one for engines: work takes c = 1 / (1 - share) times as long while two lanes are busy; c is
`Contention` of simulated_clock.py. Cores are not shared evenly: a decode dispatch waits behind the queued operations of
an update, and the update hardly slows down. Coefficients are at least 0.
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
from areal_jax.config.fields import ConfigError
from areal_jax.control.clocks.virtual import Price
from areal_jax.events.schema import DecodeEvent, Event, PrefillEvent
from areal_jax.lanes import LEARNER, is_engine_lane
from areal_jax.report.event_log import LaneInterval, event_intervals, lane_intervals
from areal_jax.simulation.simulated_clock import Contention
from areal_jax.types import Work

BASE, FORMAT = 'base', 2
# sizes on which the price of a kind depends in addition to the base
SIZES: Mapping[str, tuple[str, ...]] = {
    'decode': ('steps', 'row_steps', 'positions'),
    'prefill': ('bucket', 'tokens'),
    'train': ('tokens',),
    'snapshot': (), 'publish': (), 'load': (), 'reward': (), 'save': (), 'compile': (),
}  # fmt: skip
_SIDES = {'engines': ('decode', 'prefill'), 'learner': ('train', 'snapshot')}  # kinds whose lanes share cores
_SHARED = tuple(kind for kinds in _SIDES.values() for kind in kinds)
_MOST_SHARE, _SHARE_STEP = 0.98, 1e-4
_LEAST = 2  # pieces of work of a kind that a fit needs
_SHORT = 0.25  # of the mean of its kind: the error of shorter work is relative to this length
_HOST = ('decode', 'prefill')  # kinds after which an engine's gap is time of the host


class Sample(NamedTuple):
    """One piece of work in a log."""

    kind: str
    sizes: tuple[float, ...]  # as in SIZES
    seconds: float
    overlap_s: float


@dataclasses.dataclass(frozen=True)
class Table:
    """Fitted prices, in the form of their file."""

    prices: Mapping[str, Mapping[str, float]]  # kind -> BASE and coefficients
    contention: Contention
    host: Mapping[str, float]  # seconds of the host's loop for a completion, by kind
    residuals: Mapping[str, Mapping[str, float]]  # kind -> 'n', 'mean_s', 'median_error', 'total' (shares)
    runs: tuple[str, ...]

    def by_kind(self) -> dict[str, Price]:
        """The prices by kind of work, for a clock."""
        return {kind: _price(kind, coefficients) for kind, coefficients in self.prices.items()}


def calibrate(logs: Sequence[tuple[str, Sequence[Event]]]) -> Table:
    """Fits the prices of all kinds to several logs: (name, events) each.

    Raises ConfigError if a kind that every run has occurs less than twice: one point gives no slope.
    """
    samples = [sample for _, events in logs for sample in read_samples(events)]
    found = collections.Counter(sample.kind for sample in samples)
    for kind in _SHARED:
        if found[kind] < _LEAST:
            raise ConfigError(
                f'--calibrate: the logs of {", ".join(name for name, _ in logs)} have {found[kind]} pieces of the '
                f'work {kind!r}, and a price needs {_LEAST} or more: name longer runs'
            )
    shares, prices = dict[str, float](), dict[str, dict[str, float]]()
    for side, kinds in _SIDES.items():
        shares[side], fitted = _fit_side([sample for sample in samples if sample.kind in kinds])
        prices |= fitted
    for kind in SIZES:
        if kind not in _SHARED:
            of_kind = [sample.seconds for sample in samples if sample.kind == kind]
            prices[kind] = {BASE: float(np.mean(of_kind)) if of_kind else 0.0}
    share_of = {kind: shares[side] for side, kinds in _SIDES.items() for kind in kinds}
    residuals = {
        kind: _residuals(prices[kind], share_of.get(kind, 0.0), _Pieces.of(kind, samples))
        for kind in SIZES
        if found[kind]
    }
    host = _fit_host([gap for _, events in logs for gap in read_gaps(events)])
    contention = Contention(**{side: 1 / (1 - share) for side, share in shares.items()})
    return Table(prices, contention, host, residuals, tuple(name for name, _ in logs))


def write_table(table: Table, path: pathlib.Path) -> None:
    files.write_json(path, {'format': FORMAT, **dataclasses.asdict(table)})


def read_table(path: pathlib.Path) -> Table:
    """Reads a table; raises FileError for an incomplete file, ConfigError for a file of another form."""
    values = files.read_json(path, 'make it with areal-simulate --calibrate')
    names = {field.name for field in dataclasses.fields(Table)}
    if values.get('format') != FORMAT or values.keys() != names | {'format'}:
        raise ConfigError(
            f'simulation.prices={str(path)!r} is no table of prices of format {FORMAT}: make it with areal-simulate '
            '--calibrate'
        )
    contention = Contention(**values['contention'])
    return Table(**{name: values[name] for name in names} | {'runs': tuple(values['runs']), 'contention': contention})


def read_samples(events: Sequence[Event]) -> list[Sample]:
    """The pieces of work in one log that ended, without evaluations."""
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
    """Returns (kind of a dispatch, seconds until the next one) for the consecutive dispatches of each engine."""
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
    """The times in which lanes of engines and learner were busy."""

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
    """The spans of a lane that overlap the interval; spans are sorted, and a lane does one piece of work at a time."""
    first = max(0, bisect.bisect_left(spans, (one.start, 0.0)) - 1)
    return [span for span in spans[first : bisect.bisect_left(spans, (one.end, 0.0))] if span[1] > one.start]


def _size_decode(event: DecodeEvent) -> tuple[float, ...]:
    rows = sum(slot is not None for slot in event['slots'])
    return float(event['steps']), float(event['steps'] * rows), float(event['positions'])


def _size_prefill(event: PrefillEvent) -> tuple[float, ...]:
    return float(event['bucket']), float(event['tokens'])


def _fit_side(samples: Sequence[Sample]) -> tuple[float, dict[str, dict[str, float]]]:
    """Fits (share, prices) of the kinds of one side.

    With the right share, the total seconds of work that ran alone and of work that did not are predicted equally well.
    Least squares of the share itself would not find it: the overlap of a piece of work is as long as the piece, and so
    has the same noise.
    """
    by_kind = {kind: _Pieces.of(kind, samples) for kind in dict.fromkeys(sample.kind for sample in samples)}

    def gap(share: float) -> float:
        """Returns more than 0 if predictions fall short by a larger factor for shared work than for work alone."""
        seconds, predicted = np.zeros(2), np.zeros(2)
        for pieces in by_kind.values():
            found = pieces.predict(pieces.fit(share), share)
            for side, rows in enumerate((pieces.overlap < 0.5, pieces.overlap >= 0.5)):
                seconds[side] += pieces.seconds[rows].sum()
                predicted[side] += found[rows].sum()
        return float(seconds[1] * predicted[0] - seconds[0] * predicted[1]) if seconds.all() else 0.0

    low, high = 0.0, _MOST_SHARE
    if gap(low) <= 0:
        high = low
    while high - low > _SHARE_STEP:
        middle = (low + high) / 2
        low, high = (middle, high) if gap(middle) > 0 else (low, middle)
    share = (low + high) / 2
    prices = {
        kind: dict(zip((BASE, *SIZES[kind]), map(float, pieces.scale(pieces.fit(share), share)), strict=True))
        for kind, pieces in by_kind.items()
    }
    return share, prices


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """The n pieces of work of one kind."""

    sizes: np.ndarray  # float64 [n, 1 + sizes], the first is 1
    seconds: np.ndarray  # float64 [n]
    overlap: np.ndarray  # float64 [n], share of the seconds

    @classmethod
    def of(cls, kind: str, samples: Sequence[Sample]) -> _Pieces:
        own = [sample for sample in samples if sample.kind == kind]
        seconds = np.array([max(sample.seconds, 1e-6) for sample in own])
        overlap = np.array([sample.overlap_s for sample in own]) / seconds
        return cls(np.array([(1.0, *sample.sizes) for sample in own]), seconds, np.minimum(overlap, 1.0))

    def fit(self, share: float) -> np.ndarray:
        """Fits the prices by least squares of the relative error, so that a few long pieces do not decide."""
        from scipy.optimize import nnls

        matrix = self.sizes / (1 - share * self.overlap)[:, None]
        scale = np.maximum(np.abs(matrix).max(axis=0), 1e-12)
        weights = 1 / np.maximum(self.seconds, _SHORT * self.seconds.mean())
        return np.asarray(nnls(matrix / scale * weights[:, None], self.seconds * weights)[0] / scale, np.float64)

    def predict(self, prices: np.ndarray, share: float) -> np.ndarray:
        return self.sizes @ prices / (1 - share * self.overlap)

    def scale(self, prices: np.ndarray, share: float) -> np.ndarray:
        """Scales prices so that they predict the kind's total seconds, to which a few long pieces contribute much."""
        return prices * self.seconds.sum() / max(float(self.predict(prices, share).sum()), 1e-12)


def _residuals(price: Mapping[str, float], share: float, pieces: _Pieces) -> Mapping[str, float]:
    predicted = pieces.predict(np.array(list(price.values())), share)
    errors = np.abs(predicted - pieces.seconds) / np.maximum(pieces.seconds, _SHORT * pieces.seconds.mean())
    return {
        'n': len(pieces.seconds),
        'mean_s': float(pieces.seconds.mean()),
        'median_error': float(np.median(errors)),
        'total': float(predicted.sum() / pieces.seconds.sum()),
    }


def _fit_host(gaps: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The median gap by kind: the longer gaps of engines without requests do not move it."""
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
