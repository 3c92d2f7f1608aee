"""Parses `cluster.learner` and `cluster.engines`: the mesh and processes of the learner, and the devices of engines.

It does not need jax, so that `config.validate` can refuse a layout before a device is touched; `sharding/rules.py`
then chooses the devices. `list_roles` says which processes a launcher starts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from ml_collections import config_dict

from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import find_server
from areal_jax.errors import suggest

LEARNER, ENGINES, STRATEGY = 'cluster.learner', 'cluster.engines', 'cluster.strategy'
AXES = ('data', 'fsdp', 'expert', 'context', 'tensor')  # of the learner's mesh
ENGINE_AXES = ('expert', 'tensor')  # of an engine's mesh
ONE_DEVICE = 'data=1'  # the default of cluster.learner
MOST_ENGINES = 1024  # each has a thread
USE_EQUAL = "use equal engines, such as '4 x tensor=1'"
Role: TypeAlias = Literal['controller', 'learner', 'engine', 'exporter']
_MOST_DEVICES = 2**31 - 1
_HOSTS = re.compile(r'\s*hosts\s*=\s*([^\s,x]*)\s*x\s*(.*)', re.DOTALL)
_FORMER = {
    'distributed.processes': LEARNER,
    **{f'mesh.{axis}': LEARNER for axis in AXES},
    'mesh.strategy': STRATEGY,
    'rollout.engines': ENGINES,
    'sft.export_dtype': 'run.export_dtype',
}


@dataclasses.dataclass(frozen=True)
class LearnerLayout:
    """The sizes of the learner's mesh, and the number of its processes."""

    data: int = 1  # replicas
    fsdp: int = 1  # shards of parameters, optimizer state and batch rows
    expert: int = 1  # shards of the experts of a layer, and of batch rows
    context: int = 1  # slices of a row's tokens
    tensor: int = 1  # slices of heads, MLP and vocabulary
    hosts: int | None = None  # processes, with equally many devices each; None: one, which may also lead the run

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.sizes, strict=True):
            if size < 1:
                raise ConfigError(f"{LEARNER}='{axis}={size}': the size of {axis} must be a whole number, at least 1")
        if self.devices % self.processes:
            raise ConfigError(
                f'{LEARNER}={str(self)!r}: a mesh of {self.devices} devices cannot be shared out among '
                f'{self.processes} processes evenly; use a number of hosts that divides {self.devices}'
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each axis, in the order of AXES."""
        return self.data, self.fsdp, self.expert, self.context, self.tensor

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def processes(self) -> int:
        return self.hosts or 1

    @property
    def devices_per_process(self) -> int:
        return self.devices // self.processes

    @property
    def data_shards(self) -> int:
        """The number of parts into which the rows of a micro-batch are divided."""
        return self.data * self.fsdp * self.expert

    def __str__(self) -> str:
        """Formats the layout as in the config: 'data=2,fsdp=2', 'hosts=2 x fsdp=8'."""
        named = [f'{axis}={size}' for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        hosts = '' if self.hosts is None else f'hosts={self.hosts} x '
        return hosts + (','.join(named) or ONE_DEVICE)


@dataclasses.dataclass(frozen=True)
class EngineGroup:
    """Engines of one size."""

    count: int = 1
    shared: bool = True  # they decode on the learner's first device; False: on separate ones, after the learner's
    tensor: int = 1  # parts of heads, MLP, vocabulary and KV cache
    expert: int = 1  # parts of the experts of a layer

    @property
    def devices_each(self) -> int:
        """Devices of each engine."""
        return self.expert * self.tensor

    def __str__(self) -> str:
        """Formats the group as in the config: '2 x shared', '2 x tensor=4', '2 x expert=2,tensor=2'."""
        sizes = zip(ENGINE_AXES, (self.expert, self.tensor), strict=True)
        named = [f'{axis}={size}' for axis, size in sizes if size > 1]
        return f'{self.count} x {"shared" if self.shared else ",".join(named) or "tensor=1"}'


@dataclasses.dataclass(frozen=True)
class EnginesLayout:
    """The number of engines, and the devices of each; engines are numbered group by group."""

    groups: tuple[EngineGroup, ...] = (EngineGroup(),)  # one or more; adjacent groups differ

    @property
    def count(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def shared(self) -> bool:
        return self.groups[0].shared

    @property
    def devices(self) -> int:
        """Devices besides the learner's."""
        return 0 if self.shared else sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices of each engine."""
        return tuple(group.devices_each for group in self.groups for _ in range(group.count))

    @property
    def has_equal_engines(self) -> bool:
        return len(self.groups) == 1

    @property
    def only_group(self) -> EngineGroup:
        """The group of equal engines; raises ConfigError for engines of unequal size."""
        if not self.has_equal_engines:
            raise ConfigError(f'{ENGINES}={str(self)!r} has engines of unequal size, which do not go here; {USE_EQUAL}')
        return self.groups[0]

    @property
    def devices_each(self) -> int:
        """Devices of each engine; raises ConfigError for engines of unequal size."""
        return self.only_group.devices_each

    def select(self, index: int) -> EnginesLayout:
        """Returns the layout of engine number `index` alone."""
        group = [group for group in self.groups for _ in range(group.count)][index]
        return EnginesLayout((dataclasses.replace(group, count=1),))

    def resize(self, count: int) -> EnginesLayout:
        """Returns a layout of `count` engines of this size; raises ConfigError for engines of unequal size."""
        return EnginesLayout((dataclasses.replace(self.only_group, count=count),))

    def find_group(self, devices: int) -> EngineGroup:
        """Returns the group with `devices` devices per engine; if all engines are equal, the only group."""
        if self.has_equal_engines:
            return self.groups[0]
        return next(group for group in self.groups if group.devices_each == devices)

    def place(self, first: int = 0) -> tuple[range, ...]:
        """Returns the device numbers of each engine, assigned consecutively from `first` on."""
        ends = itertools.accumulate(self.sizes, initial=first)
        return tuple(range(start, end) for start, end in itertools.pairwise(ends))

    def __str__(self) -> str:
        """Formats the layout as in the config: '2 x tensor=2 + 4 x tensor=1'."""
        return ' + '.join(map(str, self.groups))


class DeviceSplit(NamedTuple):
    """A split of the devices between training and generation, as texts of the config."""

    learner: str  # as cluster.learner
    engines: str  # as cluster.engines

    def __str__(self) -> str:
        return f'{self.learner} | {self.engines}'


def parse_learner(text: str) -> LearnerLayout:
    """Parses 'data=2,fsdp=2' or 'hosts=2 x fsdp=8' to the sizes of the whole mesh; an axis not named has size 1.

    Raises ConfigError for an unknown or repeated axis, for a size that is not a positive whole number, and for a mesh
    that cannot be shared out among the processes.
    """
    hosts, mesh = _split_hosts(text)
    return LearnerLayout(**_parse_axes(mesh, LEARNER, text, "'fsdp=4' or 'data=2,fsdp=2'"), hosts=hosts)


def _split_hosts(text: str) -> tuple[int | None, str]:
    """'hosts=2 x fsdp=8' -> (2, 'fsdp=8'); (None, text) without hosts."""
    if not text.strip().startswith('hosts'):
        return None, text
    form = "'hosts=2 x fsdp=8': 8 devices, 4 in each of 2 processes"
    match = _HOSTS.fullmatch(text)
    if match is None or not match[2]:
        raise ConfigError(f'{LEARNER}={text!r}: hosts stand before the mesh; write {form}')
    if not re.fullmatch(r'\d{1,10}', match[1]) or not 1 <= int(match[1]) <= _MOST_DEVICES:
        raise ConfigError(f'{LEARNER}={text!r}: the number of hosts must be a whole number, at least 1; write {form}')
    return int(match[1]), match[2]


def parse_engines(text: str) -> EnginesLayout:
    """'2 x tensor=4' -> two engines on four devices each; '2 x shared' -> two on the learner's first device.

    '1 x expert=2,tensor=2' -> one on four devices; '2 x tensor=2 + 4 x tensor=1' -> six, the first two on two each.
    Raises ConfigError for a text of another form.
    """
    groups: list[EngineGroup] = []
    for part in text.split('+'):
        group = _parse_group(part, text)
        if groups and dataclasses.replace(groups[-1], count=group.count) == group:
            groups[-1] = dataclasses.replace(group, count=groups[-1].count + group.count)
        else:
            groups.append(group)
    layout = EnginesLayout(tuple(groups))
    if layout.count > MOST_ENGINES:
        raise ConfigError(f'{ENGINES}={text!r} has {layout.count} engines; name at most {MOST_ENGINES}')
    if len({group.shared for group in groups}) > 1:
        raise ConfigError(
            f"{ENGINES}={text!r} has engines on the learner's device beside engines on their own: give all of them "
            "their own, or write 'NUMBER x shared'"
        )
    cuts = {(group.devices_each, group.expert) for group in groups}
    if len(cuts) > len({devices for devices, _ in cuts}):
        raise ConfigError(
            f'{ENGINES}={text!r} cuts engines of equally many devices in two ways; give them the same expert= and '
            'tensor='
        )
    return layout


def _parse_group(part: str, text: str) -> EngineGroup:
    """One group of the text of cluster.engines."""
    forms = "'2 x shared' (on the learner's first device) or '2 x tensor=1' (on one device each)"
    count, times, where = (piece.strip() for piece in part.partition('x'))
    if not times or not where:
        raise ConfigError(f"{ENGINES}={text!r} has no 'NUMBER x WHERE'; write {forms}")
    if not re.fullmatch(r'\d{1,10}', count) or not 1 <= int(count) <= MOST_ENGINES:
        raise ConfigError(
            f'{ENGINES}={text!r}: {count!r} engines must be a whole number from 1 to {MOST_ENGINES}; write {forms}'
        )
    if where == 'shared':
        return EngineGroup(int(count))
    if '=' not in where:
        raise ConfigError(f'{ENGINES}={text!r}: {where!r} is not known{suggest(where, ["shared"])}; write {forms}')
    sizes = _parse_axes(where, ENGINES, text, forms)
    for axis, size in sizes.items():
        if axis not in ENGINE_AXES:
            raise ConfigError(
                f'{ENGINES}={text!r}: the devices of an engine share the axes {" and ".join(ENGINE_AXES)} alone; use '
                f"'{count} x tensor={size}'"
            )
    return EngineGroup(int(count), shared=False, **sizes)


def require_fit(learner: LearnerLayout, engines: EnginesLayout, available: int, platform: str) -> None:
    """Raises ConfigError, with both fields and the fix, if the layout needs more devices than `available`."""
    needed = learner.devices + engines.devices
    if needed <= available:
        return
    own = f' and {ENGINES}={str(engines)!r} needs {engines.devices}, {needed} together' if engines.devices else ''
    more = f', or set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before jax is imported'
    fix = 'lower a size' + (f", share the learner's with {ENGINES}='{engines.count} x shared'" if own else '')
    raise ConfigError(
        f'{LEARNER}={str(learner)!r} needs {learner.devices} devices{own}; the platform {platform!r} has {available}: '
        f'{fix}{more if platform == "cpu" else ""}'
    )


@dataclasses.dataclass(frozen=True)
class RoleCount:
    """Processes of one role, `python -m areal_jax.main_role --role=ROLE --index=K --count=COUNT`."""

    role: Role
    count: int
    devices: int  # accelerators of each process, the maximum if they differ; 0: none
    unequal: tuple[int, ...] = ()  # accelerators by process index; () if all processes have equally many

    def devices_of(self, index: int) -> int:
        """The accelerators of process `index`."""
        return self.unequal[index] if self.unequal else self.devices


def list_roles(config: config_dict.ConfigDict) -> list[RoleCount]:
    """The processes of a run in roles, in the order in which they are started. Does not validate the config."""
    learner = parse_learner(config.cluster.learner)
    roles = [RoleCount('controller', 1, 0), RoleCount('learner', learner.processes, learner.devices_per_process)]
    if find_server(config.rollout.server).launch:
        sizes = parse_engines(config.cluster.engines).sizes
        roles.append(RoleCount('engine', len(sizes), max(sizes), sizes if len(set(sizes)) > 1 else ()))
    if config.run.export_every:
        roles.append(RoleCount('exporter', 1, 0))
    return roles


def has_roles(config: config_dict.ConfigDict) -> bool:
    """Whether the config sets hosts= for the learner, so that a launcher starts its processes and a controller."""
    return parse_learner(config.cluster.learner).hosts is not None


def describe_former(fields: Mapping[str, object]) -> str | None:
    """The replacement of removed fields such as mesh.fsdp, as one sentence; None if the config has none of them."""
    named = {path: value for path, value in fields.items() if path in _FORMER}
    if not named:
        return None
    new: dict[str, str] = {}
    named = {path: 'N' if value is None else value for path, value in named.items()}  # None: the next word has it
    sizes = [f'{axis}={value}' for axis in AXES if (value := named.get(f'mesh.{axis}', 1)) not in (1, '1')]
    if any(_FORMER[path] == LEARNER for path in named):
        processes = named.get('distributed.processes', 1)
        hosts = '' if processes in (1, '1') else f'hosts={processes} x '
        new[LEARNER] = hosts + (','.join(sizes) or ('AXIS=SIZE' if hosts else ONE_DEVICE))
    if 'mesh.strategy' in named:
        new[STRATEGY] = str(named['mesh.strategy'])
    if 'rollout.engines' in named:
        new[ENGINES] = f'{named["rollout.engines"]} x shared'
    if 'sft.export_dtype' in named:
        new['run.export_dtype'] = str(named['sft.export_dtype'])
    given = ', '.join(f'{path}={value}' for path, value in named.items())
    use = ', '.join(f'{path}={value!r}' for path, value in new.items())
    return f'{given}: {"these fields were" if len(named) > 1 else "this field was"} replaced; use {use}'


def _parse_axes(mesh: str, field: str, text: str, forms: str) -> dict[str, int]:
    """'data=2,fsdp=2' -> {'data': 2, 'fsdp': 2}."""
    sizes: dict[str, int] = {}
    for part in mesh.split(','):
        axis, size = _parse_axis(part, field, text, forms)
        if axis in sizes:
            raise ConfigError(f'{field}={text!r} names the axis {axis} twice; give it one size')
        sizes[axis] = size
    return sizes


def _parse_axis(part: str, field: str, text: str, forms: str) -> tuple[str, int]:
    """'fsdp=4' -> ('fsdp', 4)."""
    axis, equals, size = (piece.strip() for piece in part.partition('='))
    if not equals:
        raise ConfigError(f"{field}={text!r}: {part.strip()!r} has no 'AXIS=SIZE'; write {forms}")
    if axis not in AXES:
        raise ConfigError(f'{field}={text!r}: there is no axis {axis!r}{suggest(axis, AXES)}; use {", ".join(AXES)}')
    if not re.fullmatch(r'\d{1,10}', size) or not 1 <= int(size) <= _MOST_DEVICES:
        raise ConfigError(f'{field}={text!r}: the size of {axis} must be a whole number, at least 1')
    return axis, int(size)
