"""Two optimizers in one step: the policy's, and one for the critic beside it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from areal_jax.learning.optimizer.optimizer import CRITIC_METRICS, Optimizer, OptimizerState
from areal_jax.learning.weights.trained_leaves import CRITIC, policy_leaves
from areal_jax.types import Tree


@dataclasses.dataclass(frozen=True)
class CriticOptimizer(Optimizer):
    """The policy's optimizer, and one for the critic that clips, steps and skips by itself.

    The state is the policy's, with that of the critic under CRITIC.
    """

    critic_rate: float = 0.0  # learning rate of the critic, on the schedule of the policy's

    def init(self, params: Tree) -> OptimizerState:
        return super().init(policy_leaves(params)) | {CRITIC: super().init(params[CRITIC])}

    def shardings(self, params: Tree, param_shardings: Tree, replicated: NamedSharding) -> OptimizerState:
        own = super().shardings(policy_leaves(params), policy_leaves(param_shardings), replicated)
        return own | {CRITIC: super().shardings(params[CRITIC], param_shardings[CRITIC], replicated)}

    def apply(
        self, params: Tree, state: OptimizerState, gradients: Tree, learning_rate: jax.Array
    ) -> tuple[Tree, OptimizerState, dict[str, jax.Array]]:
        policy, policy_state, metrics = super().apply(
            policy_leaves(params), policy_leaves(state), policy_leaves(gradients), learning_rate
        )
        critic, critic_state, measured = super().apply(
            params[CRITIC], state[CRITIC], gradients[CRITIC], jnp.float32(self.critic_rate)
        )
        of_critic = {name: measured[name.removeprefix('critic_')] for name in CRITIC_METRICS}
        return policy | {CRITIC: critic}, policy_state | {CRITIC: critic_state}, metrics | of_critic


def add_critic_optimizer(optimizer: Optimizer, rate: float) -> CriticOptimizer:
    """Returns the optimizer of a learner that has a critic."""
    fields = {field.name: getattr(optimizer, field.name) for field in dataclasses.fields(optimizer)}
    return CriticOptimizer(**fields, critic_rate=rate)
