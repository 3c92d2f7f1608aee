"""A study of a few toy arms: a config file, and main_sweep run on it in this process."""

from __future__ import annotations

import dataclasses
import pathlib

from areal_jax import main_sweep
from areal_jax.app.command_line import call_in_file, parse_command
from areal_jax.app.process.ending import end_command
from areal_jax.app.sweep import arms as arms_of
from areal_jax.studies.stages import Program, Scoring, StageMaker
from tests.app.sweep.toy_sweep import ROOT, TOY, NoSignals
from tests.studies.toy_process import starts

PROCESS = 'tests.studies.toy_process'
STUDY = ROOT / 'configs' / 'sweeps' / 'staleness.py'
FILE = """
import dataclasses
import importlib.util

spec = importlib.util.spec_from_file_location('staleness', {study!r})
staleness = importlib.util.module_from_spec(spec)
spec.loader.exec_module(staleness)
get_config = staleness.get_config
PLAN = staleness.QUICK
PLAN = dataclasses.replace(
    PLAN,
    lock_step=dataclasses.replace(
        PLAN.lock_step, common={{**PLAN.lock_step.common, 'run.steps': 4}}, lags={lags}, rates={rates}, seeds=(0, 1, 2),
        side_factors=(1 / 3, {factor}),
    ),
    natural=dataclasses.replace(
        PLAN.natural, common={{**PLAN.natural.common, 'run.steps': 4}}, etas=(0.0, 4.0), variants={{}},
    ),
    controls=dataclasses.replace(
        PLAN.controls, known_window=(0, 4), known={{**PLAN.controls.known, 'run.steps': 4}},
        known_bounds={{0: staleness.Bounds(0.25, 0.35), 30: staleness.Bounds(0.25, {high})}},
    ),
)


def get_study():
    return {{'full': PLAN, 'quick': PLAN}}
"""


class ToyStudy:
    """A study in a directory of its own."""

    def __init__(self, directory: pathlib.Path, **numbers):
        self.file, self.workdir = directory / 'toy.py', directory / 'study'
        self.write(**numbers)

    def write(self, lags=(0, 4, 8), rates=(0.001, 0.003), factor=3.0, high=0.35) -> None:
        """`factor`: of the larger side of the learning rate; `high`: what a control may score at most."""
        numbers = {'lags': lags, 'rates': rates, 'factor': factor, 'high': high}
        self.file.write_text(FILE.format(study=str(STUDY), **numbers))

    def run(self, monkeypatch, *words: str) -> int:
        """The exit code."""
        monkeypatch.setattr(arms_of, 'TRAINER', TOY)
        monkeypatch.setattr(Program, 'module', PROCESS)
        monkeypatch.setattr(Scoring, 'module', PROCESS)
        monkeypatch.chdir(ROOT)
        argv = ['main_sweep', f'--config={self.file}', f'--workdir={self.workdir}', *words]
        return end_command(lambda: main_sweep.main(argv, NoSignals()), doing='writing')

    def starts(self) -> dict[str, int]:
        """How often each job was started, by its name."""
        return {path.name: len(starts(path)) for path in sorted((self.workdir / 'programs').iterdir())}

    def page(self) -> str:
        return (self.workdir / 'study.md').read_text()


def read_study(form: str = 'full', source: pathlib.Path = STUDY, workdir: pathlib.Path = pathlib.Path('none')):
    """(plan, stage maker) of the study of the project."""
    argv = ['main_sweep', f'--config={source}', f'--workdir={workdir}']
    command = parse_command(argv, main_sweep.define_flags())
    plan = call_in_file(str(source), 'get_study', '')[form]
    return plan, StageMaker(command, plan, workdir)


def change(plan, part: str, **fields):
    """The plan with other fields in one part."""
    return dataclasses.replace(plan, **{part: dataclasses.replace(getattr(plan, part), **fields)})
