"""Importance ratios over a run, from the metrics of its updates."""

from __future__ import annotations

from typing import Any

import pytest

from areal_jax.report.pages.markdown_page import render_page
from areal_jax.report.ratios import ratio_split, ratios_by_age, split_rows, warn_of_wrong_versions
from areal_jax.report.report import build_report
from tests.telemetry.logs import two_facts, two_metrics, two_updates


def moments(name: str, mean: float, rms: float) -> dict[str, float]:
    return {f'{name}_mean': mean, f'{name}_rms': rms}


def lines() -> list[dict[str, Any]]:
    first, second = two_metrics()
    first |= {
        **{f'by_age/{age}/tokens': n for age, n in (('0', 10.0), ('3-4', 2.0))},
        'by_age/0/effective_sample_size': 1.0, 'by_age/0/clip_fraction': 0.1, 'by_age/0/kl': 0.0,
        'by_age/3-4/effective_sample_size': 0.5, 'by_age/3-4/clip_fraction': 0.5, 'by_age/3-4/kl': 0.25,
        'ratio/tokens': 10.0, 'ratio/left_ring_tokens': 1.0, 'ratio/identity_error': 1e-9, 'ratio/seconds': 1.0,
        'ratio/share': 0.1,
        **moments('ratio/mismatch', 0.1, 0.3), **moments('ratio/drift', 0.0, 0.0), **moments('ratio/total', 0.1, 0.3),
        **moments('ratio/inside', 0.0, 0.0),
        'ratio/of_age/0/tokens': 10.0, **moments('ratio/of_age/0/mismatch', 0.1, 0.3),
        **moments('ratio/of_age/0/drift', 0.0, 0.0),
        'ratio/of_engine/engine/0/tokens': 10.0, **moments('ratio/of_engine/engine/0/mismatch', 0.1, 0.3),
    }  # fmt: skip
    second |= {
        'by_age/0/tokens': 30.0, 'by_age/0/effective_sample_size': 0.6, 'by_age/0/clip_fraction': 0.3,
        'by_age/0/kl': 0.4,
        'ratio/tokens': 30.0, 'ratio/left_ring_tokens': 4.0, 'ratio/identity_error': 2e-9, 'ratio/seconds': 2.0,
        'ratio/share': 0.1,
        **moments('ratio/mismatch', 0.3, 0.5), **moments('ratio/drift', 0.2, 0.4), **moments('ratio/total', 0.5, 0.7),
        **moments('ratio/inside', 0.0, 0.0),
        'ratio/of_update/1/tokens': 20.0, **moments('ratio/of_update/1/drift', 0.3, 0.5),
    }  # fmt: skip
    return [first, second]


def test_means_by_age_are_weighted_by_tokens():
    young, old = ratios_by_age(lines())
    assert young['age'] == '0'
    assert young['tokens'] == 40
    assert young['effective_sample_size'] == pytest.approx((10 * 1.0 + 30 * 0.6) / 40)
    assert young['clip_fraction'] == pytest.approx((10 * 0.1 + 30 * 0.3) / 40)
    assert young['kl'] == pytest.approx(30 * 0.4 / 40)
    assert old == {'age': '3-4', 'tokens': 2, 'effective_sample_size': 0.5, 'clip_fraction': 0.5, 'kl': 0.25}


def test_the_split_over_the_run_by_hand():
    found = ratio_split(lines())
    assert found is not None
    assert (found['tokens'], found['left_ring_tokens'], found['identity_error']) == (40, 5, 2e-9)
    assert (found['seconds'], found['share']) == (3.0, pytest.approx(0.1))
    mismatch = found['parts']['mismatch']
    assert mismatch['mean']['mean'] == pytest.approx((10 * 0.1 + 30 * 0.3) / 40)
    assert mismatch['mean']['n'] == 2  # updates
    assert mismatch['mean']['low'] < 0.25 < mismatch['mean']['high']
    assert mismatch['rms'] == pytest.approx(((10 * 0.3**2 + 30 * 0.5**2) / 40) ** 0.5)
    assert [row['of'] for row in found['by_engine']] == ['engine/0']
    assert found['by_update'][0]['parts']['drift']['rms'] == 0.5
    names = [row[0] for row in split_rows(found)]
    assert names[:4] == ['log π_θ - log μ', 'mismatch', 'drift', 'inside the update']
    assert names[4:] == ['mismatch, age 0', 'drift, age 0', 'drift, updates back 1', 'mismatch, engine/0']


def test_wrong_versions_are_warned_of():
    assert warn_of_wrong_versions(ratio_split(lines())) == ''
    found = lines()
    found[1]['ratio/identity_error'] = 0.01
    assert warn_of_wrong_versions(ratio_split(found)).startswith('The parts of the importance ratio differ from the')
    assert warn_of_wrong_versions(None) == ''


def test_a_run_without_a_sample_has_no_split():
    assert ratio_split(two_metrics()) is None
    assert ratios_by_age(two_metrics()) == []
    page = render_page(build_report(two_updates(), two_metrics(), two_facts()), [])
    assert 'importance ratio (nats)' not in page
    assert 'effective sample size' not in page


def test_the_page_has_both_tables():
    page = render_page(build_report(two_updates(), lines(), two_facts()), [])
    assert '| 3-4 | 2 | 0.5 | 50% | 0.25 |' in page
    assert '| drift, updates back 1 | 20 | 0.3 | 0.5 |' in page
    assert 'Split on 40 trained tokens; 5 more were of a version that had left the ring' in page
    assert 'It took 3 s, 10% of the updates.' in page


def test_several_optimizer_steps_are_said():
    several = [
        line | {'staleness/token_age_steps_mean': 5.5, 'staleness/token_age_steps_max': 11}
        for line in two_metrics((4, 0), (3, 1))
    ]
    (found,) = [w for w in build_report(two_updates(), several, two_facts())['warnings'] if w.startswith('Ages count')]
    assert 'up to 4 optimizer steps' in found
    assert 'were 0.25 publications and 5.5 optimizer steps old on average, at most 11 steps' in found
    assert not [w for w in build_report(two_updates(), two_metrics(), two_facts())['warnings'] if w.startswith('Ages')]
