"""The interface between an update and its objective: a learner calls an Objective, and knows no concrete class.

An own objective (loss.objective='FILE.py:FUNCTION', docs/own_objective.md) implements it; this project's objectives are
in objectives.py. For shapes see learning/__init__.py; n answers of an update.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.errors import UserError
from areal_jax.learning.objective.ratios import masked_sum, sequence_sums
from areal_jax.learning.weights import NonFiniteError
from areal_jax.types import PackedBatch, TrajectoryGroup


def held_out_likelihood(logprobs: np.ndarray) -> dict[str, float]:
    """{'nll': nats per token, 'tokens': their number} from log-probs float32 [tokens].

    Raises NonFiniteError if the likelihood is NaN or infinite.
    """
    nll = -float(logprobs.mean(dtype=np.float64))
    if not math.isfinite(nll):
        raise NonFiniteError(
            f'the held-out likelihood is {nll} nats a token: lower optimizer.learning_rate, or use '
            "learner.dtype='float32'"
        )
    return {'nll': nll, 'tokens': float(logprobs.size)}


Metrics = dict[str, jax.Array]  # sums `*_sum`, `*_count`, and maxima `*_max`

PROXIMAL = 'proximal'  # log-probs of the weights before the update
REFERENCE = 'reference'  # log-probs of loss.reference
TEACHER = 'teacher'  # log-probs of loss.teacher; not together with REFERENCE
POLICY = 'policy'  # log-probs right before a step, for `prepare`; costs one more pass
COLLISION = 'collision'  # log Σ π² and log-probs of the weights before the update, for `token_advantages`
VALUES = 'values'  # of the critic, of the weights before the update; brings POLICY, for `token_advantages`
# with VALUES: the value of the state after the last token of a row that ended at its limit, else 0; `token_advantages`
END_VALUES = 'end_values'
# of each token over the vocabulary, differentiable: see LossTokens.statistic
REVERSE_KL = 'reverse_kl'  # KL(π_θ ‖ π_teacher); the teacher's pass is a part of each step
FORWARD_KL = 'forward_kl'  # KL(π_teacher ‖ π_θ)
CLAMPED_ENTROPY = 'clamped_entropy'  # without the share `entropy_clamp` of the vocabulary
DIVERGENCES = frozenset({REVERSE_KL, FORWARD_KL})
STATISTICS = DIVERGENCES | {CLAMPED_ENTROPY}
FROM_TEACHER = DIVERGENCES | {TEACHER}
INPUTS = STATISTICS | {PROXIMAL, REFERENCE, TEACHER, POLICY, COLLISION, VALUES, END_VALUES}
RETURNS = 'returns'  # targets of the critic's values, from `token_advantages`


class UndeclaredInputError(UserError):
    """An objective reads an input that its `reads` does not name, so that no pass computes it."""


@dataclasses.dataclass(frozen=True)
class LossTokens:
    """The loss tokens of a micro-batch, [R, N] each, and the denominator of their sums."""

    policy_logprobs: jax.Array  # log π_θ, differentiated; so are entropy, values and statistics, and no other field
    entropy: jax.Array  # of the whole distribution
    behavior_logprobs: jax.Array
    advantages: jax.Array
    loss_mask: jax.Array  # bool; values elsewhere mean nothing
    policy_versions: jax.Array  # int
    sequence_starts: jax.Array  # int, the place in the row of the first loss token of the same answer
    token_weights: jax.Array  # of each token in the mean, see counting.py
    denominator: jax.Array  # scalar, of the minibatch
    version: jax.Array  # int scalar, of the weights before the update
    known: Mapping[str, jax.Array]  # what `reads` names, and what `prepare` returned
    values: jax.Array | None = None  # of the critic, differentiated; None if the objective trains no critic
    statistics: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)  # STATISTICS that `reads` names

    def read(self, name: str) -> jax.Array:
        """Constant [R, N]: PROXIMAL, REFERENCE, TEACHER, VALUES (and RETURNS with it), or an array of `prepare`."""
        return jax.lax.stop_gradient(_require_declared(self.known, name, ', or in `prepares`'))

    def statistic(self, name: str) -> jax.Array:
        """Differentiable [R, N]: REVERSE_KL, FORWARD_KL or CLAMPED_ENTROPY, at the temperature of training."""
        return _require_declared(self.statistics, name)

    def mean(self, values: jax.Array) -> jax.Array:
        """This micro-batch's part of the minibatch's mean over loss tokens: float32 scalar."""
        return masked_sum(values, self.loss_mask, self.token_weights) / self.denominator

    def total(self, values: jax.Array) -> jax.Array:
        """The plain sum over the loss tokens, for metrics: float32 scalar."""
        return masked_sum(values, self.loss_mask)

    def over_sequence(self, values: jax.Array) -> jax.Array:
        """[R, N]: at each loss token the sum over the loss tokens of its answer."""
        return sequence_sums(values, self.loss_mask, self.sequence_starts)

    def count(self) -> jax.Array:
        return self.total(jnp.ones_like(self.policy_logprobs))


def _require_declared(arrays: Mapping[str, jax.Array], name: str, otherwise: str = '') -> jax.Array:
    if name not in arrays:
        raise UndeclaredInputError(
            f'the objective reads {name!r}, which it did not declare: name it in its `reads`{otherwise}'
        )
    return arrays[name]


class TokenAdvantages(NamedTuple):
    """Advantages and returns of the loss tokens of a minibatch, float32 [M, R, N] each."""

    advantages: np.ndarray
    returns: np.ndarray | None = None  # of an objective that reads VALUES


class Objective(abc.ABC):
    """The objective of an update. Immutable and hashable, because it is part of the key of compiled programs."""

    reads: frozenset[str] = frozenset()  # of INPUTS
    prepares: tuple[str, ...] = ()  # arrays of `prepare`, float32 [M, R, N]
    aggregation: str = 'token_mean'  # see counting.py
    length_constant: int = 1  # of aggregation 'constant'
    entropy_clamp: float = 0.0  # share of the vocabulary, its least likely tokens, that CLAMPED_ENTROPY leaves out
    contrasts: bool = False  # a group of equal rewards changes nothing, so that learner.filter_equal_rewards may act
    replaces_advantages: bool = False  # `token_advantages` makes them from packed tokens before the first step
    keeps_groups: bool = False  # all answers of a group are packed into one row
    masks_truncated: bool = (
        False  # answers that ended at their limit train nothing, and do not count in the denominator
    )
    learns_from_answers: ClassVar[bool] = True  # of engines: groups have rewards, tokens versions and ages
    scores_answers: ClassVar[bool] = False  # it trains `tokens.values` without reading VALUES
    source: str = ''  # FILE.py:FUNCTION of an own objective, which errors name; set by load_objective

    @property
    def trains_values(self) -> bool:
        """Whether `tokens.values` are there: the learner has a critic."""
        return self.scores_answers or VALUES in self.reads

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> list[np.ndarray]:
        """Per group float32 [its answers], one number per answer; `groups` are all groups of the update."""
        return [np.ones(len(group.trajectories), np.float32) for group in groups]

    def token_advantages(
        self,
        groups: Sequence[TrajectoryGroup],
        batches: Sequence[PackedBatch],
        passed: Sequence[Mapping[str, np.ndarray]],
    ) -> list[TokenAdvantages]:
        """The advantages of each minibatch's tokens, instead of `advantages`, if it `replaces_advantages`.

        Args:
          groups: the trained ones; trajectory ids of the batches number their answers.
          batches: with `advantages` at their tokens.
          passed: per minibatch the arrays among REFERENCE, COLLISION, VALUES and END_VALUES that `reads` names, and
            POLICY with COLLISION or VALUES; float32 [M, R, N], END_VALUES the same at all tokens of a row.
        """
        return [TokenAdvantages(batch.advantages) for batch in batches]

    def prepare(self, batch: PackedBatch, policy_logprobs: np.ndarray | None) -> Mapping[str, np.ndarray]:
        """The arrays that `prepares` names, for the next step on this minibatch.

        Args:
          policy_logprobs: float32 [M, R, N] of the weights before that step, if `reads` has POLICY.
        """
        return {}

    @abc.abstractmethod
    def loss(self, tokens: LossTokens) -> tuple[jax.Array, Metrics]:
        """(this micro-batch's part of the loss of its minibatch, metrics); pure, traced once per shape."""

    def metrics(self, merged: Mapping[str, float]) -> dict[str, float]:
        """Names and values for metrics.jsonl, from the sums and maxima of all micro-batches of an update."""
        return {}

    def measure_held_out(self, batch: PackedBatch, passed: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Measures supervised training on data that it does not train on; by default the likelihood.

        Args:
          passed: POLICY, REFERENCE with a reference, VALUES if values are trained; float32 [M, R, N].

        Raises NonFiniteError if the result is not finite.
        """
        return held_out_likelihood(passed[POLICY][batch.loss_mask])

    def describe(self) -> str:
        """The combination, for the report and the card of an exported model."""
        return type(self).__name__
