"""Train: python -m areal_jax.main_train --config=FILE --workdir=DIR [--resume] [--config.section.field=value ...]."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from areal_jax.app.ending import ProcessEnd, end_command, judge_training
from areal_jax.app.interrupt import Interrupts
from areal_jax.errors import ExitCode

# Slow imports come after the signal handlers are set and the command line is parsed.


def main(argv: Sequence[str], interrupts: Interrupts) -> int:
    """Parse, build, run; returns the exit code."""
    from absl import flags

    from areal_jax.app.command_line import parse_train_command
    from areal_jax.app.noise import silence_libraries

    silence_libraries()
    values = flags.FlagValues()
    flags.DEFINE_string('workdir', None, 'Directory for everything the run leaves.', flag_values=values)
    flags.DEFINE_bool('resume', False, 'Go on from the newest checkpoint in the workdir.', flag_values=values)
    flags.DEFINE_integer(
        'process_id', None, 'Which of the hosts of cluster.learner this is; 0 drives the run.', flag_values=values
    )
    command = parse_train_command(argv, values)

    from areal_jax.app.garbage import space_full_collections
    from areal_jax.app.memory import return_freed_memory

    return_freed_memory()  # before jax is imported
    space_full_collections()

    if command.config.telemetry.progress:
        print('starting', flush=True)  # importing jax takes seconds

    from areal_jax.app.processes import follow_run, join_processes
    from areal_jax.app.training import build_run

    if join_processes(command.config, values.process_id):
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
        print(f'stopped; the same command with --resume goes on from {workdir}/checkpoints')
        return ExitCode.STOPPED
    print((workdir / 'report.md').read_text())
    return judge_training(report)


def run() -> None:
    """Entry point of the console script."""
    end = ProcessEnd()
    with Interrupts() as interrupts:
        code = end_command(lambda: main(sys.argv, interrupts), doing='writing to the workdir')
        sys.exit(end.note(code))


if __name__ == '__main__':
    run()
