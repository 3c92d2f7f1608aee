"""A layer of experts: a router scores them for each token, and the output is the weighted sum of the best experts'.

With router r, token x and k choices: scores s = softmax(x r) over all experts; e_1..e_k the experts with the largest
scores, y = sum_j w_j expert_{e_j}(x), w_j = s_{e_j}, divided by their sum if the model says so (arXiv 2401.04088,
section 2.1; Qwen3-MoE in transformers 5.23). A sigmoid router has s = sigmoid(x r), chooses by s plus a correction
within the best groups, and multiplies w_j by a scale (arXiv 2412.19437, section 2.1.2). Recorded routes replace only
the choice (routing replay, arXiv 2510.11370): w_j still comes from the scores of the current router, which therefore
keeps its gradient. The router always computes in float32: in bfloat16 the k-th and the next score are equal in one
token of 17.

Shapes: T tokens, E experts, k choices, d model width, M width of an expert, L layers with experts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from areal_jax.columns import ROUTED_EXPERTS
from areal_jax.config.fields import ConfigError
from areal_jax.models.expert_check import Demand, choose_checked_mixer
from areal_jax.models.expert_parallel import Layer, choose_form, form_over, mix_by_gather
from areal_jax.models.expert_products import Mixer, mix_blocks
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import ClampedSwiglu, Experts, SigmoidRouter

# The mixer that a pass uses, on one device and over a mesh.
#
# Each device computes its own tokens; `tensor` cuts the width of every expert, and the parts of an output are summed.
# `expert` cuts the experts of a layer, and tokens reach them in one of the two forms of expert_parallel.py. No buffer
# has a capacity, and no token is dropped.


def require_experts(config: ModelConfig, expert: int, field: str) -> None:
    """Raises ConfigError for a model without experts, or with a number of experts that `expert` does not divide.

    Args:
      expert: devices that share the experts of a layer, from `field` of the config.
    """
    if expert > 1 and config.experts is None:
        raise ConfigError(
            f'expert={expert} of {field} shares out the experts of a layer, and this model has none; remove expert'
        )
    if config.experts and config.experts.count % expert:
        raise ConfigError(
            f'expert={expert} of {field} does not divide the {config.experts.count} experts of the model; use a divisor'
        )


def make_mix(
    device: jax.Device, mesh: Mesh | None = None, token_axes: tuple[str, ...] = (), form: str = 'auto'
) -> Mixer:
    """The mixer for a device, or for the devices of a mesh that are like it.

    Args:
      device: it may belong to a topology that is only described.
      mesh: the devices that hold the tokens; None or one device: no exchange.
      token_axes: axes of the mesh over which the tokens are cut; () = every device has all tokens.
      form: of the experts over devices, see expert_parallel.py; 'auto' = the one that moves less.
    """

    def local(
        x: jax.Array, experts: jax.Array, weights: jax.Array, *leaves: jax.Array, swiglu: ClampedSwiglu | None = None
    ) -> jax.Array:
        down = leaves[-1] if swiglu is None else leaves[2]
        demand = Demand(jnp.dtype(x.dtype).name, experts.shape[1], *down.shape)
        return _choose(device, demand)(x, experts, weights, *leaves, swiglu=swiglu)

    if mesh is None or mesh.size == 1:
        return local
    tokens = PartitionSpec(token_axes)

    def over_mesh(
        x: jax.Array, experts: jax.Array, weights: jax.Array, *leaves: jax.Array, swiglu: ClampedSwiglu | None = None
    ) -> jax.Array:
        down = leaves[-1] if swiglu is None else leaves[2]
        cut = _divides(mesh, 'tensor', down.shape[1])
        share = _divides(mesh, 'expert', len(down))  # None: each device has all experts, as a teacher's may be
        over_experts: Mixer = functools.partial(mix_by_gather, cuts_tokens=False)
        if share is not None and share in token_axes:
            held = len(x) // math.prod(mesh.shape[axis] for axis in token_axes)
            layer = Layer(held, experts.shape[1], len(down), x.shape[1] * x.dtype.itemsize)
            over_experts = form_over(mesh, share, choose_form(form, layer, mesh, share))

        def own(x: jax.Array, experts: jax.Array, weights: jax.Array, *leaves: jax.Array) -> jax.Array:
            if swiglu is not None and cut is not None:  # the sum over devices adds the bias of `down` once
                first = jax.lax.axis_index(cut) == 0
                leaves = (*leaves[:-1], jnp.where(first, leaves[-1], 0))
            mix: Mixer = functools.partial(local, swiglu=swiglu)
            mix = mix if share is None else functools.partial(over_experts, mix, share)
            y = mix(x, experts, weights, *leaves)
            return y if cut is None else jax.lax.psum(y, cut)

        wide, high = PartitionSpec(share, None, cut), PartitionSpec(share, cut)
        specs = (wide, wide, high) if swiglu is None else (wide, high, high, PartitionSpec(share))
        # check_vma=False: kernels do not say how their results vary over devices
        run = jax.shard_map(
            own, mesh=mesh, in_specs=(tokens, tokens, tokens, *specs), out_specs=tokens, check_vma=False
        )
        return run(x, experts, weights, *leaves)

    return over_mesh


def _divides(mesh: Mesh, axis: str, size: int) -> str | None:
    return axis if mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0 else None


@functools.cache
def _choose(device: jax.Device, demand: Demand) -> Mixer:
    with jax.ensure_compile_time_eval():  # the check runs programs, and a program is being traced here
        chosen = choose_checked_mixer(device, demand)
    for fault in chosen.faults:
        print(f'warning: {fault}', file=sys.stderr)
    return chosen.mix


@dataclasses.dataclass(frozen=True)
class Routing:
    """The rules by which the tokens of a pass reach experts.

    Args:
      mix: the product of tokens with their experts; the number E means no expert.
      valid: bool [T], the tokens that count: the others touch no expert; None = all.
      recorded: int [L, T, k], distinct experts that replace the choice; a token with a number of E or more has no
        record and takes its own choice. None = no token has a record.
      follows: bool [], False: the record is compared with the choice (Routed.differs) but not followed.
    """

    mix: Mixer = mix_blocks
    valid: jax.Array | None = None
    recorded: jax.Array | None = None
    follows: jax.Array | bool = True


class Routed(NamedTuple):
    """The choices of the routers of a pass, whether or not they were followed; for one layer, without the axis L."""

    live: jax.Array  # int32 [L, T, k], in descending order of the scores
    loads: jax.Array  # float32 [L, E], the number of tokens that count and reached an expert
    differs: jax.Array  # bool [L, T], the chosen set is not the recorded one; False without a record
    # float32 [L, E], the sum of the scores of the tokens that count, of which those of a token sum to 1; 0 if a kernel
    # has chosen
    scores: jax.Array

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
    correction: jax.Array | None = None,
) -> Choice:
    """The choice of tokens from the logits of their router, float32 [T, E].

    Equal scores go to the expert with the lower number. `recorded` int [T, k] and `follows` as in Routing; `correction`
    float32 [E] of a sigmoid router.
    """
    router = experts.sigmoid
    scores = jax.nn.softmax(logits, axis=-1) if router is None else jax.nn.sigmoid(logits)
    ranked = lax.stop_gradient(scores)
    if router is not None:
        ranked = _keep_groups(ranked if correction is None else ranked + correction, router)
    live = lax.top_k(ranked, experts.per_token)[1].astype(jnp.int32)
    chosen, differs = live, jnp.zeros(len(logits), bool)
    if recorded is not None:
        known = jnp.all(recorded < experts.count, axis=-1)
        found = jnp.any(live[:, :, None] == recorded[:, None, :].astype(jnp.int32), axis=-1)
        differs = known & ~jnp.all(found, axis=-1)
        chosen = jnp.where((known & follows)[:, None], recorded.astype(jnp.int32), live)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.normalised:
        total = weights.sum(-1, keepdims=True)
        weights = weights / (total if router is None else total + 1e-20)
    if router is not None:
        weights, scores = weights * router.scale, scores / scores.sum(-1, keepdims=True)
    reached = _keep_valid(chosen, experts, valid)
    counted = scores if valid is None else jnp.where(valid[:, None], scores, 0.0)
    return Choice(reached, weights, Routed(live, _count_tokens(reached, experts), differs, counted.sum(axis=0)))


def _keep_groups(ranked: jax.Array, router: SigmoidRouter) -> jax.Array:
    """Scores [T, E] with -inf for the experts of all but the best groups; a group's score is the sum of its two best.

    Corrected scores may be negative, so that 0 would not do.
    """
    if router.groups == router.kept_groups:
        return ranked
    grouped = ranked.reshape(len(ranked), router.groups, -1)
    best = lax.top_k(lax.top_k(grouped, 2)[0].sum(-1), router.kept_groups)[1]
    kept = jnp.any(best[:, :, None] == jnp.arange(router.groups), axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)


def correct_load(correction: np.ndarray, loads: np.ndarray, rate: float) -> np.ndarray:
    """A correction float32 [..., E] after a step whose tokens reached experts `loads` times, float32 [..., E].

    It grows by `rate` where an expert was reached by less than the mean, and falls where by more (arXiv 2408.15664,
    algorithm 1).
    """
    return correction + np.float32(rate) * np.sign(loads.mean(axis=-1, keepdims=True) - loads, dtype=np.float32)


def columns_of_pass(live: jax.Array) -> dict[str, jax.Array]:
    """The arrays of ModelConfig.columns, [T, *shape] each, from the choices of routers, int [L, T, k]."""
    return {ROUTED_EXPERTS.name: jnp.moveaxis(live, 0, 1)}


def follow_choice(live: jax.Array, experts: Experts, valid: jax.Array | None) -> Routed:
    """The Routed of a choice int32 [T, k] that the tokens that count have followed; `valid` as in Routing."""
    loads = _count_tokens(_keep_valid(live, experts, valid), experts)
    return Routed(live, loads, jnp.zeros(len(live), bool), jnp.zeros(experts.count, jnp.float32))


def measure_balance(scores: jax.Array, loads: jax.Array, choices: int) -> jax.Array:
    """The contribution of some tokens to E sum_e f_e P_e, the mean over the layers (arXiv 2101.03961, equation 4).

    f_e is the share of expert e in all choices, P_e the mean of its scores. 1 if the load is even. The gradient flows
    through the scores only.

    Args:
      scores: float32 [L, E], the sum over these tokens.
      loads: float32 [L, E], the number of tokens that reached an expert, over all tokens, these included.
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
