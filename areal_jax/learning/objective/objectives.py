"""The objectives that loss.objective names: likelihood of given answers, combinations of choices, own objectives.

config/objectives.py names the methods; docs/own_objective.md says how to write one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config.objectives import FIELD, describe, select_used
from areal_jax.config.policy_choices import CHOICE_FIELDS, PolicyChoices
from areal_jax.errors import UserError
from areal_jax.learning.objective.advantages import (
    CONTRASTS,
    Estimator,
    is_kl_in_reward,
    make_estimator,
    packed_advantages,
)
from areal_jax.learning.objective.counting import Counts, count_denominator
from areal_jax.learning.objective.objective import (
    CLAMPED_ENTROPY,
    COLLISION,
    END_VALUES,
    INPUTS,
    POLICY,
    PROXIMAL,
    REFERENCE,
    TEACHER,
    VALUES,
    LossTokens,
    Metrics,
    Objective,
    TokenAdvantages,
    UndeclaredInputError,
)
from areal_jax.learning.objective.policy_loss import (
    finalize_critic_metrics,
    finalize_policy_metrics,
    keep_second_moment,
    keep_share,
    kl_penalty,
    policy_loss,
    prepared_names,
    proximal_logprobs,
    uniform_numbers,
    value_loss,
)
from areal_jax.plugins import is_own, load_function, raising_user_error
from areal_jax.types import PackedBatch, TrajectoryGroup


@dataclasses.dataclass(frozen=True)
class Likelihood(Objective):
    """-Σₜ mₜ uₜ log π_θ(yₜ|sₜ) / N of given answers, over the same denominators as the policy losses."""

    aggregation: str = 'token_mean'
    learns_from_answers: ClassVar[bool] = False

    def loss(self, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
        loss = -tokens.mean(tokens.policy_logprobs)
        metrics = {'token_count': tokens.count(), 'nll_sum': -tokens.total(tokens.policy_logprobs)}
        return loss, jax.lax.stop_gradient(metrics)

    def metrics(self, merged: Mapping[str, float]) -> dict[str, float]:
        """Metrics per trained token of the update, in nats; {} without any."""
        n = merged.get('token_count', 0.0)
        if not n:
            return {}
        nll = merged['nll_sum'] / n
        perplexity = math.exp(nll) if nll < 700 else math.inf
        return {'loss/nll': nll, 'loss/perplexity': perplexity, 'loss/entropy': merged['entropy_sum'] / n}


# Policy objectives: a combination of choices as an Objective. config/objectives.py names the methods.


@dataclasses.dataclass(frozen=True)
class PolicyObjective(Objective):
    """The objective of a combination.

    Raises ConfigError for a value that its field may not hold, UserError for an own advantage that cannot be loaded.
    """

    choices: PolicyChoices
    estimate: Estimator = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, field in CHOICE_FIELDS.items():
            field.require_allowed(f'loss.{name}', getattr(self.choices, name))
        for name, value in _derive(self.choices).items():
            object.__setattr__(self, name, value)

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
        return self.estimate(groups, None)

    def token_advantages(
        self,
        groups: Sequence[TrajectoryGroup],
        batches: Sequence[PackedBatch],
        passed: Sequence[Mapping[str, np.ndarray]],
    ) -> list[TokenAdvantages]:
        return packed_advantages(self.choices, self.estimate, groups, batches, passed)

    def prepare(self, batch: PackedBatch, policy_logprobs: np.ndarray | None) -> Mapping[str, np.ndarray]:
        """'gate': 1 at the tokens that are trained; 'uniform': a number in [0, 1) for each token."""
        names, choices = self.prepares, self.choices
        if 'uniform' in names:
            return {'uniform': uniform_numbers(batch, choices.seed)}
        if 'gate' not in names:
            return {}
        assert policy_logprobs is not None, 'a gate over a minibatch needs its log-probs'
        if choices.gate == 'second_moment':
            return {'gate': keep_second_moment(batch, policy_logprobs, choices.gate_threshold)}
        return {'gate': keep_share(batch, -batch.advantages * policy_logprobs, choices.delight_share)}

    def loss(self, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
        choices = self.choices
        loss, metrics = policy_loss(choices, tokens, self._proximal(tokens))
        if choices.entropy_coefficient:
            entropy = tokens.statistic(CLAMPED_ENTROPY) if choices.entropy_clamp else tokens.entropy
            loss = loss - choices.entropy_coefficient * tokens.mean(entropy)
            if choices.entropy_clamp:
                metrics = metrics | {'clamped_entropy_sum': jax.lax.stop_gradient(tokens.total(entropy))}
        if choices.kl_coefficient:
            normalizer = (tokens.loss_mask, tokens.denominator, tokens.token_weights)
            penalty, kl_metrics = kl_penalty(
                tokens.policy_logprobs,
                tokens.read(REFERENCE),
                *normalizer,
                estimator=choices.kl_estimator,
                behavior_logprobs=tokens.behavior_logprobs,
            )
            metrics = metrics | kl_metrics
            if not is_kl_in_reward(choices):
                loss = loss + choices.kl_coefficient * penalty
        if VALUES in self.reads:
            of_critic, critic_metrics = value_loss(tokens, choices.value_clip)
            loss, metrics = loss + of_critic, metrics | critic_metrics
        return loss, metrics

    def _proximal(self, tokens: LossTokens) -> jax.Array:
        """log π_prox; the behavior log-probs if the combination does not use it."""
        kind = self.choices.proximal if self.choices.uses_proximal else 'behavior'
        if PROXIMAL in self.reads:
            return tokens.read(PROXIMAL)
        policy, behavior = tokens.policy_logprobs, tokens.behavior_logprobs
        return proximal_logprobs(kind, policy, behavior, tokens.policy_versions, tokens.version)

    def metrics(self, merged: Mapping[str, float]) -> dict[str, float]:
        return finalize_policy_metrics(merged) | finalize_critic_metrics(merged)

    def describe(self) -> str:
        used = select_used(lambda name: getattr(self.choices, name))
        return describe(used | ({'proximal': self.choices.proximal} if self.choices.uses_proximal else {}))


def _derive(choices: PolicyChoices) -> dict[str, object]:
    """The attributes of an Objective that the combination decides."""
    prepares = prepared_names(choices)
    reads = {
        PROXIMAL: choices.uses_proximal and choices.proximal == 'recompute',
        REFERENCE: bool(choices.kl_coefficient),
        COLLISION: choices.advantage == 'optimal_baseline',
        POLICY: 'gate' in prepares,
        CLAMPED_ENTROPY: bool(choices.entropy_coefficient and choices.entropy_clamp),
        VALUES: choices.advantage == 'gae',
        END_VALUES: choices.advantage == 'gae' and choices.truncated_value == 'last',
    }
    alone = choices.whiten == 'none' and not choices.overlong_tokens and not is_kl_in_reward(choices)
    return {
        'reads': frozenset(name for name, is_read in reads.items() if is_read),
        'prepares': prepares,
        'entropy_clamp': choices.entropy_clamp,
        'aggregation': choices.aggregation,
        'length_constant': choices.length_constant,
        'masks_truncated': choices.truncated_answers == 'masked',
        'contrasts': alone and (choices.advantage in CONTRASTS or is_own(choices.advantage)),
        'replaces_advantages': choices.whiten != 'none'
        or choices.advantage in ('optimal_baseline', 'gae')
        or is_kl_in_reward(choices),
        'estimate': make_estimator(choices),
    }


# Objectives of the user's own: loss.objective='FILE.py:FUNCTION', see docs/own_objective.md.


def load_objective(spec: str, options: Mapping[str, object]) -> Objective:
    """Returns FUNCTION(**options), checked.

    Raises UserError, naming the field and the spec, if that is not an Objective, or one that cannot be trained.
    """
    function = load_function(spec, FIELD)
    with raising_user_error(spec, FIELD):
        objective = function(**options)
    if not isinstance(objective, Objective):
        raise UserError(
            f'{FIELD}={spec}: it returned {type(objective).__name__}, and must return an Objective of '
            'areal_jax.learning.objective.objective'
        )
    if unknown := set(objective.reads) - INPUTS:
        raise UserError(
            f'{FIELD}={spec}: its `reads` has {sorted(unknown)[0]!r}, which no pass computes; use '
            f'{", ".join(sorted(INPUTS))}'
        )
    if {REFERENCE, TEACHER} <= objective.reads:
        raise UserError(f'{FIELD}={spec}: its `reads` has reference and teacher, of which an update computes one')
    if END_VALUES in objective.reads and VALUES not in objective.reads:
        raise UserError(f'{FIELD}={spec}: its `reads` has {END_VALUES!r} without {VALUES!r}, whose critic gives both')
    if VALUES in objective.reads and not objective.replaces_advantages:
        raise UserError(
            f'{FIELD}={spec}: its `reads` has {VALUES!r}, of which `token_advantages` makes advantages and returns: '
            'set replaces_advantages'
        )
    try:
        hash(objective)
        count_denominator(objective.aggregation, Counts(1, 1, 1))
    except TypeError as error:
        raise UserError(f'{FIELD}={spec}: {error}: make it a frozen dataclass') from error
    except ValueError as error:
        raise UserError(f'{FIELD}={spec}: {error}') from error
    object.__setattr__(objective, 'source', spec)  # it may be frozen
    return objective


def require_loss(objective: Objective, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
    """Returns `objective.loss`; raises UserError if an own objective returns no scalars, or raises itself."""
    if not objective.source:
        return objective.loss(tokens)
    try:
        with raising_user_error(objective.source, FIELD):
            returned = objective.loss(tokens)
    except UndeclaredInputError as error:
        raise UserError(f'{FIELD}={objective.source}: {error}') from error
    name = f'{FIELD}={objective.source}: {type(objective).__name__}.loss'
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise UserError(f'{name} returned {type(returned).__name__}, and must return (loss, metrics), metrics a dict')
    loss, metrics = returned
    for what, value in (('the loss', loss), *metrics.items()):
        if jnp.shape(value) != ():
            raise UserError(
                f'{name}: {what} has the shape {jnp.shape(value)}, and must be one number: sum over the tokens with '
                'tokens.mean, or tokens.total for a metric'
            )
    return jnp.asarray(loss, jnp.float32), metrics


def require_advantages(objective: Objective, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
    """Per group float32 [its answers]; raises UserError if an own objective returns anything else, or raises."""
    if not objective.source:
        return objective.advantages(groups)
    with raising_user_error(objective.source, FIELD):
        found = [np.asarray(advantages, np.float32) for advantages in objective.advantages(groups)]
    name = f'{FIELD}={objective.source}: {type(objective).__name__}.advantages'
    shapes, wanted = [a.shape for a in found], [(len(group.trajectories),) for group in groups]
    if shapes != wanted:
        raise UserError(
            f'{name} returned arrays of the shapes {shapes}, and must return one number an answer: {wanted}'
        )
    if not all(np.isfinite(advantages).all() for advantages in found):
        raise UserError(f'{name} returned a number that is not finite in float32')
    return found


def require_token_advantages(
    objective: Objective,
    groups: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    passed: Sequence[Mapping[str, np.ndarray]],
) -> list[TokenAdvantages]:
    """Returns `objective.token_advantages`; raises UserError if an own one returns anything else, or raises itself."""
    with raising_user_error(objective.source, FIELD) if objective.source else contextlib.nullcontext():
        returned = [TokenAdvantages(*of) for of in objective.token_advantages(groups, batches, passed)]
    if not objective.source:
        return returned
    name = f'{FIELD}={objective.source}: {type(objective).__name__}.token_advantages'
    needed = TokenAdvantages._fields if VALUES in objective.reads else ('advantages',)
    wanted = [batch.loss_mask.shape for batch in batches]
    for field in needed:
        found = [np.shape(getattr(of, field)) for of in returned]
        if found != wanted:
            raise UserError(f'{name} returned {field} of the shapes {found}, and must return one a minibatch: {wanted}')
        for of, batch in zip(returned, batches, strict=True):
            if not np.isfinite(np.asarray(getattr(of, field))[batch.loss_mask]).all():
                raise UserError(f'{name} returned {field} with a number that is not finite at a loss token')
    return returned


def require_prepared(
    objective: Objective, batch: PackedBatch, policy_logprobs: np.ndarray | None
) -> Mapping[str, np.ndarray]:
    """Returns `objective.prepare`; raises UserError if an own one returns other names or shapes, or raises itself."""
    if not objective.source:
        return objective.prepare(batch, policy_logprobs)
    with raising_user_error(objective.source, FIELD):
        found = {
            name: np.asarray(values, np.float32) for name, values in objective.prepare(batch, policy_logprobs).items()
        }
    shapes = {name: values.shape for name, values in found.items()}
    wanted = dict.fromkeys(objective.prepares, batch.targets.shape)
    if shapes != wanted:
        raise UserError(
            f'{FIELD}={objective.source}: {type(objective).__name__}.prepare returned arrays of the shapes {shapes}, '
            f'and must return {wanted}, which its `prepares` names'
        )
    return found


def require_finite_loss(objective: Objective, loss: float, version: int) -> None:
    """Raises UserError if the loss of an own objective is not finite: all its steps would be skipped."""
    if objective.source and not math.isfinite(loss):
        raise UserError(
            f'{FIELD}={objective.source}: the loss of update {version + 1} is {loss}: {type(objective).__name__}.loss '
            'must be finite; bound log-ratios before exp, and mask with jnp.where before a division or logarithm'
        )
