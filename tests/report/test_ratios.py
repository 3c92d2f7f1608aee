"""Importance ratios over a run, from the metrics of its updates."""

from __future__ import annotations

from typing import Any

import pytest

from areal_jax.report.engine_work import (
    ratio_split,
    ratios_by_age,
    summarize_experts,
    tabulate_split,
    warn_of_wrong_versions,
)
from areal_jax.report.pages.run_page import render_page
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
    names = [row[0] for row in tabulate_split(found).rows]
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


def test_experts_over_the_run_by_hand():
    first, second = two_metrics()
    of_age = lambda age, tokens, sets: {
        f'routes/of_age/{age}/tokens': tokens, f'routes/of_age/{age}/sets_changed': sets,
        f'routes/of_age/{age}/tokens_changed': 2 * sets,
    }  # fmt: skip
    first |= {
        'experts/load': 2.0, 'experts/dead': 3.0, 'routes/recorded': 1.0, 'routes/prompts_differ': 4.0,
        'routes/tokens': 10.0, 'routes/sets_changed': 0.1, 'routes/tokens_changed': 0.2, **of_age('0', 10.0, 0.1),
        'ratio/tokens': 5.0, **moments('ratio/routing', 0.1, 0.3),
    }  # fmt: skip
    second |= {
        'experts/load': 4.0, 'experts/dead': 1.0, 'routes/recorded': 0.5, 'routes/prompts_differ': 1.0,
        'routes/tokens': 30.0, 'routes/sets_changed': 0.2, 'routes/tokens_changed': 0.4, **of_age('1', 30.0, 0.2),
        'ratio/tokens': 15.0, **moments('ratio/routing', 0.1, 0.5),
    }  # fmt: skip
    found = summarize_experts([first, second])
    assert found is not None
    assert (found['load'], found['dead']) == (3.0, {'first': 3.0, 'last': 1.0})
    assert (found['recorded'], found['prompts_differ']) == (0.75, 5)
    whole, young, old = found['routes']
    assert (whole['tokens'], whole['sets_changed']) == (40, pytest.approx((10 * 0.1 + 30 * 0.2) / 40))
    assert whole['routing_rms'] == pytest.approx(((5 * 0.09 + 15 * 0.25) / 20) ** 0.5)
    assert (young['age'], young['tokens'], old['age'], old['tokens_changed']) == ('0', 10, '1', 0.4)
    page = render_page(build_report(two_updates(), [first, second], two_facts()), [])
    assert '| all | 40 | 18% | 35% | 0.458 |' in page
    assert (
        'The fullest expert of a layer had 3 times the mean of its layer; 3 experts had no token in the first' in page
    )


def test_a_dense_model_has_no_experts():
    assert summarize_experts(two_metrics()) is None
    assert 'Experts' not in render_page(build_report(two_updates(), two_metrics(), two_facts()), [])
