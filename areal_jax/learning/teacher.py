"""A model beside the trained one that gives log-probs of its tokens: the teacher of distillation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from areal_jax.config.ranges import ConfigError
from areal_jax.learning.objective.objective import TEACHER
from areal_jax.learning.optimizer.optimizer import Optimizer
from areal_jax.learning.row_layout import RowLayout
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.trained_part import Declared, PartMaker
from areal_jax.learning.weights import trained_leaves as trees
from areal_jax.learning.weights.trained_leaves import Params
from areal_jax.models.decoder import Decoder
from areal_jax.models.layers import stack_layers
from areal_jax.sharding.placement import place
from areal_jax.types import PackedBatch


class Teacher:
    """Weights on the learner's mesh, in `settings.dtype`, that no update changes, and the program that reads them.

    Its decoder may have another architecture than the trained one; the vocabulary is the same. It reads the rows that
    are packed for the trained model.
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
        self._weights = place(trees.cast(whole, make.settings.dtype), self._part.programs.definitions.params)

    def logprobs(self, batch: PackedBatch, version: int) -> np.ndarray:
        """float32 [M, R, N] of the targets of a batch."""
        return self._part.passes.logprobs(self._weights, {}, batch, version)

    def declared_programs(self) -> Iterator[Declared]:
        """What `logprobs` runs, one for each shape of rows."""
        for name, args in self._part.passes.declared_logprobs(self._weights, {}):
            yield self._part.programs, name, args


def place_teacher(
    given: tuple[Decoder, Params] | None, mesh: Mesh, settings: LearnerSettings, optimizer: Optimizer, packing: str
) -> Teacher | None:
    """The teacher of a learner, None where its objective reads none; raises ConfigError where it lacks one."""
    if TEACHER not in settings.objective.reads:
        return None
    if given is None:
        raise ConfigError('the objective reads a teacher: set loss.teacher, a Hugging Face directory')
    decoder, params = given
    layout = RowLayout(decoder.config, mesh, settings)
    return Teacher(PartMaker(decoder, mesh, settings, optimizer, layout, 0.0), params, packing)
