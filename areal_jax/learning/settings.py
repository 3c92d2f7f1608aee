"""The settings of an update: sections of the config, and what follows from others."""

from __future__ import annotations

import dataclasses

from areal_jax.config.generation import RolloutSection
from areal_jax.config.loss import CriticSection, LossSection
from areal_jax.config.training import DiagnosticsSection, LearnerSection, StalenessSection
from areal_jax.learning.brakes import Brake
from areal_jax.learning.objective.objective import PROXIMAL, Objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """Everything of an update but the weights, the mesh and the optimizer."""

    learner: LearnerSection
    rollout: RolloutSection = dataclasses.field(compare=False)  # programs read neither this nor `loss`
    loss: LossSection = dataclasses.field(compare=False)
    staleness: StalenessSection
    diagnostics: DiagnosticsSection
    max_microbatches: int  # 'scan' only: `warm_up` compiles for minibatches of up to so many micro-batches
    strategy: str
    publish_dtype: str  # of the weights that engines get
    # versions are files: each process of a mesh over several gets whole leaves of them to write, and one process on a
    # CPU copies them on the host
    publishes_files: bool
    objective: Objective
    scores: bool  # `warm_up` compiles what SpmdLearner.score runs
    seed: int  # of the run: part of the names of its answers
    brake: Brake
    critic: CriticSection | None  # where the objective trains values, see trained_leaves.py
    records_routes: bool  # engines record which experts tokens have reached: rows of programs have them

    def __post_init__(self) -> None:
        if (self.critic is not None) != self.objective.trains_values:
            raise ValueError(f'critic={self.critic} with an objective of which trains_values is not so')

    @property
    def steps(self) -> int:
        """Optimizer steps of an update, at most."""
        return self.learner.n_minibatches * self.learner.epochs

    @property
    def recomputes(self) -> bool:
        """Whether log-probs of the weights before the update outlive its first step."""
        return PROXIMAL in self.objective.reads and self.steps > 1

    @property
    def filters(self) -> bool:
        """Whether groups of equal rewards are left out."""
        return self.learner.filter_equal_rewards and self.objective.contrasts
