"""The report of supervised and of preference training: report.json and report.md, from facts and metrics."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from areal_jax import files
from areal_jax.app.run.held_out import tabulate_pairs
from areal_jax.report.aggregates import median
from areal_jax.report.caveats import describe_unfinished, warn_of_skipped_steps
from areal_jax.report.pages.report_texts import describe_idle_fields, describe_prolongation
from areal_jax.report.report import FILE, PAGE, count_optimizer_steps
from areal_jax.telemetry import facts as fact_file
from areal_jax.telemetry import metrics as metric_log
from areal_jax.telemetry import names
from areal_jax.telemetry.hook import FIELD as HOOK
from areal_jax.telemetry.hook import warn_of_rows
from areal_jax.telemetry.metrics import Line, plain
from areal_jax.telemetry.progress import format_duration, format_number, format_percent
from areal_jax.telemetry.trackers import FIELD as TRACKER


@dataclasses.dataclass(frozen=True)
class SftFacts:
    """What the run knows and metrics.jsonl does not; None where only the running program measures it."""

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
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of packages
    hardware: Mapping[str, object] = dataclasses.field(default_factory=dict)
    planned_steps: int | None = None  # run.steps
    finished: bool = True
    running: str | None = None  # unfinished: files.find_holder
    missing: Sequence[str] = ()  # unfinished: what the report lacks, in words
    newest_checkpoint: int | None = None  # unfinished: its update; --resume goes on there
    idle_fields: Sequence[str] = ()  # set in the config file and not used by the run as built
    own_code: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)  # as in RunFacts
    prolonged: Sequence[Mapping[str, int]] = ()  # {'at_update', 'from_steps', 'to_steps'}, in order
    hook: Mapping[str, object] = dataclasses.field(default_factory=dict)  # RowFacts; empty without one
    tracker: Mapping[str, object] = dataclasses.field(default_factory=dict)  # RowFacts; empty without one
    rollouts: Mapping[str, object] = dataclasses.field(default_factory=dict)  # RolloutFacts; empty without them

    def save(self, workdir: pathlib.Path) -> None:
        """Write WORKDIR/facts.json, all or nothing."""
        files.write_json(workdir / fact_file.FILE, plain(dataclasses.asdict(self)))

    @classmethod
    def load(cls, workdir: pathlib.Path) -> SftFacts:
        """Read WORKDIR/facts.json; raises FileError for a file that is not whole."""
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
    table = tabulate_pairs(report['held_out_pairs'], metrics) if pairs else _tabulate_likelihood(report)
    kind = 'Preference' if pairs else 'Supervised'
    lines = [
        f'# {kind} training: {report["config"] or "no config file"}, seed {report["seed"]}',
        '',
        *(f'**Warning:** {warning}\n' for warning in report['warnings']),
        _what_ran(report, 'pairs' if pairs else 'demonstrations'),
        '',
        *(f'{describe_prolongation(prolongation)}\n' for prolongation in report['prolonged']),
        *([f'{describe_idle_fields(report["idle_fields"])}\n'] if report['idle_fields'] else []),
        *table,
        '',
        f'Weights: `export/`, a Hugging Face directory; sha256 {weights}.' if weights else 'No weights were exported.',
        '',
    ]
    return '\n'.join(lines)


def _are_pairs(report: files.JsonObject, metrics: Sequence[Line]) -> bool:
    return bool(report['held_out_pairs']) or any('loss/pair_accuracy' in line for line in metrics)


def _tabulate_likelihood(report: files.JsonObject) -> list[str]:
    measured = [(f'held-out, after {step} updates', nll) for step, nll in report['held_out_nll'].items()] + [
        (f'train, {place} batch', nll) for place, nll in report['train_nll'].items()
    ]
    return [
        '| negative log-likelihood | nats per answer token |',
        '|---|---|',
        *(f'| {name} | {_format_nll(nll)} |' for name, nll in measured),
    ]


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
    """Four decimals; '-' where it is missing or was not finite."""
    return '-' if nll is None else f'{nll:.4f}'
