"""The evaluations beside training in a report: their scores by version, and what they cost generation.

run_plots.py and charts.py draw it. Scores come from evaluations.json, costs from the event log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias, cast

from areal_jax.events.schema import Event
from areal_jax.lanes import EVALUATION_WORK, is_engine_lane
from areal_jax.report import statistics
from areal_jax.report.event_log import LaneInterval, Window, lane_intervals, window
from areal_jax.report.report_keys import CurveEnds, CurveRow, Interval, Report
from areal_jax.report.statistics import mean_interval, score_interval
from areal_jax.telemetry.facts import EvaluationScores, VersionScores
from areal_jax.telemetry.progress import format_number, format_percent

Kind: TypeAlias = Literal['greedy', 'sampled']
KINDS: tuple[Kind, ...] = ('greedy', 'sampled')
_PHASES: tuple[Literal['before'], Literal['after']] = ('before', 'after')
HEAD = ('version', 'greedy', 'sampled', 'seconds', "share of generation's lane time meanwhile")


def evaluation_curve(events: Sequence[Event], rows: Sequence[VersionScores]) -> list[CurveRow]:
    """A row for each version that was evaluated beside training, ascending."""
    intervals = _of_engines(events)
    return [_row(row, intervals) for row in sorted(rows, key=lambda row: row.version)]


def curve_ends(
    rows: Sequence[VersionScores], before: EvaluationScores | None, after: EvaluationScores | None
) -> CurveEnds | None:
    """Scores before and after training on the problems and samples of the rows; None without rows."""
    if not rows:
        return None
    problems, samples = len(rows[0].scores.greedy), len(rows[0].scores.sampled[0])
    greedy = lambda scores: _greedy(scores.greedy[:problems]) if scores else None
    sampled = lambda scores: _sampled([row[:samples] for row in scores.sampled[:problems]]) if scores else None
    return {
        'greedy': {'before': greedy(before), 'after': greedy(after)},
        'sampled': {'before': sampled(before), 'after': sampled(after)},
    }


def evaluation_points(report: Report) -> dict[Kind, list[tuple[int, Interval]]]:
    """Held-out scores by version, ascending: before training, beside it and after it; a kind without any is left out.

    If the run evaluated beside training, all scores are on the problems and samples of those evaluations, else on the
    problems and samples of the report's accuracy.
    """
    curve, ends = report['evaluation_curve'], report['evaluation_curve_ends'] or report['accuracy']
    found: dict[Kind, list[tuple[int, Interval]]] = {}
    for kind in KINDS:
        between = {row['version']: row[kind] for row in curve}
        if curve and not any(between.values()):
            continue
        around = {0: ends[kind]['before'], report['steps']: ends[kind]['after']} if ends else {}
        points = [(version, interval) for version, interval in sorted((around | between).items()) if interval]
        if points:
            found[kind] = points
    return found


def evaluation_lane_share(events: Sequence[Event]) -> float | None:
    """Share of the busy seconds of the engines' lanes, in the window, that evaluation took; None without any."""
    return _share(_of_engines(events), window(events))


def evaluation_cache_bytes(events: Sequence[Event]) -> int | None:
    """Bytes of the slots that the engines have for evaluation, KV cache included; None = no such slots."""
    by_engine = {event['engine']: event['bytes'] for event in events if event['kind'] == 'evaluation_slots'}
    return sum(by_engine.values()) if by_engine else None


def describe_cost(report: Report) -> str:
    """One sentence on lane time and memory."""
    size, share = report['evaluation_cache_bytes'], report['evaluation_lane_share']
    memory = '' if size is None else f', and their slots take {size / 2**20:.4g} MiB'
    return (
        f'Evaluation beside training took {_percent(share)} of the lane time of generation (first admission to last '
        f'publication){memory}.'
    )


def curve_rows(report: Report) -> list[tuple[str, ...]]:
    """Of the page's table, under HEAD; its ends are before and after training."""
    ends = report['evaluation_curve_ends']
    if ends is None:
        return []
    before, after = (
        (name, _interval(ends['greedy'][name]), _interval(ends['sampled'][name]), '', '') for name in _PHASES
    )
    return [before, *_rows_between(report), after]


def _rows_between(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            str(row['version']),
            _interval(row['greedy']),
            _interval(row['sampled']),
            format_number(row['seconds']),
            _percent(row['lane_share']),
        )
        for row in report['evaluation_curve']
    ]


def _row(row: VersionScores, intervals: Sequence[LaneInterval]) -> CurveRow:
    own = [i for i in intervals if _is_evaluation(i) and i.detail.get('version') == row.version]
    span = Window(((min(i.start for i in own), max(i.end for i in own)),) if own else ())
    return {
        'version': row.version,
        'greedy': _greedy(row.scores.greedy),
        'sampled': _sampled(row.scores.sampled),
        'seconds': row.seconds,
        'lane_seconds': sum(i.end - i.start for i in own),
        'lane_share': _share(intervals, span),
    }


def _of_engines(events: Sequence[Event]) -> list[LaneInterval]:
    return [interval for interval in lane_intervals(events) if is_engine_lane(interval.lane)]


def _is_evaluation(interval: LaneInterval) -> bool:
    return interval.work in EVALUATION_WORK


def _share(intervals: Sequence[LaneInterval], within: Window) -> float | None:
    seconds = [(within.overlap(i.start, i.end), _is_evaluation(i)) for i in intervals]
    own = sum(covered for covered, evaluates in seconds if evaluates)
    return own / sum(covered for covered, _ in seconds) if own else None


def _greedy(scores: Sequence[float]) -> Interval:
    return _as_report(mean_interval(scores))


def _sampled(scores: Sequence[Sequence[float]]) -> Interval | None:
    """None where no answer was sampled."""
    return _as_report(score_interval(scores)) if any(scores) else None


def _as_report(interval: statistics.Interval) -> Interval:
    return cast(Interval, dataclasses.asdict(interval))


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return '-'
    if interval['low'] is None:
        return f'{interval["mean"]:.3f}'
    return f'{interval["mean"]:.3f} [{interval["low"]:.3f}, {interval["high"]:.3f}]'


def _percent(share: float | None) -> str:
    """'4.2%': format_percent has no decimals, and the share is small."""
    return format_percent(share) if share is None else f'{share:.1%}'
