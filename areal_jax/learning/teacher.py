"""A model beside the trained one that its objective compares it with: the teacher of distillation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from areal_jax.config.ranges import ConfigError
from areal_jax.learning.objective.objective import DIVERGENCES, FROM_TEACHER, TEACHER
from areal_jax.learning.optimizer.optimizer import Optimizer
from areal_jax.learning.row_layout import RowLayout
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.trained_part import Declared, PartMaker
from areal_jax.learning.vocabulary_statistics import TeacherForm
from areal_jax.learning.weights import trained_leaves as trees
from areal_jax.learning.weights.trained_leaves import Params
from areal_jax.models.decoder import Decoder
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import stack_layers
from areal_jax.sharding.placement import place
from areal_jax.types import PackedBatch, Tree


class Teacher:
    """Weights on the learner's mesh, in `settings.dtype`, that no update changes, and the program that reads them.

    Its decoder may have another architecture than the trained one; the vocabulary is the same. It reads the rows that
    are packed for the trained model. Its log-probs of their tokens come from a pass before the steps. An objective that
    compares whole distributions has its pass, with `form` and `weights`, inside each step: hidden states of another
    pass would take N * d' numbers of memory for N tokens.
    """

    def __init__(self, make: PartMaker, params: Params, packing: str):
        """Places `params`, in list form; `packing` is that of the learner's rows.

        Raises ConfigError where its attention cannot read such rows.
        """
        if packing == 'shared_prompt' != make.layout.packing:
            raise ConfigError(
                f'loss.teacher: its attention, {make.layout.attention}, cannot show one prompt to several answers, as '
                "the rows of the trained model have them; set learner.packing='ordinary'"
            )
        whole = stack_layers(params) if make.decoder.layers == 'stacked' else params
        self._part = make.make(whole, lambda path: True)
        self.gives_logprobs = TEACHER in make.settings.objective.reads
        self.weights = place(trees.cast(whole, make.settings.dtype), self._part.programs.definitions.params)
        self.form = TeacherForm(make.decoder, make.layout.attention)

    def logprobs(self, batch: PackedBatch, version: int) -> np.ndarray:
        """float32 [M, R, N] of the targets of a batch."""
        return self._part.passes.logprobs(self.weights, {}, batch, version)

    def declared_programs(self) -> Iterator[Declared]:
        """What `logprobs` runs, one for each shape of rows."""
        if not self.gives_logprobs:
            return
        for name, args in self._part.passes.declared_logprobs(self.weights, {}):
            yield self._part.programs, name, args


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
    teacher = Teacher(PartMaker(decoder, mesh, settings, optimizer, layout, 0.0), params, packing)
    return (teacher, teacher.form, teacher.weights) if reads & DIVERGENCES else (teacher, None, None)
