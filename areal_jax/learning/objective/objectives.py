"""The objectives that loss.objective names: likelihood, combinations of choices, pairs, distillation, own objectives.

config/objectives.py names the methods; docs/own_objective.md says how to write one.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config.declarations import require_allowed
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
from areal_jax.learning.objective.counting import Counts, count_denominator, find_starts
from areal_jax.learning.objective.objective import (
    CLAMPED_ENTROPY,
    COLLISION,
    DIVERGENCES,
    END_VALUES,
    FORWARD_KL,
    INPUTS,
    POLICY,
    PROXIMAL,
    REFERENCE,
    REVERSE_KL,
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
from areal_jax.learning.objective.ratios import Array, bounded_exp, kl_term, masked_sum, sequence_sums
from areal_jax.learning.weights import NonFiniteError
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


_PAIR_STARTS = 'pair_starts'  # the place in the row of the first loss token of the same pair
_ENDS = 'ends'  # 1 at the last loss token of an answer, else 0
_CHOSEN, _REJECTED = 1.0, -1.0  # used as the advantages


class PairObjective(Objective):
    """The mean over the pairs of -log σ(score of the chosen answer - score of the rejected one).

    A group is a pair, the chosen answer first, and is packed into one row, so that the loss of a micro-batch is exact.
    """

    prepares: ClassVar[tuple[str, ...]] = (_PAIR_STARTS,)  # type: ignore[misc]
    aggregation: ClassVar[str] = 'sequence_mean'  # type: ignore[misc]  # both answers have the loss of their pair
    keeps_groups: ClassVar[bool] = True  # type: ignore[misc]
    learns_from_answers: ClassVar[bool] = False

    @abc.abstractmethod
    def score_tokens(self, tokens: LossTokens) -> jax.Array:
        """[R, N]: the sum over an answer is its score."""

    @abc.abstractmethod
    def score_held_out(self, passed: Mapping[str, np.ndarray], ends: np.ndarray) -> np.ndarray:
        """[M, R, N]: as `score_tokens`, from the passes over a batch; `ends` is 1 at an answer's last loss token."""

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
        """1 for the chosen answer, -1 for the rejected one; raises ValueError for a group that is not a pair."""
        if sizes := {len(group.trajectories) for group in groups} - {2}:
            raise ValueError(f'a group of {sizes.pop()} answers is no pair of a chosen and a rejected one')
        return [np.array([_CHOSEN, _REJECTED], np.float32) for _ in groups]

    def prepare(self, batch: PackedBatch, policy_logprobs: np.ndarray | None) -> Mapping[str, np.ndarray]:
        return {_PAIR_STARTS: find_starts(batch.trajectory_ids // 2).astype(np.float32)}  # ids count in pairs

    def loss(self, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
        starts = tokens.read(_PAIR_STARTS).astype(jnp.int32)
        mask, signs = tokens.loss_mask, tokens.advantages
        scores = jnp.where(mask, self.score_tokens(tokens), 0.0)
        margin = sequence_sums(signs * scores, mask, starts)  # the same at all tokens of a pair
        loss = tokens.mean(-jax.nn.log_sigmoid(margin))
        per_answer = lambda values: masked_sum(values, mask, tokens.token_weights)
        metrics = {
            'answer_count': per_answer(jnp.ones_like(margin)),
            'token_count': tokens.count(),
            'margin_sum': per_answer(margin),
            'accuracy_sum': per_answer((1.0 + jnp.sign(margin)) / 2),
            'chosen_sum': tokens.total(jnp.where(signs > 0, scores, 0.0)),
            'rejected_sum': tokens.total(jnp.where(signs < 0, scores, 0.0)),
        }
        return loss, jax.lax.stop_gradient(metrics)

    def metrics(self, merged: Mapping[str, float]) -> dict[str, float]:
        """Means over the pairs of the update; {} without any. A pair with equal scores counts as half right."""
        n = merged.get('answer_count', 0.0)
        if not n:
            return {}
        entropy = {} if self.scores_answers else {'loss/entropy': merged['entropy_sum'] / merged['token_count']}
        return entropy | {
            'loss/margin': merged['margin_sum'] / n,
            'loss/pair_accuracy': merged['accuracy_sum'] / n,
            'loss/chosen_reward': merged['chosen_sum'] / (n / 2),
            'loss/rejected_reward': merged['rejected_sum'] / (n / 2),
        }

    def measure_held_out(self, batch: PackedBatch, passed: Mapping[str, np.ndarray]) -> dict[str, float]:
        """{'preference_loss', 'margin', 'pair_accuracy', 'pairs'}.

        The margin is the mean of Δ, the score of the chosen answer minus the rejected answer's; the accuracy is the
        share with Δ > 0, where Δ = 0 counts half.
        """
        mask = batch.loss_mask
        scores = self.score_held_out(passed, _find_ends(batch))[mask].astype(np.float64)
        margins = np.bincount(batch.trajectory_ids[mask] // 2, batch.advantages[mask] * scores)
        with np.errstate(invalid='ignore'):
            loss = float(np.logaddexp(0.0, -margins).mean())
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"the held-out preference loss is {loss}: lower optimizer.learning_rate, or use learner.dtype='float32'"
            )
        return {
            'preference_loss': loss,
            'margin': float(margins.mean()),
            'pair_accuracy': float((1 + np.sign(margins)).mean() / 2),
            'pairs': float(len(margins)),
        }


@dataclasses.dataclass(frozen=True)
class DirectPreference(PairObjective):
    """DPO: the score of an answer is β (log π_θ(y|x) - log π_ref(y|x)), log-probs summed over all its tokens.

    Rafailov et al., arXiv 2305.18290, equation 7. Raises ConfigError for a β that is not above 0.
    """

    beta: float
    reads: ClassVar[frozenset[str]] = frozenset({REFERENCE})  # type: ignore[misc]

    def __post_init__(self) -> None:
        require_allowed({'loss.dpo_beta': self.beta})

    def score_tokens(self, tokens: LossTokens) -> jax.Array:
        return self.beta * (tokens.policy_logprobs - tokens.read(REFERENCE))

    def score_held_out(self, passed: Mapping[str, np.ndarray], ends: np.ndarray) -> np.ndarray:
        return self.beta * (passed[POLICY].astype(np.float64) - passed[REFERENCE])

    def describe(self) -> str:
        return f'DPO, beta {self.beta:g}'


@dataclasses.dataclass(frozen=True)
class RewardModel(PairObjective):
    """The score of an answer is the value of the state before its last token, which has read all earlier tokens.

    Bradley and Terry's model, as Ouyang et al., arXiv 2203.02155, equation 1, train it on pairs.
    """

    scores_answers: ClassVar[bool] = True
    prepares: ClassVar[tuple[str, ...]] = (_PAIR_STARTS, _ENDS)  # type: ignore[misc]

    def prepare(self, batch: PackedBatch, policy_logprobs: np.ndarray | None) -> Mapping[str, np.ndarray]:
        return {**super().prepare(batch, policy_logprobs), _ENDS: _find_ends(batch)}

    def score_tokens(self, tokens: LossTokens) -> jax.Array:
        assert tokens.values is not None, 'the learner gives values to an objective that trains them'
        return tokens.read(_ENDS) * tokens.values

    def score_held_out(self, passed: Mapping[str, np.ndarray], ends: np.ndarray) -> np.ndarray:
        return ends * passed[VALUES]

    def describe(self) -> str:
        return 'reward model of pairs, Bradley-Terry'


def _find_ends(batch: PackedBatch) -> np.ndarray:
    """float32 [M, R, N]: 1 at the last loss token of each answer."""
    ids: Array = np.where(batch.loss_mask, batch.trajectory_ids, -1)
    later = np.concatenate([ids[..., 1:], np.full_like(ids[..., :1], -1)], axis=-1)
    return ((ids != later) & batch.loss_mask).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class SampledDistillation(Objective):
    """KL(π_θ ‖ π_teacher) of each next token, by the policy gradient of tokens that the policy sampled.

      L(θ) = -Σₜ mₜ uₜ wₜ Aₜ log π_θ(yₜ|sₜ) / N,   Aₜ = log π_teacher(yₜ|sₜ) - log π_θ(yₜ|sₜ),   wₜ = π_θ / π_behav

    A and w are constant. With y drawn from π_behav, the expected gradient at a state is the gradient of the divergence:
    Σ_y π_θ(y) (log π_θ(y) - log π_teacher(y)) ∇ log π_θ(y). States keep the weight with which they were visited.
    Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649, section 3, with the reverse
    divergence: no gradient goes through the sampling of states. Rewards are not read; log w is clamped to ±20.

    Raises ConfigError for a value that its field may not hold.
    """

    behavior_weight_cap: float | None = None  # the upper bound of w
    aggregation: str = 'token_mean'
    length_constant: int = 1
    reads: ClassVar[frozenset[str]] = frozenset({TEACHER})  # type: ignore[misc]

    def __post_init__(self) -> None:
        require_allowed({'loss.behavior_weight_cap': self.behavior_weight_cap})

    def loss(self, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
        mask = tokens.loss_mask
        policy, behavior, teacher = (
            jnp.where(mask, x, 0.0) for x in (tokens.policy_logprobs, tokens.behavior_logprobs, tokens.read(TEACHER))
        )
        now = jax.lax.stop_gradient(policy)
        moved, advantage = now - behavior, teacher - now
        ratio = bounded_exp(moved)
        weight = ratio if self.behavior_weight_cap is None else jnp.minimum(ratio, self.behavior_weight_cap)
        metrics = {
            'token_count': tokens.count(),
            'weight_sum': tokens.total(weight),
            'weight_sq_sum': tokens.total(weight**2),
            'weight_max': jnp.max(jnp.where(mask, weight, 0.0), initial=0.0),
            'kl_sum': tokens.total(kl_term(moved)),
            'teacher_kl_sum': tokens.total(weight * kl_term(advantage)),
        }
        return tokens.mean(-weight * advantage * policy), jax.lax.stop_gradient(metrics)

    def metrics(self, merged: Mapping[str, float]) -> dict[str, float]:
        """Metrics per trained token of the update; {} without any.

        'loss/teacher_kl' estimates KL(π_θ ‖ π_teacher) of a token, nats, by w (e^A - 1 - A): every term is at least 0.
        """
        n = merged.get('token_count', 0.0)
        if not n:
            return {}
        total, squares = merged['weight_sum'], merged['weight_sq_sum']
        return {
            'loss/teacher_kl': merged['teacher_kl_sum'] / n,
            'loss/behavior_weight_mean': total / n,
            'loss/behavior_weight_max': merged['weight_max'],
            'loss/effective_sample_size': total**2 / (n * squares) if squares else 0.0,
            'loss/approx_kl': merged['kl_sum'] / n,
            'loss/entropy': merged['entropy_sum'] / n,
        }

    def describe(self) -> str:
        cap = '' if self.behavior_weight_cap is None else f', weights of at most {self.behavior_weight_cap:g}'
        return f'reverse KL to the teacher on sampled tokens{cap}'


@dataclasses.dataclass(frozen=True)
class VocabularyDistillation(Objective):
    """A divergence of each next token over the whole vocabulary, differentiated itself, at the states visited.

      L(θ) = Σₜ mₜ uₜ Dₜ / N,   'reverse': D = KL(π_θ ‖ π_teacher)   'forward': D = KL(π_teacher ‖ π_θ)

    Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649, section 3: no gradient goes through
    the sampling of states. D is not estimated from the token drawn, so it has no importance weight; states keep the
    weight with which the sampling policy visited them. Rewards are not read. `aggregation`: see Objective.

    Raises ConfigError for an unknown divergence.
    """

    divergence: str = 'reverse'
    aggregation: str = 'token_mean'
    length_constant: int = 1
    reads: ClassVar[frozenset[str]] = DIVERGENCES  # type: ignore[misc]

    def __post_init__(self) -> None:
        require_allowed({'loss.divergence': self.divergence})

    def loss(self, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
        reverse, forward = tokens.statistic(REVERSE_KL), tokens.statistic(FORWARD_KL)
        moved = jnp.where(tokens.loss_mask, tokens.policy_logprobs - tokens.behavior_logprobs, 0.0)
        metrics = {
            'token_count': tokens.count(),
            'kl_sum': tokens.total(kl_term(moved)),
            'teacher_kl_sum': tokens.total(reverse),
            'teacher_forward_kl_sum': tokens.total(forward),
        }
        loss = tokens.mean(forward if self.divergence == 'forward' else reverse)
        return loss, jax.lax.stop_gradient(metrics)

    def metrics(self, merged: Mapping[str, float]) -> dict[str, float]:
        """Metrics per trained token of the update, nats; {} without any. 'loss/teacher_kl' is KL(π_θ ‖ π_teacher)."""
        n = merged.get('token_count', 0.0)
        if not n:
            return {}
        return {
            'loss/teacher_kl': merged['teacher_kl_sum'] / n,
            'loss/teacher_forward_kl': merged['teacher_forward_kl_sum'] / n,
            'loss/approx_kl': merged['kl_sum'] / n,
            'loss/entropy': merged['entropy_sum'] / n,
        }

    def describe(self) -> str:
        return f'{self.divergence} KL between policy and teacher over the vocabulary'
