"""The learner that goes on with another mesh between two updates: what cluster.reallocate moves."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.prepared_mesh import PreparedMesh, move_state, prepare_mesh
from areal_jax.types import Tree


class MovingLearner(SpmdLearner):
    """`protocols.Learner` that moves. For one process, an objective without a teacher, and no split of the ratio."""

    def __init__(self, *args: Any, **options: Any):
        """See SpmdLearner; config/splits.py refuses what keeps its mesh."""
        super().__init__(*args, **options)
        # with the mesh in use: its programs are kept for the way back
        self._prepared = {self._mesh: PreparedMesh(self._mesh, self._layout, self.parts[0])}

    def prepare(self, mesh: Mesh) -> list[Tree]:
        """Compiles what `move` to this mesh needs; in any thread, while updates go on. Nothing the second time.

        Returns shapes and shardings of what `publish` returns on the mesh in use, and will return on the other.

        Raises ConfigError for a mesh that cannot share out the model or the rows.
        """
        if mesh not in self._prepared:
            prepared = prepare_mesh(self._make, self.parts[0], mesh)
            prepared.compile()
            self._prepared[mesh] = prepared
        return [self._prepared[one].describe_publication() for one in (self._mesh, mesh)]

    def move(self, mesh: Mesh) -> None:
        """Goes on with another mesh, between two updates; weights and optimizer state keep their bits."""
        if mesh == self._mesh:
            return
        self.prepare(mesh)
        prepared, self._copy = self._prepared[mesh], None
        move_state(self.state, prepared.part)
        self._mesh, self._layout, self.parts = mesh, prepared.layout, [prepared.part]
        self.programs, self._passes = prepared.part.programs, prepared.part.passes
        self.attention, self.packing = self._layout.attention, self._layout.packing
        self._price = self._price._replace(packing=self.packing)
        self._declared = self._declare()
