"""Train: python -m areal_jax.main_train --config=FILE --workdir=DIR [--resume] [--config.section.field=value ...]."""

from __future__ import annotations

import pathlib

from absl import app, flags

from areal_jax.app.command_line import CommandLine, flags_parser, parse_train_command
from areal_jax.app.noise import silence_libraries
from areal_jax.errors import ExitCode

_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory for everything the run leaves.')
_PROCESS_ID = flags.DEFINE_integer('process_id', None, 'Which of distributed.processes this is; 0 drives the run.')
_RESUME = flags.DEFINE_bool('resume', False, 'Go on from the newest checkpoint in the workdir.')


def main(command: CommandLine) -> int:
    from areal_jax.app.memory import return_freed_memory

    return_freed_memory()
    from areal_jax.app.ending import end_command

    return end_command(lambda: _train(command), doing=f'writing to {_WORKDIR.value}')


def _train(command: CommandLine) -> int:
    if command.config.telemetry.progress:
        print('starting', flush=True)  # importing jax takes seconds
    from areal_jax.app.processes import follow_run, join_processes
    from areal_jax.app.session import Session
    from areal_jax.app.sft import SftSession

    workdir = pathlib.Path(str(_WORKDIR.value))
    if join_processes(command.config, _PROCESS_ID.value):
        follow_run(command.config)
        return ExitCode.FINISHED
    kind = SftSession if command.config.loss.objective == 'sft' else Session
    session = kind(command.config, workdir, resume=_RESUME.value, source=command.source, overrides=command.overrides)
    report = session.train()
    if report is None and not session.resumable:
        print('stopped; a lock-step run (staleness.schedule) keeps no checkpoint: start anew in another --workdir')
        return ExitCode.STOPPED
    if report is None:
        print(f'stopped; the same command with --resume goes on from {workdir}/checkpoints')
        return ExitCode.STOPPED
    print((workdir / 'report.md').read_text())
    return ExitCode.FINISHED


def run() -> None:
    """Entry point of the console script."""
    silence_libraries()
    app.run(main, flags_parser=flags_parser(parse_train_command))


if __name__ == '__main__':
    run()
