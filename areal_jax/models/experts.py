"""A layer of experts: a router scores them for each token, and the token is the weighted sum of those with the best.

With router r, token x and k choices: scores s = softmax(x r) over all experts; e_1..e_k the experts with the largest,
y = sum_j w_j expert_{e_j}(x), w_j = s_{e_j}, divided by their sum where the model says so (arXiv 2401.04088, section
2.1; Qwen3-MoE in transformers 5.23). Recorded routes replace the choice alone (routing replay, arXiv 2510.11370): the
weights come from the scores of these weights, so that the router keeps its gradient. The router computes in float32
whatever the weights are: in bfloat16 the k-th and the next score are equal in one token of 17.

Shapes: T tokens, E experts, k choices, d model width, M width of an expert, L layers with experts.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from areal_jax.columns import ROUTED_EXPERTS
from areal_jax.models.expert_products import Mixer, mix_blocks
from areal_jax.models.shape import Experts


@dataclasses.dataclass(frozen=True)
class Routing:
    """How the tokens of a pass reach experts.

    Args:
      mix: the product of tokens with their experts; an expert E is none.
      valid: bool [T], the tokens that count: the others touch no expert; None = all.
      recorded: int [L, T, k], distinct experts that are taken in place of the choice; a token with an E or more among
        its k has none recorded and takes its own choice. None = no token has.
      follows: bool [], False: what is recorded is compared with the choice (Routed.differs) and not taken.
    """

    mix: Mixer = mix_blocks
    valid: jax.Array | None = None
    recorded: jax.Array | None = None
    follows: jax.Array | bool = True


class Routed(NamedTuple):
    """What the routers of a pass chose, whether or not it was followed; of one layer without the leading axis."""

    live: jax.Array  # int32 [L, T, k], in descending order of the scores
    loads: jax.Array  # float32 [L, E], how many tokens that count reached an expert
    differs: jax.Array  # bool [L, T], the set that was chosen is another than the recorded one; False without a record
    scores: jax.Array  # float32 [L, E], the sum of the scores of the tokens that count; 0 where a kernel has chosen

    @property
    def columns(self) -> dict[str, jax.Array]:
        """See `columns_of_pass`."""
        return columns_of_pass(self.live)


class Choice(NamedTuple):
    """The experts of each token."""

    experts: jax.Array  # int32 [T, k]; E = none
    weights: jax.Array  # float32 [T, k]
    routed: Routed


def choose_experts(
    logits: jax.Array,
    experts: Experts,
    valid: jax.Array | None = None,
    recorded: jax.Array | None = None,
    follows: jax.Array | bool = True,
) -> Choice:
    """The choice of tokens from the logits of their router, float32 [T, E].

    Equal scores go to the expert with the lower number. `recorded` int [T, k] and `follows` as in Routing.
    """
    scores = jax.nn.softmax(logits, axis=-1)
    live = lax.top_k(lax.stop_gradient(scores), experts.per_token)[1].astype(jnp.int32)
    chosen, differs = live, jnp.zeros(len(logits), bool)
    if recorded is not None:
        known = jnp.all(recorded < experts.count, axis=-1)
        found = jnp.any(live[:, :, None] == recorded[:, None, :].astype(jnp.int32), axis=-1)
        differs = known & ~jnp.all(found, axis=-1)
        chosen = jnp.where((known & follows)[:, None], recorded.astype(jnp.int32), live)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.normalised:
        weights = weights / weights.sum(-1, keepdims=True)
    reached = _keep_valid(chosen, experts, valid)
    counted = scores if valid is None else jnp.where(valid[:, None], scores, 0.0)
    return Choice(reached, weights, Routed(live, _count_tokens(reached, experts), differs, counted.sum(axis=0)))


def columns_of_pass(live: jax.Array) -> dict[str, jax.Array]:
    """ModelConfig.columns of what routers chose, int [L, T, k]: an array [T, *shape] each."""
    return {ROUTED_EXPERTS.name: jnp.moveaxis(live, 0, 1)}


def follow_choice(live: jax.Array, experts: Experts, valid: jax.Array | None) -> Routed:
    """What is said of a choice int32 [T, k] that the tokens that count have followed; `valid` as in Routing."""
    loads = _count_tokens(_keep_valid(live, experts, valid), experts)
    return Routed(live, loads, jnp.zeros(len(live), bool), jnp.zeros(experts.count, jnp.float32))


def measure_balance(scores: jax.Array, loads: jax.Array, choices: int) -> jax.Array:
    """The part of some tokens in E sum_e f_e P_e, the mean over the layers (arXiv 2101.03961, equation 4).

    f_e is the share of expert e in all choices, P_e the mean of its scores. 1 where the load is even. The gradient is
    that of the scores.

    Args:
      scores: float32 [L, E], the sum over these tokens.
      loads: float32 [L, E], how many tokens reached an expert, over all tokens of which these are a part.
      choices: experts of a token.
    """
    total = jnp.maximum(loads.sum(axis=-1, keepdims=True), 1.0)
    shares, means = loads / total, scores / (total / choices)
    return scores.shape[-1] * jnp.mean(jnp.sum(jax.lax.stop_gradient(shares) * means, axis=-1))


def _keep_valid(chosen: jax.Array, experts: Experts, valid: jax.Array | None) -> jax.Array:
    return chosen if valid is None else jnp.where(valid[:, None], chosen, experts.count)


def _count_tokens(reached: jax.Array, experts: Experts) -> jax.Array:
    """float32 [E]."""
    return jnp.zeros(experts.count + 1, jnp.float32).at[reached.reshape(-1)].add(1.0)[: experts.count]
