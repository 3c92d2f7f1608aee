"""The report of a run: report.json, and with it report.md, report.html, timeline.json and the plots.

Made from events.jsonl, metrics.jsonl, expert_loads.jsonl and the facts of the run.
"""

from __future__ import annotations

import collections
import logging
import pathlib
from collections.abc import Sequence
from statistics import median
from typing import cast

from areal_jax import files
from areal_jax.control.buffer import BY_REWARD
from areal_jax.control.episode import LOST
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.events.schema import Event, InterruptEvent
from areal_jax.report import aggregates
from areal_jax.report import engine_work as generation
from areal_jax.report import report_keys as contents
from areal_jax.report.agents import summarize_agents
from areal_jax.report.aggregates import Metrics, ledger, server_rows
from areal_jax.report.caveats import find_caveats
from areal_jax.report.engine_work import ratio_split, ratios_by_age, summarize_code, summarize_experts
from areal_jax.report.engines.classes import summarize_classes
from areal_jax.report.event_log import Window, load_events, outside_evaluation, publication_rows, window
from areal_jax.report.limit import (
    as_report,
    busy_shares,
    compare_scores,
    curve_ends,
    evaluation_cache_bytes,
    evaluation_curve,
    evaluation_lane_share,
    measure_limit,
)
from areal_jax.report.pages.energy_section import summarize_energy
from areal_jax.report.pages.html_page import FILE as HTML_PAGE
from areal_jax.report.pages.html_page import render_html
from areal_jax.report.pages.pictures import write_plots
from areal_jax.report.pages.run_page import render_page
from areal_jax.report.pages.web_page import describe_missing_library
from areal_jax.report.report_keys import Report
from areal_jax.report.run_record import Run
from areal_jax.report.sources import summarize_sources
from areal_jax.report.timeline import write_timeline
from areal_jax.report.token_fates import age_histograms, censoring, token_age, token_age_steps, token_fates
from areal_jax.telemetry import metrics as metric_log
from areal_jax.telemetry import names
from areal_jax.telemetry.facts import EVALUATIONS, RunFacts, VersionScores, read_curve
from areal_jax.telemetry.metrics import number, plain

FILE = 'report.json'
PAGE = 'report.md'
_log = logging.getLogger(__name__)


def write_report(
    workdir: pathlib.Path | str, facts: RunFacts, plots: bool = True, events: Sequence[Event] | None = None
) -> dict[str, object]:
    """Writes report.json, report.md, report.html, timeline.json and plots/ from the files of the work directory.

    Args:
        workdir: holds events.jsonl and metrics.jsonl, and expert_loads.jsonl for a model with experts.
        facts: the run's facts; app/run/reports.py finds them in a work directory.
        plots: whether to draw; if not, report.md shows no pictures, and report.html is not written.
        events: the content of events.jsonl, if it was already read.

    Returns the report. Raises UserError for a file there that was torn or edited.
    """
    run = load_run(pathlib.Path(workdir), facts, events)
    files.write_json(run.workdir / FILE, run.report)
    write_timeline(run.events, run.workdir, 'simulated ' if facts.simulation else '')
    pictures = write_plots(run.events, run.metrics, run.report, run.workdir, run.loads) if plots else []
    files.write_text(run.workdir / PAGE, render_page(run.report, pictures))
    if plots and (missing := describe_missing_library(HTML_PAGE)):
        _log.warning('%s', missing)
    elif plots:
        files.write_text(run.workdir / HTML_PAGE, render_html(run))
    return dict(run.report)


def load_run(workdir: pathlib.Path, facts: RunFacts, events: Sequence[Event] | None = None) -> Run:
    """Reads the work directory and builds its report; writes nothing. Raises as `write_report`."""
    events = load_events(workdir / EVENTS) if events is None else events
    metrics = metric_log.read_metrics(workdir / metric_log.FILE)
    loads = metric_log.read_metrics(workdir / metric_log.LOADS)
    report = build_report(events, metrics, facts, read_curve(workdir / EVALUATIONS), loads)
    return Run(workdir, events, metrics, report, loads)


def build_report(
    events: Sequence[Event],
    metrics: Metrics,
    facts: RunFacts,
    curve: Sequence[VersionScores] = (),
    loads: Metrics = (),
) -> Report:
    """Builds the content of report.json from JSON-able values; None means: not measured."""
    training, within = list(outside_evaluation(events)), window(events)
    limit = measure_limit(events, len(metrics), facts)
    interruptions = _interruptions(training)
    trained, unparsed = aggregates.total(metrics, names.TOKENS_TRAINED), names.REWARD_UNPARSED
    report: Report = {
        **_told(facts),
        'steps': len(metrics),
        'running': bool(facts.running),
        'attempts': 1 + sum(event['kind'] == 'restore' for event in events),
        'wall_seconds': _span(events) if facts.wall_seconds is None and facts.clock == 'real' else facts.wall_seconds,
        'groups': _groups(events, metrics),
        'tokens': {'generated': generation.generated_tokens(training), 'trained': trained},
        'optimizer_steps': count_optimizer_steps(metrics),
        'reward': aggregates.ends(metrics, names.REWARD_MEAN),
        'unparsed_rate': {**aggregates.ends(metrics, unparsed), 'mean': aggregates.mean(metrics, unparsed)},
        'audit': _audit(training),
        'code': summarize_code(metrics, facts),
        'accuracy': compare_scores(facts.evaluation_before, facts.evaluation_after),
        'most_frequent_answer_share': _most_frequent(facts),
        'evaluation_curve': evaluation_curve(events, curve),
        'evaluation_curve_ends': curve_ends(curve, facts.evaluation_before, facts.evaluation_after),
        'evaluation_lane_share': evaluation_lane_share(events),
        'evaluation_cache_bytes': evaluation_cache_bytes(events),
        'token_age': token_age(metrics),
        'token_age_steps': token_age_steps(metrics),
        'token_age_histograms': age_histograms(metrics),
        'versions_per_trajectory': {
            'mean': aggregates.weighted_mean(metrics, names.VERSIONS_MEAN, names.UPDATE_TRAJECTORIES),
            'max': aggregates.largest(metrics, names.VERSIONS_MAX),
        },
        'interruptions': len(interruptions),
        'steps_with_interruption': len({event['to_version'] for event in interruptions}),
        'admission_held': aggregates.admission_held(metrics, within),
        'idle_slots': aggregates.idle_slots(metrics, training, within),
        'publish_pause_seconds': _pauses(training),
        'request_pause_seconds': generation.request_pauses(training),
        'publications': publication_rows(training),
        'agents': summarize_agents(training),
        'engine_work': generation.engine_work(training),
        'attention_positions': generation.attention_positions(training),
        'preemptions': generation.preemptions(training),
        'servers': server_rows(events),
        'token_fates': token_fates(events, metrics, finished=facts.finished),
        'censoring': censoring(events, metrics),
        'mismatch': aggregates.mismatch(metrics),
        'ratios_by_age': ratios_by_age(metrics),
        'ratio_split': ratio_split(metrics),
        'experts': summarize_experts(metrics, loads),
        'throughput': _throughput(training, metrics, within),
        'energy': summarize_energy(metrics, facts.energy),
        'busy': busy_shares(events),
        'time': as_report(limit),
        'event_loop_lag_seconds': {'max': facts.event_loop_lag_max},
        'window_seconds': within.seconds,
        'cause_of_gap': limit.cause,
        'warnings': [],
    }
    if classes := summarize_classes(events, training, metrics, within):
        report['engine_classes'] = classes
    if sources := summarize_sources(events, metrics, facts.evaluation_before, facts.evaluation_after):
        report['sources'] = sources
    report['warnings'] = find_caveats(events, metrics, report, facts)
    return cast(Report, plain(report))


def _told(facts: RunFacts) -> contents.Told:
    return cast(contents.Told, {name: getattr(facts, name) for name in contents.Told.__annotations__})


def count_optimizer_steps(metrics: Metrics) -> contents.OptimizerSteps:
    """Counts over all updates: {'applied', 'skipped' because the gradient was not finite}."""
    applied, skipped = aggregates.total(metrics, names.OPTIMIZER_STEPS), aggregates.total(metrics, names.SKIPPED_STEPS)
    counted: contents.OptimizerSteps = {'applied': int(applied), 'skipped': int(skipped)}
    if blocks := sorted(int(block) for line in metrics if (block := number(line, names.BLOCK)) is not None):
        counted['updates_by_block'] = {str(block): count for block, count in collections.Counter(blocks).items()}
    return counted


def _span(events: Sequence[Event]) -> float | None:
    return events[-1]['time'] - events[0]['time'] if events else None


def _groups(events: Sequence[Event], metrics: Metrics) -> contents.Groups:
    """Counts drawn and dropped groups from the events; trained and filtered groups from the published updates."""
    draws = ledger(events)
    reasons = collections.Counter(draws.reasons[draw] for draw, state in draws.states.items() if state == 'dropped')
    groups: contents.Groups = {
        'drawn': len(draws.states),
        'trained': int(aggregates.total(metrics, names.GROUPS_TRAINED)),
        'filtered': int(aggregates.total(metrics, names.UPDATE_FILTERED)),
        'dropped': dict(sorted(reasons.items())),
        'filtered_rate': _filtered_rate(events, sum(reasons[reason] for reason in BY_REWARD)),
    }
    if lost := lost_answers(events):
        groups['lost'] = lost
    return groups


def lost_answers(events: Sequence[Event]) -> contents.LostAnswers | None:
    """Compares answers that every engine gave up with answers that ended; None if no answer was lost."""
    lost = [event['tokens'] for event in events if event['kind'] == 'finish' and event['reason'] == LOST]
    ended = ('stop', 'length')
    finished = [event['tokens'] for event in events if event['kind'] == 'finish' and event['reason'] in ended]
    if not lost:
        return None
    return {
        'lost': len(lost),
        'lost_tokens_mean': sum(lost) / len(lost),
        'finished': len(finished),
        'finished_tokens_mean': sum(finished) / max(1, len(finished)),
    }


def _filtered_rate(events: Sequence[Event], filtered: int) -> float | None:
    """The filtered share of the groups that finished with a scored answer; the kept groups entered the buffer."""
    kept = sum(event['kind'] == 'buffer' for event in events)
    return filtered / (filtered + kept) if filtered else None


def _audit(events: Sequence[Event]) -> contents.Audit | None:
    outcomes = [event['outcome'] for event in events if event['kind'] == 'audit']
    if not outcomes:
        return None
    return {
        'answers': len(outcomes),
        'disagreements': outcomes.count('disagrees'),
        'undecided': outcomes.count('undecided'),
    }


def _interruptions(events: Sequence[Event]) -> list[InterruptEvent]:
    """The times at which new weights met unfinished requests on an engine."""
    return [event for event in events if event['kind'] == 'interrupt' and event['requests']]


def _pauses(events: Sequence[Event]) -> contents.MedianMax:
    """Stops of the engines to load trained weights (version 0 is loaded before anything runs)."""
    pauses = [event['pause_seconds'] for event in events if event['kind'] == 'load' and event['version'] > 0]
    return {'median': median(pauses) if pauses else None, 'max': max(pauses, default=None)}


def _throughput(events: Sequence[Event], metrics: Metrics, within: Window) -> contents.Throughput:
    """Tokens per second of the window, and medians of the rates per device."""
    generated = generation.generated_tokens([event for event in events if within.contains(event['time'])])
    trained, seconds = aggregates.total(metrics, names.TOKENS_TRAINED), within.seconds
    return {
        'generate_tokens_per_second': generated / seconds if seconds else None,
        'train_tokens_per_second': trained / seconds if seconds else None,
        'generate_tokens_per_second_per_device': aggregates.median(metrics, names.GENERATE_RATE_PER_DEVICE),
        'learner_tokens_per_second_per_device': aggregates.median(metrics, names.LEARNER_RATE_PER_DEVICE),
        'mfu': aggregates.median(metrics, names.MFU),
    }


def _most_frequent(facts: RunFacts) -> contents.BeforeAfter:
    before, after = facts.evaluation_before, facts.evaluation_after
    return {
        'before': before.most_frequent_answer_share if before else None,
        'after': after.most_frequent_answer_share if after else None,
    }
