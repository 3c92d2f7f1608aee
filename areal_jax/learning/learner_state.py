"""What a learner keeps on its mesh between commands. programs.py places it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from areal_jax.learning.objective.objective import REFERENCE
from areal_jax.learning.programs import CompiledPrograms
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.train_step import Programs
from areal_jax.learning.weights import trained_leaves as trees
from areal_jax.learning.weights.trained_leaves import Params
from areal_jax.sharding.placement import place
from areal_jax.types import Tree


@dataclasses.dataclass
class LearnerState:
    """Trees of arrays over the mesh. The programs of an update donate `params` and `optimizer`.

    Every field that a program donates is replaced by its result at once: the old buffers must not be read again.
    """

    params: Tree  # trained weights, float32
    frozen: Tree  # all other weights, in learner.dtype; empty without adapters
    optimizer: Tree  # see optimizer.Optimizer
    reference: Tree = None  # trained weights of the reference, in learner.dtype; None where no objective reads it

    @property
    def weights_and_optimizer(self) -> dict[str, Tree]:
        """What a checkpoint holds, in one tree for `require_finite`."""
        return trees.join(self.params, self.frozen) | {'optimizer': self.optimizer}


def place_state(
    trained: Params,
    frozen: Params,
    settings: LearnerSettings,
    programs: CompiledPrograms,
    reference: Params | None = None,
) -> LearnerState:
    """Copies weights to the mesh and makes the state of an optimizer that has done no step.

    Args:
      reference: where the objective reads it, weights of the shapes of `trained`; None = those.
    """
    shardings = programs.definitions
    params = _copy(trees.cast(trained, 'float32'), programs)
    return LearnerState(
        params=params,
        frozen=place(trees.cast(frozen, settings.learner.dtype), shardings.frozen),
        optimizer=programs.run('initial_state', params),
        reference=_place_reference(params, reference, settings, programs),
    )


def describe_state(trained: Params, frozen: Params, settings: LearnerSettings, programs: Programs) -> LearnerState:
    """The shapes, dtypes and shardings of what `place_state` makes, for compiling before it is there."""
    params = _describe(trained, programs.params, 'float32')
    return LearnerState(
        params=params,
        frozen=_describe(frozen, programs.frozen, settings.learner.dtype),
        optimizer=_describe(jax.eval_shape(programs.optimizer.init, params), programs.state),
        reference=describe_cast(trees.policy_leaves(params), settings.learner.dtype)
        if REFERENCE in settings.objective.reads
        else None,
    )


def describe_cast(tree: Tree, dtype: str) -> Tree:
    """Arrays, or descriptions of arrays, as they would be in `dtype`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding), tree)


def _place_reference(
    params: Tree, reference: Params | None, settings: LearnerSettings, programs: CompiledPrograms
) -> Tree:
    if REFERENCE not in settings.objective.reads:
        return None
    if reference is None:
        return trees.policy_leaves(programs.run('copy' if settings.learner.dtype == 'float32' else 'cast', params))
    return place(trees.cast(reference, settings.learner.dtype), trees.policy_leaves(programs.definitions.params))


def _describe(tree: Tree, shardings: Tree, dtype: str | None = None) -> Tree:
    describe = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding)
    return jax.tree.map(describe, tree, shardings)


def _copy(trained: Params, programs: CompiledPrograms) -> Tree:
    """The trained weights on the mesh, in buffers that an update may overwrite."""
    shardings = programs.definitions.params
    on_host = all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(trained))
    if on_host and jax.process_count() == 1:  # copied once, while they are placed
        return jax.device_put(trained, shardings, may_alias=False)
    return programs.run('copy', place(trained, shardings))
