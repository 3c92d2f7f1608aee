"""Beside the loop: the run's report: report.json, and with it report.md, the timeline and the plots."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import statistics as python_statistics
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax import files
from areal_jax.report.caveats import find_caveats
from areal_jax.report.limit import as_report, busy_shares, measure_limit
from areal_jax.report.page import render_page
from areal_jax.report.plots import write_plots
from areal_jax.report.statistics import cluster_interval, mean_interval, paired_interval
from areal_jax.report.timeline import write_timeline
from areal_jax.telemetry import events as event_log
from areal_jax.telemetry import metrics as metric_log
from areal_jax.telemetry import names
from areal_jax.telemetry.events import Event
from areal_jax.telemetry.facts import EvaluationScores, RunFacts
from areal_jax.telemetry.json_lines import plain

FILE = 'report.json'
PAGE = 'report.md'
Records = Sequence[Mapping[str, Any]]


def write_report(workdir: pathlib.Path | str, facts: RunFacts, plots: bool = True) -> dict[str, Any]:
    """Write report.json, report.md, timeline.json and plots/ from what the work directory holds; returns the report.

    Args:
        workdir: holds events.jsonl and metrics.jsonl.
        facts: of the run; app/rebuild.py finds them in a work directory.
        plots: whether to draw; without it the page shows no pictures.

    Raises UserError for a file there that was torn or edited.
    """
    workdir = pathlib.Path(workdir)
    events = event_log.load_events(workdir / event_log.FILE)
    metrics = metric_log.read_metrics(workdir / metric_log.FILE)
    report = build_report(events, metrics, facts)
    files.write_json(workdir / FILE, report)
    write_timeline(events, workdir)
    pictures = write_plots(events, metrics, report, workdir) if plots else []
    files.write_text(workdir / PAGE, render_page(report, pictures))
    return report


def build_report(events: Sequence[Event], metrics: Records, facts: RunFacts) -> dict[str, Any]:
    """Everything that report.json holds, as JSON-able values; None where nothing was measured."""
    training = list(event_log.outside_evaluation(events))
    limit = measure_limit(events, len(metrics), facts)
    report = {
        'steps': len(metrics),
        'planned_steps': facts.planned_steps,
        'finished': facts.finished,
        'attempts': 1 + sum(event['kind'] == 'restore' for event in events),
        'wall_seconds': _span(events) if facts.wall_seconds is None and facts.clock == 'real' else facts.wall_seconds,
        'groups': _groups(events, metrics),
        'problems': dict(facts.problems),
        'tokens': {'generated': _generated(training), 'trained': _total(metrics, names.TOKENS_TRAINED)},
        'optimizer_steps': count_optimizer_steps(metrics),
        'reward': _ends(metrics, names.REWARD_MEAN),
        'accuracy': _accuracy(facts.evaluation_before, facts.evaluation_after),
        'most_frequent_answer_share': {
            'before': facts.evaluation_before and facts.evaluation_before.most_frequent_answer_share,
            'after': facts.evaluation_after and facts.evaluation_after.most_frequent_answer_share,
        },
        'token_age': _token_age(metrics),
        'versions_per_trajectory': {
            'mean': _weighted_mean(metrics, names.VERSIONS_MEAN, names.UPDATE_TRAJECTORIES),
            'max': _largest(metrics, names.VERSIONS_MAX),
        },
        **_interruptions(training),
        'admission_held': _admission_held(metrics, event_log.window(events)),
        'publish_pause_seconds': _pauses(training),
        'mismatch': _mismatch(metrics),
        'throughput': _throughput(training, metrics, event_log.window(events)),
        'busy': busy_shares(events),
        'time': as_report(limit),
        'compilations': facts.compilations,
        'peak_memory_bytes': facts.peak_memory_bytes,
        'event_loop_lag_seconds': {'max': facts.event_loop_lag_max},
        'weights_sha256': facts.weights_sha256,
        'git_commit': facts.git_commit,
        'versions': dict(facts.versions),
        # Beyond the numbers: what ran, and how to read them.
        'config': facts.config,
        'seed': facts.seed,
        'eta': facts.eta,
        'schedule': facts.schedule,
        'clock': facts.clock,
        'idle_fields': list(facts.idle_fields),
        'prolonged': [dict(prolongation) for prolongation in facts.prolonged],
        'hardware': dict(facts.hardware),
        'devices': dict(facts.devices),
        'window_seconds': event_log.window(events).seconds,
        'cause_of_gap': limit.cause,
    }
    return plain({**report, 'warnings': find_caveats(events, metrics, report, facts)})


def count_optimizer_steps(metrics: Records) -> dict[str, int]:
    """Over all updates: {'applied', 'skipped' because the gradient was not finite}."""
    applied, skipped = _total(metrics, names.OPTIMIZER_STEPS), _total(metrics, names.SKIPPED_STEPS)
    return {'applied': int(applied), 'skipped': int(skipped)}


def _span(events: Sequence[Event]) -> float | None:
    return events[-1]['time'] - events[0]['time'] if events else None


def _groups(events: Sequence[Event], metrics: Records) -> dict[str, Any]:
    """Drawn and dropped from the events; trained and filtered from the updates that were published."""
    ledger = event_log.ledger(events)
    reasons = collections.Counter(ledger.reasons[draw] for draw, state in ledger.states.items() if state == 'dropped')
    return {
        'drawn': len(ledger.states),
        'trained': int(_total(metrics, names.GROUPS_TRAINED)),
        'filtered': int(_total(metrics, names.UPDATE_FILTERED)),
        'dropped': dict(sorted(reasons.items())),
    }


def _admission_held(metrics: Records, within: event_log.Window) -> dict[str, float]:
    """Share of the window in which each bound kept admission closed, the largest first."""
    held: collections.Counter[str] = collections.Counter()
    for line in metrics:
        for name, seconds in line.items():
            if name.startswith(names.ADMISSION_HELD):
                held[name.removeprefix(names.ADMISSION_HELD)] += seconds
    span = max(within.seconds, held.total())  # in lock-step admission is held before the first group too
    return {bound: seconds / span for bound, seconds in held.most_common()}


def _generated(events: Sequence[Event]) -> int:
    return sum(event['tokens'] for event in events if event['kind'] == 'decode')


def _values(metrics: Records, name: str) -> list[float]:
    return [line[name] for line in metrics if line.get(name) is not None]


def _total(metrics: Records, name: str) -> float:
    return sum(_values(metrics, name))


def _largest(metrics: Records, name: str) -> float | None:
    return max(_values(metrics, name), default=None)


def _ends(metrics: Records, name: str) -> dict[str, float | None]:
    values = _values(metrics, name)
    return {'first': values[0] if values else None, 'last': values[-1] if values else None}


def _weighted_mean(metrics: Records, name: str, weight: str) -> float | None:
    """Mean over the updates, each with its count; updates without a value or a count are left out."""
    pairs = [(line[name], line[weight]) for line in metrics if line.get(name) is not None and line.get(weight)]
    total = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / total if total else None


def _token_age(metrics: Records) -> dict[str, float | None]:
    counts: collections.Counter[int] = collections.Counter()
    for line in metrics:
        counts.update(dict(enumerate(line.get(names.TOKEN_AGE_HISTOGRAM) or [])))
    if not (total := counts.total()):
        mean = _weighted_mean(metrics, names.TOKEN_AGE_MEAN, names.TOKENS_TRAINED)
        return {'mean': mean, 'max': _largest(metrics, names.TOKEN_AGE_MAX)}
    mean = sum(age * count for age, count in counts.items()) / total
    return {'mean': mean, 'max': max(age for age, count in counts.items() if count)}


def _interruptions(events: Sequence[Event]) -> dict[str, int]:
    """Times that new weights met unfinished requests on an engine, and the number of updates that did so."""
    met = [event for event in events if event['kind'] == 'interrupt' and event['requests']]
    versions = {event['to_version'] for event in met}
    return {'interruptions': len(met), 'steps_with_interruption': len(versions)}


def _pauses(events: Sequence[Event]) -> dict[str, float | None]:
    """Stops of the engines to load trained weights (version 0 is loaded before anything runs)."""
    pauses = [event['pause_seconds'] for event in events if event['kind'] == 'load' and event['version'] > 0]
    return {'median': python_statistics.median(pauses) if pauses else None, 'max': max(pauses, default=None)}


def _mismatch(metrics: Records) -> dict[str, float | None]:
    count = int(_total(metrics, names.MISMATCH_COUNT))
    measured = [line for line in metrics if line.get(names.MISMATCH_COUNT)]
    return {
        'mean': _weighted_mean(measured, names.MISMATCH_MEAN, names.MISMATCH_COUNT),
        'max': _largest(measured, names.MISMATCH_MAX),
        'exact_share': _weighted_mean(measured, names.MISMATCH_EXACT, names.MISMATCH_COUNT),
        'n': count,
    }


def _throughput(events: Sequence[Event], metrics: Records, within: event_log.Window) -> dict[str, float | None]:
    """Tokens per second of the window."""
    if not within.seconds:
        return {'generate_tokens_per_second': None, 'train_tokens_per_second': None}
    generated = _generated([event for event in events if within.contains(event['time'])])
    return {
        'generate_tokens_per_second': generated / within.seconds,
        'train_tokens_per_second': _total(metrics, names.TOKENS_TRAINED) / within.seconds,
    }


def _accuracy(before: EvaluationScores | None, after: EvaluationScores | None) -> dict[str, Any] | None:
    if before is None and after is None:
        return None
    both = before is not None and after is not None and _has_samples(before) and _has_samples(after)
    gain = paired_interval(before.sampled, after.sampled) if both and before and after else None
    return {
        'greedy': {'before': _greedy(before), 'after': _greedy(after)},
        'sampled': {
            'before': _sampled(before),
            'after': _sampled(after),
            'gain': dataclasses.asdict(gain) if gain else None,
        },
    }


def _has_samples(scores: EvaluationScores) -> bool:
    return any(scores.sampled)


def _greedy(scores: EvaluationScores | None) -> dict[str, Any] | None:
    return dataclasses.asdict(mean_interval(scores.greedy)) if scores and scores.greedy else None


def _sampled(scores: EvaluationScores | None) -> dict[str, Any] | None:
    return dataclasses.asdict(cluster_interval(scores.sampled)) if scores and _has_samples(scores) else None
