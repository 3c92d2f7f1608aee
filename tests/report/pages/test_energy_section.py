"""Joules of a run from the rows of its updates, by arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from areal_jax.report.pages.energy_section import (
    NOT_FILTERED,
    USEFUL,
    describe_energy,
    format_range,
    summarize_energy,
    tabulate_energy,
)
from areal_jax.telemetry.energy_meters import STATES, EnergyFacts

FACTS: EnergyFacts = {
    'sources': [{'meter': 'nvml', 'devices': '2 x NVIDIA H200', 'sentence': 'Measured.'}],
    'watts': {'NVIDIA H200, idle': '80 to 130 W: somebody'},
    'note': '',
    'lost': [],
}


def row(joules: float | None, tokens: tuple[int, int, int], seconds: tuple[int, ...], **more: float) -> dict[str, Any]:
    """An update; `tokens` generated, trained and useful, seconds in the order of STATES."""
    generated, trained, useful = tokens
    whole = {} if joules is None else {'energy/joules': joules}
    counts = {'tokens/generated': generated, 'tokens/trained': trained, 'update/useful_tokens': useful}
    spent = {f'energy/seconds/{state}': of for state, of in zip(STATES, seconds, strict=True)}
    return {**whole, **counts, **spent, **{f'energy/{name}': value for name, value in more.items()}}


def test_measured_joules_have_no_interval_and_their_idle_share_has_one():
    # 300 + 500 J by 40, 20 and 8 tokens; the last update, whose counter was lost, counts in none of them
    lines = [
        row(300, (30, 10, 5), (1, 1, 6, 2), nvml_joules=300, decode_activity=0.5, idle_joules=90, idle_joules_low=60,
            idle_joules_high=120),
        row(500, (10, 10, 3), (2, 0, 2, 1), nvml_joules=500, decode_activity=0.1, idle_joules=30, idle_joules_low=20,
            idle_joules_high=40),
        row(None, (99, 99, 99), (1, 1, 1, 1)),
    ]  # fmt: skip
    energy = summarize_energy(lines, FACTS)
    assert energy is not None
    assert (energy['joules'], energy['updates']) == ({'low': 800, 'value': 800, 'high': 800}, 2)
    by_token = {name: energy['by_token'][name] for name in ('generated', 'trained', 'useful')}  # type: ignore[literal-required]
    assert by_token == {
        name: dict.fromkeys(('low', 'value', 'high'), joules)
        for name, joules in {'generated': 20, 'trained': 40, 'useful': 100}.items()
    }
    assert energy['by_token']['useful_rule'] == USEFUL
    assert energy['idle_share'] == {'low': 80 / 800, 'value': 120 / 800, 'high': 160 / 800}
    assert energy['device_seconds'] == {'train': 4, 'prefill': 2, 'decode': 9, 'idle': 4}
    assert energy['decode_activity'] == pytest.approx((6 * 0.5 + 2 * 0.1) / 8)
    rows = dict(tabulate_energy(energy).rows)
    assert rows['joules measured by NVML: 2 x NVIDIA H200'] == '800 J'
    assert rows['joules a useful token'] == '100 J'
    assert rows['share of the joules of accelerators while idle (modelled)'] == '15% [10%, 20%]'
    assert rows['seconds of devices, busy / idle'] == '15 / 4'
    assert describe_energy(energy) == [
        'Measured.', f'Useful tokens are {USEFUL}.', 'NVIDIA H200, idle: 80 to 130 W: somebody.',
    ]  # fmt: skip


def test_modelled_joules_have_the_interval_of_the_published_watts_and_measured_ones_beside_them_have_none():
    # packages 100 J measured, accelerators 400 [300, 500], of which idle 100 [80, 120]
    line = row(
        500, (10, 0, 0), (1, 0, 1, 2), rapl_joules=100, modelled_joules=400, modelled_joules_low=300,
        modelled_joules_high=500, idle_joules=100, idle_joules_low=80, idle_joules_high=120,
    )  # fmt: skip
    energy = summarize_energy([line], None)  # of a run that has not finished: nobody named the devices yet
    assert energy is not None
    assert energy['joules'] == {'low': 400, 'value': 500, 'high': 600}
    assert energy['by_token']['generated'] == {'low': 40, 'value': 50, 'high': 60}
    assert (energy['by_token']['trained'], energy['by_token']['useful']) == (None, None)
    # idle at its lowest beside busy at its highest, 500 - 120; the other way round 300 - 80
    assert energy['idle_share'] == {'low': 80 / (80 + 380), 'value': 100 / 400, 'high': 120 / (120 + 220)}
    rows = dict(tabulate_energy(energy).rows)
    assert rows['joules modelled'] == '400 J [300, 500]'
    assert rows['joules measured by RAPL'] == '100 J'
    assert rows['joules a generated token'] == '50 J [40, 60]'


def test_useful_tokens_of_a_log_without_them_are_those_that_the_filter_left():
    line = row(500, (10, 5, 0), (1, 0, 1, 2), nvml_joules=500)
    del line['update/useful_tokens']
    energy = summarize_energy([line], FACTS)
    assert energy is not None
    assert energy['by_token']['useful'] == {'low': 100, 'value': 100, 'high': 100}
    assert energy['by_token']['useful_rule'] == NOT_FILTERED


def test_without_a_meter_and_without_watts_there_is_one_sentence():
    facts: EnergyFacts = {'sources': [], 'watts': {}, 'note': 'No joules are known.', 'lost': []}
    energy = summarize_energy([row(None, (10, 5, 0), (1, 0, 1, 2))], facts)
    assert energy is not None
    assert describe_energy(energy) == ['No joules are known.']
    assert [name for name, _ in tabulate_energy(energy).rows if 'joules' in name] == []
    assert (summarize_energy([{'step': 1}], None), tabulate_energy(None).rows, describe_energy(None)) == (None, [], [])


def test_joules_have_a_unit_of_their_size():
    assert format_range({'low': 2281271, 'value': 3208383, 'high': 4135495}) == '3.21 MJ [2.28, 4.14]'
    assert format_range({'low': 5000, 'value': 5000, 'high': 5000}) == '5 kJ'
    assert format_range({'low': 0.085, 'value': 0.12, 'high': 0.154}) == '0.12 J [0.085, 0.154]'
    assert format_range(None) == '-'
