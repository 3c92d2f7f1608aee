"""Cuts the leaves of the weights into blocks, and chooses the block that an update trains. Pure functions; no jax.

Block 0 has the leaves outside the layers: embedding, positions, final norm and head. Every other block has consecutive
layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from areal_jax.config.fields import ConfigError
from areal_jax.config.training import OptimizerSection

_LAYER = re.compile(r'layers/(\d+)/')


@dataclasses.dataclass(frozen=True)
class BlockOrder:
    """Chooses the block that an update trains; needs more than one block."""

    settings: OptimizerSection
    seed: int  # of the run: of the shuffled order

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.settings.blocks

    @property
    def keeps_moments(self) -> bool:
        """Whether the moments of a block outlive the updates of other blocks."""
        return self.settings.block_state == 'host'

    def block_of(self, version: int) -> int:
        """The block that the update from `version` to `version` + 1 trains."""
        return self.block_of_turn(self.turn_of(version))

    def turn_of(self, version: int) -> int:
        """The turn, from 0, of the update from `version`. A turn is `block_updates` consecutive updates of one block.

        A round has a turn for each block.
        """
        return version // self.settings.block_updates

    def block_of_turn(self, turn: int) -> int:
        number, place = divmod(turn, self.blocks)
        return ORDERS[self.settings.block_order](self.blocks, self.seed, number)[place]

    def ends_turn(self, version: int) -> bool:
        """Whether the update to `version` was the last one of its turn."""
        return version % self.settings.block_updates == 0


def cyclic(blocks: int, seed: int, number: int) -> list[int]:
    """The order of round `number`: 0, 1, ..., the same in all rounds."""
    return list(range(blocks))


def shuffled(blocks: int, seed: int, number: int) -> list[int]:
    """A permutation of the blocks, a function of (seed, round) alone; no block ends a round and begins the next one.

    If the first block was the last one of the previous round, the first two blocks change places. With two blocks that
    would change the last one too, so all rounds have the order of round 0.
    """
    if blocks < 3:
        return _permute(blocks, seed, 0)
    order = _permute(blocks, seed, number)
    if number and order[0] == _permute(blocks, seed, number - 1)[-1]:
        order[:2] = order[1], order[0]
    return order


# by optimizer.block_order; (number of blocks, seed, round) -> blocks in their order
ORDERS: Mapping[str, Callable[[int, int, int], list[int]]] = {'cyclic': cyclic, 'shuffled': shuffled}


def _permute(blocks: int, seed: int, number: int) -> list[int]:
    """Ranks of raw Philox output, which every version of numpy reproduces."""
    key = np.array([seed, number], np.uint64)
    ranks: list[int] = np.argsort(np.random.Philox(key=key).random_raw(blocks), kind='stable').tolist()
    return ranks


def cut_blocks(sizes: Mapping[str, int], blocks: int) -> list[frozenset[str]]:
    """The paths of the leaves of each block; every leaf is in exactly one.

    Args:
      sizes: bytes of every leaf by its path in list form, 'layers/0/mlp_norm'.
      blocks: at least 2. Blocks of layers have about equal bytes.

    Raises ConfigError if there are fewer layers than blocks of them.
    """
    by_layer: dict[int, int] = {}
    for path, size in sizes.items():
        if (layer := layer_of(path)) is not None:
            by_layer[layer] = by_layer.get(layer, 0) + size
    if len(by_layer) < blocks - 1:
        raise ConfigError(
            f'optimizer.blocks={blocks} needs {blocks - 1} layers beside the block of embedding, final norm and head, '
            f'and the model has {len(by_layer)}; use optimizer.blocks={len(by_layer) + 1} or less'
        )
    ends = _cut_evenly([by_layer[layer] for layer in range(len(by_layer))], blocks - 1)
    number = {layer: sum(layer >= end for end in ends) + 1 for layer in by_layer}
    cut: list[set[str]] = [set() for _ in range(blocks)]
    for path in sizes:
        layer = layer_of(path)
        cut[0 if layer is None else number[layer]].add(path)
    return [frozenset(paths) for paths in cut]


def layer_of(path: str) -> int | None:
    """The layer of a leaf; None outside the layers."""
    match = _LAYER.match(path)
    return None if match is None else int(match[1])


def _cut_evenly(sizes: Sequence[int], parts: int) -> list[int]:
    """The exclusive ends of parts of consecutive entries, nearest to equal shares of the sum; no part is empty."""
    sums = [0, *itertools.accumulate(sizes)]
    ends: list[int] = []
    for part in range(1, parts):
        first = ends[-1] + 1 if ends else 1
        choices = range(first, len(sizes) - (parts - part) + 1)
        ends.append(min(choices, key=lambda end: abs(sums[end] * parts - sums[-1] * part)))
    return [*ends, len(sizes)]
