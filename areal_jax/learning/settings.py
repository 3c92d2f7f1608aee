"""The settings of an update: sections of the config, and values derived from other sections."""

from __future__ import annotations

import dataclasses

from areal_jax.config.generation import RolloutSection
from areal_jax.config.loss import CriticSection, LossSection
from areal_jax.config.training import DiagnosticsSection, LearnerSection, StalenessSection
from areal_jax.learning.brakes import Brake
from areal_jax.learning.objective.objective import PROXIMAL, Objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """All settings of an update except the weights, the mesh and the optimizer."""

    learner: LearnerSection
    rollout: RolloutSection = dataclasses.field(compare=False)  # programs read neither this nor `loss`
    loss: LossSection = dataclasses.field(compare=False)
    staleness: StalenessSection
    diagnostics: DiagnosticsSection
    max_microbatches: int  # 'scan' only: the largest number of micro-batches for which `warm_up` compiles
    strategy: str
    publish_dtype: str  # of the weights that engines get
    # versions are files: if a mesh spans processes, each gets whole leaves to write; a single process on a CPU copies
    # the weights on the host
    publishes_files: bool
    objective: Objective
    scores: bool  # `warm_up` compiles the programs of SpmdLearner.score
    seed: int  # of the run: part of the names of its answers
    brake: Brake
    critic: CriticSection | None  # if the objective trains values, see trained_leaves.py
    records_routes: bool  # engines record which experts tokens have reached: rows of programs have them

    def __post_init__(self) -> None:
        if (self.critic is not None) != self.objective.trains_values:
            raise ValueError(f'critic={self.critic} with an objective of which trains_values is not so')

    @property
    def steps(self) -> int:
        """The most optimizer steps of an update."""
        return self.learner.n_minibatches * self.learner.epochs

    @property
    def recomputes(self) -> bool:
        """Whether log-probs of the weights before the update are needed after its first step."""
        return PROXIMAL in self.objective.reads and self.steps > 1

    @property
    def filters(self) -> bool:
        """Whether groups of equal rewards are left out."""
        return self.learner.filter_equal_rewards and self.objective.contrasts
