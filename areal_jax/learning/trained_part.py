"""The programs and passes that train a set of leaves of the weights, and the move of a learner to another mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from areal_jax.config.fields import ConfigError
from areal_jax.learning import weights as trees
from areal_jax.learning.forward import TeacherForm
from areal_jax.learning.objective.objective import DIVERGENCES, FROM_TEACHER, TEACHER
from areal_jax.learning.optimizer import Optimizer
from areal_jax.learning.passes import Declared, Passes, Teacher
from areal_jax.learning.programs import CompiledPrograms, LearnerState, Programs, describe_state
from areal_jax.learning.row_layout import RowLayout
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.weights import Params, Trainable, critic_axes, export_weights
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import is_router_state, logical_axes, shared_tensors, stack_layers
from areal_jax.sharding.placement import place
from areal_jax.sharding.rules import Shares, param_shardings, replicated
from areal_jax.types import Tree


@dataclasses.dataclass(frozen=True)
class PartMaker:
    """Makes the parts of one learner from the values that they share."""

    decoder: Decoder
    mesh: Mesh
    settings: LearnerSettings
    optimizer: Optimizer
    layout: RowLayout
    learning_rate: float
    teacher: TeacherForm | None = None  # the teacher that a step itself runs
    teacher_weights: Tree = None  # its weights on the mesh

    def make(self, params: Params, trains: Trainable, *, block: int | None = None) -> TrainedPart:
        """The part that trains the leaves of `params` (arrays or descriptions) for whose paths `trains` is true.

        `block`: the number of the part if a learner has several; each then publishes only the leaves that it trains.
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
        spread = settings.publication == 'leaves' and jax.process_count() > 1
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
            shares=self._share(_with_shardings(exported, cut(exported))) if spread else None,
        )

    def _share(self, exported: Params) -> Shares:
        return Shares(exported, self.mesh, together=shared_tensors(self.decoder.config))


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
        declared = [(self.programs, *one) for one in self.passes.declared_programs(self.described)]
        if exports:
            frozen = self.described.frozen if self.block is None else {}
            declared.insert(0, (self.programs, 'export', (self.described.params, frozen)))
        return declared


def _with_shardings(tree: Tree, shardings: Tree) -> Tree:
    describe = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(describe, tree, shardings)


def _paths(tree: Params, prefix: str = '') -> list[str]:
    found: list[str] = []
    for name, value in sorted(tree.items()):
        found += _paths(value, f'{prefix}{name}/') if isinstance(value, dict) else [f'{prefix}{name}']
    return found


# A model with which the objective compares the trained one: the teacher of distillation.


def place_teacher(
    given: tuple[Decoder, Params] | None,
    trained: ModelConfig,
    mesh: Mesh,
    settings: LearnerSettings,
    optimizer: Optimizer,
    packing: str,
) -> tuple[Teacher | None, TeacherForm | None, Tree]:
    """(the teacher of a learner of shape `trained`, form and weights of a teacher that the steps themselves run).

    Each is None if the objective does not use it.

    Raises ConfigError if the objective needs a teacher that is not given, or compares different vocabularies.
    """
    reads = settings.objective.reads
    if not reads & FROM_TEACHER:
        return None, None, None
    if given is None:
        raise ConfigError('the objective reads a teacher: set loss.teacher, a Hugging Face directory')
    decoder, params = given
    ours, theirs = (shape.output_size or shape.vocab_size for shape in (trained, decoder.config))
    if reads & DIVERGENCES and ours != theirs:
        raise ConfigError(
            f'loss.teacher predicts one of {theirs} tokens, and the model that is trained one of {ours}: their '
            "distributions cannot be compared; name another teacher, or use loss.divergence='sampled'"
        )
    settings = dataclasses.replace(
        settings,
        records_routes=False,
        learner=dataclasses.replace(settings.learner, routes='live', router_aux_loss=0.0),
    )  # routes are of the trained model
    layout = RowLayout(decoder.config, mesh, settings)
    teacher = _place(PartMaker(decoder, mesh, settings, optimizer, layout, 0.0), params, packing)
    return (teacher, teacher.form, teacher.weights) if reads & DIVERGENCES else (teacher, None, None)


def _place(make: PartMaker, params: Params, packing: str) -> Teacher:
    """Places `params`, in list form; `packing` is the packing of the learner's rows.

    Raises ConfigError if its attention cannot read such rows.
    """
    if packing == 'shared_prompt' != make.layout.packing:
        raise ConfigError(
            f'loss.teacher: its attention, {make.layout.attention}, cannot show one prompt to several answers, as '
            "the rows of the trained model have them; set learner.packing='ordinary'"
        )
    whole = stack_layers(params) if make.decoder.layers == 'stacked' else params
    part = make.make(whole, lambda path: True)
    return Teacher(
        part.passes,
        place(trees.cast(whole, make.settings.learner.dtype), part.programs.definitions.params),
        TeacherForm(make.decoder, make.layout.attention),
        gives_logprobs=TEACHER in make.settings.objective.reads,
    )


# Another mesh for a learner: its programs, compiled ahead, and the move of weights and optimizer state to it.
#
# learner.py moves between two updates; until then nothing here touches the mesh and state in use.


@dataclasses.dataclass(frozen=True)
class PreparedMesh:
    """The row layout and the programs of a learner on one mesh; no weights."""

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
        """Shapes and shardings of the result of `SpmdLearner.publish` on this mesh."""
        programs, described = self.part.programs.definitions, self.part.described
        shapes = jax.eval_shape(programs.export(), described.params, described.frozen)
        return _with_shardings(shapes, programs.exported)


def prepare_mesh(make: PartMaker, part: TrainedPart, mesh: Mesh) -> PreparedMesh:
    """Prepares another mesh for the learner of `make` and its only `part`.

    Raises ConfigError for a mesh over which the model or the rows cannot be sharded.
    """
    layout = RowLayout(make.decoder.config, mesh, make.settings)
    described = trees.join(part.described.params, part.described.frozen)
    other = dataclasses.replace(make, mesh=mesh, layout=layout).make(described, part.trains)
    return PreparedMesh(mesh, layout, other)


def move_state(state: LearnerState, part: TrainedPart) -> None:
    """Moves weights and optimizer state to the mesh of the part, bit for bit.

    Moves leaf by leaf: a leaf is copied to the host and its old buffers are freed, so a device never holds it twice.
    """
    shardings = part.programs.definitions
    state.working = None  # the next step makes it there
    state.params = _move(_take(state, 'params'), shardings.params)
    state.frozen = _move(_take(state, 'frozen'), shardings.frozen)
    state.optimizer = _move(_take(state, 'optimizer'), shardings.state)
    routers = trees.policy_leaves(trees.split(shardings.frozen, is_router_state)[0])
    state.reference_routers = _move(_take(state, 'reference_routers'), routers)
    if state.reference is not None:
        state.reference = _move(_take(state, 'reference'), trees.policy_leaves(shardings.params))


def _take(state: LearnerState, name: str) -> Tree:
    tree = getattr(state, name)
    setattr(state, name, None)
    return tree


def _move(tree: Tree, shardings: Tree) -> Tree:
    """Moves over the host, as `jax.device_put` between meshes does too; from one device it would compile first."""
    leaves, structure = jax.tree.flatten(tree)
    del tree
    for index, sharding in enumerate(jax.tree.leaves(shardings)):
        whole, leaves[index] = jax.device_get(leaves[index]), None
        leaves[index] = jax.block_until_ready(jax.device_put(whole, sharding, may_alias=False))
    return jax.tree.unflatten(structure, leaves)
