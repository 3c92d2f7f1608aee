"""Train: python -m areal_jax.main_train --config=FILE --workdir=DIR [--resume] [--config.section.field=value ...]."""

from __future__ import annotations

import pathlib
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from areal_jax.app.ending import ProcessEnd, describe_untrained, end_command
from areal_jax.app.interrupt import Interrupts
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
    with Interrupts() as interrupts:
        return end_command(lambda: _train(interrupts), doing=f'writing to {_WORKDIR.value}')


def _train(interrupts: Interrupts) -> int:
    from areal_jax.app.processes import follow_run, join_processes
    from areal_jax.app.session import Session
    from areal_jax.app.sft import SftSession

    workdir = pathlib.Path(str(_WORKDIR.value))
    source = config_flags.get_config_filename(flags.FLAGS['config'])
    if join_processes(_CONFIG.value, _PROCESS_ID.value):
        follow_run(_CONFIG.value)
        return ExitCode.FINISHED
    kind = SftSession if _CONFIG.value.loss.objective == 'sft' else Session
    session = kind(_CONFIG.value, workdir, resume=_RESUME.value, source=source, interrupts=interrupts)
    report = session.train()
    if report is None:
        print(f'stopped; the same command with --resume goes on from {workdir}/checkpoints')
        return ExitCode.STOPPED
    print((workdir / 'report.md').read_text())
    if not report['optimizer_steps']['applied']:
        print(f'error: {describe_untrained(report)}', file=sys.stderr)
        return ExitCode.NOTHING_TRAINED
    return ExitCode.FINISHED


def run() -> None:
    """Entry point of the console script."""
    end = ProcessEnd()
    logging.set_verbosity(logging.WARNING)
    flags.mark_flags_as_required(['config', 'workdir'])
    app.run(lambda arguments: end.note(main(arguments)))


if __name__ == '__main__':
    run()
