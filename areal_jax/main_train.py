"""areal-train: makes a run in this process, from a config file to its report."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_jax.app.process.ending import Interrupts, judge_training
from areal_jax.commands.command import EXITS_OF_TRAINING, FIELDS_OF_TRAINING, Command, answer, run_command
from areal_jax.errors import ExitCode, UserError

if TYPE_CHECKING:
    from absl import flags
    from ml_collections import config_dict


def main(argv: Sequence[str], interrupts: Interrupts) -> int:
    """Builds and trains the run; returns the exit code."""
    answer(COMMAND, argv[1:])

    from areal_jax.app.command_line import parse_train_command
    from areal_jax.app.process.setup import set_up_process, silence_libraries

    silence_libraries()
    values = _define_flags()
    command = parse_train_command(argv, values, describes=True)
    if values.accelerator is not None and not values.dry_run:
        raise UserError(f'--accelerator={values.accelerator!r} is for --dry_run; a run takes the devices that it finds')

    set_up_process()

    if command.config.telemetry.progress:
        print('starting', flush=True)  # importing jax takes seconds

    if values.dry_run:
        return _describe(command.config, values.accelerator)

    from areal_jax.app.process.accelerator import use_xla_flags

    use_xla_flags(command.config)

    from areal_jax.app.library import build_run
    from areal_jax.app.roles.learner_role import follow_run, join_processes
    from areal_jax.app.run.reports import tell_end
    from areal_jax.native.compiled_library import keep_blocks

    follows = join_processes(command.config, values.process_id)
    keep_blocks()
    if follows:
        follow_run(command.config)
        return ExitCode.FINISHED
    workdir = pathlib.Path(values.workdir)
    session = build_run(
        command.config,
        workdir,
        resume=values.resume,
        source=command.source,
        overrides=command.overrides,
        interrupts=interrupts,
    )
    report = session.train()
    if report is None:
        print(_describe_stop(workdir))
        return ExitCode.STOPPED
    print(tell_end(report, workdir, whole=values.report))
    return judge_training(report)


def _describe(config: config_dict.ConfigDict, accelerator: str | None) -> ExitCode:
    """Prints the plan of a run, and with an accelerator whether it fits there."""
    from areal_jax.app.parts.dry_run import count_devices, describe_run, judge, plan_run, render_verdicts

    if accelerator is None:
        print(describe_run(plan_run(config)))
        return ExitCode.FINISHED
    from areal_jax.aot.topology import describe_accelerator

    topology = describe_accelerator(accelerator, count_devices(config))
    planned = plan_run(config, topology.devices)
    verdicts = judge(planned, topology.memory_bytes)
    print(describe_run(planned))
    print(f'\n{render_verdicts(verdicts, config, f"{len(topology.devices)} x {topology.chip.name}")}')
    return ExitCode.FINISHED if all(one.fits for one in verdicts) else ExitCode.USER_ERROR


def _describe_stop(workdir: pathlib.Path) -> str:
    if any((workdir / 'checkpoints').glob('step_*')):
        return f'stopped; the same command with --resume goes on from {workdir}/checkpoints'
    return 'stopped before the first update; the same command with --resume starts again'


def _define_flags() -> flags.FlagValues:
    """Defines the flags of this command except --config."""
    from absl import flags

    from areal_jax.app.command_line import define_path

    values = flags.FlagValues()
    define_path(values, 'workdir', 'Directory for everything the run leaves.')
    flags.DEFINE_bool('resume', False, 'Go on from the newest checkpoint in the workdir.', flag_values=values)
    flags.DEFINE_bool(
        'dry_run', False, 'Print shapes, shardings and memory of a device; draw and write nothing.', flag_values=values
    )
    flags.DEFINE_string(
        'accelerator',
        None,
        "For --dry_run: devices that are not here, 'H200', '8 x H100' or 'v5p:2x4x4', and whether the run fits.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        'report', False, 'Print the whole report at the end, as into a pipe; else eight lines.', flag_values=values
    )
    flags.DEFINE_integer(
        'process_id', None, 'Which of the hosts of cluster.learner this is; 0 drives the run.', flag_values=values
    )
    return values


COMMAND = Command(
    program='areal-train',
    purpose='Trains a model by reinforcement learning or by demonstrations, and leaves weights and a report.',
    usage=(
        '--config=FILE[:ARGUMENT] --workdir=DIR [--resume] [--report] [--config.SECTION.FIELD=VALUE ...]',
        '--config=FILE[:ARGUMENT] --dry_run [--accelerator=DEVICES] [--config.SECTION.FIELD=VALUE ...]',
    ),
    flags=_define_flags,
    examples="""
    # a small run, in about a minute on a CPU
    areal-train --config=configs/tiny_cpu.py --workdir=runs/tiny
    # more updates of it, with the newest checkpoint as start
    areal-train --config=configs/tiny_cpu.py --workdir=runs/tiny --resume --config.run.steps=30
    # whether a run fits an accelerator that is not here
    areal-train --config=configs/tiny_cpu.py --dry_run --accelerator=v5e
    """,
    fields=FIELDS_OF_TRAINING,
    exits={
        **EXITS_OF_TRAINING,
        ExitCode.USER_ERROR: f'{EXITS_OF_TRAINING[ExitCode.USER_ERROR]}, or a run that does not fit --accelerator',
    },
)


def run() -> None:
    """Entry point of the console script."""
    run_command(main, 'writing to the workdir')


if __name__ == '__main__':
    run()
