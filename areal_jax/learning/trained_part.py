"""What trains a set of leaves of the weights: its programs, the passes that run them, and what to compile of it."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.sharding import Mesh

from areal_jax.learning.critic import critic_axes
from areal_jax.learning.learner_state import LearnerState, describe_state
from areal_jax.learning.optimizer.optimizer import Optimizer
from areal_jax.learning.passes import Passes
from areal_jax.learning.programs import CompiledPrograms
from areal_jax.learning.row_layout import RowLayout
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.train_step import Programs
from areal_jax.learning.vocabulary_statistics import TeacherForm
from areal_jax.learning.weights import trained_leaves as trees
from areal_jax.learning.weights.interchange import export_weights
from areal_jax.learning.weights.trained_leaves import Params, Trainable
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import logical_axes
from areal_jax.sharding.rules import Shares, param_shardings, replicated
from areal_jax.types import Tree

Declared = tuple[CompiledPrograms, str, tuple[Tree, ...]]  # a program by its name, and arguments of its shapes


@dataclasses.dataclass(frozen=True)
class PartMaker:
    """What the sets of leaves of one learner have in common."""

    decoder: Decoder
    mesh: Mesh
    settings: LearnerSettings
    optimizer: Optimizer
    layout: RowLayout
    learning_rate: float
    teacher: TeacherForm | None = None  # whom a step itself reads, and its weights on the mesh
    teacher_weights: Tree = None

    def make(self, params: Params, trains: Trainable, *, block: int | None = None) -> TrainedPart:
        """The part that trains the leaves of `params` (arrays or descriptions) for whose paths `trains` is true.

        `block`: the number of the part where a learner has several, each of which publishes its own leaves alone.
        """
        trained, frozen = trees.split(params, trains)
        programs = CompiledPrograms(self._define(trained, frozen, block))
        passes = Passes(
            self.layout, programs, self.settings, self.mesh, self.learning_rate, teacher=self.teacher_weights
        )
        return TrainedPart(
            trains, programs, passes, describe_state(trained, frozen, self.settings, programs.definitions), block
        )

    def _define(self, trained: Params, frozen: Params, block: int | None) -> Programs:
        decoder, settings, mesh = self.decoder, self.settings, self.mesh
        axes = logical_axes(decoder.config)

        def cut(tree: Params) -> dict[str, Tree]:
            shardings = param_shardings(trees.policy_leaves(tree), axes, mesh, settings.strategy)
            if trees.CRITIC not in tree:
                return shardings
            of_critic = param_shardings(tree[trees.CRITIC], critic_axes(axes), mesh, settings.strategy)
            return shardings | {trees.CRITIC: of_critic}

        export = functools.partial(export_weights, decoder, settings.publish_dtype)
        exported = jax.eval_shape(export, trained, frozen if block is None else {})
        spread = settings.publishes_files and jax.process_count() > 1
        return Programs(
            decoder,
            settings,
            self.optimizer,
            mesh,
            attention=self.layout.attention,
            trained=None if block is None else tuple(_paths(trained)),
            teacher=self.teacher,
            params=cut(trained),
            frozen=cut(frozen),
            state=self.optimizer.shardings(trained, cut(trained), replicated(mesh)),
            exported=cut(exported),
            shares=Shares(_with_shardings(exported, cut(exported)), mesh) if spread else None,
        )


@dataclasses.dataclass(frozen=True)
class TrainedPart:
    """The programs of one set of leaves; see PartMaker.make."""

    trains: Trainable
    programs: CompiledPrograms
    passes: Passes
    described: LearnerState
    block: int | None

    def declared_programs(self, *, exports: bool) -> list[Declared]:
        """Every program that its updates and, with `exports`, publications run."""
        declared = [
            (self.programs, name, args)
            for name, args in self.passes.declared_programs(self.described)
            if name != 'export'
        ]
        if exports:
            frozen = self.described.frozen if self.block is None else {}
            declared.insert(0, (self.programs, 'export', (self.described.params, frozen)))
        return declared


def _with_shardings(tree: Tree, shardings: Tree) -> Tree:
    describe = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(describe, tree, shardings)


def _paths(tree: Params, prefix: str = '') -> list[str]:
    """Of all leaves, in order."""
    found: list[str] = []
    for name, value in sorted(tree.items()):
        found += _paths(value, f'{prefix}{name}/') if isinstance(value, dict) else [f'{prefix}{name}']
    return found
