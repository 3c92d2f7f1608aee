from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from areal_jax.report.pages.run_plots import MAX_VERSIONS, shown_span, write_plots
from areal_jax.report.report import build_report
from areal_jax.report.timeline import slot_spans
from tests.telemetry.logs import dispatch, event_log, publish, two_facts, two_metrics, two_updates


def test_pictures_are_pictures(tmp_path: pathlib.Path):
    from matplotlib.image import imread

    report = build_report(two_updates(), two_metrics(), two_facts())
    paths = write_plots(two_updates(), two_metrics(), report, tmp_path)
    assert paths == ['plots/reward.png', 'plots/token_age.png', 'plots/slots.png']
    for path in paths:
        pixels = imread(tmp_path / path)
        assert pixels.shape[1] == 1200
        assert pixels.shape[0] >= 300
        colors = np.unique((pixels[::3, ::3, :3] * 255).astype(np.uint8).reshape(-1, 3), axis=0)
        assert len(colors) > 30
        ink = (pixels[..., :3].min(-1) < 0.9).mean()
        assert 0.01 < ink < 0.9, (path, ink)


def test_no_data_no_picture(tmp_path: pathlib.Path):
    report: dict[str, Any] = {'accuracy': None, 'eta': None, 'evaluation_curve': [], 'evaluation_curve_ends': None}
    assert write_plots([], [], report, tmp_path) == []
    assert list((tmp_path / 'plots').iterdir()) == []


@pytest.mark.parametrize(('publications', 'start', 'end'), [(3, 0, 20), (MAX_VERSIONS + 4, 3, 3 + MAX_VERSIONS - 1)])
def test_a_long_run_shows_its_middle(publications: int, start: float, end: float):
    # published at 1, 2, 3, ...: 12 publications leave out (12 - 8) // 2 = 2 at the front, so from the one at 3 s
    entries = [*(publish(t, t) for t in range(1, publications + 1)), *dispatch(0, 20, 0, ['a'], 1, 0)]
    events = event_log(*sorted(entries, key=lambda entry: entry[0]))
    assert shown_span(slot_spans(events), events) == (start, end)


@pytest.mark.filterwarnings('error')
def test_slots_without_publication_or_interruption_are_drawn_without_a_warning(tmp_path: pathlib.Path):
    report: dict[str, Any] = {'accuracy': None, 'eta': None, 'evaluation_curve': [], 'evaluation_curve_ends': None}
    assert write_plots(event_log(*dispatch(0, 20, 0, ['a'], 1, 0)), [], report, tmp_path) == ['plots/slots.png']


def test_the_curve_of_evaluations_lies_between_before_and_after(tmp_path: pathlib.Path):
    interval = lambda mean: {'mean': mean, 'low': mean - 0.1, 'high': mean + 0.1, 'n': 8}
    row = {'greedy': interval(0.4), 'sampled': None, 'seconds': 1.0, 'lane_seconds': 0.5, 'lane_share': 0.1}
    report: dict[str, Any] = {
        'accuracy': None,
        'evaluation_curve_ends': {
            'greedy': {'before': interval(0.2), 'after': None},
            'sampled': {'before': None, 'after': None},
        },
        'eta': None, 'steps': 8, 'evaluation_curve': [row | {'version': 4}],
    }  # fmt: skip
    assert write_plots([], [], report, tmp_path) == ['plots/evaluation.png']
