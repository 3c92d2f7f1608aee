"""Another mesh for a learner: its programs, compiled ahead, and the move of weights and optimizer state to it.

moving_learner.py moves between two updates; until then nothing here touches what it computes with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from areal_jax.learning.learner_state import LearnerState
from areal_jax.learning.row_layout import RowLayout
from areal_jax.learning.trained_part import PartMaker, TrainedPart
from areal_jax.learning.weights import trained_leaves as trees
from areal_jax.types import Tree


@dataclasses.dataclass(frozen=True)
class PreparedMesh:
    """What a learner computes with on one mesh; no weights."""

    mesh: Mesh
    layout: RowLayout
    part: TrainedPart

    def compile(self, announce: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Compiles every program of updates and publications; returns their number. Runs none of them."""
        part = self.part
        declared = part.declared_programs(exports=True)
        for done, (programs, name, args) in enumerate(declared):
            announce(done, len(declared))
            programs.compile(name, *args)
        return len(declared)

    def describe_publication(self) -> Tree:
        """Shapes and shardings of what `SpmdLearner.publish` returns on this mesh."""
        programs, described = self.part.programs.definitions, self.part.described
        shapes = jax.eval_shape(programs.export(), described.params, described.frozen)
        describe = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.tree.map(describe, shapes, programs.exported)


def prepare_mesh(make: PartMaker, part: TrainedPart, mesh: Mesh) -> PreparedMesh:
    """What the learner of `make` and its only `part` computes with on another mesh.

    Raises ConfigError for a mesh that cannot share out the model or the rows.
    """
    layout = RowLayout(make.decoder.config, mesh, make.settings)
    described = trees.join(part.described.params, part.described.frozen)
    other = dataclasses.replace(make, mesh=mesh, layout=layout).make(described, part.trains)
    return PreparedMesh(mesh, layout, other)


def move_state(state: LearnerState, part: TrainedPart) -> None:
    """Moves weights and optimizer state to the mesh of the part, bit for bit.

    Leaf by leaf: a leaf is on the host when its old buffers are freed, so that a device never holds it twice.
    """
    shardings = part.programs.definitions
    state.params = _move(_take(state, 'params'), shardings.params)
    state.frozen = _move(_take(state, 'frozen'), shardings.frozen)
    state.optimizer = _move(_take(state, 'optimizer'), shardings.state)
    if state.reference is not None:
        state.reference = _move(_take(state, 'reference'), trees.policy_leaves(shardings.params))


def _take(state: LearnerState, name: str) -> Tree:
    """A field of the state, which lets it go."""
    tree = getattr(state, name)
    setattr(state, name, None)
    return tree


def _move(tree: Tree, shardings: Tree) -> Tree:
    """Over the host, which `jax.device_put` between meshes does as well, and from one device after it has compiled."""
    leaves, structure = jax.tree.flatten(tree)
    del tree
    for index, sharding in enumerate(jax.tree.leaves(shardings)):
        whole, leaves[index] = jax.device_get(leaves[index]), None
        leaves[index] = jax.block_until_ready(jax.device_put(whole, sharding, may_alias=False))
    return jax.tree.unflatten(structure, leaves)
