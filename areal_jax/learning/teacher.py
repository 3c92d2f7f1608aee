"""A model beside the trained one that its objective compares it with: the teacher of distillation."""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh

from areal_jax.config.ranges import ConfigError
from areal_jax.learning.objective.objective import DIVERGENCES, FROM_TEACHER, TEACHER
from areal_jax.learning.optimizer.optimizer import Optimizer
from areal_jax.learning.row_layout import RowLayout
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.trained_part import PartMaker
from areal_jax.learning.update import Teacher
from areal_jax.learning.vocabulary_statistics import TeacherForm
from areal_jax.learning.weights import trained_leaves as trees
from areal_jax.learning.weights.trained_leaves import Params
from areal_jax.models.decoder import Decoder
from areal_jax.models.layers import stack_layers
from areal_jax.models.shape import ModelConfig
from areal_jax.sharding.placement import place
from areal_jax.types import Tree


def place_teacher(
    given: tuple[Decoder, Params] | None,
    trained: ModelConfig,
    mesh: Mesh,
    settings: LearnerSettings,
    optimizer: Optimizer,
    packing: str,
) -> tuple[Teacher | None, TeacherForm | None, Tree]:
    """The teacher of a learner of the shape `trained`, and form and weights of one that the steps themselves read.

    Each is None where the objective has no use for it.

    Raises ConfigError where the objective lacks one, or compares it over a vocabulary that they do not share.
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
        settings, records_routes=False, routes='live', router_aux_loss=0.0
    )  # of the trained model
    layout = RowLayout(decoder.config, mesh, settings)
    teacher = _place(PartMaker(decoder, mesh, settings, optimizer, layout, 0.0), params, packing)
    return (teacher, teacher.form, teacher.weights) if reads & DIVERGENCES else (teacher, None, None)


def _place(make: PartMaker, params: Params, packing: str) -> Teacher:
    """Places `params`, in list form; `packing` is the packing of the learner's rows.

    Raises ConfigError where its attention cannot read such rows.
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
        place(trees.cast(whole, make.settings.dtype), part.programs.definitions.params),
        TeacherForm(make.decoder, make.layout.attention),
        gives_logprobs=TEACHER in make.settings.objective.reads,
    )
