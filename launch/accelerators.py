"""TPU slices by generation: accelerator types, topologies, hosts. Used by jobset.py and ray/.

The names are those in the sources of Ray 2.60.0 (python/ray/_private/accelerators/tpu.py), Tunix and SGLang-JAX;
none has been tried on Google Cloud from here. Compare them with the provider's tables before you pay for a slice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from areal_jax.config.cluster import RoleCount
from areal_jax.config.structure import suggest
from areal_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Generation:
    """One kind of TPU."""

    node_selector: str  # value of cloud.google.com/gke-tpu-accelerator
    type_prefix: str  # of the accelerator type: 'v5litepod' in v5litepod-16
    cores_per_chip: int  # in the number of an accelerator type
    topologies: tuple[str, ...]
    chips_per_host: int = 4  # of a slice with several hosts
    devices_per_chip: int = 1  # that jax shows


_THREE_D = ('2x2x1', '2x2x2', '2x2x4', '2x4x4')
_TWO_D = ('1x1', '2x2', '2x4', '2x8', '4x4', '4x8', '8x8', '8x16', '16x16')
GENERATIONS: Mapping[str, Generation] = {
    'v4': Generation('tpu-v4-podslice', 'v4', 2, _THREE_D),
    'v5p': Generation('tpu-v5p-slice', 'v5p', 2, _THREE_D),
    'v5e': Generation('tpu-v5-lite-podslice', 'v5litepod', 1, _TWO_D),
    'v6e': Generation('tpu-v6e-slice', 'v6e', 1, _TWO_D),
    'v7x': Generation('tpu7x', 'v7x', 2, _THREE_D, devices_per_chip=2),
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


def find_slice(generation: str, topology: str, chips_per_host: int | None) -> Slice:
    """The slice of a topology; `chips_per_host` is needed where the topology exists with two numbers of hosts.

    Raises UserError for an unknown generation or topology.
    """
    if generation not in GENERATIONS:
        raise UserError(
            f'{generation!r} is no TPU that is known here{suggest(generation, GENERATIONS)}; known are '
            f'{", ".join(GENERATIONS)}'
        )
    known = GENERATIONS[generation]
    if topology not in known.topologies:
        raise UserError(
            f'the topology {topology!r} is none of {generation}; those that are known are {", ".join(known.topologies)}'
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
