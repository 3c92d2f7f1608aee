"""A run of roles as slurm.py, ray/ and jobset.py start it: which processes there are, and the command of each.

An executor starts, watches and restarts these commands and does nothing else, so it cannot change a number of the run.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence

from absl import flags
from ml_collections import config_dict

from areal_jax.app.command_line import CommandLine, define_path, find_config_file, require_workdir
from areal_jax.app.process.setup import require_extras
from areal_jax.app.roles.roles import require_roles
from areal_jax.app.workdir.environment import read_versions
from areal_jax.config import flatten
from areal_jax.config.cluster import ENGINES, LEARNER, USE_EQUAL, Role, RoleCount, has_roles, list_roles
from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import SERVER, find_server, resolve
from areal_jax.errors import UserError

MODULE = 'areal_jax.main_role'
STEADY_S = 600  # a role that lived so long has started well: its restarts are counted anew
_PLUGINS = ('jax-cuda13-plugin', 'jax-cuda12-plugin')
PER_NODE = ('/tmp', '/var/tmp', '/dev/shm', '/run')  # usually a disk or memory of one machine


@dataclasses.dataclass(frozen=True)
class ClusterRun:
    """The roles of one run, and the words that all their commands share."""

    config: config_dict.ConfigDict
    source: str  # of the config: FILE or FILE:ARGUMENT
    workdir: str
    overrides: tuple[str, ...]  # '--config.section.field=value'
    roles: Mapping[Role, RoleCount]
    python: str  # interpreter of the roles

    @property
    def command(self) -> list[str]:
        """Of every role, without its flags."""
        return [self.python, '-m', MODULE, f'--config={self.source}', f'--workdir={self.workdir}', *self.overrides]

    @property
    def learner(self) -> RoleCount:
        return self.roles['learner']

    @property
    def engine(self) -> RoleCount:
        """With count 0 where the config names servers that are running already."""
        return self.roles.get('engine', RoleCount('engine', 0, 0))

    @property
    def exporter(self) -> RoleCount:
        """With count 0 where nothing is exported beside training."""
        return self.roles.get('exporter', RoleCount('exporter', 0, 0))


def define_flags(values: flags.FlagValues, workdir: str = 'Directory for everything the run leaves.') -> None:
    """The flags of every executor; `workdir` explains --workdir."""
    define_path(values, 'workdir', workdir)
    flags.DEFINE_bool('dry_run', False, 'Print what would be started, and start nothing.', flag_values=values)


def define_shared(values: flags.FlagValues) -> None:
    """The flags of executors whose machines share this machine's file system."""
    flags.DEFINE_bool('resume', False, 'Go on with the run that is in the workdir.', flag_values=values)
    define_path(values, 'python', 'Interpreter of the roles, on every machine.', sys.executable)


def locate_run(command: CommandLine, values: flags.FlagValues) -> ClusterRun:
    """The run of a command line whose files are on this machine; paths become absolute. Raises UserError."""
    require_workdir(values.workdir)
    run = build_run(command, str(pathlib.Path(values.workdir).absolute()), values.python)
    require_extras(run.config)
    return dataclasses.replace(run, source=find_config_file(run.source).absolute_source)


def build_run(command: CommandLine, workdir: str, python: str) -> ClusterRun:
    """The run of a parsed command line. Raises ConfigError for a config that names no roles."""
    config = command.config
    require_roles(config)
    if not has_roles(config):
        raise ConfigError(
            f'{LEARNER}={config.cluster.learner!r} names no processes, and an executor starts a learner of one or '
            f"more: use {LEARNER}='hosts=1 x {config.cluster.learner}'"
        )
    roles = {role.role: role for role in list_roles(config)}
    if any(role.unequal for role in roles.values()):
        raise ConfigError(
            f'{ENGINES}={config.cluster.engines!r} has engines of unequal size, which launch.local alone starts; '
            f'{USE_EQUAL}'
        )
    return ClusterRun(config, command.source, workdir, render_overrides(command), roles, python)


def render_overrides(command: CommandLine) -> tuple[str, ...]:
    """The fields that a command line sets, as words of another command line."""
    values = dict(flatten(command.config.copy_and_resolve_references()))
    return tuple(f'--config.{path}={values[path]}' for path in command.overrides)


def require_unused(run: ClusterRun, resume: bool) -> None:
    """Raises UserError for a workdir that holds a run, unless it shall go on, and for none that could."""
    from areal_jax.app.workdir.run_directory import holds_run  # here: it imports the report, which --help does not need

    if holds_run(pathlib.Path(run.workdir)) != resume:
        fix = 'start without --resume' if resume else 'go on with --resume, or give another --workdir'
        raise UserError(f'{run.workdir} holds {"no run yet" if resume else "a run already"}: {fix}')


def require_environments(run: ClusterRun, on_gpus: bool, settings: Sequence[str]) -> None:
    """Raises UserError, before a job is queued, for an interpreter that its roles or servers could not use.

    Args:
      on_gpus: the nodes have GPUs.
      settings: shell lines or NAME=VALUE that are set on the nodes; what these name is not looked for here.
    """
    if on_gpus and not read_versions(run.python, _PLUGINS):
        raise UserError(
            f'--python={run.python} has no jax for GPUs ({" or ".join(_PLUGINS)}), and roles would compute on CPUs: '
            f"{run.python} -m pip install 'jax[cuda13]', or name another interpreter"
        )
    launch = find_server(run.config.rollout.server).launch
    if launch and launch.require_version:
        resolve(launch.require_version, SERVER)(on_gpus, settings)


def require_shared(workdir: str, nodes: int) -> None:
    """Raises UserError for a workdir in a folder that each of several nodes has for itself."""
    folder = next((folder for folder in PER_NODE if pathlib.Path(workdir).is_relative_to(folder)), None)
    if nodes > 1 and folder:
        raise UserError(
            f'--workdir={workdir} is in {folder}, which each of the {nodes} nodes has for itself: name a directory '
            'that all of them share'
        )


def require_own_addresses(host: str, nodes: int) -> None:
    """Raises UserError for one address of the roles of several nodes."""
    if host and nodes > 1:
        raise UserError(
            f'--host={host} would be the address of the roles of all {nodes} nodes: leave it out, and each role has '
            'that of its node'
        )
