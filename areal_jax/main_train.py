"""Train: python -m areal_jax.main_train --config=FILE --workdir=DIR [--resume] [--config.section.field=value ...]."""

from __future__ import annotations

import pathlib

from absl import app, flags, logging
from ml_collections import config_flags

from areal_jax.errors import ExitCode

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Experiment file, e.g. configs/tiny_cpu.py.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory for everything the run leaves.')
_PROCESS_ID = flags.DEFINE_integer('process_id', None, 'Which of distributed.processes this is; 0 drives the run.')
_RESUME = flags.DEFINE_bool('resume', False, 'Go on from the newest checkpoint in the workdir, or start again.')


def main(arguments: list[str]) -> int:
    if len(arguments) > 1:
        raise app.UsageError(f'unexpected arguments: {arguments[1:]}')
    from areal_jax.app.memory import return_freed_memory

    return_freed_memory()
    from areal_jax.app.ending import end_command

    return end_command(_train, doing=f'writing to {_WORKDIR.value}')


def _train() -> int:
    from areal_jax.app.processes import follow_run, join_processes
    from areal_jax.app.session import Session
    from areal_jax.app.sft import SftSession

    workdir = pathlib.Path(str(_WORKDIR.value))
    source = config_flags.get_config_filename(flags.FLAGS['config'])
    if join_processes(_CONFIG.value, _PROCESS_ID.value):
        follow_run(_CONFIG.value)
        return ExitCode.FINISHED
    kind = SftSession if _CONFIG.value.loss.objective == 'sft' else Session
    session = kind(_CONFIG.value, workdir, resume=_RESUME.value, source=source)
    report = session.train()
    if report is None:
        print(f'stopped; the same command with --resume goes on from {workdir}/checkpoints')
        return ExitCode.STOPPED
    print((workdir / 'report.md').read_text())
    return ExitCode.FINISHED


def run() -> None:
    """Entry point of the console script."""
    logging.set_verbosity(logging.WARNING)
    flags.mark_flags_as_required(['config', 'workdir'])
    app.run(main)


if __name__ == '__main__':
    run()
