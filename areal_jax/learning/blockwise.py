"""Training in blocks: an update trains some of the leaves, and the others are frozen (docs/blockwise.md).

Block 0 has the leaves outside the layers: embedding, positions, final norm and head. Every other block has consecutive
layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from areal_jax.config.fields import ConfigError
from areal_jax.config.training import OptimizerSection
from areal_jax.learning import weights as trees
from areal_jax.learning.diagnostics.measurement import Metrics
from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.optimizer import Optimizer
from areal_jax.learning.passes import Declared
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.trained_part import PartMaker, TrainedPart
from areal_jax.learning.weights import Params, match_snapshot, read_snapshot
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import nest
from areal_jax.sharding.placement import copy_shards
from areal_jax.sharding.rules import path_name
from areal_jax.telemetry.metrics import merge
from areal_jax.telemetry.names import BLOCK
from areal_jax.types import TrajectoryGroup, Tree

_LAYER = re.compile(r'layers/(\d+)/')


@dataclasses.dataclass(frozen=True)
class BlockOrder:
    """Chooses the block that an update trains; needs more than one block."""

    settings: OptimizerSection
    seed: int  # of the run: of the shuffled order

    @property
    def blocks(self) -> int:
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


_BLOCKS, _MOMENTS = 'blocks', 'transform'  # in a checkpoint: blocks/2/transform/... are the moments of block 2


class BlockLearner(SpmdLearner):
    """`protocols.Learner` whose updates each train one block. For one process, with layers as a list.

    `publish` returns leaves that have not changed since the last publication as the same arrays, so that a channel
    sends only the others.

    config/training.py refuses settings that cannot be trained in blocks.

    Raises ConfigError for more blocks than the model has layers.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: Params,
        mesh: Mesh,
        *,
        blocks: BlockOrder,
        optimizer: Optimizer,
        learning_rate: float,
        settings: LearnerSettings,
        compile_ahead: bool = False,
    ):
        self.blocks = blocks
        self._block = 0  # the one that is trained on the mesh
        self._moments: dict[int, Tree] = {}  # of other blocks that have been trained, on the host
        self._published: Tree = None  # the last publication
        self._changed = set(range(blocks.blocks))  # blocks that differ from the last publication
        super().__init__(
            decoder,
            params,
            mesh,
            optimizer=optimizer,
            learning_rate=learning_rate,
            settings=settings,
            compile_ahead=compile_ahead,
        )

    def _make_parts(self, make: PartMaker, params: Params) -> list[TrainedPart]:
        if make.decoder.config.experts and make.decoder.config.experts.sigmoid:
            raise ConfigError(
                f'optimizer.blocks={self.blocks.blocks} trains all leaves of a block, and the corrections of this '
                "model's sigmoid routers are not trained: use optimizer.blocks=1"
            )
        self.paths: Sequence[frozenset[str]] = cut_blocks(leaf_sizes(params), self.blocks.blocks)
        return [make.make(params, paths.__contains__, block=block) for block, paths in enumerate(self.paths)]

    def _declare(self) -> list[Declared]:
        turning = 'copy', 'initial_state'
        return super()._declare() + [
            (part.programs, name, (part.described.params,)) for part in self.parts for name in turning
        ]

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Metrics:
        """Trains the block of this version; see SpmdLearner.update."""
        self._turn_to(self.blocks.block_of(version))
        self._changed.add(self._block)
        return merge(learner=super().update(groups, version), blocks={BLOCK: float(self._block)})

    def publish(self, version: int) -> Tree:
        """See SpmdLearner.publish. Leaves that did not change are the arrays of the last publication."""
        self._version, self._update = version, None
        whole = trees.join(self.state.params, self.state.frozen)
        leaves = {} if self._published is None else _by_path(self._published)
        for block in sorted(self._changed):
            leaves |= _by_path(self._export(block, whole))
        self._changed.clear()
        self._copy = self._published = nest(leaves.items())
        return self._copy

    def read_block(self, block: int) -> dict[str, np.ndarray]:
        """The weights of one block by path, float32 on the host, in memory that no update writes to."""
        whole = trees.join(self.state.params, self.state.frozen)
        own, _ = trees.split(whole, self.parts[block].trains)
        return {path: np.asarray(copy_shards(leaf)) for path, leaf in _by_path(own).items()}

    def replace_block(self, block: int, values: Mapping[str, np.ndarray]) -> None:
        """Gives a block other weights, by path; its moments stay. Raises ValueError for leaves of another block."""
        if values.keys() != self.paths[block]:
            raise ValueError(f'block {block} has {len(self.paths[block])} leaves, and {len(values)} others were given')
        part, state = self.parts[block], self.state
        new = jax.device_put(nest(values.items()), part.programs.definitions.params, may_alias=False)
        if block == self._block:
            state.params, state.working = new, None
        else:
            state.frozen = trees.join(new, trees.split(state.frozen, part.trains)[1])
        self._copy = self._version = None
        self._changed.add(block)

    def restore(self, saved: Mapping[str, Tree]) -> None:
        """See SpmdLearner.restore. The next update turns to the block of its version."""
        state, part = self.state, self.parts[self._block]
        blocks = sorted({int(path.split('/')[1]) for path in saved['optimizer'] if path.startswith(f'{_BLOCKS}/')})
        if unknown := [block for block in blocks if block >= self.blocks.blocks]:
            raise ValueError(f'saved moments are of block {unknown[0]}, and optimizer.blocks={self.blocks.blocks}')
        described = self._describe(lambda part: part.described.optimizer, state.optimizer['step'], blocks)
        whole = trees.join(state.params, state.frozen)
        current = jax.tree.map(_describe_leaf, {'params': whole, 'optimizer': described})
        match_snapshot(self._decoder, saved, current)
        state.params = state.frozen = state.optimizer = state.working = None
        self._copy = self._published = None
        first = self.parts[0].programs.definitions
        placed = self._describe(lambda part: part.programs.definitions.state, first.state['step'], blocks)
        over = {'params': trees.join(first.params, first.frozen), 'optimizer': placed}
        new = read_snapshot(self._decoder, saved, current, over)
        self._moments = {int(block): to_host(of[_MOMENTS]) for block, of in new['optimizer'].get(_BLOCKS, {}).items()}
        trained, state.frozen = trees.split(new['params'], part.trains)
        self._begin(part, trained, new['optimizer']['step'])
        self._changed = set(range(self.blocks.blocks))
        self.require_finite('the checkpoint', 'remove it to go on from the one before, or start again')

    def _turn_to(self, block: int) -> None:
        if block != self._block:
            state, part = self.state, self.parts[block]
            if self.blocks.keeps_moments:
                self._moments[self._block] = to_host(state.optimizer[_MOMENTS])
            step, state.optimizer = state.optimizer['step'], None
            trained, state.frozen = trees.split(trees.join(state.params, state.frozen), part.trains)
            state.params, state.working, self._block = None, None, block
            self._begin(part, trained, step)
        if not self.blocks.keeps_moments:
            self._moments.clear()  # a checkpoint at the end of a turn has the moments of the previous block

    def _begin(self, part: TrainedPart, trained: Params, step: jax.Array) -> None:
        state, programs = self.state, part.programs
        state.params = programs.run('copy', trained)
        state.optimizer = {**programs.run('initial_state', state.params), 'step': step}
        if (kept := self._moments.pop(self._block, None)) is not None:
            over = programs.definitions.state[_MOMENTS]
            state.optimizer[_MOMENTS] = jax.device_put(kept, over, may_alias=False)
        self.programs, self._passes = programs, part.passes

    def _whole_optimizer(self) -> Tree:
        optimizer = self.state.optimizer
        moments = self._moments | {self._block: optimizer[_MOMENTS]}
        return {'step': optimizer['step'], _BLOCKS: {str(b): {_MOMENTS: moments[b]} for b in sorted(moments)}}

    def _describe(self, state_of: Callable[[TrainedPart], Tree], step: Tree, blocks: Sequence[int]) -> Tree:
        """The tree of `_whole_optimizer` for these blocks, with the leaves of `state_of`: shapes or shardings."""
        own = {str(block): {_MOMENTS: state_of(self.parts[block])[_MOMENTS]} for block in blocks}
        return {'step': step, _BLOCKS: own} if own else {'step': step}

    def _export(self, block: int, whole: Params) -> Tree:
        part = self.parts[block]
        own, _ = trees.split(whole, part.trains)
        return self._host_copies.copy(own) if self._host_copies else part.programs.run('export', own, {})


def leaf_sizes(params: Params) -> dict[str, int]:
    """Bytes of each leaf in float32, by path; leaves need a shape only."""
    return {path: leaf.size * 4 for path, leaf in _by_path(params).items()}


def to_host(tree: Tree) -> Tree:
    """Numpy arrays in memory that no update writes to."""
    return jax.tree.map(copy_shards, tree)


def _by_path(tree: Tree) -> dict[str, Tree]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _describe_leaf(leaf: Tree) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
