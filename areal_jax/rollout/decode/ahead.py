"""Compiles the programs of a backend before there are weights on its devices, while others use these."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding

from areal_jax.rollout.decode import decode_rows
from areal_jax.rollout.decode.decode_weights import PreparedWeights
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend


def compile_ahead(backend: JaxDecodeBackend, weights: PreparedWeights) -> None:
    """Compiles what `warm_up` would run, and runs nothing; from any thread.

    `weights` are those of a backend over as many other devices, or descriptions of them: only shapes are read.
    """

    def describe(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding, mesh = leaf.sharding, backend.placement.mesh
        if mesh is None or not isinstance(sharding, NamedSharding):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, sharding.spec))

    described, state = jax.tree.map(describe, weights), backend.abstract_state()
    padding = backend.cache_blocks  # the block behind the last
    at = np.full(decode_rows.COPIES, padding, np.int32)
    backend.initial_program.lower().compile()
    backend.copy_program.lower(state, at, at).compile()
    for lowered in backend.lower_all(described):
        lowered.compile()
    if state.columns:
        table = np.zeros(-(-backend.context_tokens // backend.block_tokens), np.int32)
        backend.read_program.lower(state.columns, table).compile()
