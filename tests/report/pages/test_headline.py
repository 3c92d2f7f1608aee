"""The answers to what a reader asks first, and how they are read."""

from __future__ import annotations

from typing import Any

import pytest

from areal_jax.report.pages.blocks import Tile
from areal_jax.report.pages.headline import describe_state, summarize_run, tell_headline
from areal_jax.report.pages.run_page import render_page
from areal_jax.report.report import build_report
from areal_jax.report.report_keys import Report
from tests.telemetry.logs import two_facts, two_metrics, two_updates


def made(**changes: Any) -> Report:
    """The report of two updates with some of its values replaced."""
    return {**build_report(two_updates(), two_metrics(), two_facts()), **changes}  # type: ignore[typeddict-item]


def tile(name: str, **changes: Any) -> Tile:
    return next(tile for tile in tell_headline(made(**changes)) if tile.name == name)


def accuracy(low: float | None, high: float | None) -> dict[str, Any]:
    interval = {'mean': 0.25, 'low': 0.2, 'high': 0.3, 'n': 64}
    ends = {'before': interval, 'after': interval | {'mean': 0.75}}
    return {'greedy': ends, 'sampled': ends | {'gain': {'mean': 0.5, 'low': low, 'high': high, 'n': 64}}}


@pytest.mark.parametrize(
    ('low', 'high', 'tone', 'reading'),
    [
        (0.125, 0.875, 'good', 'Yes: the interval of the gain lies above 0.'),
        (-0.125, 0.875, 'fair', 'Not shown: the interval of the gain contains 0.'),
        (-0.875, -0.125, 'bad', 'It got worse: the interval of the gain lies below 0.'),
        (None, None, 'unknown', 'Too few problems for an interval.'),
    ],
)
def test_a_gain_is_read_by_its_interval(low: float | None, high: float | None, tone: str, reading: str):
    found = tile('gain', accuracy=accuracy(low, high))
    assert (found.value, found.tone, found.reading) == ('+0.500', tone, reading)
    assert found.details[1:] == ('sampled 0.250 → 0.750', 'greedy 0.250 → 0.750')


def test_without_an_evaluation_the_reward_is_shown_as_what_it_is():
    found = tile('gain', accuracy=None, evaluation_curve=[], reward={'first': 0.125, 'last': 0.5})
    assert (found.value, found.details) == ('0.5', ('first batch 0.125',))
    assert 'problems trained on' in found.reading


def test_a_run_under_way_shows_its_last_evaluation():
    score = {'mean': 0.5, 'low': 0.4, 'high': 0.6, 'n': 8}
    found = tile('gain', accuracy=None, evaluation_curve=[{'version': 4, 'greedy': score, 'sampled': None}])
    assert (found.value, found.unit) == ('0.500', 'held-out accuracy of version 4')
    assert found.details == ('95% interval [0.400, 0.600] (n = 8)',)


@pytest.mark.parametrize(
    ('achieved', 'value', 'tone'), [(2.0, '100%', 'good'), (2.5, '80%', 'fair'), (4.0, '50%', 'bad')]
)
def test_speed_is_the_share_of_the_limit(achieved: float, value: str, tone: str):
    time = {'generate': 2.0, 'train': 1.0, 'publish': 0.0, 'ideal': 2.0, 'achieved': achieved, 'ideal_rule': ''}
    found = tile('speed', time=time, cause_of_gap='Achieved x (bound by y): of the gap, all is waiting.')
    assert (found.value, found.tone, found.reading) == (value, tone, 'Of the gap, all is waiting.')


@pytest.mark.parametrize(
    ('mean', 'oldest', 'eta', 'part'),
    [
        (0.0, 0, 0.0, 'On-policy'),
        (1.0, 2, 4.0, 'Within the bound'),
        (3.9, 4, 4.0, 'At its bound'),
        (1.0, 5, 4.0, 'older than eta'),
        (9.0, 20, None, 'unbounded'),
    ],
)
def test_age_is_read_against_eta(mean: float, oldest: int, eta: float | None, part: str):
    assert part in tile('age', token_age={'mean': mean, 'max': oldest}, eta=eta).reading


@pytest.mark.parametrize(('mean', 'tone'), [(1e-6, 'good'), (1e-3, 'fair'), (0.1, 'bad'), (None, 'unknown')])
def test_mismatch_is_read_against_rounding(mean: float | None, tone: str):
    found = tile('agreement', mismatch={'mean': mean, 'max': mean, 'exact_share': 0.5, 'n': 8 if mean else 0})
    assert found.tone == tone


@pytest.mark.parametrize(('left', 'tone'), [(0.92, 'fair'), (0.2, 'bad')])
def test_the_mismatch_of_engines_in_8_bits_is_read_as_what_it_costs(left: float, tone: str):
    quantized = {'kl': 0.03, 'effective_sample_size': left, 'ratio_share': 0.5}
    found = tile('agreement', mismatch={'mean': 0.2, 'max': 1.0, 'exact_share': 0.0, 'n': 8, 'quantized': quantized})
    assert found.reading.startswith('Engines decode in 8 bits: ')
    assert f'with {left:.0%} of the samples left' in found.reading
    assert found.tone == tone


def test_an_open_ledger_is_bad():
    fates = {'generated': 8, 'fates': {'trained': 6, 'filtered': 2}, 'fault': 'x', 'by_age': {}, 'by_version': None}
    found = tile('data', token_fates=fates)
    assert (found.value, found.tone, found.reading) == ('75%', 'bad', 'The ledger does not close: x.')
    assert found.details[-1] == 'filtered 25%'


def test_nothing_measured_is_a_dash_and_a_reason():
    report = build_report([], [], two_facts(evaluation_before=None, evaluation_after=None))
    told = tell_headline(report)
    assert [tile.value for tile in told if tile.name in ('gain', 'speed', 'age', 'agreement', 'data')] == ['-'] * 5
    assert all(tile.reading.endswith('.') for tile in told)


@pytest.mark.parametrize(
    ('finished', 'running', 'state'),
    [
        (True, False, ('finished', 'good')),
        (False, True, ('under way', 'fair')),
        (False, False, ('not finished', 'bad')),
    ],
)
def test_the_state_of_the_run(finished: bool, running: bool, state: tuple[str, str]):
    text, tone = describe_state(made(finished=finished, running=running, steps=2, planned_steps=4))
    assert (text, tone) == (f'{state[0]}, 2 of 4 updates', state[1])


def test_every_tile_is_a_row_of_report_md():
    page = render_page(report := made(), [])
    assert all(f'| {tile.question} | {tile.answer} | {tile.reading} |' in page for tile in tell_headline(report))


def test_a_summary_has_the_verdicts_first_and_its_lines_fit():
    found = made(accuracy=accuracy(0.125, 0.875), warnings=['One.', 'Two.'], wall_seconds=40.0)
    whole = dict(line.split(maxsplit=1) for line in summarize_run(found, 1000))
    assert list(whole) == ['run', 'learnt', 'speed', 'age', 'mismatch', 'warnings']
    assert whole['run'] == 'finished, 2 updates, 40 s of wall time'
    assert whole['learnt'].startswith('Yes: the interval of the gain lies above 0. Gain +0.500, 95% interval [+0.125, ')
    assert whole['speed'].startswith('80% of the limit, 10 s an update')
    assert whole['warnings'] == '2, the first one: One.'
    cut = summarize_run(found, 60)
    assert all(len(line) <= 60 for line in cut)
    assert all(line.removesuffix(' ...') in ' '.join(summarize_run(found, 1000)) for line in cut)
    assert cut[1].endswith(' ...')


def test_a_summary_says_what_was_not_measured():
    found = made(mismatch={'mean': None, 'max': None, 'exact_share': None, 'n': 0}, simulation='8 x H100', warnings=[])
    whole = dict(line.split(maxsplit=1) for line in summarize_run(found, 1000))
    assert whole['learnt'] == 'A simulation has no weights, and its rewards are drawn.'
    assert whole['mismatch'].startswith('Not measured: ')
    assert whole['warnings'] == 'none'
