"""Sweeps of toy arms: a file with get_sweep(), and main_sweep run on it in this process or in one of its own."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

from areal_jax import main_sweep
from areal_jax.app.command_line import parse_command
from areal_jax.app.process.ending import end_command
from areal_jax.app.sweep import arms as arms_of
from areal_jax.app.sweep import sweep_page
from areal_jax.app.sweep.arms import Arm, read_arms
from tests.app.sweep.toy_arm import STEPS

ROOT = pathlib.Path(__file__).parents[3]
TOY = 'tests.app.sweep.toy_arm'
FILE = """
from areal_jax import config as schema

inf = float('inf')


def get_config():
    config = schema.default_config()
    config.run.steps = {steps}
    config.run.clock = 'virtual'
    config.run.export = False
    config.telemetry.plots = False
    return config


def get_sweep():
    return {arms!r}
"""
PROGRAM = f"""
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ignored in what a shell puts in the background
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
import areal_jax.app.sweep.arms
areal_jax.app.sweep.arms.TRAINER = {TOY!r}
from areal_jax.app.sweep import sweep_page  # pictures and charts take longer than all arms
sweep_page.write_plots, sweep_page.render_html = lambda results, workdir: [], lambda results: ''
from areal_jax.main_sweep import run
run()
"""


class NoSignals:
    """In place of Interrupts: nobody asks to stop."""

    def deferred(self, request, then, abandon=None):
        return contextlib.nullcontext()


class ToySweep:
    """A sweep in a directory of its own."""

    def __init__(self, directory: pathlib.Path, arms: Mapping[str, Mapping[str, object]], steps: int = STEPS):
        self.file, self.workdir = directory / 'toy.py', directory / 'sweep'
        self.write(arms, steps)

    def write(self, arms: Mapping[str, Mapping[str, object]], steps: int = STEPS) -> None:
        self.file.write_text(FILE.format(steps=steps, arms=arms))

    def argv(self, *words: str) -> list[str]:
        return ['main_sweep', f'--config={self.file}', f'--workdir={self.workdir}', *words]

    def arms(self, *words: str) -> list[Arm]:
        values = main_sweep.define_flags()
        return read_arms(parse_command(self.argv(*words), values), self.workdir)

    def run(self, monkeypatch, *words: str, draws: bool = False) -> int:
        """In this process; the exit code. `draws`: with pictures and charts, which take longer than all arms."""
        monkeypatch.setattr(arms_of, 'TRAINER', TOY)
        if not draws:
            monkeypatch.setattr(sweep_page, 'write_plots', lambda results, workdir: [])
            monkeypatch.setattr(sweep_page, 'render_html', lambda results: '')
        monkeypatch.chdir(ROOT)
        return end_command(lambda: main_sweep.main(self.argv(*words), NoSignals()), doing='writing')

    def start(self, *words: str, pause_s: float = 0.0, **variables: str) -> subprocess.Popen[str]:
        """As a process of its own, with variables of its environment."""
        return subprocess.Popen(
            [sys.executable, '-c', PROGRAM, *self.argv(*words)[1:]],
            cwd=ROOT,
            env={**os.environ, 'PAUSE_S': str(pause_s), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def notes(self, arm: str) -> list[str]:
        path = self.workdir / arm / 'toy.txt'
        return path.read_text().splitlines() if path.exists() else []

    def updates(self, arm: str) -> list[int]:
        path = self.workdir / arm / 'metrics.jsonl'
        return [json.loads(line)['step'] for line in path.read_text().splitlines()] if path.exists() else []
