"""Which bundles of resources a run asks of Ray, and which process runs in which; without importing Ray."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from absl import flags

from areal_jax.config.cluster import ENGINES, LEARNER, RoleCount
from areal_jax.errors import UserError

from ..accelerators import CPU, Slice, find_accelerator, require_fit
from ..cluster_run import ClusterRun

_CPUS = 'CPU'  # resource


@dataclasses.dataclass(frozen=True)
class Process:
    """One actor, in the bundle of its number."""

    name: str  # 'engine-3'
    command: Sequence[str]  # without --host, which its node adds


@dataclasses.dataclass(frozen=True)
class Group:
    """Processes that are placed together, and placed anew together when one of their nodes is lost."""

    name: str
    bundle: Mapping[str, float]  # resources of each process
    processes: Sequence[Process]
    environment: Mapping[str, str]
    slice: Slice | None = None  # of TPUs; its hosts are the bundles

    def __str__(self) -> str:
        resources = ', '.join(f'{name}: {number:g}' for name, number in self.bundle.items())
        of = f', the hosts of a slice of {self.slice}' if self.slice else ''
        lines = [f'group {self.name}: {len(self.processes)} x {{{resources}}}{of}']
        prefix = [f'{name}={value}' for name, value in self.environment.items()]
        for process in self.processes:
            lines.append(f'  {process.name}: {shlex.join([*prefix, *process.command])} --host=NODE')
        return '\n'.join(lines)


def plan_groups(run: ClusterRun, values: flags.FlagValues) -> list[Group]:
    """One group for the controller, the learner, each engine and the exporter; `values` are the flags of launch.ray.

    Raises UserError for an accelerator or a topology that is unknown, or that the run does not fit.
    """
    environment = dict(_split(pair) for pair in values.environment)
    cluster = run.config.cluster
    controller = Group('controller', {_CPUS: values.controller_cpus}, _processes(run, 'controller', 1), environment)
    groups = [_plan(run, run.learner, range(run.learner.count), values, '', f'{LEARNER}={cluster.learner!r}')]
    for index in range(run.engine.count):
        asks = f'an engine of {ENGINES}={cluster.engines!r}'
        groups.append(_plan(run, run.engine, range(index, index + 1), values, 'engine_', asks))
    # in this order: the learner before engines that would fit into its hosts, the others where room is left
    if run.exporter.count:
        groups.append(Group('exporter', {_CPUS: values.cpus}, _processes(run, 'exporter', 1), {}))
    return [
        dataclasses.replace(group, environment={**group.environment, **environment}) for group in [*groups, controller]
    ]


def _plan(run: ClusterRun, role: RoleCount, indices: range, values: flags.FlagValues, prefix: str, asks: str) -> Group:
    """The group of the processes with these indices; an engine flag that is not given defaults to the learner's."""
    name = role.role if role.role == 'learner' else f'{role.role}-{indices[0]}'
    processes, bundle = _processes(run, role.role, role.count, indices), {_CPUS: values.cpus}
    found = find_accelerator(values, prefix)
    if found == CPU:
        devices = {'XLA_FLAGS': f'--xla_force_host_platform_device_count={role.devices}'}
        return Group(name, bundle, processes, devices if role.devices > 1 else {})
    if not isinstance(found, Slice):
        return Group(name, {**bundle, 'GPU': role.devices}, processes, {})
    require_fit(role, len(indices), found, asks)
    return Group(name, {**bundle, 'TPU': found.chips_per_host}, processes, {}, found)


def _processes(run: ClusterRun, role: str, count: int, indices: range = range(1)) -> list[Process]:
    flags_of = [[f'--role={role}', f'--index={index}', f'--count={count}'] for index in indices]
    names = [f'{role}-{index}' for index in indices]
    return [Process(name, [*run.command, *own]) for name, own in zip(names, flags_of, strict=True)]


def _split(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition('=')
    if not equals or not name:
        raise UserError(f'--environment={pair!r} has no NAME=VALUE')
    return name, value
