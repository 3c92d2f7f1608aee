"""Writes reports of supervised training, rebuilds the report of a workdir, and prints the end of a run."""

from __future__ import annotations

import bisect
import dataclasses
import math
import pathlib
import re
import shlex
import shutil
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast

from areal_jax import files
from areal_jax.app.workdir.records import STARTS, Start, read_starts
from areal_jax.config import CONFIG, default_config
from areal_jax.config.agent_fields import find_sandbox_warnings
from areal_jax.config.loss import find_objective_warnings
from areal_jax.config.near_names import read_saved
from areal_jax.config.objectives import describe_method, find_objective
from areal_jax.errors import UserError
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.installation import find_command
from areal_jax.lanes import LEARNER, is_engine_lane
from areal_jax.report.aggregates import median
from areal_jax.report.caveats import describe_unfinished, warn_of_skipped_steps
from areal_jax.report.event_log import LaneInterval, Window, lane_intervals, load_events, of_training, window
from areal_jax.report.pages.blocks import Table, Text, render_markdown
from areal_jax.report.pages.headline import LABEL, summarize_run
from areal_jax.report.pages.html_page import FILE as WEB_PAGE
from areal_jax.report.pages.run_page import describe_idle_fields, describe_prolongation, describe_revisions
from areal_jax.report.report import FILE, PAGE, count_optimizer_steps, load_run, write_report
from areal_jax.report.report_keys import Report
from areal_jax.report.run_record import Run
from areal_jax.telemetry import facts as fact_file
from areal_jax.telemetry import metrics as metric_log
from areal_jax.telemetry import names
from areal_jax.telemetry.facts import EVALUATIONS, HELD_OUT_SCORES, EvaluationScores, RunFacts, read_scores
from areal_jax.telemetry.hook import FIELD as HOOK
from areal_jax.telemetry.hook import warn_of_rows
from areal_jax.telemetry.metrics import Line, number, plain
from areal_jax.telemetry.progress import format_duration, format_number, format_percent
from areal_jax.telemetry.trackers import FIELD as TRACKER


def alone_seconds(intervals: Sequence[LaneInterval], within: Window, updates: int) -> dict[str, float | None]:
    """Returns the seconds per update of 'generate' (the busiest engine) and 'train'.

    The cost per unit (token, step) of each kind of work is its median over the intervals during which all other engines
    and the learner were idle, and at most the median of all intervals. The result is that cost times the work done in
    the window, per update; None for a lane with a kind of work that never ran alone.
    """
    # calls to a server overlap, and the server's own cost is not known here
    engines = [i for i in intervals if is_engine_lane(i.lane) and i.work != 'generate']
    learner = [i for i in intervals if i.lane == LEARNER]
    own = _own_costs(engines, learner), _own_costs(learner, engines)
    engines = of_training(engines)
    generate = [
        _seconds([i for i in engines if i.lane == lane], own[0], within, updates)
        for lane in sorted({i.lane for i in engines})
    ]
    known = [seconds for seconds in generate if seconds is not None]
    return {
        'generate': max(known) if known and len(known) == len(generate) else None,
        'train': _seconds(learner, own[1], within, updates),
    }


def _own_costs(own: Sequence[LaneInterval], other: Sequence[LaneInterval]) -> dict[str, float]:
    """Returns seconds per unit, by kind of work; without the kinds that never ran alone.

    A cost is at most the median of all intervals of its kind: other work can only slow it down. So the snapshot of a
    checkpoint, the only publication while engines are idle, does not set the price of every publication.
    """
    alone: dict[str, list[float]] = {}
    everywhere: dict[str, list[float]] = {}
    everything = _ByStart([*own, *other])
    for one in own:
        if one.amount > 0:
            cost = (one.end - one.start) / one.amount
            everywhere.setdefault(one.work, []).append(cost)
            if not everything.overlap_beside(one):
                alone.setdefault(one.work, []).append(cost)
    return {kind: min(_middle(found), _middle(everywhere[kind])) for kind, found in alone.items()}


def _middle(costs: list[float]) -> float:
    return sorted(costs)[len(costs) // 2]


def _seconds(lane: Sequence[LaneInterval], costs: dict[str, float], within: Window, updates: int) -> float | None:
    total = 0.0
    for kind in sorted({i.work for i in lane if i.amount > 0}):
        if kind not in costs:
            return None
        total += costs[kind] * sum(i.amount for i in lane if i.work == kind and within.contains(i.end))
    return total / updates if lane and updates else None


class _ByStart:
    """Intervals by start, each with the latest end so far in any lane and in any other lane."""

    def __init__(self, intervals: Sequence[LaneInterval]):
        ordered = sorted(intervals, key=lambda interval: interval.start)
        self._starts = [interval.start for interval in ordered]
        self._latest: list[tuple[float, str, float]] = []  # latest end, its lane, latest end of another lane
        end, lane, of_another = -math.inf, '', -math.inf
        for one in ordered:
            if one.lane == lane:
                end = max(end, one.end)
            elif one.end > end:
                end, lane, of_another = one.end, one.lane, end
            else:
                of_another = max(of_another, one.end)
            self._latest.append((end, lane, of_another))

    def overlap_beside(self, interval: LaneInterval) -> bool:
        """Whether an interval of another lane overlaps it."""
        begun = bisect.bisect_left(self._starts, interval.end)
        if not begun:
            return False
        end, lane, of_another = self._latest[begun - 1]
        return interval.start < (of_another if lane == interval.lane else end)


# Text that training on given data prints for a batch and for held-out data, for demonstrations and for pairs.


_OF_BATCH = ('loss/pair_accuracy', 'loss/margin', 'loss/value')


def describe_held_out(step: int, measured: Mapping[str, float]) -> str:
    """Returns 'held-out nll after 20 updates: 0.1234 nats a token', or the accuracy of pairs."""
    if 'nll' in measured:
        return f'held-out nll after {step} updates: {measured["nll"]:.4f} nats a token'
    return (
        f'held-out pairs after {step} updates: chosen above rejected in {measured["pair_accuracy"]:.1%}, '
        f'margin {measured["margin"]:.4f}, loss {measured["preference_loss"]:.4f}'
    )


def describe_update(values: Mapping[str, float]) -> str:
    """Returns 'nll 1.2345', or 'loss 0.6931 accuracy 0.50' for pairs, of the batch of an update."""
    if 'loss/pair_accuracy' in values:
        return f'loss {values["loss/value"]:.4f} accuracy {values["loss/pair_accuracy"]:.2f}'
    return f'nll {values.get("loss/nll", float("nan")):.4f}'


def _tabulate_pairs(held_out: Mapping[str, Mapping[str, float]], metrics: Sequence[Line]) -> Table:
    """Returns accuracy, margin, loss of held-out pairs by update, and of the first and last batch."""
    rows = [
        (f'held-out, after {step} updates', values['pair_accuracy'], values['margin'], values['preference_loss'])
        for step, values in held_out.items()
    ]
    batches = [line for line in metrics if 'loss/pair_accuracy' in line]
    for place, line in zip(('first', 'last'), batches[:1] + batches[-1:], strict=False):
        accuracy, margin, loss = (number(line, name) or 0.0 for name in _OF_BATCH)
        rows.append((f'train, {place} batch', accuracy, margin, loss))
    cells = [(name, *(f'{value:.4f}' for value in values)) for name, *values in rows]
    return Table(('pairs', 'chosen above rejected', 'margin', 'loss'), cells)


def read_pairs_measured(metrics: Sequence[Line]) -> dict[int, dict[str, float]]:
    """Returns the measurements of held-out pairs in metrics.jsonl, by update."""
    found = (names.HELD_OUT_ACCURACY, names.HELD_OUT_MARGIN, names.HELD_OUT_LOSS, names.HELD_OUT_PAIRS)
    return {
        int(number(line, names.STEP) or 0): {
            name.removeprefix(names.HELD_OUT): number(line, name) or 0.0 for name in found
        }
        for line in metrics
        if names.HELD_OUT_ACCURACY in line
    }


# The report of supervised and of preference training: report.json and report.md, from facts and metrics.


@dataclasses.dataclass(frozen=True)
class SftFacts:
    """Facts about the run that metrics.jsonl lacks; None if only the running program measures them."""

    config: str
    seed: int
    steps: int
    epochs: float
    held_out_nll: Mapping[int, float | None]  # nats per answer token, by update from 0; None: not finite
    trained_tokens: int
    training_seconds: float  # of updates and measurements, all attempts together
    compilations: int  # after warm-up
    # of pairs, by update: pair_accuracy, margin, preference_loss, pairs
    held_out_pairs: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    demonstrations: Mapping[str, int] | None = None  # or pairs: train, held_out, dropped
    wall_seconds: float | None = None  # of this attempt
    peak_memory_bytes: int | None = None
    weights_sha256: str | None = None
    git_commit: str | None = None
    revisions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # as in RunFacts
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of packages
    hardware: Mapping[str, object] = dataclasses.field(default_factory=dict)
    planned_steps: int | None = None  # run.steps
    finished: bool = True
    running: str | None = None  # unfinished: files.find_holder
    missing: Sequence[str] = ()  # unfinished: parts that the report lacks, in words
    newest_checkpoint: int | None = None  # unfinished: its update; --resume continues there
    idle_fields: Sequence[str] = ()  # set in the config file and not used by the run as built
    own_code: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)  # as in RunFacts
    prolonged: Sequence[Mapping[str, int]] = ()  # {'at_update', 'from_steps', 'to_steps'}, in order
    hook: Mapping[str, object] = dataclasses.field(default_factory=dict)  # RowFacts; empty without one
    tracker: Mapping[str, object] = dataclasses.field(default_factory=dict)  # RowFacts; empty without one
    rollouts: Mapping[str, object] = dataclasses.field(default_factory=dict)  # RolloutFacts; empty without them

    def save(self, workdir: pathlib.Path) -> None:
        """Writes WORKDIR/facts.json, all or nothing."""
        files.write_json(workdir / fact_file.FILE, plain(dataclasses.asdict(self)))

    @classmethod
    def load(cls, workdir: pathlib.Path) -> SftFacts:
        """Reads WORKDIR/facts.json; raises FileError for an incomplete file."""
        values = fact_file.read_facts(workdir, cls)
        for name in ('held_out_nll', 'held_out_pairs'):
            values[name] = {int(step): measured for step, measured in values.get(name, {}).items()}
        values |= {name: tuple(values.get(name, ())) for name in ('idle_fields', 'prolonged', 'missing')}
        return cls(**values)


def write_sft_report(workdir: pathlib.Path, facts: SftFacts) -> files.JsonObject:
    """Writes report.json and report.md from the facts and metrics.jsonl; returns the report."""
    metrics = metric_log.read_metrics(workdir / metric_log.FILE)
    values = [line['loss/nll'] for line in metrics if 'loss/nll' in line]
    optimizer_steps = count_optimizer_steps(metrics)
    warnings = [
        _warn_of_end(facts),
        warn_of_skipped_steps(optimizer_steps),
        warn_of_rows(HOOK, facts.hook),
        warn_of_rows(TRACKER, facts.tracker),
    ]
    report: files.JsonObject = plain(
        {
            **dataclasses.asdict(facts),
            'running': bool(facts.running),
            'held_out_nll': {str(step): nll for step, nll in sorted(facts.held_out_nll.items())},
            'held_out_pairs': {str(step): values for step, values in sorted(facts.held_out_pairs.items())},
            'train_nll': {'first': values[0] if values else None, 'last': values[-1] if values else None},
            'optimizer_steps': optimizer_steps,
            'throughput': {
                'learner_tokens_per_second_per_device': median(metrics, names.LEARNER_RATE_PER_DEVICE),
                'mfu': median(metrics, names.MFU),
            },
            'warnings': [warning for warning in warnings if warning],
        }
    )
    files.write_json(workdir / FILE, report)
    files.write_text(workdir / PAGE, _render(report, metrics))
    return report


def _warn_of_end(facts: SftFacts) -> str:
    if facts.finished:
        return ''
    return describe_unfinished(facts.steps, facts, 'it was stopped or killed')


def _render(report: files.JsonObject, metrics: Sequence[Line]) -> str:
    weights, pairs = report['weights_sha256'], _are_pairs(report, metrics)
    kind, noun = ('Preference', 'pairs') if pairs else ('Supervised', 'demonstrations')
    texts = [
        *(f'**Warning:** {warning}' for warning in report['warnings']),
        _what_ran(report, noun),
        *(describe_prolongation(prolongation) for prolongation in report['prolonged']),
        describe_revisions(report['revisions']) if report['revisions'] else '',
        describe_idle_fields(report['idle_fields']) if report['idle_fields'] else '',
    ]
    table = _tabulate_pairs(report['held_out_pairs'], metrics) if pairs else _tabulate_likelihood(report)
    end = f'Weights: `export/`, a Hugging Face directory; sha256 {weights}.' if weights else 'No weights were exported.'
    title = f'{kind} training: {report["config"] or "no config file"}, seed {report["seed"]}'
    return render_markdown(title, [*map(Text, texts), table, Text(end)], [])


def _are_pairs(report: files.JsonObject, metrics: Sequence[Line]) -> bool:
    return bool(report['held_out_pairs']) or any('loss/pair_accuracy' in line for line in metrics)


def _tabulate_likelihood(report: files.JsonObject) -> Table:
    measured = [(f'held-out, after {step} updates', nll) for step, nll in report['held_out_nll'].items()] + [
        (f'train, {place} batch', nll) for place, nll in report['train_nll'].items()
    ]
    return Table(
        ('negative log-likelihood', 'nats per answer token'), [(name, _format_nll(nll)) for name, nll in measured]
    )


def _what_ran(report: files.JsonObject, noun: str) -> str:
    steps, sizes, memory = report['optimizer_steps'], report['demonstrations'], report['peak_memory_bytes']
    rate, mfu = report['throughput']['learner_tokens_per_second_per_device'], report['throughput']['mfu']
    speed = '' if rate is None else f'{format_number(rate)} tokens a second and device read by an update, '
    utilisation = '' if mfu is None else f'{format_percent(mfu)} of the peak of the devices, '
    data = (
        f'{sizes["train"]} {noun} ({sizes["held_out"]} held out and measured, {sizes["dropped"]} dropped '
        'because they fit no row)'
        if sizes
        else f'the {noun}'
    )
    return (
        f'{report["steps"]} updates ({steps["applied"]} optimizer steps applied, {steps["skipped"]} skipped because '
        f'their gradient was not finite), {format_number(report["epochs"])} epochs over {data}, '
        f'{report["trained_tokens"]} tokens in the loss, {format_duration(report["training_seconds"])}; '
        f'{speed}{utilisation}{report["compilations"]} compilations after warm-up'
        f'{"" if memory is None else f", {memory / 1e9:.2f} GB of memory at most"}.'
    )


def _format_nll(nll: float | None) -> str:
    """Returns four decimals; '-' if the value is missing or was not finite."""
    return '-' if nll is None else f'{nll:.4f}'


# Rebuilds the report of a workdir: of a run that finished, was stopped or was killed.


_CHECKPOINTS = 'checkpoints'  # run_directory.CHECKPOINTS
Config = Mapping[str, object]  # sections of fields, as in config.json
Value = TypeVar('Value', str, int, float)


class ReportError(UserError):
    """A directory without a run, or a file of a run that cannot be read; the message names it."""


def rebuild_report(workdir: pathlib.Path, plots: bool) -> None:
    """Writes the report again. Without facts.json the run has not finished, and the report says so.

    Raises ReportError for a directory without a run, and UserError for a file that was torn or edited.
    """
    config = _read_config(workdir)
    if _is_supervised(workdir, config):
        finished = (workdir / fact_file.FILE).exists()
        write_sft_report(workdir, SftFacts.load(workdir) if finished else unfinished_sft_facts(workdir, config))
    else:
        write_report(workdir, _facts(workdir, config), plots=plots)


def read_run(workdir: pathlib.Path) -> Run:
    """Reads a run with a new report, not written. Raises like `rebuild_report`, and for supervised training."""
    config = _read_config(workdir)
    if _is_supervised(workdir, config):
        raise ReportError(
            f'{workdir} holds supervised training, which has no event log; give runs of reinforcement learning'
        )
    return load_run(workdir, _facts(workdir, config))


def _is_supervised(workdir: pathlib.Path, config: Config) -> bool:
    return not find_objective(_field(workdir, config, 'loss.objective', str)).generates


def _facts(workdir: pathlib.Path, config: Config) -> RunFacts:
    finished = (workdir / fact_file.FILE).exists()
    return RunFacts.load(workdir) if finished else unfinished_facts(workdir, config)


def unfinished_facts(workdir: pathlib.Path, config: Config) -> RunFacts:
    """Returns the facts of an unfinished run, from config.json, the event log and the metrics."""
    schedule = _field(workdir, config, 'staleness.schedule', str)
    eta = float(_field(workdir, config, 'staleness.eta', float))
    events, scores = load_events(workdir / EVENTS), read_scores(workdir / EVALUATIONS)
    metrics = metric_log.read_metrics(workdir / metric_log.FILE)
    intervals, within = lane_intervals(events), window(events)
    origin = _origin(workdir)
    starts = _read_starts(workdir)
    return RunFacts(
        config=CONFIG,
        seed=_field(workdir, config, 'run.seed', int),
        eta=eta if schedule == 'natural' else None,
        schedule=schedule,
        clock=_field(workdir, config, 'run.clock', str),
        **_describe_objective(config),
        planned_steps=_field(workdir, config, 'run.steps', int),
        finished=False,
        running=files.find_holder(workdir),
        missing=_missing(workdir, config, scores),
        newest_checkpoint=_newest_checkpoint(workdir),
        evaluation_before=scores.get('before'),
        evaluation_after=scores.get('after'),
        compilations=_total(metrics, names.COMPILATIONS),
        compilation_budget=_field(workdir, config, 'run.compilation_budget', int),
        alone_seconds=alone_seconds(intervals, within, len(metrics)) if metrics else {},
        cores=cast(int, origin['hardware'].get('cores', 1)),
        sandbox=starts[-1].get('sandbox') if starts else None,
        **origin,
    )


class _Objective(TypedDict):
    """The fields of facts that describe the objective."""

    objective: str
    warnings: tuple[str, ...]


def _describe_objective(config: Config) -> _Objective:
    """Describes the objective of a config of this or an earlier version; missing fields get their defaults."""
    sections = default_config().to_dict()
    known = {name: fields | cast(dict[str, object], config.get(name, {})) for name, fields in sections.items()}
    c = types.SimpleNamespace(**{name: types.SimpleNamespace(**fields) for name, fields in known.items()})
    return {'objective': describe_method(c.loss), 'warnings': (*find_objective_warnings(c), *find_sandbox_warnings(c))}


class _Origin(TypedDict):
    """The fields of facts about the machine and code of a run, known since its start."""

    git_commit: str | None
    revisions: Mapping[str, str]
    versions: Mapping[str, str]
    hardware: Mapping[str, object]


def _origin(workdir: pathlib.Path) -> _Origin:
    """Returns the origin of the newest start; empty if the run was killed before it noted a start."""
    starts = _read_starts(workdir)
    if not starts:
        return {'git_commit': None, 'revisions': {}, 'versions': {}, 'hardware': {}}
    found = starts[-1]['environment']
    hardware = {name: found[name] for name in ('cores', 'machine', 'devices')}
    return {
        'git_commit': found['commit'],
        'revisions': starts[-1].get('revisions', {}),
        'versions': found['versions'],
        'hardware': hardware,
    }


def _read_starts(workdir: pathlib.Path) -> list[Start]:
    path = workdir / STARTS
    return read_starts(path.read_bytes(), str(path)) if path.exists() else []


def unfinished_sft_facts(workdir: pathlib.Path, config: Config) -> SftFacts:
    """Returns the facts of unfinished supervised training, from config.json and the metrics."""
    metrics = metric_log.read_metrics(workdir / metric_log.FILE)
    last = metrics[-1] if metrics else {}
    measured = [line for line in metrics if names.HELD_OUT_NLL in line]
    return SftFacts(
        config=CONFIG,
        seed=_field(workdir, config, 'run.seed', int),
        steps=int(number(last, names.STEP) or 0),
        epochs=number(last, names.EPOCH) or 0.0,
        held_out_nll={int(number(line, names.STEP) or 0): number(line, names.HELD_OUT_NLL) for line in measured},
        held_out_pairs=read_pairs_measured(metrics),
        trained_tokens=_total(metrics, names.TOKENS_TRAINED),
        training_seconds=number(last, names.TIME) or 0.0,
        compilations=_total(metrics, names.COMPILATIONS),
        planned_steps=_field(workdir, config, 'run.steps', int),
        finished=False,
        running=files.find_holder(workdir),
        missing=('sizes of the data', 'memory', 'hash and export of the weights'),
        newest_checkpoint=_newest_checkpoint(workdir),
        **_origin(workdir),
    )


def _missing(workdir: pathlib.Path, config: Config, scores: Mapping[str, EvaluationScores]) -> tuple[str, ...]:
    """Lists the parts that the report of an unfinished asynchronous run lacks."""
    wanted = _field(workdir, config, 'evaluation.problems', int) > 0
    unscored = [
        f'{HELD_OUT_SCORES} {phase} training' for phase in ('before', 'after') if wanted and phase not in scores
    ]
    return (*unscored, 'memory', 'lag of the event loop', 'processor time', 'hash of the weights')


def _newest_checkpoint(workdir: pathlib.Path) -> int | None:
    """Returns its update; None without one. Only names are read: a damaged checkpoint is found on resuming."""
    steps = [re.match(r'step_(\d+)', path.name) for path in (workdir / _CHECKPOINTS).glob('step_*')]
    return max((int(step[1]) for step in steps if step), default=None)


def _total(metrics: Sequence[Line], name: str) -> int:
    return int(sum(number(line, name) or 0 for line in metrics))


def _read_config(workdir: pathlib.Path) -> Config:
    path = workdir / CONFIG
    if not path.exists():
        raise ReportError(f'{workdir} holds no run: there is no {CONFIG}; give the --workdir of a run')
    return read_saved(path)


def _field(workdir: pathlib.Path, config: Config, path: str, kind: type[Value]) -> Value:
    """Returns the value of 'section.field'; a float may be written as an integer."""
    section, name = path.split('.')
    fields = config.get(section)
    value = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(value, (int, float) if kind is float else kind):
        raise ReportError(
            f'{workdir / CONFIG} holds {path}={value!r}: it was edited or is of another program; give the --workdir of '
            'a run'
        )
    return cast(Value, value)


# The output at the end of a run: eight lines on a terminal, the whole report in a pipe; and of an evaluation.


def tell_end(report: Mapping[str, Any], workdir: pathlib.Path, *, whole: bool, follow: str = 'areal-eval') -> str:
    """Returns the output at the end of a run.

    Args:
      whole: on a terminal too, print the report itself, in Markdown, before the eight lines.
      follow: the command that is named as the next one; '' for none.
    """
    page = (workdir / PAGE).read_text()
    if not sys.stdout.isatty():
        return page
    is_short = 'token_age' not in report  # of supervised and preference training
    width = shutil.get_terminal_size().columns
    lines = [] if is_short else summarize_run(cast(Report, report), width)
    shown = next(file for name in (WEB_PAGE, PAGE) if (file := workdir / name).exists())
    lines.append(f'{"report":<{LABEL}}{shown}')
    if follow:
        lines.append(f'{"next":<{LABEL}}{_name_next(follow, str(report["config"]), workdir)}')
    return '\n'.join([*([page] if whole or is_short else []), *lines])


def tell_results(table: str, file: pathlib.Path) -> str:
    """Returns the output at the end of an evaluation: its table, its file, and on a terminal the next command."""
    lines = ['', table, str(file)]
    if sys.stdout.isatty():
        lines.append(f'{"next":<{LABEL}}{find_command("areal-rollouts")} {shlex.quote(str(file.parent))}')
    return '\n'.join(lines)


def _name_next(program: str, config: str, workdir: pathlib.Path) -> str:
    """Returns the command that evaluates the weights of the run, in the form that this shell finds."""
    flags = {'config': config, 'model': str(workdir), 'workdir': f'{workdir}_eval'}
    return ' '.join([find_command(program), *(f'--{name}={shlex.quote(value)}' for name, value in flags.items())])
