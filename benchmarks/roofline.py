"""Seconds that an engine takes on a chip, from flops and bytes: prices of the virtual clock for work of real size.

A decode step reads all weights and the KV cache of all rows, or computes, whichever takes longer; prefill computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from areal_jax.control.clocks.virtual import Price
from areal_jax.types import Work

WEIGHT_BYTES = 2  # 16-bit weights, and as many bytes for each number of the cache
GIGABYTE = 1e9


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of a chip; `nic_bytes_s` is what weights are sent to it with."""

    name: str
    flops: float  # dense, 16 bit
    bytes_s: float  # of its memory
    memory_bytes: float
    nic_bytes_s: float


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """Sizes of a model."""

    name: str
    parameters: float
    product_parameters: float  # that a token is multiplied with: layers and output head
    head_parameters: float
    layers: int
    attention_width: int  # heads * head_dim
    kv_bytes: int  # of one position


@dataclasses.dataclass(frozen=True)
class Reached:
    """Shares of the peaks that are reached."""

    bandwidth: float  # while decoding
    prefill: float  # of the flops


H800 = Chip('H800 SXM', 989e12, 3.35e12, 80e9, 50e9)
R1_DISTILL_1_5B = ServedModel('R1-distill-Qwen-1.5B', 1.78e9, 1.54e9, 151936 * 1536, 28, 1536, 28672)


# of the bandwidth, by models of 7 to 8 billion parameters with one row, eager, and the gain of graphs: 2605.30571
BATCH_ONE = 0.27 * 1.26
BATCH_ONE_MODEL = ServedModel('Qwen3-8B', 8.19e9, 7.57e9, 151936 * 4096, 36, 4096, 147456)


def step_overhead_s(chip: Chip, model: ServedModel, reached: Reached) -> float:
    """Of a decode step, besides its work: what a step of one row takes longer than it reads weights, by layers."""
    read_s = WEIGHT_BYTES * BATCH_ONE_MODEL.product_parameters / chip.bytes_s
    return model.layers / BATCH_ONE_MODEL.layers * read_s * (1 / BATCH_ONE - 1 / reached.bandwidth)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """One engine on one chip."""

    chip: Chip
    model: ServedModel
    reached: Reached
    step_overhead_s: float = 0.0  # of a decode step, besides its work

    def step_s(self, rows: float, positions: float) -> float:
        """A decode step; `positions` of the cache are read, over all rows."""
        model, chip = self.model, self.chip
        read = WEIGHT_BYTES * model.product_parameters + model.kv_bytes * positions
        computed = 2 * model.product_parameters * rows + 4 * model.layers * model.attention_width * positions
        return self.step_overhead_s + max(read / (self.reached.bandwidth * chip.bytes_s), computed / chip.flops)

    def prefill_s(self, tokens: float, positions: float) -> float:
        """Prefill of so many tokens, which see so many positions in sum."""
        model = self.model
        products = 2 * (model.product_parameters - model.head_parameters) * tokens
        return (products + 4 * model.layers * model.attention_width * positions) / (
            self.reached.prefill * self.chip.flops
        )

    def transfer_s(self) -> float:
        """The weights of a version, to one chip."""
        return WEIGHT_BYTES * self.model.parameters / self.chip.nic_bytes_s

    def cache_tokens(self) -> int:
        """Positions that fit beside the weights in nine tenths of the memory."""
        room = 0.9 * self.chip.memory_bytes - WEIGHT_BYTES * self.model.parameters
        return int(room / self.model.kv_bytes)

    def prices(self) -> Mapping[str, Price]:
        """For VirtualClock: of an engine's work."""

        def decode(lane: str, work: Work) -> float:
            rows = work.size['rows']
            # each step sees one position more of each row: the mean over the steps, since the price is linear there
            return work.amount * self.step_s(rows, work.size['positions'] + rows * (work.amount - 1) / 2)

        def prefill(lane: str, work: Work) -> float:
            return self.prefill_s(work.size['tokens'], work.size['positions'])

        return {'decode': decode, 'prefill': prefill, 'load': lambda lane, work: self.transfer_s()}
