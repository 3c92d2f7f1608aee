"""Starts a run on a Ray cluster.

Run it on a node that stays: all roles end with it. --dry_run prints bundles and commands, and needs no Ray.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

from absl import flags

from areal_jax.app.command_line import parse_command
from areal_jax.commands.command import EXITS_OF_TRAINING, FIELDS_OF_ROLES, ROLES_OF_TINY, Command, answer
from areal_jax.config.fields import ConfigError
from areal_jax.errors import ExitCode, UserError
from areal_jax.installation import build_python_path, describe_install

from ..accelerators import GPU, define_accelerators
from ..cluster_run import (
    define_flags,
    define_shared,
    locate_run,
    require_environments,
    require_own_addresses,
    require_shared,
    require_unused,
)
from .plan import Group, plan_groups
from .reservation import await_let_go
from .supervision import supervise

LOGS = 'ray'  # in the workdir: a log for each start of a role
_SECONDS, _CORES = ('wait_s', 'grace_s'), ('cpus', 'controller_cpus')  # flags


def main(argv: Sequence[str]) -> int:
    """Parse, place, supervise; returns the exit code of the controller."""
    answer(COMMAND, argv[1:])
    values = _define()
    command = parse_command(argv, values)
    _require_numbers(values)
    run = locate_run(command, values)
    groups = plan_groups(run, values)
    if values.dry_run:
        print('\n'.join(map(str, groups)))
        return ExitCode.FINISHED
    if importlib.util.find_spec('ray') is None:
        raise ConfigError(f'launch.ray needs the package ray, which is not installed: {describe_install("ray")}')
    require_unused(run, values.resume)
    require_environments(run, GPU in (values.accelerator, values.engine_accelerator), values.environment)
    return _place_and_supervise(groups, run.workdir, values)


def _place_and_supervise(groups: Sequence[Group], workdir: str, values: flags.FlagValues) -> int:
    import ray

    from .placement import ATTEMPT_S, PlacedGroup, describe_shortage

    try:
        ray.init(
            address=values.address,
            log_to_driver=False,
            runtime_env={'env_vars': {'PYTHONPATH': build_python_path()}},
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f'--address={values.address}: no Ray cluster answers there ({error})') from error
    try:
        if not values.local_nodes:
            nodes = sum(1 for node in ray.nodes() if node['Alive'])
            require_own_addresses(values.host, nodes)
            require_shared(workdir, nodes)
        return supervise(
            groups,
            lambda group: PlacedGroup(group, logs=f'{workdir}/{LOGS}', host=values.host, restarts=values.restarts),
            describe_shortage,
            restarts=values.restarts,
            wait_s=values.wait_s,
            grace_s=values.grace_s,
        )
    finally:
        await_let_go(2 * ATTEMPT_S)  # Ray may crash where a thread is still inside it
        ray.shutdown()


def _require_numbers(values: flags.FlagValues) -> None:
    """Raises UserError for nan, which the bounds of a flag let through, and for infinitely many cores."""
    for name in (*_SECONDS, *_CORES):
        number = getattr(values, name)
        if math.isnan(number) or (name in _CORES and math.isinf(number)):
            raise UserError(
                f'--{name}={number} is no number of {"cores" if name in _CORES else "seconds"}: use one such as 1'
            )


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    define_flags(values)
    define_shared(values)
    flags.DEFINE_string(
        'address', 'auto', 'Of the cluster: HOST:PORT, or auto on one of its nodes.', flag_values=values
    )
    define_accelerators(values)
    flags.DEFINE_string('host', '', "Address of all roles; by default that of each one's node.", flag_values=values)
    flags.DEFINE_float('cpus', 1.0, 'Cores that a learner process or an engine asks for.', 0.0, flag_values=values)
    flags.DEFINE_float('controller_cpus', 1.0, 'Cores that the controller asks for.', 0.0, flag_values=values)
    flags.DEFINE_multi_string('environment', [], 'NAME=VALUE for every role.', flag_values=values)
    flags.DEFINE_integer('restarts', 10, 'Most restarts of a role in a row, and most moves.', 0, flag_values=values)
    flags.DEFINE_float('wait_s', 600.0, 'Seconds to wait for nodes.', 0.0, flag_values=values)
    flags.DEFINE_float('grace_s', 120.0, 'Seconds for roles to save their state.', 0.0, flag_values=values)
    flags.DEFINE_bool('local_nodes', False, 'All nodes are on this machine, and share its /tmp.', flag_values=values)
    return values


COMMAND = Command(
    program='python -m launch.ray',
    purpose='Starts a run in roles on a Ray cluster, and restarts or moves what dies.',
    usage=(
        '--config=FILE[:ARGUMENT] --workdir=DIR [--accelerator=KIND] [--address=HOST:PORT] [--resume] [--dry_run] '
        '[FLAGS] [--config.SECTION.FIELD=VALUE ...]',
    ),
    flags=_define,
    examples=f"""
    # bundles and commands of a run on CPUs; nothing is started, and Ray is not needed
    python -m launch.ray {ROLES_OF_TINY} --workdir=runs/roles --accelerator=cpu --dry_run
    # the run, on the cluster of this node
    python -m launch.ray {ROLES_OF_TINY} --workdir=runs/roles --accelerator=cpu --local_nodes
    """,
    fields=FIELDS_OF_ROLES,
    exits=EXITS_OF_TRAINING,
    notes='Start it on a node that stays: all roles end with it.',
)
