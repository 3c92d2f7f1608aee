"""Watts of chips by what they do, as others have measured and published them.

Values are of the board of a GPU, which is what NVML measures, or of a TPU with its memory. They hold no share of the
host, of the network or of the cooling. No watts are published for TPU v5 and later, so these chips have no row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

TRAIN, PREFILL, DECODE, IDLE = 'train', 'prefill', 'decode', 'idle'
STATES = (TRAIN, PREFILL, DECODE, IDLE)  # of a device; of several at once the first one counts
FULL_ROWS = 128  # largest batch of decoding whose watts are published


@dataclasses.dataclass(frozen=True)
class Watts:
    """The lowest and the highest published value of one state; `source` says where they are from."""

    low: float
    high: float
    source: str = ''

    @property
    def mid(self) -> float:
        """The middle of the two; nothing says where between them a chip is."""
        return (self.low + self.high) / 2


@dataclasses.dataclass(frozen=True)
class ChipPower:
    """Watts of one device, as jax counts devices."""

    idle: Watts  # a program is loaded, and nothing runs
    decode_one: Watts  # decoding of one row
    decode_full: Watts  # decoding of FULL_ROWS rows or more
    prefill: Watts
    train: Watts

    def draw(self, state: str, activity: float = 0.0) -> Watts:
        """Watts in a state; raises KeyError for one that is not in STATES.

        Args:
          activity: of DECODE, from 0 (one row) to 1 (FULL_ROWS), see `decode_activity`. Watts are linear in it.
        """
        if state == DECODE:
            one, full = self.decode_one, self.decode_full
            return Watts(one.low + (full.low - one.low) * activity, one.high + (full.high - one.high) * activity)
        return {TRAIN: self.train, PREFILL: self.prefill, IDLE: self.idle}[state]

    @property
    def sources(self) -> dict[str, str]:
        """What is measured -> the published values and their source."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: f'{watts.low:g} to {watts.high:g} W: {watts.source}' for name, watts in values.items()}


def decode_activity(rows: float) -> float:
    """log₂ rows / log₂ FULL_ROWS, within [0, 1]: decoding follows its batch, about linearly in the logarithm.

    So it does between the two published batches of an H100, 300 W with 1 row and 600 W with 128 (power model of the
    fleet simulator of the vLLM semantic router, after the ML.ENERGY benchmark v3).
    """
    return min(1.0, max(0.0, math.log2(max(rows, 1.0)) / math.log2(FULL_ROWS)))


_ERLANGEN = 'arXiv 2605.11999 (decoding on an H200: 137 to 300 W)'
_FLEET = 'power model of the vLLM fleet simulator (H100 SXM: 300 W with 1 row, 600 W with 128)'
_EIGHT = 'ML.ENERGY benchmark (8 models on an H100 with 1 to 128 rows: 267 to 680 W)'
_LIMIT = 'NVIDIA data sheet (limit of the board: 700 W)'
_CONTEXT = 'arXiv 2605.23918 (a CUDA context draws up to 50 W more than a board without one)'
_MEASURED = 'benchmarks/results/gpu_h200.json'
_TRAINING = f'arXiv 2506.14551 (training reaches 76% of the rated power, 532 of 700 W) to {_LIMIT}'

_H100 = ChipPower(
    idle=Watts(70, 120, f'70 W by nvidia-smi without a context, and {_CONTEXT}'),
    decode_one=Watts(267, 300, f'{_EIGHT}; {_FLEET}'),
    decode_full=Watts(300, 680, f'{_ERLANGEN}; {_EIGHT}'),
    prefill=Watts(600, 700, f'no value of its own: between decoding with 128 rows, {_FLEET}, and {_LIMIT}'),
    train=Watts(532, 700, _TRAINING),
)
_H200 = ChipPower(
    idle=Watts(80, 134, f'80 W by NVML without a context, and {_CONTEXT}; 130 to 134 W measured, {_MEASURED}'),
    decode_one=Watts(137, 300, f'{_ERLANGEN}; {_FLEET}'),
    decode_full=Watts(300, 593, f'{_ERLANGEN}; ML.ENERGY benchmark (at most 593 W on an H200)'),
    prefill=Watts(593, 700, f'no value of its own: between the most in decoding, 593 W, and {_LIMIT}'),
    train=Watts(532, 700, f'as an H100, whose limit is the same: {_TRAINING}'),
)
_V4 = 'arXiv 2304.01433, table 4 (programs in production: at least 121 W, 170 W on average, at most 192 W)'
_TPU_V4 = ChipPower(
    idle=Watts(90, 90, 'arXiv 2304.01433, table 4'),
    decode_one=Watts(121, 170, f'no value of its own: {_V4}'),
    decode_full=Watts(121, 192, f'no value of its own: {_V4}'),
    prefill=Watts(170, 192, f'no value of its own: {_V4}'),
    train=Watts(170, 192, f'no value of its own: {_V4}'),
)

# by jax.Device.device_kind, which of a GPU is the name that the driver reports; then by name of a chip in a simulation
POWER: Mapping[str, ChipPower] = {
    'NVIDIA H100 80GB HBM3': _H100,
    'NVIDIA H200': _H200,
    'TPU v4': _TPU_V4,
    'H100 SXM': _H100,
    'H200 SXM': _H200,
}
