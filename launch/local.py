"""Starts servers and trainer of a run on this machine: python -m launch.local --config=FILE --workdir=DIR [--resume].

Further flags, --config.section.field=value, go to all of them. A dead server is started again. Ctrl-C stops the run,
whose trainer saves its state first. If this process is killed, all others end.
"""

from __future__ import annotations

import functools
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence

from absl import flags

from areal_jax.app.command_line import CommandLine, parse_train_command
from areal_jax.app.ending import end_command
from areal_jax.config.cluster import parse_engines
from areal_jax.config.ranges import ConfigError
from areal_jax.files import DirectoryLock
from areal_jax.publication.versions import find_directory, list_versions
from launch.programs import Server
from launch.supervisor import run_together

TRAINER, SERVER = 'areal_jax.main_train', 'areal_jax.main_serve'
LOGS = 'servers'  # in the workdir
_OF_TRAINER = re.compile(r'--?(no)?(workdir|resume)(=.*)?', re.DOTALL)


def main(argv: Sequence[str]) -> int:
    """Parse, start, wait; returns the exit code, that of the trainer."""
    values = flags.FlagValues()
    flags.DEFINE_string('workdir', None, 'Directory for everything the run leaves.', flag_values=values)
    flags.DEFINE_bool('resume', False, 'Go on from the newest checkpoint in the workdir.', flag_values=values)
    command = parse_train_command(argv, values)
    words = list(values.read_flags_from_files(argv, force_gnu=False))
    workdir = pathlib.Path(values.workdir)
    lock = DirectoryLock(workdir / LOGS)
    try:
        trainer = [sys.executable, '-m', TRAINER, *words[1:]]
        return run_together(trainer, plan_servers(command, words[1:], workdir))
    finally:
        lock.release()


def plan_servers(command: CommandLine, words: Sequence[str], workdir: pathlib.Path) -> list[Server]:
    """The servers of cluster.engines; each starts from the newest version, so none before the first is published."""
    config = command.config
    if config.publication.channel != 'files':
        raise ConfigError(
            f'publication.channel={config.publication.channel!r} reaches engines in the process of the trainer only: '
            "servers load weights from disk, use publication.channel='files'"
        )
    if config.distributed.processes > 1:
        raise ConfigError(
            f'distributed.processes={config.distributed.processes}: launch.local starts one trainer; use '
            'distributed.processes=1, or start trainers and servers one by one'
        )
    versions = find_directory(config.publication.directory, workdir)
    shared = list(words_of_servers(words))
    return [
        Server(
            str(number),
            functools.partial(server_command, shared, versions, workdir),
            workdir / LOGS / f'{number}.log',
        )
        for number in range(parse_engines(config.cluster.engines).count)
    ]


def server_command(words: Sequence[str], versions: pathlib.Path, workdir: pathlib.Path) -> list[str] | None:
    """None where no version has been published yet."""
    found = list(list_versions(versions).values())
    if not found:
        return None
    own = [f'--model={found[-1]}', '--port=0', f'--workdir={workdir}']
    return [sys.executable, '-m', SERVER, *words, *own]


def words_of_servers(words: Sequence[str]) -> Iterator[str]:
    """The words of the command line that servers take too: without --workdir and --resume."""
    remaining = iter(words)
    for word in remaining:
        match = _OF_TRAINER.fullmatch(word)
        if match is None:
            yield word
        elif match[2] == 'workdir' and match[3] is None:
            next(remaining)  # its value


def run() -> None:
    """Entry point of `python -m launch.local`."""
    sys.exit(end_command(lambda: main(sys.argv), doing='writing to the workdir'))


if __name__ == '__main__':
    run()
