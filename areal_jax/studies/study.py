"""Runs the unfinished stages of a study one after the other, and writes its page."""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import importlib.util
import io
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence

from areal_jax import files
from areal_jax.app.command_line import CommandLine, CommandLineError, call_in_file
from areal_jax.app.process.ending import Interrupts
from areal_jax.app.sweep.arms import Arm, Job, Runner, read_state
from areal_jax.config import flatten
from areal_jax.config.fields import ConfigError
from areal_jax.errors import ExitCode, UserError
from areal_jax.installation import describe_install
from areal_jax.studies.page import FAILED, FILE, check_controls, find_rates, render_page
from areal_jax.studies.plan import Plan
from areal_jax.studies.stages import (
    CONTROLS,
    KNEE,
    STAGES,
    Program,
    Rates,
    Record,
    Records,
    Stage,
    StageMaker,
    read_records,
)

RECORD, TABLE = 'study.json', 'arms.csv'
FORMS = ('full', 'quick')
_PURPOSE = "which returns {'full': Plan, 'quick': Plan}, see areal_jax/studies/plan.py"
_NO_RATE = 'the later stages need the learning rate of every method, which the sweep of the rate has not given'


def read_plan(command: CommandLine, form: str) -> Plan:
    """Reads the plan of a form from get_study() of the config file; raises CommandLineError for anything else."""
    plans = call_in_file(command.source, 'get_study', _PURPOSE)
    plan = plans.get(form) if isinstance(plans, Mapping) else None
    if not isinstance(plan, Plan):
        raise CommandLineError(f'--config={command.source}: get_study() must be a function {_PURPOSE}')
    return plan


class Study:
    """A study in its directory; an unfinished study of the same plan continues.

    `form` is one of FORMS, `jobs` are programs and runs at a time, as the plan says if it is None.

    Raises UserError for a plan with an arm that cannot run, and for a directory that does not belong to this study.
    """

    def __init__(self, command: CommandLine, form: str, workdir: pathlib.Path, jobs: int | None):
        self._source, self._form, self._workdir, self._jobs = command.source, form, workdir, jobs
        self._plan = read_plan(command, form)
        self._maker = StageMaker(command, self._plan, workdir)
        any_rate = dict.fromkeys(self._plan.lock_step.methods, self._plan.lock_step.rates[0])
        for name in STAGES:
            self._maker.make(name, any_rate)  # every arm is checked before the first one starts
        self._record = {
            'config': command.source,
            'form': form,
            'plan': self._plan.as_dict(),
            'fields': {path: repr(value) for path, value in flatten(command.config.copy_and_resolve_references())},
        }
        self._require_same()

    def print_commands(self) -> None:
        """Prints the commands of all unfinished jobs that are known so far, one a line."""
        for name in STAGES:
            if (stage := self._make(name)) is None:
                print(f'{name} and what follows: once the sweep of the learning rate has finished', file=sys.stderr)
                return
            jobs: list[Job] = [*_pending_programs(stage), *_pending_runs(stage)]
            for job in jobs:
                print(shlex.join(job.command(False)))

    def run(self, interrupts: Interrupts) -> int:
        """Runs all unfinished stages and writes the page; returns the exit code.

        Raises UserError for arms or controls that failed, after all others have run.
        """
        files.write_json(self._workdir / RECORD, self._record)
        stages: list[Stage] = []
        stopped, missing = False, ''
        for name in STAGES:
            stage = self._make(name)
            if stage is None:
                missing = _NO_RATE
                break
            stages.append(stage)
            stopped = self._run_stage(stage, interrupts)
            if stopped:
                break
        records = [record for stage in stages for record in read_records(stage.arms, stage.programs)]
        self._write(records)
        print(self._workdir / FILE, flush=True)
        if stopped:
            print('stopped; the same command goes on')
            return ExitCode.STOPPED
        unfinished = [record for record in records if not record.state.is_finished]
        said = [_describe_unfinished(unfinished, len(records))] if unfinished else []
        failed = [control.text for control in check_controls(self._plan, records) if control.outcome == FAILED]
        said += [f'{len(failed)} controls failed, the first: {failed[0]}'] if failed else []
        if said or missing:
            raise UserError('; '.join(filter(None, (*said, missing))))
        return ExitCode.FINISHED

    def _make(self, name: str) -> Stage | None:
        """Makes a stage; None if it needs learning rates that are not known yet."""
        rates: Rates = {}
        if name not in (CONTROLS, KNEE):
            rates = find_rates(self._plan, read_records(self._maker.make(KNEE, {}).arms))
            if rates.keys() != self._plan.lock_step.methods.keys():
                return None
        return self._maker.make(name, rates)

    def _run_stage(self, stage: Stage, interrupts: Interrupts) -> bool:
        """Runs the unfinished jobs of a stage; True if it was told to stop."""
        programs, runs = _pending_programs(stage), _pending_runs(stage)
        print(f'{stage.name}: {len(programs)} programs and {len(runs)} runs are left', flush=True)
        if self._run_programs(programs, self._jobs or self._plan.jobs, interrupts):
            return True
        runner = Runner(runs, self._jobs or self._plan.natural.jobs, self._workdir, read_state)
        runner.run(interrupts)
        if runner.is_stopping:
            return True
        scoring = self._maker.scoring(stage)
        unscored = [] if scoring.read_state().is_finished else [scoring]
        return self._run_programs(unscored, 1, interrupts)

    def _run_programs(self, programs: Sequence[Program], jobs: int, interrupts: Interrupts) -> bool:
        for program in programs:
            program.write_list()
        runner = Runner(programs, jobs, self._workdir, lambda program: program.read_state())
        runner.run(interrupts)
        return runner.is_stopping

    def _require_same(self) -> None:
        """Raises ConfigError if the directory holds anything but this study, started or not; writes nothing."""
        path, another = self._workdir / RECORD, 'give another --workdir'
        if not path.exists():
            there = [entry.name for entry in self._workdir.iterdir()] if self._workdir.is_dir() else []
            if others := sorted(name for name in there if not name.startswith('.')):
                raise ConfigError(
                    f'--workdir={self._workdir} holds {others[0]} and no {RECORD}, so it is no study; {another}'
                )
            return
        saved, wanted = (dict(flatten(values)) for values in (files.read_json(path, another), self._record))
        for field in sorted({*saved, *wanted}):
            before, after = (str(values.get(field, 'not set')) for values in (saved, wanted))
            if before != after:
                raise ConfigError(
                    f'--workdir={self._workdir} was begun with {field}={before}, and now it is {after}; set it back, '
                    f'or {another}'
                )

    def _write(self, records: Records) -> None:
        """Writes the table, the figures if matplotlib is installed, and the page."""
        files.write_text(self._workdir / TABLE, _render_csv(records))
        pictures: list[str] = []
        if importlib.util.find_spec('matplotlib') is None:
            print(f'no figures: {describe_install("plots")}', file=sys.stderr)
        else:
            from areal_jax.studies.figures import write_figures

            pictures = write_figures(self._plan, records, self._workdir)
        page = render_page(self._source, self._form, self._plan, records, pictures, _describe_machine())
        files.write_text(self._workdir / FILE, page)


def _pending_programs(stage: Stage) -> list[Program]:
    return [program for program in stage.programs if not program.read_state().is_finished]


def _pending_runs(stage: Stage) -> list[Arm]:
    return [arm for arm in stage.runs if not read_state(arm).is_finished]


def _describe_unfinished(unfinished: Sequence[Record], count: int) -> str:
    first = unfinished[0]
    return (
        f'{len(unfinished)} of {count} arms have not finished, the first {first.factors.stage}/{first.factors.name} '
        f'({first.state.reason or "not started"}); {FILE} lists them, and the same command goes on with them'
    )


def _describe_machine() -> str:
    return f'{os.cpu_count()} cores ({platform.machine()}), jax {importlib.metadata.version("jax")}.'


def _render_csv(records: Records) -> str:
    """Renders a row for each arm, with all digits; unknown values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    factors = [field.name for field in dataclasses.fields(records[0].factors)] if records else []
    numbers = ('score', 'area', 'tokens_per_second', 'age', 'oldest', 'mismatch', 'drift', 'split_cost', 'weights')
    writer.writerow([*factors, 'state', *numbers])
    for record in records:
        values = [*(getattr(record.factors, name) for name in factors), record.state.word]
        values += [getattr(record, name) for name in numbers]
        writer.writerow(['' if value is None else value for value in values])
    return text.getvalue()
