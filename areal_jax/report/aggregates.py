"""Sums, means and extremes of metrics over all updates of a run."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NotRequired, TypedDict

from areal_jax.events.schema import Event
from areal_jax.report.engines.engine_presence import find_presence, restrict
from areal_jax.report.event_log import Window
from areal_jax.report.pages.blocks import Table, tabulate
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, number

_OUT = ('unknown', 'quarantined')


class ServerRow(TypedDict):
    """One server that answers came from."""

    engine: str
    url: str  # where it served last
    starts: int  # times that it registered
    tokens: int  # received, including evaluations and probes
    failures: int  # times that it was taken out of service
    last_failure: str  # why, the last time; '' = never


def server_rows(events: Sequence[Event]) -> list[ServerRow]:
    """One row per engine in another process, sorted by name; [] if the run had no servers."""
    found: dict[str, ServerRow] = {}
    for event in events:
        if event['kind'] == 'register':
            row = found.setdefault(event['engine'], _new_row(event['engine']))
            row['url'], row['starts'] = event['url'], row['starts'] + 1
        elif event['kind'] == 'receive' or (event['kind'] == 'decode' and event['engine'] in found):
            found[event['engine']]['tokens'] += event['tokens']  # only a simulation logs `decode` of a server
        elif event['kind'] == 'engine_state' and event['state'] in _OUT:
            row = found[event['engine']]
            row['failures'], row['last_failure'] = row['failures'] + 1, event['reason']
    return [found[engine] for engine in sorted(found)]


def _new_row(engine: str) -> ServerRow:
    return {'engine': engine, 'url': '', 'starts': 0, 'tokens': 0, 'failures': 0, 'last_failure': ''}


def tabulate_servers(rows: Sequence[ServerRow]) -> Table:
    """Returns the page's table of servers."""
    columns: dict[str, Callable[[ServerRow], str]] = {
        'engine': lambda row: row['engine'],
        'server': lambda row: row['url'],
        'tokens received': lambda row: str(row['tokens']),
        'starts': lambda row: str(row['starts']),
        'taken out of service': _describe_failures,
    }
    return tabulate(rows, columns)


def _describe_failures(row: ServerRow) -> str:
    return f'{row["failures"]}, the last time: {row["last_failure"]}' if row['failures'] else '0'


# The ledger of draws: the state of every draw, and whether each only moved forward.


State = Literal['pending', 'running', 'buffered', 'trained', 'dropped']
_ENTERED_BY: dict[str, State] = {
    'draw': 'pending', 'admit': 'running', 'buffer': 'buffered', 'consume': 'trained', 'drop': 'dropped',
}  # fmt: skip
_COMES_FROM: dict[State, tuple[State | None, ...]] = {
    'pending': (None,),
    'running': ('pending',),
    'buffered': ('running',),
    'trained': ('buffered',),
    'dropped': ('pending', 'running', 'buffered'),
}


class DrawLedger:
    """Follows the state of every draw, event by event; keeps each move that the loop does not allow as a violation."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}
        self.reasons: dict[int, str] = {}  # of the dropped
        self.violations: list[str] = []
        self._counts: collections.Counter[State] = collections.Counter()

    def apply(self, event: Event) -> None:
        if event['kind'] == 'consume':
            for draw in event['draws']:
                self._move(draw, event)
        elif event['kind'] in ('draw', 'admit', 'buffer', 'drop'):
            self._move(event['draw'], event)
        if event['kind'] == 'drop':
            self.reasons[event['draw']] = event['reason']

    def count(self, state: State) -> int:
        return self._counts[state]

    def _move(self, draw: int, event: Event) -> None:
        before, state = self.states.get(draw), _ENTERED_BY[event['kind']]
        if before not in _COMES_FROM[state]:
            self.violations.append(
                f'event {event["seq"]} ({event["kind"]}): draw {draw} goes from {before or "unknown"} to {state}'
            )
        if before is not None:
            self._counts[before] -= 1
        self._counts[state] += 1
        self.states[draw] = state


def ledger(events: Iterable[Event]) -> DrawLedger:
    """The ledger after all events."""
    found = DrawLedger()
    for event in events:
        found.apply(event)
    return found


def conservation(events: Iterable[Event]) -> list[str]:
    """Violations of the rule that each draw is in exactly one state and only moves forward; empty if it holds."""
    return ledger(events).violations


Metrics = Sequence[Line]  # of the updates, in order


class Ends(TypedDict):
    first: float | None  # of the first update
    last: float | None


class MeanMax(TypedDict):
    mean: float | None
    max: float | None


class Mismatch(MeanMax):
    """Engine against learner, in nats, over tokens of the current version."""

    exact_share: float | None  # tokens whose two log-probs are the same float
    n: int  # tokens
    by_engine: NotRequired[Mapping[str, EngineMismatch]]  # absent if one engine generated all tokens
    quantized: NotRequired[QuantizedMismatch]  # absent if engines decode with the weights as published
    delta_rule: NotRequired[float | None]  # mean over trained tokens, by diagnostics.delta_rule; absent without
    latent_form: NotRequired[float | None]  # likewise, by diagnostics.latent_form


class QuantizedMismatch(TypedDict):
    """Distance of the quantized policy from the published one, over the same tokens; means weighted by tokens."""

    kl: float | None  # nats
    effective_sample_size: float | None  # share
    ratio_share: float | None  # of the mean square of the log-ratio of all generated tokens


class EngineMismatch(TypedDict):
    """Mismatch over the tokens of the answers that this engine ended."""

    mean: float | None
    n: int


def total(metrics: Metrics, name: str) -> float:
    """Sum over the updates that have the metric."""
    return sum(_values(metrics, name))


def largest(metrics: Metrics, name: str) -> float | None:
    """Largest value over the updates."""
    return max(_values(metrics, name), default=None)


def median(metrics: Metrics, name: str) -> float | None:
    """Median over the updates that have the metric."""
    values = _values(metrics, name)
    return statistics.median(values) if values else None


def ends(metrics: Metrics, name: str) -> Ends:
    """First and last value."""
    values = _values(metrics, name)
    return {'first': values[0] if values else None, 'last': values[-1] if values else None}


def mean(metrics: Metrics, name: str) -> float | None:
    """Mean over the updates that have the metric."""
    values = _values(metrics, name)
    return sum(values) / len(values) if values else None


def weighted_mean(metrics: Metrics, name: str, weight: str) -> float | None:
    """Mean over the updates, weighted by `weight`; updates without a value or a weight are left out."""
    pairs = [(number(line, name), number(line, weight)) for line in metrics]
    counted = [(value, count) for value, count in pairs if value is not None and count]
    weights = sum(count for _, count in counted)
    return sum(value * count for value, count in counted) / weights if weights else None


def mismatch(metrics: Metrics) -> Mismatch:
    """Mismatch of log-probs over all compared tokens."""
    count = int(total(metrics, names.MISMATCH_COUNT))
    measured = [line for line in metrics if number(line, names.MISMATCH_COUNT)]
    by_engine = _mismatch_by_engine(metrics)
    found: Mismatch = {
        'mean': weighted_mean(measured, names.MISMATCH_MEAN, names.MISMATCH_COUNT),
        'max': largest(measured, names.MISMATCH_MAX),
        'exact_share': weighted_mean(measured, names.MISMATCH_EXACT, names.MISMATCH_COUNT),
        'n': count,
    }
    if any(names.MISMATCH_KL in line for line in measured):
        found['quantized'] = {
            'kl': weighted_mean(measured, names.MISMATCH_KL, names.MISMATCH_COUNT),
            'effective_sample_size': weighted_mean(measured, names.MISMATCH_SAMPLE_SIZE, names.MISMATCH_COUNT),
            'ratio_share': weighted_mean(measured, names.MISMATCH_RATIO_SHARE, names.MISMATCH_COUNT),
        }
    if any(names.MISMATCH_RULE_COUNT in line for line in metrics):
        found['delta_rule'] = weighted_mean(metrics, names.MISMATCH_RULE, names.MISMATCH_RULE_COUNT)
    if any(names.MISMATCH_LATENTS_COUNT in line for line in metrics):
        found['latent_form'] = weighted_mean(metrics, names.MISMATCH_LATENTS, names.MISMATCH_LATENTS_COUNT)
    if len(by_engine) > 1:
        found['by_engine'] = by_engine
    return found


def _mismatch_by_engine(metrics: Metrics) -> dict[str, EngineMismatch]:
    prefix, suffix = names.MISMATCH_OF, '/n'
    keys = {key for line in metrics for key in line if key.startswith(prefix) and key.endswith(suffix)}
    found: dict[str, EngineMismatch] = {}
    for engine in sorted(key.removeprefix(prefix).removesuffix(suffix) for key in keys):
        count, mean = f'{prefix}{engine}{suffix}', f'{prefix}{engine}/mean_abs'
        found[engine] = {'mean': weighted_mean(metrics, mean, count), 'n': int(total(metrics, count))}
    return found


def admission_held(metrics: Metrics, within: Window) -> dict[str, float]:
    """Share of the window in which each bound kept admission closed, the largest first."""
    return _shares_by_bound(metrics, names.ADMISSION_HELD, within.seconds)


def idle_slots(metrics: Metrics, events: Sequence[Event], within: Window) -> dict[str, float]:
    """Share of the slots' seconds in the window in which a slot had no answer, by the bound that held admission back.

    Slots of an engine count while it is in the pool.
    """
    slots = {event['engine']: len(event['slots']) for event in events if event['kind'] == 'decode'}
    presence = find_presence(events)
    away_s = sum(
        count * (within.seconds - restrict(within, presence, engine).seconds) for engine, count in slots.items()
    )
    return _shares_by_bound(metrics, names.IDLE_SLOTS, within.seconds * sum(slots.values()) - away_s)


def _shares_by_bound(metrics: Metrics, prefix: str, span: float) -> dict[str, float]:
    seconds: dict[str, float] = collections.defaultdict(float)
    for line in metrics:
        for name in line:
            if name.startswith(prefix):
                seconds[name.removeprefix(prefix)] += number(line, name) or 0.0
    span = max(span, sum(seconds.values()))  # in lock-step admission is held before the first group too
    return {bound: seconds[bound] / span for bound in sorted(seconds, key=lambda bound: -seconds[bound])}


def _values(metrics: Metrics, name: str) -> list[float]:
    return [value for line in metrics if (value := number(line, name)) is not None]
