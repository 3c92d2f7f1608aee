"""The loss of a policy objective: one combination of ratio, correction, gate and surrogate, token by token.

  L(θ) = Σₜ mₜ uₜ Mₜ (-wₜ fₜ Âₜ + wₜ eₜ) / N

m is the loss mask, u and N the aggregation (aggregation.py), M the gate, w the correction (corrections.py), f and e the
surrogate (surrogates.py), Â the advantage. Decoupled PPO, equation 5 of "AReaL: A Large-Scale Asynchronous
Reinforcement Learning System for Language Reasoning", arXiv 2505.24298, after Hilton et al., arXiv 2110.00641, has
f = min(r, clip(r, 1-ε, 1+ε)) by the sign of Â with r = π_θ / π_prox, w = π_prox / π_behav, M = 1 and e = 0.
The log of a ratio is clamped to ±20 before exp; beyond, the ratio is constant and its gradient zero. A surrogate that
reads a log-ratio itself gets it unclamped. Losses are minimised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.corrections import behavior_weight, is_vetoed, shifts_too_far
from areal_jax.learning.objective.objective import LossTokens, Metrics
from areal_jax.learning.objective.ratios import SumSequence, kl_term, namespace, policy_ratio
from areal_jax.learning.objective.sums import Array, fixed, masked_sum
from areal_jax.learning.objective.surrogates import SURROGATES, SurrogateInputs


class Terms(NamedTuple):
    """Of each token, [..., N]."""

    loss: Array
    weight: Array  # the correction, constant
    above: Array  # bool: the surrogate's upper edge acts on it
    below: Array  # bool: the lower edge does
    closed: Array  # bool: a gate, a mask or the veto takes it out of the loss, not out of the denominator


def token_terms(
    choices: PolicyChoices,
    policy: Array,
    proximal: Array,
    behavior: Array,
    advantages: Array,
    over_sequence: SumSequence,
    prepared: Mapping[str, Array],
) -> Terms:
    """The terms of tokens with log-probs and advantages [..., N], 0 where they are masked; numpy and jax alike.

    `proximal` is log π_prox; where the combination has no use for it, any values do. Only `policy` is differentiated.
    """
    xp, policy_now = namespace(policy), fixed(policy)
    denominator = behavior if choices.ratio_denominator == 'behavior' else proximal
    ratio = policy_ratio(choices.ratio, policy, denominator, over_sequence)
    behind = policy_now if choices.ratio == 'none' else proximal  # compared with behavior
    weight = behavior_weight(choices, behind - behavior, over_sequence)
    closed = is_vetoed(choices, behind - behavior, over_sequence)
    if choices.correction == 'mask':
        closed = closed | (weight == 0)
    if choices.gate == 'probability_shift':
        closed = closed | shifts_too_far(choices, policy_now, denominator, advantages)
    elif choices.gate == 'second_moment':
        closed = closed | (prepared['gate'] == 0)
    factor, above, below, extra = SURROGATES[choices.surrogate](
        choices, SurrogateInputs(ratio.value, ratio.log, policy, advantages, prepared)
    )
    loss = -weight * factor * advantages
    if not (isinstance(extra, float) and extra == 0.0):
        loss = loss + weight * extra
    if choices.veto is not None or choices.gate != 'none':
        loss = xp.where(closed, 0.0, loss)
    return Terms(loss, weight, above, below, closed)


def policy_loss(choices: PolicyChoices, tokens: LossTokens, proximal: jax.Array) -> tuple[jax.Array, Metrics]:
    """(loss, metrics), float32; an empty mask gives loss 0 and gradient 0."""
    mask = tokens.loss_mask
    constants = jax.lax.stop_gradient((proximal, tokens.behavior_logprobs, tokens.advantages))
    policy, proximal, behavior, advantages = (
        jnp.where(mask, x, 0.0).astype(jnp.float32) for x in (tokens.policy_logprobs, *constants)
    )
    prepared = {name: tokens.read(name) for name in prepared_names(choices)}
    terms = token_terms(choices, policy, proximal, behavior, advantages, tokens.over_sequence, prepared)
    metrics = _ratio_metrics(policy - behavior, terms, mask)
    return tokens.mean(terms.loss), jax.lax.stop_gradient(metrics)


def prepared_names(choices: PolicyChoices) -> tuple[str, ...]:
    """What policy_objective.prepare computes on the host before a step."""
    if choices.gate == 'second_moment' or _draws(choices, 'kondo'):
        return ('gate',)
    return ('uniform',) if _draws(choices, 'bernoulli') else ()


def _draws(choices: PolicyChoices, gate: str) -> bool:
    return choices.surrogate == 'delight' and choices.delight_gate == gate


def _ratio_metrics(log_full_ratio: jax.Array, terms: Terms, loss_mask: jax.Array) -> Metrics:
    """Sums and maxima for `finalize_policy_metrics`.

    'kl_sum' adds k - 1 - log k with k = π_θ/π_behav, an unbiased estimate of KL(behavior ‖ policy), because the tokens
    were sampled from the behavior policy.
    """
    weight = terms.weight
    return {
        'token_count': masked_sum(jnp.ones_like(weight), loss_mask),
        'clip_count': masked_sum(terms.above | terms.below, loss_mask),
        'weight_sum': masked_sum(weight, loss_mask),
        'weight_sq_sum': masked_sum(weight**2, loss_mask),
        'weight_max': jnp.max(jnp.where(loss_mask, weight, 0.0), initial=0.0),
        'kl_sum': masked_sum(kl_term(log_full_ratio), loss_mask),
    }


def finalize_policy_metrics(merged: Mapping[str, float]) -> dict[str, float]:
    """Per trained token of the update; nothing for no token."""
    n = merged.get('token_count', 0.0)
    if not n:
        return {}
    weight_sum, weight_sq_sum = merged['weight_sum'], merged['weight_sq_sum']
    asked_for = {'loss/reference_kl': 'reference_kl_sum', 'loss/clamped_entropy': 'clamped_entropy_sum'}
    found = {name: merged[total] / n for name, total in asked_for.items() if total in merged}
    return found | {
        'loss/clip_fraction': merged['clip_count'] / n,
        'loss/behavior_weight_mean': weight_sum / n,
        'loss/behavior_weight_max': merged['weight_max'],
        'loss/effective_sample_size': weight_sum**2 / (n * weight_sq_sum) if weight_sq_sum else 0.0,
        'loss/approx_kl': merged['kl_sum'] / n,
        'loss/entropy': merged['entropy_sum'] / n,
    }
