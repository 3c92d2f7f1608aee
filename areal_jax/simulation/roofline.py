"""Seconds that work takes on a chip, from flops and bytes: prices of the virtual clock for work of real size.

A decode step reads the weights and the KV cache of all rows, or computes, whichever takes longer; prefill and training
compute; the optimizer and a publication move bytes. `positions` are summed over the tokens in question: how many
positions each of them sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from areal_jax.control.clocks.virtual import Price
from areal_jax.simulation.prices import QWEN3_8B, Chip, ModelShape
from areal_jax.types import Work

WEIGHT_BYTES = 2  # 16-bit weights, as they decode and are published
OPTIMIZER_BYTES = 28  # of a parameter, float32: weight, two moments and gradient are read, all but the last written
MEMORY_SHARE = 0.9  # of an engine's memory, for weights and KV cache
# of the bandwidth, by models of 7 to 8 billion parameters with one row, eager, and the gain of graphs: 2605.30571
BATCH_ONE = 0.27 * 1.26
BATCH_ONE_SHAPE = QWEN3_8B


@dataclasses.dataclass(frozen=True)
class Reached:
    """Shares of the peaks that are reached, as published for others' engines and trainers.

    The defaults: 0.6 of the bandwidth is the low end of what served engines are said to reach (0.6 to 0.85); 0.5 of the
    flops in prefill is the low end likewise (0.5 to 0.73); 0.40 in training lies in what AReaL reaches on H800s with
    packed sequences, 0.39 to 0.46 (arXiv 2505.24298, figure 6a).
    """

    bandwidth: float = 0.6  # while decoding
    prefill: float = 0.5  # of the flops, also of a decode step that computes more than it reads
    mfu: float = 0.40  # of the flops, while training


def step_overhead_s(chip: Chip, shape: ModelShape, reached: Reached) -> float:
    """Of a decode step, besides its work: what a step of one row takes longer than it reads weights, by layers."""
    read_s = WEIGHT_BYTES * BATCH_ONE_SHAPE.product_parameters / chip.bytes_s
    return shape.layers / BATCH_ONE_SHAPE.layers * read_s * (1 / BATCH_ONE - 1 / reached.bandwidth)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """One engine, or the learner, on chips of one kind that share its work evenly."""

    chip: Chip
    shape: ModelShape
    reached: Reached = Reached()
    devices: int = 1  # of the engine: tensor parallel; of the learner: all of them
    step_overhead_s: float = 0.0  # of a decode step, besides its work

    def step_s(self, rows: float, positions: float) -> float:
        """A decode step; `positions` of the cache are read, over all rows."""
        shape, chip = self.shape, self.chip
        read = WEIGHT_BYTES * shape.read_parameters(rows) + shape.kv_bytes * positions
        read_s = read / (self.reached.bandwidth * chip.bytes_s * self.devices)
        computed = 2 * shape.active_parameters * rows + self._attention(positions)
        computed_s = computed / (self.reached.prefill * chip.flops * self.devices)
        return self.step_overhead_s + max(read_s, computed_s) + self._reduce_s(rows)

    def prefill_s(self, tokens: float, positions: float) -> float:
        """Prefill, or rebuild, of so many tokens; the head is used for the last of each prompt and left out."""
        products = 2 * (self.shape.active_parameters - self.shape.head_parameters) * tokens
        flops = self.reached.prefill * self.chip.flops * self.devices
        return (products + self._attention(positions)) / flops + self._reduce_s(tokens)

    def train_s(self, tokens: float, positions: float, passes: float) -> float:
        """Training on so many tokens.

        `passes` are in forward passes: 3 for the update, 4 where activations are computed again, 1 more for proximal
        log-probs and 1 more for a reference model.
        """
        computed = 2 * self.shape.active_parameters * tokens + self._attention(positions)
        return passes * computed / (self.reached.mfu * self.chip.flops * self.devices)

    def optimizer_s(self) -> float:
        """A step of Adam with float32 state, cut over the devices: the bytes that it touches, at the full bandwidth."""
        return OPTIMIZER_BYTES * self.shape.parameters / (self.chip.bytes_s * self.devices)

    def publication_s(self, receiver: int, senders: int, changed: float = 1.0) -> float:
        """Transfer of a version, without the pause of an engine: what the slower side's networks take.

        Args:
          receiver: devices of one engine, each of which receives a part.
          senders: devices of the learner, each of which sends a part.
          changed: share of the weights that is sent.
        """
        sent = changed * WEIGHT_BYTES * self.shape.parameters
        return sent / (self.chip.network_bytes_s * min(receiver, senders))

    def cache_tokens(self) -> int:
        """Positions that fit beside the weights in nine tenths of the memory."""
        memory = MEMORY_SHARE * self.chip.memory_bytes * self.devices
        return int((memory - WEIGHT_BYTES * self.shape.parameters) / self.shape.kv_bytes)

    def prices(self) -> Mapping[str, Price]:
        """For VirtualClock: of an engine's work."""

        def decode(lane: str, work: Work) -> float:
            rows = work.size['rows']
            # each step sees one position more of each row: the mean over the steps, since the price is linear there
            return work.amount * self.step_s(rows, work.size['positions'] + rows * (work.amount - 1) / 2)

        def prefill(lane: str, work: Work) -> float:
            return self.prefill_s(work.size['tokens'], work.size['positions'])

        load_s = self.publication_s(self.devices, self.devices)
        return {'decode': decode, 'prefill': prefill, 'load': lambda lane, work: load_s}

    def _attention(self, positions: float) -> float:
        """Flops."""
        return 4 * self.shape.layers * self.shape.attention_width * positions

    def _reduce_s(self, tokens: float) -> float:
        """Two all-reduces a layer of the residual stream, 16 bit; their latency is left out.

        In a ring each of n devices sends 2 (n - 1) / n of the bytes (Patarasuk and Yuan 2009), in one direction
        of its interconnect.
        """
        n, one_direction = self.devices, self.chip.interconnect_bytes_s / 2
        reduced = 2 * self.shape.layers * tokens * self.shape.hidden * WEIGHT_BYTES
        return 2 * (n - 1) / n * reduced / one_direction
