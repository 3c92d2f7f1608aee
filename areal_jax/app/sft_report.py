"""What supervised training leaves when it ends: report.json and report.md."""

from __future__ import annotations

import dataclasses
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax import files
from areal_jax.app.provenance import git_commit, hardware, package_versions
from areal_jax.telemetry import metrics as metric_log
from areal_jax.telemetry.caveats import warn_of_skipped_steps
from areal_jax.telemetry.json_lines import plain
from areal_jax.telemetry.numerals import format_duration, format_number
from areal_jax.telemetry.report import FILE, PAGE, count_optimizer_steps


@dataclasses.dataclass(frozen=True)
class SftFacts:
    """What the run knows and metrics.jsonl does not."""

    config: str
    seed: int
    steps: int
    epochs: float
    demonstrations: Mapping[str, int]  # train, held_out, dropped
    held_out_nll: Mapping[int, float]  # nats per answer token, by update; 0 = before the first
    trained_tokens: int
    training_seconds: float  # of updates and measurements, all attempts together
    wall_seconds: float  # of this attempt
    compilations: int  # after warm-up
    peak_memory_bytes: int
    weights_sha256: str
    prolonged: Sequence[Mapping[str, int]] = ()
    idle_fields: Sequence[str] = ()  # set in the config file and not used by the run as built


def write_sft_report(workdir: pathlib.Path, facts: SftFacts) -> dict[str, Any]:
    """Writes report.json and report.md from the facts and metrics.jsonl; returns the report."""
    metrics = metric_log.read_metrics(workdir / metric_log.FILE)
    values = [line['loss/nll'] for line in metrics if 'loss/nll' in line]
    optimizer_steps = count_optimizer_steps(metrics)
    warning = warn_of_skipped_steps(optimizer_steps)
    report = plain(
        {
            **dataclasses.asdict(facts),
            'held_out_nll': {str(step): nll for step, nll in sorted(facts.held_out_nll.items())},
            'train_nll': {'first': values[0] if values else None, 'last': values[-1] if values else None},
            'optimizer_steps': optimizer_steps,
            'warnings': [warning] if warning else [],
            'git_commit': git_commit(),
            'versions': package_versions(),
            'hardware': hardware() | {'platform': platform.platform()},
        }
    )
    files.write_json(workdir / FILE, report)
    files.write_text(workdir / PAGE, _render(report))
    return report


def _render(report: Mapping[str, Any]) -> str:
    held_out, train, sizes = report['held_out_nll'], report['train_nll'], report['demonstrations']
    measured = [f'| held-out, after {step} updates | {_format_nll(nll)} |' for step, nll in held_out.items()]
    steps = report['optimizer_steps']
    lines = [
        f'# Supervised training: {report["config"] or "no config file"}, seed {report["seed"]}',
        '',
        *(f'**Warning:** {warning}\n' for warning in report['warnings']),
        f'{report["steps"]} updates ({steps["applied"]} optimizer steps applied, {steps["skipped"]} skipped because '
        f'their gradient was not finite), {format_number(report["epochs"])} epochs over {sizes["train"]} '
        f'demonstrations ({sizes["held_out"]} held out and measured, {sizes["dropped"]} dropped because they fit no '
        f'row), {report["trained_tokens"]} tokens in the loss, {format_duration(report["training_seconds"])}; '
        f'{report["compilations"]} compilations after warm-up, '
        f'{report["peak_memory_bytes"] / 1e9:.2f} GB of memory at most.',
        '',
        '| negative log-likelihood | nats per answer token |',
        '|---|---|',
        *measured,
        *(f'| train, {place} batch | {_format_nll(nll)} |' for place, nll in train.items()),
        '',
        f'Weights: `export/`, a Hugging Face directory; sha256 {report["weights_sha256"]}.',
        '',
    ]
    return '\n'.join(lines)


def _format_nll(nll: float | None) -> str:
    """Four decimals; '-' where it is missing or was not finite."""
    return '-' if nll is None else f'{nll:.4f}'
