"""The report of supervised training from facts and metrics that are given."""

from __future__ import annotations

import json
import pathlib

from areal_jax.app.run.sft_report import SftFacts, write_sft_report

FACTS = SftFacts(
    config='configs/x.py', seed=0, steps=2, epochs=1.0, demonstrations={'train': 2, 'held_out': 0, 'dropped': 0},
    held_out_nll={}, trained_tokens=20, training_seconds=2.0, wall_seconds=3.0, compilations=0,
    peak_memory_bytes=10**9, weights_sha256='ab' * 32,
)  # fmt: skip


def report(workdir: pathlib.Path, *optimizer_steps: tuple[float, float]) -> tuple[dict, str]:
    """report.json and report.md of a run with (applied, skipped) optimizer steps in its updates."""
    lines = [
        {'step': step, 'loss/nll': 1.5, 'update/optimizer_steps': applied, 'update/skipped_steps': skipped}
        for step, (applied, skipped) in enumerate(optimizer_steps, start=1)
    ]
    (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    write_sft_report(workdir, FACTS)
    return json.loads((workdir / 'report.json').read_text()), (workdir / 'report.md').read_text()


def test_a_run_that_applied_every_step_warns_of_nothing(tmp_path: pathlib.Path):
    found, page = report(tmp_path, (1.0, 0.0), (1.0, 0.0))
    assert (found['optimizer_steps'], found['warnings']) == ({'applied': 2, 'skipped': 0}, [])
    assert '2 updates (2 optimizer steps applied, 0 skipped because their gradient was not finite), 1 epochs' in page
    assert 'Warning' not in page


def test_skipped_steps_are_counted_and_warned_of(tmp_path: pathlib.Path):
    found, page = report(tmp_path, (2.0, 0.0), (1.0, 1.0))
    assert found['optimizer_steps'] == {'applied': 3, 'skipped': 1}
    (warning,) = found['warnings']
    assert warning.startswith('1 of 4 optimizer steps were skipped because their gradient was not finite: those steps')
    assert f'\n**Warning:** {warning}\n\n2 updates (3 optimizer steps applied, 1 skipped' in page


def test_a_run_that_applied_no_step_says_that_the_weights_never_changed(tmp_path: pathlib.Path):
    (warning,) = report(tmp_path, (0.0, 1.0), (0.0, 1.0))[0]['warnings']
    assert warning.startswith('2 of 2 optimizer steps were skipped')
    assert 'the weights never changed. Look at the weights that the model starts from, learner.loss_scale' in warning
