"""TPU slices by generation: accelerator types, topologies, hosts.

The names are those in the sources of Ray 2.60.0 (python/ray/_private/accelerators/tpu.py), Tunix and SGLang-JAX;
none has been tried on Google Cloud from here. Compare them with the provider's tables before you pay for a slice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from absl import flags

from areal_jax.config.cluster import RoleCount
from areal_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Generation:
    """One kind of TPU."""

    node_selector: str  # value of cloud.google.com/gke-tpu-accelerator
    type_prefix: str  # of the accelerator type: 'v5litepod' in v5litepod-16
    cores_per_chip: int  # in the number of an accelerator type
    topologies: tuple[str, ...]
    largest: tuple[int, int, int] | None = None  # of further topologies, all of whose sizes are multiples of 4
    chips_per_host: int = 4  # of a slice with several hosts
    devices_per_chip: int = 1  # that jax shows

    def has(self, topology: str) -> bool:
        """Whether there are slices of this topology."""
        sizes = [int(size) for size in topology.split('x') if size.isdecimal()]
        if topology in self.topologies or self.largest is None or 'x'.join(map(str, sizes)) != topology:
            return topology in self.topologies
        fits = len(sizes) == 3 and all(4 <= size <= most for size, most in zip(sizes, self.largest, strict=True))
        return fits and not any(size % 4 for size in sizes)

    def describe_topologies(self) -> str:
        """'2x2x1, 2x2x2, ...'."""
        further = f', and multiples of 4 up to {"x".join(map(str, self.largest))}' if self.largest else ''
        return ', '.join(self.topologies) + further


GPU, CPU = 'gpu', 'cpu'
_THREE_D = ('2x2x1', '2x2x2', '2x2x4', '2x4x4')
_CUBES = ('4x4x4', '4x4x8', '4x8x8', '8x8x8', '8x8x16', '8x16x16')  # of v7x
_TWO_D = ('1x1', '2x2', '2x4', '2x8', '4x4', '4x8', '8x8', '8x16', '16x16')
GENERATIONS: Mapping[str, Generation] = {
    'v4': Generation('tpu-v4-podslice', 'v4', 2, _THREE_D, (12, 12, 16)),
    'v5p': Generation('tpu-v5p-slice', 'v5p', 2, _THREE_D, (16, 16, 24)),
    'v5e': Generation('tpu-v5-lite-podslice', 'v5litepod', 1, _TWO_D),
    'v6e': Generation('tpu-v6e-slice', 'v6e', 1, _TWO_D),
    'v7x': Generation('tpu7x', 'v7x', 2, (*_THREE_D, *_CUBES), devices_per_chip=2),
}
_EITHER = '2x4'  # exists as one machine of 8 chips and as two of 4


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of TPUs, all of whose hosts fail together."""

    generation: str
    topology: str
    hosts: int
    chips_per_host: int

    @property
    def devices_per_host(self) -> int:
        """That jax shows in the process of a host."""
        return self.chips_per_host * GENERATIONS[self.generation].devices_per_chip

    @property
    def pod_type(self) -> str:
        """'v4-16', 'v5litepod-16'."""
        generation = GENERATIONS[self.generation]
        return f'{generation.type_prefix}-{self.hosts * self.chips_per_host * generation.cores_per_chip}'

    def __str__(self) -> str:
        return f'{self.generation} {self.topology}'


def define_accelerators(values: flags.FlagValues) -> None:
    """--accelerator, --topology and --chips_per_host, and the same with engine_ for engines."""
    kinds = f'{", ".join(GENERATIONS)}, {GPU} or {CPU}'
    for prefix, of in (('', 'the learner'), ('engine_', "engines, where it is not the learner's")):
        flags.DEFINE_string(f'{prefix}accelerator', None, f'{kinds}: of {of}.', flag_values=values)
        flags.DEFINE_string(f'{prefix}topology', None, f'Of a slice of TPUs, 4x4: of {of}.', flag_values=values)
        flags.DEFINE_integer(f'{prefix}chips_per_host', None, f'Of a slice 2x4, 4 or 8: of {of}.', flag_values=values)


def find_accelerator(values: flags.FlagValues, prefix: str) -> str | Slice:
    """What the flags with this prefix name, 'gpu', 'cpu' or a slice; engines default to the learner's.

    Raises UserError for what is unknown, and for a slice without a topology.
    """
    kind = values[f'{prefix}accelerator'].value or values.accelerator
    topology = values[f'{prefix}topology'].value or values.topology
    if kind in (GPU, CPU):
        return str(kind)
    if kind not in GENERATIONS:
        given = ' is missing' if kind is None else f'={kind!r} is not known'
        raise UserError(f'--{prefix}accelerator{given}: use {", ".join(GENERATIONS)}, {GPU} or {CPU}')
    if topology is None:
        raise UserError(f'--{prefix}accelerator={kind} needs --{prefix}topology, for example 4x4')
    return find_slice(kind, topology, values[f'{prefix}chips_per_host'].value)


def find_slice(generation: str, topology: str, chips_per_host: int | None) -> Slice:
    """The slice of a topology; `chips_per_host` is needed where the topology exists with two numbers of hosts.

    Raises UserError for an unknown topology.
    """
    known = GENERATIONS[generation]
    if not known.has(topology):
        raise UserError(
            f'the topology {topology!r} is none of {generation}; those that are known are {known.describe_topologies()}'
        )
    chips = math.prod(int(size) for size in topology.split('x'))
    allowed = (4, 8) if topology == _EITHER else (min(chips, known.chips_per_host),)
    if topology == _EITHER and chips_per_host not in allowed:
        raise UserError(
            f'{generation} {topology} exists as one host of 8 chips and as two hosts of 4: say which with '
            f'--chips_per_host, which is {chips_per_host}'
        )
    per_host = chips_per_host or allowed[0]
    if per_host not in allowed:
        raise UserError(
            f'--chips_per_host={per_host}: a host of a slice of {generation} {topology} has {allowed[0]} chips; leave '
            'out the flag'
        )
    return Slice(generation, topology, chips // per_host, per_host)


def require_fit(role: RoleCount, hosts: int, found: Slice, field: str) -> None:
    """Raises UserError where `hosts` processes of the role do not fill the slice exactly.

    Each process takes a whole host: a TPU chip belongs to one process.
    """
    if (hosts, role.devices) != (found.hosts, found.devices_per_host):
        raise UserError(
            f'{field} asks for {hosts} x {role.devices} devices, and a slice of {found} has {found.hosts} x '
            f'{found.devices_per_host}: make the two equal'
        )
