"""Peaks of accelerators as their vendors state them, by name.

Flops are dense, in 16 bits: vendor pages often print the double, for sparse matrices. The figure of an interconnect is
both directions together, of one chip.
"""

from __future__ import annotations

import dataclasses

from areal_jax.config.ranges import ConfigError
from areal_jax.errors import suggest

# Of a chip whose network is not published; an assumption: as the nodes of arXiv 2505.24298, 3.2 Tb/s for 8 chips.
ASSUMED_NIC_BYTES_S = 50e9


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of one chip."""

    name: str
    flops: float  # a second, dense, 16 bit
    bytes_s: float  # of its memory
    memory_bytes: float
    interconnect_bytes_s: float  # both directions together, to chips of the same node or slice
    nic_bytes_s: float | None  # its share of the network between nodes; None = not published with the chip
    source: str = ''

    @property
    def network_bytes_s(self) -> float:
        """What its network is taken to have: `nic_bytes_s`, or ASSUMED_NIC_BYTES_S where none is published."""
        return ASSUMED_NIC_BYTES_S if self.nic_bytes_s is None else self.nic_bytes_s


A100 = Chip('A100-80 SXM', 312e12, 2.04e12, 80e9, 600e9, None, 'data sheet of NVIDIA')
H800 = Chip(
    'H800 SXM', 989e12, 3.35e12, 80e9, 400e9, 50e9,
    'data sheet of the vendor; network: nodes of 8 with RoCE of 3.2 Tb/s, arXiv 2505.24298',
)  # fmt: skip
H100 = Chip('H100 SXM', 989e12, 3.35e12, 80e9, 900e9, None, 'data sheet of NVIDIA')
H200 = Chip('H200 SXM', 989e12, 4.8e12, 141e9, 900e9, None, 'data sheet of NVIDIA')
V5E = Chip(
    'TPU v5e', 197e12, 0.82e12, 16e9, 400e9, 2 * 100e9 / 8 / 8,
    'documentation of Google Cloud; network: two of 100 Gb/s for a host of 8 chips',
)  # fmt: skip
V5P = Chip('TPU v5p', 459e12, 2.765e12, 95e9, 1200e9, 50e9 / 8, 'documentation of Google Cloud; network: DCN 50 Gb/s')
V6E = Chip('TPU v6e', 918e12, 1.638e12, 32e9, 800e9, 100e9 / 8, 'documentation of Google Cloud; network: DCN 100 Gb/s')
TPU7X = Chip(
    'TPU7x', 2307e12, 7.38e12, 192e9, 1200e9, 100e9 / 8, 'documentation of Google Cloud; network: DCN 100 Gb/s'
)

CHIPS = (A100, H800, H100, H200, V5E, V5P, V6E, TPU7X)


def find_chip(name: str) -> Chip:
    """The chip of that name: 'H800', 'h800 sxm', 'TPU v5e' and 'v5e' are understood, in either case.

    Raises ConfigError that names the chips for an unknown one.
    """
    for chip in CHIPS:
        if name.strip().lower() in _names(chip):
            return chip
    known = {short: chip for chip in CHIPS for short in _names(chip)}
    raise ConfigError(
        f'the chip {name!r} is not known{suggest(name.lower(), known)}; use one of '
        f'{", ".join(chip.name for chip in CHIPS)}'
    )


def _names(chip: Chip) -> list[str]:
    """What it is called, in small letters: in full, and without the maker's or the socket's word."""
    full = chip.name.lower()
    bare = full.removesuffix(' sxm').removeprefix('tpu ')
    return [full, bare, bare.removesuffix('-80')]
