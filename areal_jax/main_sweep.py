"""areal-sweep: runs a sweep or a study, and makes its table.

FILE has get_config() and get_sweep(), which returns {name of an arm: {'section.field': value}}. The same command
continues after any interruption, and rebuilds the table of a finished sweep. A FILE with get_study() in place of
get_sweep() is a study, docs/study.md; --quick runs its short form. A FILE with get_programs() trains its arms as
programs of many arms, docs/frictions.md; it has a short form too.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_jax.app.process.ending import Interrupts
from areal_jax.commands.command import EXITS_OF_TRAINING, FIELDS_OF_TRAINING, Command, answer, run_command
from areal_jax.config.fields import ConfigError
from areal_jax.errors import ExitCode, UserError
from areal_jax.installation import describe_install

if TYPE_CHECKING:
    from absl import flags

    from areal_jax.app.command_line import CommandLine
    from areal_jax.app.sweep.arms import Arm
    from areal_jax.app.sweep.sweep_results import Results
    from areal_jax.studies.stages import ProgramSweep
    from areal_jax.studies.study import Study


def main(argv: Sequence[str], interrupts: Interrupts) -> int:
    """Runs the unfinished arms and writes the table; returns the exit code."""
    answer(COMMAND, argv[1:])

    from areal_jax.app.command_line import defines, parse_command, require_workdir
    from areal_jax.app.process.setup import silence_libraries
    from areal_jax.app.sweep.arms import (
        Runner,
        measure_arm,
        note_sweep,
        read_arms,
        read_state,
        render_command,
        require_same_sweep,
        select_arms,
    )
    from areal_jax.files import DirectoryLock

    silence_libraries()
    values = define_flags()
    command = parse_command(argv, values)
    require_workdir(values.workdir)
    if values.jobs is not None and values.jobs < 1:
        raise ConfigError(f'--jobs={values.jobs} must be at least 1')
    workdir = pathlib.Path(values.workdir)
    if defines(command.source, 'get_study'):
        return _run_study(command, values, workdir, interrupts)
    if defines(command.source, 'get_programs'):
        return _run_programs(command, values, workdir, interrupts)
    if values.quick:
        raise ConfigError(f'--quick is for a study, and {command.source} has no get_study(): leave it out')
    arms = read_arms(command, workdir)
    selected = select_arms(arms, values.only)
    require_same_sweep(workdir, command.source, arms)
    states = {arm.name: read_state(arm) for arm in selected}
    pending = [arm for arm in selected if not states[arm.name].is_finished]
    if values.dry_run:
        for arm in pending:
            print(render_command(arm, states[arm.name].holds_updates))
        print(f'{len(selected) - len(pending)} of {len(selected)} arms have finished', file=sys.stderr)
        return ExitCode.FINISHED
    lock = DirectoryLock(workdir)
    try:
        note_sweep(workdir, command.source, arms)
        runner = Runner(pending, values.jobs or 1, workdir, read_state, measure_arm)
        runner.run(interrupts)
        results = write_results(command.source, arms, workdir)
        return _end({arm.name for arm in selected}, results, workdir, runner.is_stopping)
    finally:
        lock.release()


def _run_study(command: CommandLine, values: flags.FlagValues, workdir: pathlib.Path, interrupts: Interrupts) -> int:
    """Checks all arms, runs the unfinished ones and writes the page; returns the exit code."""
    from areal_jax.studies.study import Study

    if values.only:
        raise ConfigError(f'--only={values.only}: the stages of a study need each other; leave it out')
    study = Study(command, 'quick' if values.quick else 'full', workdir, values.jobs)
    return _run_all(study, values, workdir, interrupts)


def _run_programs(command: CommandLine, values: flags.FlagValues, workdir: pathlib.Path, interrupts: Interrupts) -> int:
    """Checks all arms, trains the unfinished ones and writes the scores; returns the exit code."""
    from areal_jax.studies.stages import ProgramSweep

    if values.only:
        raise ConfigError(f'--only={values.only}: arms of a program are trained together; leave it out')
    sweep = ProgramSweep(command, 'quick' if values.quick else 'full', workdir, values.jobs or 1)
    return _run_all(sweep, values, workdir, interrupts)


def _run_all(
    runs: Study | ProgramSweep, values: flags.FlagValues, workdir: pathlib.Path, interrupts: Interrupts
) -> int:
    """Prints the commands, or runs them with the directory locked; returns the exit code."""
    from areal_jax.files import DirectoryLock

    if values.dry_run:
        runs.print_commands()
        return ExitCode.FINISHED
    lock = DirectoryLock(workdir)
    try:
        return runs.run(interrupts)
    finally:
        lock.release()


def write_results(source: str, arms: Sequence[Arm], workdir: pathlib.Path) -> Results:
    """Writes results.csv, differences.csv, results.md and, if their libraries are installed, plots and results.html."""
    from areal_jax.app.sweep.sweep_page import FILE, PAGE, render_html, render_page, write_plots
    from areal_jax.app.sweep.sweep_results import build_results, write_tables
    from areal_jax.files import write_text
    from areal_jax.report.pages.web_page import describe_missing_library

    results = build_results(source, arms)
    write_tables(results, workdir)
    pictures: list[str] = []
    if importlib.util.find_spec('matplotlib') is None:
        print(f'no plots: {describe_install("plots")}', file=sys.stderr)
    else:
        pictures = write_plots(results, workdir)
    write_text(workdir / FILE, render_page(results, pictures))
    if missing := describe_missing_library(PAGE):
        print(missing, file=sys.stderr)
    else:
        write_text(workdir / PAGE, render_html(results))
    return results


def _end(selected: set[str], results: Results, workdir: pathlib.Path, is_stopped: bool) -> int:
    """Prints a summary and returns the exit code; raises UserError for failed arms."""
    from areal_jax.app.sweep.sweep_page import FILE, describe_missing, summarize_sweep

    print('\n'.join(summarize_sweep(results, workdir)) if sys.stdout.isatty() else workdir / FILE, flush=True)
    if is_stopped:
        print(f'stopped; the same command goes on. {describe_missing(results.arms)}')
        return ExitCode.STOPPED
    chosen = [result for result in results.arms if result.arm.name in selected]
    if missing := describe_missing(chosen):
        raise UserError(f'{missing}; the same command goes on with them')
    if untrained := [result.arm.name for result in chosen if not result.state.has_trained]:
        print(f'error: no optimizer step was made by {", ".join(untrained)}', file=sys.stderr)
        return ExitCode.NOTHING_TRAINED
    return ExitCode.FINISHED


def define_flags() -> flags.FlagValues:
    """Defines the flags of this command except --config."""
    from absl import flags

    from areal_jax.app.command_line import define_path

    values = flags.FlagValues()
    define_path(values, 'workdir', 'Directory of the sweep: one workdir for each arm, and the table.')
    flags.DEFINE_integer(
        'jobs', None, 'How many arms run at a time: 1 without it, of a study as it plans.', flag_values=values
    )
    flags.DEFINE_bool('quick', False, 'The short form of a study.', flag_values=values)
    flags.DEFINE_string('only', '', "Arms to run, by name or pattern: 'eta4_*,eta0_seed1'.", flag_values=values)
    flags.DEFINE_bool(
        'dry_run', False, 'Check every arm, print the commands of those to run, write nothing.', flag_values=values
    )
    return values


COMMAND = Command(
    program='areal-sweep',
    purpose='Trains every arm of a sweep or a study, a run for each, and makes the table that compares them.',
    usage=(
        '--config=FILE[:ARGUMENT] --workdir=DIR [--jobs=N] [--only=ARMS] [--quick] [--dry_run] '
        '[--config.SECTION.FIELD=VALUE ...]',
    ),
    flags=define_flags,
    examples="""
    # what a sweep would run
    areal-sweep --config=configs/sweeps/tiny.py --workdir=runs/sweep --dry_run
    # two arms at a time; the same command goes on after a stop
    areal-sweep --config=configs/sweeps/tiny.py --workdir=runs/sweep --jobs=2
    """,
    fields=FIELDS_OF_TRAINING,
    exits={**EXITS_OF_TRAINING, ExitCode.STOPPED: 'stopped by a signal: the same command goes on'},
    notes='FILE has get_sweep(), get_study() or get_programs() beside get_config(). Fields that the command line sets '
    'hold for all arms.',
)


def run() -> None:
    """Entry point of the console script."""
    run_command(main, 'writing to the workdir of the sweep', 'the same command goes on')


if __name__ == '__main__':
    run()
