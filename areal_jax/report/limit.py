"""Explains the time of an update: seconds by lane, the shortest possible time, and the reason for the gap.

Made from the intervals of the event log and the facts that only the program knows (telemetry/facts.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

from areal_jax.events.schema import Event
from areal_jax.lanes import EVALUATION_WORK, LEARNER, is_engine_lane, is_publish_lane
from areal_jax.report import statistics
from areal_jax.report.engines.engine_presence import find_presence, restrict
from areal_jax.report.event_log import (
    LaneInterval,
    Window,
    busy_share,
    group_by_lane,
    lane_intervals,
    lane_seconds,
    of_training,
    window,
)
from areal_jax.report.pages.blocks import Table
from areal_jax.report.report_keys import Accuracy, Busy, CurveEnds, CurveRow, Interval, Report, Time
from areal_jax.report.statistics import mean_interval, score_interval
from areal_jax.telemetry.facts import EvaluationScores, RunFacts, VersionScores
from areal_jax.telemetry.progress import format_number, format_percent

Kind: TypeAlias = Literal['greedy', 'sampled']
KINDS: tuple[Kind, ...] = ('greedy', 'sampled')
_PHASES: tuple[Literal['before'], Literal['after']] = ('before', 'after')


def evaluation_curve(events: Sequence[Event], rows: Sequence[VersionScores]) -> list[CurveRow]:
    """One row per version that was evaluated during training, ascending."""
    intervals = _of_engines(events)
    return [_row(row, intervals) for row in sorted(rows, key=lambda row: row.version)]


def curve_ends(
    rows: Sequence[VersionScores], before: EvaluationScores | None, after: EvaluationScores | None
) -> CurveEnds | None:
    """Scores before and after training on the problems and samples of the rows; None without rows."""
    if not rows:
        return None
    problems, samples = len(rows[0].scores.greedy), len(rows[0].scores.sampled[0])

    def cut(scores: EvaluationScores | None) -> EvaluationScores | None:
        sampled = tuple(row[:samples] for row in scores.sampled[:problems]) if scores else ()
        return EvaluationScores(scores.greedy[:problems], sampled) if scores else None

    return summarize_scores(cut(before), cut(after))


def summarize_scores(before: EvaluationScores | None, after: EvaluationScores | None) -> CurveEnds:
    """Returns mean scores with their intervals; None without an evaluation, or without sampled answers."""
    return {
        'greedy': {'before': _greedy(before), 'after': _greedy(after)},
        'sampled': {'before': _sampled(before), 'after': _sampled(after)},
    }


def compare_scores(before: EvaluationScores | None, after: EvaluationScores | None) -> Accuracy | None:
    """Returns the scores before and after training, and the gain on the same problems; None without an evaluation."""
    if before is None and after is None:
        return None
    ends, gain = summarize_scores(before, after), None
    if before and after and ends['sampled']['before'] and ends['sampled']['after']:
        gain = tell_interval(statistics.paired_interval(before.sampled, after.sampled))
    return {'greedy': ends['greedy'], 'sampled': {**ends['sampled'], 'gain': gain}}


def evaluation_points(report: Report) -> dict[Kind, list[tuple[int, Interval]]]:
    """Held-out scores by version, ascending: before, during and after training; a kind without scores is left out.

    If the run evaluated during training, all scores are on the problems and samples of these evaluations, else on the
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


def tabulate_curve(report: Report) -> Table:
    """Returns the page's table of the versions evaluated, from before training to after it; empty without any."""
    head = ('version', 'greedy', 'sampled', 'seconds', "share of generation's lane time meanwhile")
    ends = report['evaluation_curve_ends']
    if ends is None:
        return Table(head, [])
    score = lambda interval: format_interval(interval, count=False)
    before, after = ((name, score(ends['greedy'][name]), score(ends['sampled'][name]), '', '') for name in _PHASES)
    between = [
        (
            str(row['version']),
            score(row['greedy']),
            score(row['sampled']),
            format_number(row['seconds']),
            _percent(row['lane_share']),
        )
        for row in report['evaluation_curve']
    ]
    return Table(head, [before, *between, after], 'Evaluation beside training')


def _row(row: VersionScores, intervals: Sequence[LaneInterval]) -> CurveRow:
    own = [i for i in intervals if _is_evaluation(i) and i.detail.get('version') == row.version]
    span = Window(((min(i.start for i in own), max(i.end for i in own)),) if own else ())
    return {
        'version': row.version,
        'greedy': cast(Interval, _greedy(row.scores)),
        'sampled': _sampled(row.scores),
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


def _greedy(scores: EvaluationScores | None) -> Interval | None:
    return tell_interval(mean_interval(scores.greedy)) if scores and scores.greedy else None


def _sampled(scores: EvaluationScores | None) -> Interval | None:
    return tell_interval(score_interval(scores.sampled)) if scores and any(scores.sampled) else None


def tell_interval(interval: statistics.Interval) -> Interval:
    """Returns the interval as the report has it."""
    return cast(Interval, dataclasses.asdict(interval))


def format_interval(interval: Interval | None, sign: str = '', *, mean: bool = True, count: bool = True) -> str:
    """Formats '0.719 [0.599, 0.814] (n = 64)', or only the parts that are asked for; '-' for None."""
    if not interval:
        return '-'
    shown = format(interval['mean'], f'{sign}.3f') if mean else ''
    bounds = '' if interval['low'] is None else f'[{interval["low"]:{sign}.3f}, {interval["high"]:{sign}.3f}]'
    return ' '.join(filter(None, (shown, bounds, f'(n = {interval["n"]})' if count else '')))


def _percent(share: float | None) -> str:
    """'4.2%': format_percent has no decimals, and the share is small."""
    return format_percent(share) if share is None else f'{share:.1%}'


OWN_DEVICES = 'lanes own their devices: max(lane seconds)'
VIRTUAL = 'virtual clock, every lane has its own modelled time: max(lane seconds)'
SHARED = 'lanes share the cores: max(lane seconds measured alone, CPU seconds / cores)'
SHARED_DEVICE = 'lanes share one accelerator, which runs one program at a time: sum of the lane seconds measured alone'
ONE_BY_ONE = 'generation and training, one after the other'


@dataclasses.dataclass(frozen=True)
class Limit:
    """Seconds of an update; None if nothing was measured."""

    generate: float | None  # lane seconds, mean over the engine lanes
    train: float | None  # lane seconds of the learner
    publish: float | None  # lane seconds of publication, the busiest of its lanes
    ideal: float | None
    achieved: float | None  # window seconds / updates
    ideal_rule: str
    bound: str  # the quantity that is the ideal: a lane, 'generate alone', 'CPU seconds / cores'; '' without one
    cause: str  # of the gap between achieved and ideal, one sentence


def measure_limit(events: Sequence[Event], updates: int, facts: RunFacts) -> Limit:
    """Lane seconds, ideal and achieved time of an update.

    If lanes do not share devices, or the clock is virtual, the ideal is the time of the busiest lane. If lanes share
    cores, as virtual CPU devices do, a lane that waits for a core counts as busy; so the ideal is then the maximum of
    the lanes' times measured alone and of the processor time divided by the number of cores. If all lanes compute on
    one accelerator, their programs run one after the other, and the ideal is the sum of their times alone.
    """
    intervals, within, rule = of_training(lane_intervals(events)), window(events), _rule(facts)
    if not updates or not within.seconds:
        return Limit(None, None, None, None, None, rule, '', 'No update was published, so no time was measured.')
    per_update = {lane: seconds / updates for lane, seconds in lane_seconds(intervals, within).items()}
    engines = {lane: seconds for lane, seconds in per_update.items() if is_engine_lane(lane)}
    publishing = [seconds for lane, seconds in per_update.items() if is_publish_lane(lane)]
    bounds = {SHARED: _shared_bounds, SHARED_DEVICE: _device_bounds}.get(rule, lambda *_: per_update)(updates, facts)
    bound = max(bounds, key=lambda name: bounds[name], default='')
    ideal, achieved = bounds.get(bound), within.seconds / updates
    fill = fill_seconds(intervals, within) / updates
    return Limit(
        _mean_of_engines(engines, events, within), per_update.get(LEARNER), max(publishing, default=None),
        ideal, achieved, rule, bound, explain_gap(ideal, achieved, bound, fill),
    )  # fmt: skip


def _mean_of_engines(seconds: Mapping[str, float], events: Sequence[Event], within: Window) -> float | None:
    """Mean lane seconds of the engines, weighted by the share of the window in which each was in the pool."""
    presence = find_presence(events)
    there = [restrict(within, presence, lane).seconds for lane in seconds]
    if all(one == within.seconds for one in there):
        return sum(seconds.values()) / len(seconds) if seconds else None
    return sum(seconds.values()) * within.seconds / sum(there) if sum(there) else None


def busy_shares(events: Sequence[Event]) -> Busy:
    """The share of the window in which a lane was busy: 'rollout' (mean of the engines), 'learner'; None = no lane.

    An engine's share is of the part of the window in which it was in the pool; that part is its weight in the mean.
    """
    by_lane, within, presence = group_by_lane(lane_intervals(events)), window(events), find_presence(events)
    own = {lane: restrict(within, presence, lane) for lane in sorted(by_lane) if is_engine_lane(lane)}
    found = {lane: busy_share(by_lane[lane], lane, one) for lane, one in own.items()}
    shares = {lane: share for lane, share in found.items() if share is not None}
    there = sum(own[lane].seconds for lane in shares)
    if all(own[lane].seconds == within.seconds for lane in shares):
        rollout = sum(shares.values()) / len(shares) if shares else None
    else:
        rollout = sum(share * own[lane].seconds for lane, share in shares.items()) / there
    return {
        'rollout': rollout,
        'learner': busy_share(by_lane[LEARNER], LEARNER, within) if LEARNER in by_lane else None,
    }


def fill_seconds(intervals: Sequence[LaneInterval], within: Window) -> float:
    """Seconds of the window before the first training, in which the learner has no data yet."""
    starts = [interval.start for interval in intervals if interval.lane == LEARNER and interval.work == 'train']
    if not starts or not within.spans:
        return 0.0
    return within.overlap(within.spans[0][0], min(starts))


def explain_gap(ideal: float | None, achieved: float, bound: str, fill: float) -> str:
    """One sentence that compares the achieved with the ideal time; all times in seconds of an update."""
    if not ideal:
        return 'No ideal could be computed: neither lane seconds alone nor CPU seconds were measured.'
    start = (
        f'Achieved {format_number(achieved)} s an update against an ideal of {format_number(ideal)} s '
        f'({format_percent(ideal / achieved)}, bound by {bound})'
    )
    gap = achieved - ideal
    if gap <= 0.02 * achieved:
        return f'{start}: no gap to speak of.'
    filling = min(fill, gap) if bound == LEARNER else 0.0
    rest = gap - filling
    named = ((filling, 'the pipeline filling before the first update'), (rest, _waiting(bound)))
    parts = [(seconds, reason) for seconds, reason in named if seconds > 0.1 * gap]
    whole = format_number(gap)
    told = ' and '.join(f'{format_number(seconds)} s is {reason}' for seconds, reason in parts)
    if told.startswith(f'{whole} s is '):
        return f'{start}: the gap of {told}.'
    return f'{start}: of the gap of {whole} s, {told}.'


def _waiting(bound: str) -> str:
    if is_engine_lane(bound):
        return 'engines without an admitted request (staleness bound, buffer or running groups)'
    if bound == LEARNER:
        return 'the learner waiting for finished groups'
    if '/ cores' in bound:
        return 'cores that are idle while a lane waits for another or runs on fewer cores than there are'
    if bound == ONE_BY_ONE:
        return 'the accelerator without a program, and programs that are slower beside others'
    if bound.endswith('alone'):
        return 'lanes slowing each other down on the shared cores or waiting for each other'
    return f'the lane {bound} waiting for work'


def _rule(facts: RunFacts) -> str:
    if facts.clock == 'virtual':
        return VIRTUAL
    if facts.lanes_own_devices:
        return OWN_DEVICES
    return SHARED_DEVICE if _is_one_accelerator(facts) else SHARED


def _is_one_accelerator(facts: RunFacts) -> bool:
    """Whether learner and engines share a single device, and it is not a CPU."""
    used = set(_list_devices(facts.devices))
    names = cast(Sequence[str], facts.hardware.get('devices', ()))
    return len(used) == 1 and bool(names) and not any('cpu' in name.lower() for name in names)


def _list_devices(devices: Mapping[str, Any]) -> Iterator[int]:
    yield from devices.get('learner', ())
    yield from itertools.chain(*devices.get('engines', {}).values())


def _device_bounds(updates: int, facts: RunFacts) -> dict[str, float]:
    known = [seconds for seconds in facts.alone_seconds.values() if seconds is not None]
    return {ONE_BY_ONE: sum(known)} if known and len(known) == len(facts.alone_seconds) else {}


def _shared_bounds(updates: int, facts: RunFacts) -> dict[str, float]:
    bounds = {f'{name} alone': seconds for name, seconds in facts.alone_seconds.items() if seconds is not None}
    if facts.cpu_seconds is not None:
        bounds['CPU seconds / cores'] = facts.cpu_seconds / facts.cores / updates
    return bounds


def as_report(limit: Limit) -> Time:
    """The section `time` of the report."""
    values = dataclasses.asdict(limit).items()
    return cast(Time, {name: value for name, value in values if name not in ('bound', 'cause')})
