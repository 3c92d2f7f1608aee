"""A run whose learner is in this process: the model, the learner and its programs, the export of its weights.

controller_run.py has the run whose learner is in other processes.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from ml_collections import config_dict

from areal_jax.app.compilations import CompilationCounter, use_compilation_cache
from areal_jax.app.export import replace_export, write_export
from areal_jax.app.finished_export import DIRECTORY as EXPORT
from areal_jax.app.finished_export import holds_export
from areal_jax.app.learner import build_learner, require_finite_weights
from areal_jax.app.model import Model, build_model
from areal_jax.app.processes import lead
from areal_jax.app.profile import DIRECTORY, TracedLearner
from areal_jax.app.provenance import Hardware, hardware
from areal_jax.app.run import Checkpoint, Run
from areal_jax.app.sizes import measure_parts, require_room
from areal_jax.app.start_warnings import print_passed_over, print_warnings
from areal_jax.app.text_model import describe_loading, require_rules_of_origin
from areal_jax.app.workdir import CHECKPOINTS, describe_unexported, note_weights
from areal_jax.checkpoint.store import CheckpointError
from areal_jax.config.cluster import parse_learner
from areal_jax.distributed.leader import CommandLeader
from areal_jax.errors import UserError
from areal_jax.learning.finiteness import NonFiniteError
from areal_jax.learning.learner import SpmdLearner
from areal_jax.protocols import Learner
from areal_jax.types import Tree

_OF_LEARNER = ('params', 'optimizer')  # names in the arrays of a checkpoint


class OwnLearner(Run):
    """See Run."""

    learner: SpmdLearner | CommandLeader
    _memory_parts: dict[str, int]

    def _require_startable(self, config: config_dict.ConfigDict) -> None:
        require_rules_of_origin(config)
        require_room(config)
        self._memory_parts = measure_parts(config)

    def _print_warnings(self, config: config_dict.ConfigDict) -> None:
        print_warnings(config)

    def _use_compilation_cache(self) -> None:
        self._parts.enter_context(use_compilation_cache(self.config))

    def _measure_memory(self) -> dict[str, int]:
        """Bytes by what they are for: shapes, programs of the learner, copies for a checkpoint."""
        parts = self._memory_parts
        if self.config.checkpoint.every:
            parts = parts | {'copy for a checkpoint': parts.get('optimizer', 0)}
        return parts | (
            {'programs': self.learner.programs.temporary_bytes} if isinstance(self.learner, SpmdLearner) else {}
        )

    def _count_compilations(self) -> CompilationCounter:
        return self._parts.enter_context(CompilationCounter())

    def _load_model(self) -> Model:
        self._start.begin(describe_loading(self.config))
        model = build_model(self.config, self._start.count_bytes)
        note_weights(self.workdir, model.source, resume=self._resume)
        self.decoder, self._model = model.decoder, model
        self._exports = self.config.run.export
        self._export_dtype = self.config.run.export_dtype if self._exports else ''
        return model

    def _build_learner(self, model: Model, checkpoint: Checkpoint | None) -> None:
        """Builds the learner of all processes, with the checkpoint's weights or else the model's; drops the model's."""
        self._start.begin('building the learner')
        # processes that compile a program for all of them do so at the same time, at a command
        ahead = self._finished is None and parse_learner(self.config.cluster.learner).processes == 1
        learner = build_learner(self.config, model, compile_ahead=ahead)
        self._parts.callback(learner.close, wait=not self._ends_process())
        if not self._trains_later():
            learner.begin_compiling()
        print_passed_over('learner.attention', learner.passed_over)
        learner.announce = functools.partial(self._start.count_programs, of='learner')
        leader = lead(self.config, learner, self.workdir)
        self.learner = leader if leader is learner else self._own(leader)
        model.params = None  # the learner has its copy
        require_finite_weights(self.config, self.learner, model)
        if checkpoint is None:
            return
        try:
            self.learner.restore({name: checkpoint.arrays[name] for name in _OF_LEARNER})
        except NonFiniteError as error:
            raise CheckpointError(f'{self.workdir / CHECKPOINTS}: {error}') from error
        except ValueError as error:
            raise CheckpointError(f'{self.workdir / CHECKPOINTS} is of another model: {error}') from error

    def _trains_later(self) -> bool:
        """Whether the learner's programs are compiled after others that are needed first."""
        return False

    def _traced_learner(self) -> Learner:
        """The learner, or one that traces the updates that telemetry.profile_steps names."""
        steps = self.config.telemetry.profile_steps
        if not steps:
            return self.learner
        return self._own(TracedLearner(self.learner, steps[0], steps[-1], self.workdir / DIRECTORY))

    def _export(self, weights: Tree, digest: str) -> None:
        """Writes WORKDIR/export. The results of the run are on the disk, so that a failure is kept for the end.

        Engines may decode with weights of a lower precision. Then the checkpoint has what is exported.
        """
        if not self._exports:
            return
        steps, announce = self.config.run.steps, self._start.count_bytes
        self._start.begin_silently('exporting')
        try:
            if all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(weights)):
                out, dtype = self.workdir / EXPORT, self._export_dtype
                write_export(out, self.workdir, steps, weights, digest, self._model, dtype, announce)
            else:
                replace_export(self.workdir, steps, self._export_dtype, announce)
        except UserError as error:
            self._unsaved = self._unsaved or describe_unexported(error, self.workdir)
        finally:
            self._start.end()

    def _complete_export(self) -> None:
        """Writes the export of a finished run where it is missing, after a kill or on a disk that was full."""
        steps = self.config.run.steps
        if self._exports and not holds_export(self.workdir, steps):
            self._start.begin_silently('exporting')
            replace_export(self.workdir, steps, self._export_dtype, self._start.count_bytes)
            self._start.end()

    def _find_hardware(self) -> Hardware:
        return hardware()
