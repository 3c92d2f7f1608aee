"""areal-simulate: runs the production controller on a modelled cluster, without weights."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_jax.app.process.ending import Interrupts
from areal_jax.commands.command import Command, answer, run_command
from areal_jax.errors import ExitCode, UserError

if TYPE_CHECKING:
    from absl import flags


def main(argv: Sequence[str], interrupts: Interrupts) -> int:
    """Runs the simulation, or calibrates prices; returns the exit code."""
    answer(COMMAND, argv[1:])

    from areal_jax.app.command_line import parse_flags, parse_train_command

    values = _define_flags()
    if any(word.lstrip('-').startswith('calibrate') for word in argv[1:]):
        parse_flags(argv, values)
        return _calibrate(values)
    command = parse_train_command(argv, values)

    from areal_jax.app.process.setup import set_up_process
    from areal_jax.app.run.reports import tell_end
    from areal_jax.app.simulate.simulated_site import build_simulation

    set_up_process()
    workdir = pathlib.Path(values.workdir)
    run = build_simulation(
        command.config,
        workdir,
        resume=values.resume,
        source=command.source,
        overrides=command.overrides,
        interrupts=interrupts,
    )
    report = run.train()
    if report is None:
        print('stopped; the same command with --resume goes on')
        return ExitCode.STOPPED
    print(tell_end(report, workdir, whole=values.report, follow=''))
    return ExitCode.FINISHED


def _calibrate(values: flags.FlagValues) -> int:
    """Fits prices, predicts the held-out runs, and prints both; returns the exit code."""
    from areal_jax.app.simulate.calibrated_runs import as_json, calibrate_runs, describe_table, predict_run
    from areal_jax.files import write_json

    if values.out is None:
        raise UserError('--calibrate writes a table of prices: name its file with --out=FILE.json')
    out = pathlib.Path(values.out)
    table = calibrate_runs([pathlib.Path(run) for run in values.calibrate], out)
    print(describe_table(table), flush=True)
    predictions = []
    for run in values.predict:
        predictions.append(predict_run(pathlib.Path(run), out))
        print(predictions[-1].describe(), flush=True)
    if values.json:
        write_json(pathlib.Path(values.json), as_json(table, predictions))
    return ExitCode.FINISHED


def _define_flags() -> flags.FlagValues:
    """Defines the flags of this command except --config."""
    from absl import flags

    from areal_jax.app.command_line import define_path, define_paths

    values = flags.FlagValues()
    define_path(values, 'workdir', 'Directory for everything the simulation leaves.')
    flags.DEFINE_bool('resume', False, 'Go on from the newest checkpoint in the workdir.', flag_values=values)
    flags.DEFINE_bool(
        'report', False, 'Print the whole report at the end, as into a pipe; else some lines.', flag_values=values
    )
    define_paths(values, 'calibrate', 'Real runs, to whose logs prices are fitted.')
    define_paths(values, 'predict', 'Real runs that were left out: simulated with these prices.')
    define_path(values, 'out', 'Where the table of prices goes, for simulation.prices.')
    define_path(values, 'json', 'Where table and predictions go.')
    return values


COMMAND = Command(
    program='areal-simulate',
    purpose='Simulates a run on a modelled cluster: the same controller, without weights; leaves log and report.',
    usage=(
        '--config=FILE[:ARGUMENT] --workdir=DIR [--resume] [--config.SECTION.FIELD=VALUE ...]',
        '--calibrate=RUN,RUN --out=FILE [--predict=RUN,RUN] [--json=FILE]',
    ),
    flags=_define_flags,
    examples="""
    # sixteen accelerators and a model of 1.5 billion parameters, in about a minute
    areal-simulate --config=configs/simulate/sixteen.py --workdir=runs/sixteen
    # fit prices to two runs, and predict a third with them
    areal-simulate --calibrate=runs/one,runs/two --out=prices.json --predict=runs/three
    """,
    fields=(
        *('simulation.prices', 'simulation.chip', 'simulation.model', 'simulation.answers', 'simulation.prompts'),
        *('cluster.learner', 'cluster.engines', 'rollout.slots', 'rollout.max_running_groups', 'staleness.eta'),
        *('learner.groups_per_update', 'rollout.group_size', 'run.steps', 'checkpoint.every'),
    ),
)


def run() -> None:
    """Entry point of the console script."""
    run_command(main, 'writing to the workdir')


if __name__ == '__main__':
    run()
