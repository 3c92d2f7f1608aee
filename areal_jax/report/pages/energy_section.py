"""The energy of a run in its report: sums over the updates, and the texts and rows of the pages.

Values cover the updates whose joules are known. Measured values have no interval; the interval of a modelled value
goes from the lowest to the highest published watts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from areal_jax.report.aggregates import Metrics, total, weighted_mean
from areal_jax.report.pages.blocks import Table
from areal_jax.telemetry import names
from areal_jax.telemetry.energy_accounting import METERS
from areal_jax.telemetry.energy_meters import DECODE, IDLE, MODELLED, NVML, STATES, EnergyFacts
from areal_jax.telemetry.metrics import Line, number
from areal_jax.telemetry.progress import format_number, format_percent

_UNITS = (('MJ', 1e6), ('kJ', 1e3), ('J', 1.0))
USEFUL = 'trained tokens of applied optimizer steps whose advantage is not 0'
NOT_FILTERED = (
    'trained tokens, of groups that the filter of equal rewards left where it is on: which of them have an advantage '
    'of 0 is not known'
)


class Range(TypedDict):
    """A number with the lowest and the highest that published watts allow; all equal if it is measured."""

    low: float
    value: float
    high: float


class SourceRow(TypedDict):
    meter: str  # nvml, rapl, modelled
    devices: str  # '' for a run that has not finished
    joules: Range | None  # over the updates in which the meter could be read


class EnergyByToken(TypedDict):
    """Joules of all sources by tokens of the same updates."""

    generated: Range | None
    trained: Range | None
    useful: Range | None
    useful_rule: str  # which tokens are useful


class EnergySummary(TypedDict):
    joules: Range | None  # of all sources; None if devices of the run are left out
    updates: int  # whose joules these are
    by_token: EnergyByToken
    sources: list[SourceRow]
    device_seconds: Mapping[str, float]  # train, prefill, decode, idle
    decode_activity: float | None  # log(rows) / log(128)
    idle_share: Range | None  # of the joules of the accelerators; modelled
    watts: Mapping[str, str]  # published values behind the model, with their sources
    sentences: list[str]


def summarize_energy(metrics: Metrics, facts: EnergyFacts | None) -> EnergySummary | None:
    """Sums up the energy; None if telemetry.energy is 'off'. An unfinished run has no facts."""
    lines = [line for line in metrics if any(name.startswith(names.ENERGY_SECONDS) for name in line)]
    if not lines and facts is None:
        return None
    whole = [line for line in lines if names.ENERGY in line]
    sentences = [source['sentence'] for source in facts['sources']] if facts else []
    sentences += [sentence for sentence in ((facts['note'], *facts['lost']) if facts else ()) if sentence]
    return {
        'joules': _sum(whole, names.ENERGY),
        'updates': len(whole),
        'by_token': _by_token(whole),
        'sources': _sources(lines, facts),
        'device_seconds': {state: total(lines, f'{names.ENERGY_SECONDS}{state}') for state in STATES} if lines else {},
        'decode_activity': weighted_mean(lines, names.ENERGY_ACTIVITY, f'{names.ENERGY_SECONDS}{DECODE}'),
        'idle_share': _idle_share(whole),
        'watts': dict(facts['watts']) if facts else {},
        'sentences': sentences,
    }


def _sum(lines: Sequence[Line], name: str) -> Range | None:
    """Sum over the updates that have the metric, with the interval of its modelled part."""
    lines = [line for line in lines if number(line, name) is not None]
    if not lines:
        return None
    value = total(lines, name)
    if name not in (names.ENERGY, names.ENERGY_MODELLED):
        return {'low': value, 'value': value, 'high': value}
    modelled = total(lines, names.ENERGY_MODELLED)
    low, high = total(lines, names.ENERGY_MODELLED_LOW), total(lines, names.ENERGY_MODELLED_HIGH)
    return {'low': value - modelled + low, 'value': value, 'high': value - modelled + high}


def _by_token(whole: Sequence[Line]) -> EnergyByToken:
    knows_useful = all(names.USEFUL_TOKENS in line for line in whole)
    joules = _sum(whole, names.ENERGY)

    def divide(name: str) -> Range | None:
        tokens = total(whole, name)
        if joules is None or not tokens:
            return None
        return {'low': joules['low'] / tokens, 'value': joules['value'] / tokens, 'high': joules['high'] / tokens}

    return {
        'generated': divide(names.TOKENS_GENERATED),
        'trained': divide(names.TOKENS_TRAINED),
        'useful': divide(names.USEFUL_TOKENS if knows_useful else names.TOKENS_TRAINED),
        'useful_rule': USEFUL if knows_useful else NOT_FILTERED,
    }


def _sources(lines: Sequence[Line], facts: EnergyFacts | None) -> list[SourceRow]:
    devices = {source['meter']: source['devices'] for source in facts['sources']} if facts else {}
    rows: list[SourceRow] = []
    for meter, name in (*METERS.items(), (MODELLED, names.ENERGY_MODELLED)):
        joules = _sum(lines, name)
        if joules is not None or meter in devices:
            rows.append({'meter': meter, 'devices': devices.get(meter, ''), 'joules': joules})
    return rows


def _idle_share(whole: Sequence[Line]) -> Range | None:
    """Idle joules of the accelerators / all their joules; the latter are measured or, if none are, modelled."""
    idle = total(whole, names.ENERGY_IDLE)
    measured, modelled = total(whole, METERS[NVML]), total(whole, names.ENERGY_MODELLED)
    low, high = total(whole, names.ENERGY_IDLE_LOW), total(whole, names.ENERGY_IDLE_HIGH)
    if not idle or not measured + modelled:
        return None
    if measured:
        return {'low': low / measured, 'value': min(1.0, idle / measured), 'high': min(1.0, high / measured)}
    busy_low = total(whole, names.ENERGY_MODELLED_LOW) - low
    busy_high = total(whole, names.ENERGY_MODELLED_HIGH) - high
    return {'low': low / (low + busy_high), 'value': idle / modelled, 'high': high / (high + busy_low)}


def tabulate_energy(energy: EnergySummary | None) -> Table:
    """Returns the page's table; empty without energy accounting."""
    return Table(('energy', ''), _rows(energy) if energy else [])


def _rows(energy: EnergySummary) -> list[tuple[str, ...]]:
    by_token, seconds = energy['by_token'], energy['device_seconds']
    rows: list[tuple[str, ...]] = [
        (f'joules of {energy["updates"]} updates, all sources', format_range(energy['joules'])),
        *((_name_source(source), format_range(source['joules'])) for source in energy['sources']),
        ('joules a generated token', format_range(by_token['generated'])),
        ('joules a trained token', format_range(by_token['trained'])),
        ('joules a useful token', format_range(by_token['useful'])),
        ('share of the joules of accelerators while idle (modelled)', _format_share(energy['idle_share'])),
    ]
    rows = [row for row in rows if row[1] != '-']
    if seconds:
        spent = sum(seconds.values())
        shares = (
            f'{state} {format_number(of)} ({format_percent(of / spent)})' for state, of in seconds.items() if spent
        )
        rows.append(('seconds of devices', ', '.join(shares) or '-'))
        busy = spent - seconds.get(IDLE, 0.0)
        rows.append(('seconds of devices, busy / idle', f'{format_number(busy)} / {format_number(spent - busy)}'))
        rows.append(('activity of decoding (log of the rows by log of 128)', format_percent(energy['decode_activity'])))
    return rows


def describe_energy(energy: EnergySummary | None) -> list[str]:
    """Sentences on the sources of the joules, missing parts and useful tokens; [] without energy accounting."""
    if energy is None:
        return []
    useful = f'Useful tokens are {energy["by_token"]["useful_rule"]}.' if energy['by_token']['useful'] else ''
    watts = [f'{what}: {text}.' for what, text in energy['watts'].items()]
    return [sentence for sentence in (*energy['sentences'], useful, *watts) if sentence]


def format_range(found: Range | None) -> str:
    """Formats as '12.5 J [10, 15]' or '3.2 MJ [2.3, 4.1]', without an empty interval; '-' for None."""
    if found is None:
        return '-'
    unit, size = next((unit for unit in _UNITS if found['value'] >= unit[1]), _UNITS[-1])
    low, value, high = (format_number(joules / size) for joules in (found['low'], found['value'], found['high']))
    return f'{value} {unit}' if found['low'] == found['high'] else f'{value} {unit} [{low}, {high}]'


def _format_share(found: Range | None) -> str:
    if found is None:
        return '-'
    return f'{format_percent(found["value"])} [{format_percent(found["low"])}, {format_percent(found["high"])}]'


def _name_source(source: SourceRow) -> str:
    how = 'modelled' if source['meter'] == MODELLED else f'measured by {source["meter"].upper()}'
    return f'joules {how}{": " if source["devices"] else ""}{source["devices"]}'
