"""Figures of a study in the form of the paper's Figure 5: curves by lag without and with the decoupled objective, and
throughput by eta; and scores over the lag for every loss and learning rate."""

from __future__ import annotations

import itertools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from areal_jax.report.pages.blocks import Line
from areal_jax.report.pages.colors import BLUE, PALETTE, order_shades
from areal_jax.report.pages.curves import moving_mean
from areal_jax.report.pages.pictures import DIRECTORY, MARKERS, draw_lines, label_axes, make_figure, save_figure
from areal_jax.studies import page
from areal_jax.studies.page import eta_records, lag_records
from areal_jax.studies.plan import Plan
from areal_jax.studies.stages import Record, Records

if TYPE_CHECKING:  # drawing is imported where it is needed: it takes a second
    from matplotlib.axes import Axes

CURVES, SCORES = 'curves_and_throughput.png', 'score_by_age.png'
_SMOOTHING = 10  # updates in the moving mean of a curve
_WIDTH = 13  # inches


def write_figures(plan: Plan, records: Records, workdir: pathlib.Path) -> list[str]:
    """Writes WORKDIR/plots/*.png; returns the paths of figures that have data, relative to the work directory."""
    directory = workdir / DIRECTORY
    directory.mkdir(exist_ok=True)
    drawn = {
        CURVES: _draw_curves(plan, records, directory / CURVES),
        SCORES: _draw_scores(plan, records, directory / SCORES),
    }
    return [f'{DIRECTORY}/{name}' for name, has_data in drawn.items() if has_data]


def _draw_curves(plan: Plan, records: Records, path: pathlib.Path) -> bool:
    lags = plan.lock_step.lags
    found = {(method, lag): lag_records(records, method, lag) for method in ('plain', 'decoupled') for lag in lags}
    if not any(found.values()):
        return False
    figure = make_figure(4.6, _WIDTH)
    panels = figure.subplots(1, 3)
    for axes, method in zip(panels, ('plain', 'decoupled'), strict=False):
        shades = zip(lags, order_shades(len(lags)), strict=True)
        drawn = (_mean_curve(found[method, lag], str(lag), color) for lag, color in shades)
        draw_lines(axes, [line for line in drawn if line])
        share = 'share of right symbols in the batch' if method == 'plain' else ''
        label_axes(axes, f'{method} PPO', 'update', share)
        axes.set_ylim(0, 1.02)
    panels[1].legend(title='lag', frameon=False, fontsize=9, loc='upper left', bbox_to_anchor=(1, 1))
    _draw_throughput(plan, records, panels[2])
    save_figure(figure, path)
    return True


def _mean_curve(records: Sequence[Record], label: str, color: str) -> Line | None:
    """Returns the mean over the seeds of moving means."""
    length = min((len(record.curve) for record in records), default=0)
    width = min(_SMOOTHING, length)
    if not width:
        return None
    curves = [moving_mean(record.curve[:length], width)[width - 1 :] for record in records]
    return Line(label, range(width, length + 1), np.mean(curves, axis=0).tolist(), color)


def _draw_throughput(plan: Plan, records: Records, axes: Axes) -> None:
    rates = [(eta, page.throughput(records, eta)) for eta in plan.natural.etas]
    known = [(f'{eta:g}', rate) for eta, rate in rates if rate is not None]
    axes.bar([name for name, _ in known], [rate for _, rate in known], color=BLUE, width=0.6)
    for index, (_, rate) in enumerate(known):
        axes.annotate(f'{rate:.0f}', (index, rate), ha='center', va='bottom', fontsize=9)
    label_axes(axes, 'trained tokens per second of the clock', 'eta', '')


def _draw_scores(plan: Plan, records: Records, path: pathlib.Path) -> bool:
    part = plan.lock_step
    factors = sorted((1.0, *part.side_factors))
    if not any(lag_records(records, method, lag) for method in part.methods for lag in part.lags):
        return False
    figure = make_figure(4.6, _WIDTH)
    panels = figure.subplots(1, len(factors) + 1, sharey=True)
    for axes, factor in zip(panels, factors, strict=False):
        arms = {method: [lag_records(records, method, lag, factor) for lag in part.lags] for method in part.methods}
        _draw_means(axes, arms)
        axes.set_xticks(range(len(part.lags)), [str(lag) for lag in part.lags])
        label_axes(axes, f'{factor:.3g} of the knee', 'lag', 'score' if factor == factors[0] else '')
    natural = plan.natural
    _draw_means(panels[-1], {m: [eta_records(records, m, eta) for eta in natural.etas] for m in natural.methods})
    panels[-1].set_xticks(range(len(plan.natural.etas)), [f'{eta:g}' for eta in plan.natural.etas])
    label_axes(panels[-1], 'natural', 'eta', '')
    panels[0].set_ylim(0, 1.02)
    panels[0].legend(frameon=False, fontsize=9)
    save_figure(figure, path)
    return True


def _draw_means(axes: Axes, arms: Mapping[str, Sequence[Sequence[Record]]]) -> None:
    """Draws, for each method, the mean score of each group of records with its range over the seeds."""
    lines = []
    for (method, groups), color, marker in zip(arms.items(), itertools.cycle(PALETTE), itertools.cycle(MARKERS)):
        places = [place for place, group in enumerate(groups) if group]
        scores = [[record.score for record in groups[place] if record.score is not None] for place in places]
        means, lows, highs = ([of(found) for found in scores] for of in (statistics.fmean, min, max))
        if places:
            lines.append(Line(method, places, means, color, marker=marker, lows=lows, highs=highs))
    draw_lines(axes, lines, band=0.15)
