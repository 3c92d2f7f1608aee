"""Starts the processes of a run on this machine.

They are a trainer and its servers, or, where cluster.learner names hosts, a controller, so many learner processes and
the engines (roles.py). A server that dies or hangs is started again. Ctrl-C stops the run, which saves its state first.
If this process is killed, all others end.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from absl import flags
from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.command_line import define_path, parse_train_command
from areal_jax.app.process.accelerator import VISIBLE, find_gpus
from areal_jax.app.process.ending import RESUME, end_command
from areal_jax.app.roles.own_server import SERVERS
from areal_jax.commands.command import EXITS_OF_TRAINING, FIELDS_OF_ROLES, ROLES_OF_TINY, Command, answer
from areal_jax.config import validate
from areal_jax.config.cluster import has_roles, parse_engines
from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import SERVER, Launch, find_server, name_launched, resolve
from areal_jax.errors import ExitCode

from .gpus import share_gpus
from .heartbeats import Heartbeats
from .programs import Server, Variables, describe_command
from .roles import run_roles
from .supervisor import run_together

TRAINER = 'areal_jax.main_train'


def main(argv: Sequence[str]) -> int:
    """Parse, start, wait; returns the exit code of the trainer."""
    answer(COMMAND, argv[1:])
    values = _define_flags()
    config = parse_train_command(argv, values).config
    workdir = pathlib.Path(values.workdir)
    words = [word for word in argv[1:] if word.strip('-').removeprefix('no').partition('=')[0] != 'dry_run']
    if has_roles(config):
        rest = [word for word in words if word.strip('-').removeprefix('no').partition('=')[0] != 'resume']
        return run_roles(config, workdir, rest, dict(os.environ), resume=values.resume, dry_run=values.dry_run)
    require_startable(config)
    trainer = [sys.executable, '-m', TRAINER, *words]
    visible = {name: {VISIBLE: gpus} for name, gpus in share_gpus(config, find_gpus(os.environ)).items()}
    variables = visible.get('learner-0', {})
    if values.dry_run:
        servers = plan_servers(config, workdir, visible)
        print(describe_command(trainer, variables), *(server.describe() for server in servers), sep='\n')
        return ExitCode.FINISHED
    lock = files.DirectoryLock(workdir / SERVERS)
    try:
        if prepare := _find_launch(config).prepare:
            resolve(prepare, SERVER)(config, workdir)
        return run_together(trainer, plan_servers(config, workdir, visible), Heartbeats(workdir), variables)
    finally:
        lock.release()


def require_startable(config: config_dict.ConfigDict) -> None:
    """Raises UserError for a run that one trainer and servers of this machine cannot make."""
    launch = _find_launch(config)
    validate(config)
    if launch.require:
        resolve(launch.require, SERVER)()


def _find_launch(config: config_dict.ConfigDict) -> Launch:
    kind = find_server(config.rollout.server)
    if kind.launch is None:
        raise ConfigError(
            f'rollout.server={config.rollout.server!r} has no servers that launch.local starts; use rollout.server='
            f'{name_launched()}, or start the trainer alone with python -m areal_jax.main_train'
        )
    return kind.launch


def plan_servers(
    config: config_dict.ConfigDict, workdir: pathlib.Path, variables: Mapping[str, Variables]
) -> list[Server]:
    """One server for each of cluster.engines; `variables` are added to the environment of 'engine-0' and so on."""
    directory = workdir / SERVERS
    launch = _find_launch(config)
    plan = resolve(launch.plan, SERVER)
    return [
        Server(
            str(number),
            [sys.executable, '-m', *plan(config, workdir, number), f'--name={number}'],
            functools.partial(pathlib.Path, directory, f'{number}.log'),
            variables.get(f'engine-{number}', {}),
            registers=launch.registers_at_start,
        )
        for number in range(parse_engines(config.cluster.engines).count)
    ]


def _define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    define_path(values, 'workdir', 'Directory for everything the run leaves.')
    flags.DEFINE_bool('resume', False, 'Go on from the newest checkpoint in the workdir.', flag_values=values)
    flags.DEFINE_bool('dry_run', False, 'Print the commands, one a line, and start nothing.', flag_values=values)
    return values


COMMAND = Command(
    program='python -m launch.local',
    purpose='Starts a run and its servers, or all roles of a run, on this machine, and restarts what dies.',
    usage=('--config=FILE[:ARGUMENT] --workdir=DIR [--resume] [--dry_run] [--config.SECTION.FIELD=VALUE ...]',),
    flags=_define_flags,
    examples=f"""
    # a trainer and a server of this project
    python -m launch.local --config=configs/tiny_cpu.py --config.rollout.server=own \
        --config.publication.channel=files --workdir=runs/served
    # the commands of a run in roles: a controller, a learner process and an engine
    python -m launch.local {ROLES_OF_TINY} --workdir=runs/roles --dry_run
    """,
    fields=FIELDS_OF_ROLES,
    exits=EXITS_OF_TRAINING,
)


def run() -> None:
    """Entry point of `python -m launch.local`."""
    sys.exit(end_command(lambda: main(sys.argv), doing='writing to the workdir', again=RESUME))


if __name__ == '__main__':
    run()
