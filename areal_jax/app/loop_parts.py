"""What the run of the asynchronous loop needs from the owner of its learner and engines. Nothing here imports jax.

loop_run.py uses it; session.py and controller_run.py implement it.
"""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol, TypedDict

from areal_jax.app.environment import Environment
from areal_jax.app.run import Checkpoint, Run
from areal_jax.app.scores import Scores, evaluation_row
from areal_jax.control.schedule import VersionRing
from areal_jax.protocols import Channel
from areal_jax.rollout.pool import Pool
from areal_jax.tasks.tokenizer import Tokenizer
from areal_jax.telemetry.devices import DeviceRates
from areal_jax.telemetry.facts import EvaluationScores
from areal_jax.telemetry.values import Line
from areal_jax.types import PublishedWeights, Tree


class ModelText(Protocol):
    """What the loop needs of a model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def source(self) -> pathlib.Path | None:
        """File or directory of the weights; None = drawn."""
        ...


class EngineFacts(TypedDict):
    """The fields of RunFacts that say what engines and learner compute on."""

    kv_cache_bytes: int | None
    memory_parts: Mapping[str, int]
    lanes_own_devices: bool
    devices: Mapping[str, Any]


class LoopParts(Run):
    """See Run."""

    _scores: Scores

    def _note_scores(self, phase: str, scores: EvaluationScores) -> None:
        self._scores.add(phase, scores)
        if self._feed and phase == 'before':
            self._feed.put(0, self._scores_of(phase))

    def _scores_of(self, phase: str) -> Line:
        return evaluation_row(self._scores.get(phase), 0 if phase == 'before' else self.config.run.steps)

    @abc.abstractmethod
    def _load_model(self) -> Any:
        """A ModelText; what belongs to it is kept for `_build_learner`."""

    @abc.abstractmethod
    def _build_learner(self, model: Any, checkpoint: Checkpoint | None) -> None:
        """Sets `learner`, with the checkpoint's weights or else the model's."""

    async def _finish_compiling(self) -> None:
        """Compiles what was not yet needed."""

    @abc.abstractmethod
    def _find_vocab_size(self) -> int: ...

    @abc.abstractmethod
    def _find_rates(self) -> DeviceRates:
        """Finds out who has which devices."""

    @abc.abstractmethod
    def _build_channel(self) -> Channel: ...

    @abc.abstractmethod
    def _restore_ring(self, ring: VersionRing, saved: Mapping[str, Tree]) -> None:
        """Fills the ring with the weights of earlier versions out of a checkpoint, by version."""

    @abc.abstractmethod
    def _build_pool_here(self, published: PublishedWeights) -> Pool:
        """Engines in this process."""

    @abc.abstractmethod
    def _copy_version(self, published: PublishedWeights) -> Tree:
        """Weights of an earlier version for a checkpoint, in host memory."""

    @abc.abstractmethod
    def _find_final_weights(self) -> Tree:
        """Those after the last update, as engines have them."""

    @abc.abstractmethod
    def _digest(self, weights: Tree) -> str:
        """What the report says of the weights at the end."""

    @abc.abstractmethod
    def _read_environment(self) -> Environment:
        """What the bits of the run depend on."""

    @abc.abstractmethod
    def _find_engine_facts(self) -> EngineFacts: ...
