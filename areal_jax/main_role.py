"""areal-role: runs one process of a run in roles; started by an executor (docs/cluster/index.md)."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from areal_jax.app.process.ending import Interrupts, code_of_stopped_server
from areal_jax.commands.command import (
    EXITS_OF_TRAINING,
    FIELDS_OF_ROLES,
    ROLES_OF_TINY,
    Command,
    answer,
    run_command,
)
from areal_jax.errors import ExitCode, UserError

if TYPE_CHECKING:
    from absl import flags

    from areal_jax.app.command_line import CommandLine
    from areal_jax.app.roles.roles import RoleProcess
    from areal_jax.config.cluster import Role

# A controller never imports jax.


def main(argv: Sequence[str], interrupts: Interrupts) -> int:
    """Checks the directory and runs the role; returns the exit code."""
    answer(COMMAND, argv[1:])

    from areal_jax.app.command_line import parse_train_command
    from areal_jax.app.process.setup import set_up_process, silence_libraries
    from areal_jax.app.roles.roles import require_role
    from areal_jax.registry import require_usable

    silence_libraries()
    values = _define_flags()
    command = parse_train_command(argv, values)
    process = _parse_process(values)
    require_role(command.config, process, values.count)
    require_usable(process.workdir)
    set_up_process()
    return ROLES[process.role](command, process, interrupts)


def _control(command: CommandLine, process: RoleProcess, interrupts: Interrupts) -> int:
    from areal_jax.app.roles.controller_role import control

    return control(command, process, interrupts)


def _learn(command: CommandLine, process: RoleProcess, interrupts: Interrupts) -> int:
    from areal_jax.app.process.accelerator import use_xla_flags

    use_xla_flags(command.config)

    from areal_jax.app.roles.learner_role import serve_learner

    serve_learner(command.config, process)
    return ExitCode.FINISHED


def _generate(command: CommandLine, process: RoleProcess, interrupts: Interrupts) -> int:
    from areal_jax.config.kinds import SERVER, find_server, resolve

    launch = find_server(command.config.rollout.server).launch
    assert launch is not None  # by require_role
    code: int = resolve(launch.serve, SERVER)(command.config, process, interrupts)
    return code


def _export(command: CommandLine, process: RoleProcess, interrupts: Interrupts) -> int:
    os.environ['JAX_PLATFORMS'] = 'cpu'  # devices belong to other roles

    from areal_jax.app.export.run_export import serve_exports

    has_finished = serve_exports(command.config, process, interrupts)
    return ExitCode.FINISHED if has_finished else code_of_stopped_server()


ROLES: Mapping[Role, Callable[[CommandLine, RoleProcess, Interrupts], int]] = {
    'controller': _control,
    'learner': _learn,
    'engine': _generate,
    'exporter': _export,
}


def _parse_process(values: flags.FlagValues) -> RoleProcess:
    from areal_jax.app.roles.roles import RoleProcess, parse_index
    from areal_jax.config.addresses import ALL_ADDRESSES
    from areal_jax.errors import suggest

    if values.role not in ROLES:
        near = suggest(values.role or '', list(ROLES))
        raise UserError(f'--role={values.role or ""} is none of {", ".join(ROLES)}{near}')
    if values.role == 'learner' and values.host in ALL_ADDRESSES:
        raise UserError(f'--host={values.host}: name the interface at which the other roles reach this learner process')
    index = 0 if values.role in ('controller', 'exporter') and values.index is None else parse_index(values.index)
    return RoleProcess(cast('Role', values.role), index, pathlib.Path(values.workdir), values.host)


def _define_flags() -> flags.FlagValues:
    """Defines the flags of this command except --config."""
    from absl import flags

    from areal_jax.app.command_line import define_path

    values = flags.FlagValues()
    flags.DEFINE_string('role', None, 'What this process does in the run.', flag_values=values)
    flags.DEFINE_string(
        'index',
        None,
        'Of this process among those of its role, from 0; env:NAME = in that variable.',
        flag_values=values,
    )
    flags.DEFINE_integer('count', None, 'Processes of the role, to be compared with the config.', flag_values=values)
    define_path(values, 'workdir', 'Of the run; all hosts share it.')
    flags.DEFINE_string('host', '127.0.0.1', 'Address at which other roles reach this one.', flag_values=values)
    return values


COMMAND = Command(
    program='areal-role',
    purpose='Runs one process of a run in roles: its controller, a learner process, an engine or the exporter.',
    usage=(
        '--role=ROLE --config=FILE[:ARGUMENT] --workdir=DIR [--index=K|env:NAME] [--count=N] [--host=ADDRESS] '
        '[--config.SECTION.FIELD=VALUE ...]',
    ),
    flags=_define_flags,
    examples=f"""
    # the controller of a run with one learner process and one engine
    areal-role --role=controller --workdir=runs/roles {ROLES_OF_TINY}
    # its learner process; all three run at the same time
    areal-role --role=learner --index=0 --workdir=runs/roles {ROLES_OF_TINY}
    # its engine
    areal-role --role=engine --index=0 --workdir=runs/roles {ROLES_OF_TINY}
    """,
    fields=FIELDS_OF_ROLES,
    choices={'role': tuple(ROLES)},
    exits={**EXITS_OF_TRAINING, ExitCode.STOPPED: 'stopped by a signal or by a lost process: the same role goes on'},
    notes='An executor starts all roles of a run: python -m launch.local, launch.slurm, launch.ray or launch.jobset. A '
    'role goes on from what is in the workdir.',
)


def run() -> None:
    """Entry point of the console script."""
    run_command(main, 'writing to the workdir', 'the same role goes on')


if __name__ == '__main__':
    run()
