"""Advantages: the rewards of an update become one number for each answer, an episode. numpy only.

All rows of an episode have its advantage. Named estimators see one group at a time, in the rewards that rewards.py
shapes. An own one, loss.advantage='FILE.py:FUNCTION', sees a whole update: function(rewards, groups) -> advantages, all
[answers], where `groups` numbers the group of each answer; one with a third parameter gets the answers too, each as its
first row (types.Trajectory).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.errors import UserError
from areal_jax.learning.objective.rewards import count_generated_of_rows, shape_rewards, sum_rows, to_rows
from areal_jax.learning.packing.rows import BatchError
from areal_jax.plugins import is_own, load_function, raising_user_error
from areal_jax.types import TrajectoryGroup, concatenate

OwnEstimator: TypeAlias = Callable[..., object]
# float64 [n] rewards, [n] generated tokens of the answers of a group -> [n] advantages
GroupEstimator: TypeAlias = Callable[[np.ndarray, np.ndarray, PolicyChoices], np.ndarray]
# groups, and of each what a pass says -> per group float32 [its rows]
Estimator: TypeAlias = Callable[[Sequence[TrajectoryGroup], 'Sequence[Passed] | None'], list[np.ndarray]]

_FIELD = 'loss.advantage'
STD_FLOOR = 1e-4  # keeps the advantage finite where the rewards of a group hardly differ
SAMPLE_FLOOR = 1e-6  # the papers' constant, beside the deviation with ddof 1
WHITEN_FLOOR = 1e-8  # of a variance


class Passed(NamedTuple):
    """What passes before the update say of the answers of a group, float64 [n] each."""

    penalty: np.ndarray  # is taken from the reward
    log_weights: np.ndarray  # log Π π / π_behav, for 'optimal_baseline' as what follows
    norms: np.ndarray  # squared norm of the gradient of the log-prob of the answer, to a factor


def group_normalized(rewards: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + 1e-4) with the population's standard deviation (DeepSeekMath, arXiv 2402.03300)."""
    return (rewards - rewards.mean()) / (rewards.std() + STD_FLOOR)


def sample_normalized(rewards: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + 1e-6) with ddof 1, as DeepSeekMath's code and its successors have it; needs n >= 2."""
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + SAMPLE_FLOOR)


def group_mean(rewards: np.ndarray) -> np.ndarray:
    """r - mean: no division by the spread (Dr. GRPO, arXiv 2503.20783)."""
    return rewards - rewards.mean()


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """r_i - mean of the others = n / (n - 1) * (r_i - mean) (RLOO, arXiv 2402.14740); needs n >= 2."""
    return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))


def relative_to_mean(rewards: np.ndarray) -> np.ndarray:
    """(r - mean) / mean, 0 where all are 0 (MaxRL, arXiv 2602.02710); raises BatchError for a reward below 0."""
    if rewards.min() < 0:
        raise BatchError(
            f"loss.advantage='max_rl' divides by the mean reward of a group, and a reward is {rewards.min():g}: give "
            'rewards of at least 0, or use another advantage'
        )
    mean = rewards.mean()
    return (rewards - mean) / mean if mean else np.zeros_like(rewards)


def length_baseline(rewards: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """r - Σ n r / Σ n with n generated tokens: the optimal baseline if the norm of a gradient grows with them.

    OPO, arXiv 2505.23585, equation 7; without any token the plain mean.
    """
    total = tokens.sum()
    return rewards - ((tokens * rewards).sum() / total if total else rewards.mean())


def optimal_value(rewards: np.ndarray, beta: float) -> np.ndarray:
    """r - V with the soft maximum V = β log mean exp(r / β), which is the larger the smaller β is. Their sum is not 0.

    OAPL, arXiv 2602.19362, equation 2.
    """
    scaled = rewards / beta
    top = scaled.max()
    return rewards - beta * (top + np.log(np.exp(scaled - top).mean()))


def optimal_baseline(rewards: np.ndarray, log_weights: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """(r - b) / (std + 1e-6), b = Σ w² n r / Σ w² n: the baseline of least variance of Σ w (r - b) ∇log π.

    VCPO, arXiv 2602.17616, with the population's deviation; without any trained token b is the mean.

    Args:
      log_weights: log w, of which differences alone count.
      norms: n, at least 0.
    """
    logs = np.where(norms > 0, np.nan_to_num(log_weights, nan=-np.inf), -np.inf)
    shares = np.exp(2 * (logs - logs.max())) * norms if np.isfinite(logs.max()) else np.zeros_like(norms)
    total = shares.sum()
    baseline = (shares * rewards).sum() / total if total else rewards.mean()
    return (rewards - baseline) / (rewards.std() + SAMPLE_FLOOR)


ESTIMATORS: Mapping[str, GroupEstimator] = {
    'group': lambda r, n, c: group_normalized(r) if c.deviation == 'population' else sample_normalized(r),
    'group_mean': lambda r, n, c: group_mean(r),
    'rloo': lambda r, n, c: leave_one_out(r),
    'reward': lambda r, n, c: r,
    'max_rl': lambda r, n, c: relative_to_mean(r),
    'length_baseline': lambda r, n, c: length_baseline(r, n),
    'optimal_value': lambda r, n, c: optimal_value(r, c.oapl_value_beta),
    'optimal_baseline': lambda r, n, c: optimal_baseline(r, np.zeros(len(r)), np.ones(len(r))),  # before the pass
}
# equal rewards have the advantage 0: a group of them, or of one answer, changes nothing
CONTRASTS = frozenset(ESTIMATORS) - {'reward', 'optimal_value'}


def group_advantages(group: TrajectoryGroup, choices: PolicyChoices, passed: Passed | None = None) -> np.ndarray:
    """One advantage for each answer, constant over the tokens of its rows: float32 [rows of the group].

    Groups may be partial. Where advantages contrast answers, equal rewards and a group of one give exactly 0, whatever
    the rounding of the mean. Raises ValueError for an unknown estimator.
    """
    if choices.advantage == 'gae':  # a critic makes them, after its pass
        return to_rows(group, _rewards(group, choices, passed).astype(np.float32))
    if choices.advantage not in ESTIMATORS:
        known = ', '.join(sorted(ESTIMATORS))
        raise ValueError(f'loss.advantage={choices.advantage!r} is unknown; use one of {known}')
    rewards = _rewards(group, choices, passed)
    if choices.advantage in CONTRASTS and (rewards == rewards[0]).all():
        return np.zeros(len(group.trajectories), np.float32)
    if choices.advantage == 'optimal_baseline' and passed is not None:
        return to_rows(group, optimal_baseline(rewards, passed.log_weights, passed.norms).astype(np.float32))
    tokens = sum_rows(group, count_generated_of_rows(group))
    return to_rows(group, ESTIMATORS[choices.advantage](rewards, tokens, choices).astype(np.float32))


def make_estimator(choices: PolicyChoices) -> Estimator:
    """The advantages of all groups of an update, before loss.whiten, which packed_advantages.py does over loss tokens.

    An own function is loaded here, once. Raises UserError for one that cannot be loaded.
    """
    if is_own(choices.advantage):
        function = load_function(choices.advantage, _FIELD)
        return lambda groups, passed: own_advantages(groups, function, choices, passed)
    return lambda groups, passed: [
        group_advantages(group, choices, known) for group, known in zip(groups, _of_each(groups, passed), strict=True)
    ]


def whiten(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """(A - mean) / sqrt(var + 1e-8) over tokens, the variance with ddof 1; 0 for fewer than two tokens.

    REINFORCE++, arXiv 2501.03262, section 3.2. A token-weighted mean of centred groups is not 0: it is subtracted.

    Args:
      values: float64 [k].
      tokens: float64 [k], how many tokens have each of them.
    """
    total = tokens.sum()
    if total < 2:
        return np.zeros_like(values)
    mean = (tokens * values).sum() / total
    variance = (tokens * (values - mean) ** 2).sum() / (total - 1)
    return (values - mean) / np.sqrt(variance + WHITEN_FLOOR)


def own_advantages(
    groups: Sequence[TrajectoryGroup],
    function: OwnEstimator,
    choices: PolicyChoices,
    passed: Sequence[Passed] | None = None,
) -> list[np.ndarray]:
    """Per group float32 [its rows], from one call of an own function over all of them.

    Raises UserError if the function raises, or returns another shape or a number that is not finite.
    """
    if not groups:
        return []
    spec = choices.advantage
    sizes = [len(group.heads) for group in groups]
    known = zip(groups, _of_each(groups, passed), strict=True)
    rewards = concatenate([_rewards(group, choices, of) for group, of in known], np.float64)
    given: list[object] = [rewards.copy(), np.repeat(np.arange(len(groups)), sizes)]
    if _takes_answers(function):
        given.append([trajectory for group in groups for trajectory in group.heads])
    with raising_user_error(spec, _FIELD):
        returned = function(*given)
        advantages = np.asarray(returned, np.float64)
    if advantages.shape != rewards.shape:
        raise UserError(
            f'{_FIELD}={spec}: it returned the shape {advantages.shape} for {len(rewards)} rewards of {len(groups)} '
            f'groups; it must return one advantage for each reward, the shape {rewards.shape}'
        )
    with np.errstate(over='ignore'):
        narrow = advantages.astype(np.float32)
    if not np.isfinite(narrow).all():
        bad = int(np.flatnonzero(~np.isfinite(narrow))[0])
        raise UserError(
            f'{_FIELD}={spec}: advantage {bad} is {advantages[bad]}, for the reward {rewards[bad]:g}; advantages must '
            'be finite in float32'
        )
    return [to_rows(*of) for of in zip(groups, np.split(narrow, np.cumsum(sizes)[:-1]), strict=True)]


def _of_each(groups: Sequence[TrajectoryGroup], passed: Sequence[Passed] | None) -> Sequence[Passed | None]:
    return [None] * len(groups) if passed is None else passed


def _rewards(group: TrajectoryGroup, choices: PolicyChoices, passed: Passed | None) -> np.ndarray:
    shaped = shape_rewards(group, choices)
    return shaped if passed is None else shaped - passed.penalty


def _takes_answers(function: OwnEstimator) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in positional for parameter in parameters) > 2
