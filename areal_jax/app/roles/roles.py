"""The roles of a run: which ones it has, and whether this process belongs to it. Needs no jax."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable

from ml_collections import config_dict

from areal_jax.config import TrackedConfig, flatten, validate
from areal_jax.config.cluster import LEARNER, Role, list_roles
from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import find_server, name_launched
from areal_jax.config.objectives import find_objective
from areal_jax.errors import ExitCode, UserError
from areal_jax.installation import read_code_version
from areal_jax.registry import Entry, FencedError, Heartbeat, await_living

CONTROLLER = 'controller-0'  # in the registry
_ENVIRONMENT = 'env:'
_CONFIG = 'config'  # in the controller's entry


@dataclasses.dataclass(frozen=True)
class RoleProcess:
    """One process of a run in roles."""

    role: Role
    index: int
    workdir: pathlib.Path
    host: str = '127.0.0.1'  # the address at which the others reach it

    @property
    def name(self) -> str:
        """The name in the registry: 'engine-3'."""
        return f'{self.role}-{self.index}'

    def __str__(self) -> str:
        return f'{self.role} {self.index}'


def parse_index(text: str | None) -> int:
    """Parses '3', or 'env:NAME' for the number in an environment variable. Raises UserError for anything else."""
    if not text:
        raise UserError('--index is missing: give the number of this process among those of its role, from 0')
    value: str | None = text
    if text.startswith(_ENVIRONMENT):
        value = os.environ.get(text.removeprefix(_ENVIRONMENT))
        if value is None:
            raise UserError(f'--index={text}: there is no such variable in the environment of this process')
    if value is None or not value.isdecimal():
        raise UserError(f'--index={text} gives {value!r}, and a whole number from 0 is needed')
    return int(value)


def require_roles(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError for a run that cannot be in roles."""
    validate(config)
    if not find_objective(config.loss.objective).generates:
        raise ConfigError(
            f'loss.objective={config.loss.objective!r} has neither engines nor a controller: start '
            'python -m areal_jax.main_train in each process'
        )
    if find_server(config.rollout.server).in_process:
        raise ConfigError(
            f'rollout.server={config.rollout.server!r}: engines of a run in roles are servers; use rollout.server='
            f"{name_launched()} with publication.channel='files', or start python -m areal_jax.main_train"
        )
    if config.telemetry.profile_steps:
        raise ConfigError(
            f'telemetry.profile_steps={tuple(config.telemetry.profile_steps)}: the learner of a run in roles is not '
            'traced; use ()'
        )


def require_role(config: config_dict.ConfigDict, process: RoleProcess, count: int | None) -> None:
    """Raises UserError for a run that cannot be in roles, and for a process that the run does not have.

    Args:
      count: processes of its role, as given on the command line; None = not given.
    """
    require_roles(config)
    role, index = process.role, process.index
    found = {entry.role: entry.count for entry in list_roles(config)}
    if role not in found and role == 'exporter':
        raise UserError('--role=exporter: run.export_every=0 exports nothing beside training; start none')
    if role not in found:
        raise UserError(
            f'--role={role}: rollout.server={config.rollout.server!r} has no engines but those of rollout.urls; start '
            'none'
        )
    field = {'learner': LEARNER, 'engine': 'cluster.engines'}.get(role, '')
    given = f'{field}={config.cluster[field.partition(".")[2]]!r} has' if field else 'a run has'
    if count is not None and count != found[role]:
        raise UserError(f'--count={count}, and {given} {found[role]} of the role {role}: start as many')
    if index >= found[role]:
        raise UserError(
            f'--role={role} --index={index}, and {given} {found[role]}: indices go from 0 to {found[role] - 1}'
        )


def await_controller(process: RoleProcess, config: config_dict.ConfigDict, deadline_s: float) -> None:
    """Waits until the controller of this run is alive, which shows that both see the same directory.

    Raises LostPeerError if it is not alive within the deadline, UserError if its code version or config differs.
    """
    controller = await_living(
        process.workdir,
        [CONTROLLER],
        deadline_s,
        what='the controller',
        fix='start it, and give all roles a --workdir that all their hosts share',
    )[CONTROLLER]
    if controller.code != read_code_version():
        raise UserError(
            f'{process} is areal_jax {read_code_version()} and {controller} is areal_jax {controller.code}: run the '
            'same sources on all hosts'
        )
    theirs = dict(flatten(controller.details.get(_CONFIG, {})))
    for field, value in flatten(TrackedConfig(config).as_dict()):
        if theirs.get(field) != value:
            raise ConfigError(
                f'{process} has {field}={value!r} and {controller} has {theirs.get(field)!r}: start all roles with the '
                'same config'
            )


def end_fenced(error: FencedError) -> None:
    """Ends this process at once: its main thread may be compiling, or waiting in a collective."""
    print(f'error: {error}', file=sys.stderr, flush=True)
    os._exit(ExitCode.USER_ERROR)


def keep_name(
    process: RoleProcess, config: config_dict.ConfigDict, end: Callable[[FencedError], None] = end_fenced
) -> Heartbeat:
    """Registers the process, and calls `end` on another thread if another process takes its name."""
    details = {_CONFIG: TrackedConfig(config).as_dict()} if process.name == CONTROLLER else {}
    name, role, index = process.name, process.role, process.index
    entry = Entry(name, 0, '', role=role, index=index, code=read_code_version(), details=details)
    return Heartbeat(process.workdir, entry, end)
