"""The settings of an update: sections of the config, and values derived from other sections."""

from __future__ import annotations

import dataclasses

from areal_jax.config.training import DiagnosticsSection, LearnerSection, StalenessSection
from areal_jax.learning.brakes import Brake
from areal_jax.learning.objective.objective import PROXIMAL, Objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """The settings of the critic, see trained_leaves.py."""

    own_model: bool  # else a head on the policy's trunk
    trunk_gradient: float  # of such a head: the weight of its loss in the gradient of the trunk, in [0, 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """All settings of an update except the weights, the mesh and the optimizer."""

    learner: LearnerSection
    staleness: StalenessSection
    diagnostics: DiagnosticsSection
    max_microbatches: int  # 'scan' only: the largest number of micro-batches for which `warm_up` compiles
    strategy: str
    publish_dtype: str  # of the weights that engines get
    # versions are files: if a mesh spans processes, each gets whole leaves to write; a single process on a CPU copies
    # the weights on the host
    publishes_files: bool
    objective: Objective
    temperature: float
    denominator: str  # 'all': groups that filter_equal_rewards leaves out count too
    truncated_sampling: str  # tokens drawn with top-k or top-p: 'refuse', or 'full_softmax' to train them anyway
    scores: bool  # `warm_up` compiles the programs of SpmdLearner.score
    seed: int  # of the run: part of the names of its answers
    quantized: bool  # whether engines decode in 8 bits; if so, an update measures the difference that this makes
    brake: Brake
    critic: CriticSettings | None  # if the objective trains values
    records_routes: bool  # engines record which experts tokens have reached

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
