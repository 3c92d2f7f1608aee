"""Advantages: the rewards of an update become one number for each answer (an episode). numpy only.

All rows of an episode have its advantage. Named estimators see the shaped rewards of one group at a time. An own
estimator, loss.advantage='FILE.py:FUNCTION', sees a whole update: function(rewards, groups) -> advantages, all
[answers], where `groups` numbers the group of each answer; a function with a third parameter gets the answers too, each
as its first row (types.Trajectory).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.errors import UserError
from areal_jax.learning.objective.counting import count_generated, find_starts, rewards_of
from areal_jax.learning.objective.objective import COLLISION, END_VALUES, POLICY, REFERENCE, VALUES, TokenAdvantages
from areal_jax.learning.objective.policy_loss import estimate_kl
from areal_jax.learning.objective.ratios import sequence_sums
from areal_jax.learning.packed_rows import BatchError
from areal_jax.plugins import is_own, load_function, raising_user_error
from areal_jax.types import PackedBatch, TrajectoryGroup

OwnEstimator: TypeAlias = Callable[..., object]
# float64 [n] rewards, [n] generated tokens of the answers of a group -> [n] advantages
GroupEstimator: TypeAlias = Callable[[np.ndarray, np.ndarray, PolicyChoices], np.ndarray]
# (groups, results of a pass for each group or None) -> per group float32 [its rows]
Estimator: TypeAlias = Callable[[Sequence[TrajectoryGroup], 'Sequence[Passed] | None'], list[np.ndarray]]

_FIELD = 'loss.advantage'
_NOTHING = np.zeros(0)  # float64: goes before a list of arrays that may be empty
STD_FLOOR = 1e-4  # keeps the advantage finite if the rewards of a group hardly differ
SAMPLE_FLOOR = 1e-6  # the papers' constant, with ddof 1 and in `optimal_baseline`
WHITEN_FLOOR = 1e-8  # added to a variance


def shape_rewards(group: TrajectoryGroup, choices: PolicyChoices) -> np.ndarray:
    """float64 [episodes]: clip((r - penalty - bias) scale, ±clip) with the length penalty of `overlong_penalty`.

    The order is AReaL's (arXiv 2505.24298, section 7). Raises BatchError as `rewards_of`.
    """
    rewards = rewards_of(group)
    if choices.overlong_tokens:
        tokens = sum_rows(group, count_generated_of_rows(group))
        rewards = rewards - choices.overlong_penalty * overlong_share(
            tokens, choices.longest_answer, choices.overlong_tokens
        )
    if choices.reward_bias or choices.reward_scale != 1.0:
        rewards = (rewards - choices.reward_bias) * choices.reward_scale
    return rewards if choices.reward_clip is None else np.clip(rewards, -choices.reward_clip, choices.reward_clip)


def overlong_share(tokens: np.ndarray, longest: int, buffer: int) -> np.ndarray:
    """0 up to `longest - buffer` tokens, then rising to 1 at `longest`. DAPO, arXiv 2503.14476, equation 13."""
    return np.clip((tokens - (longest - buffer)) / buffer, 0.0, 1.0)


def count_generated_of_rows(group: TrajectoryGroup) -> np.ndarray:
    """float64 [rows of the group], see `count_generated`."""
    return np.array([count_generated(t) for t in group.trajectories], np.float64)


def sum_rows(group: TrajectoryGroup, values: np.ndarray) -> np.ndarray:
    """float64 [rows of the group] -> [episodes]; if each episode has one row, the values themselves, bit for bit."""
    sizes = [len(rows) for rows in group.episodes]
    return values if len(sizes) == len(values) else np.add.reduceat(values, np.cumsum([0, *sizes[:-1]]))


def to_rows(group: TrajectoryGroup, values: np.ndarray) -> np.ndarray:
    """[episodes of the group] -> [rows]: each row has the value of its episode."""
    return np.repeat(values, [len(rows) for rows in group.episodes])


class Passed(NamedTuple):
    """Results of passes before the update for the answers of a group, float64 [n] each."""

    penalty: np.ndarray  # subtracted from the reward
    log_weights: np.ndarray  # log Π π / π_behav; for 'optimal_baseline', like `norms`
    norms: np.ndarray  # squared norm of the gradient of the log-prob of the answer, up to a factor


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
    """(r - mean) / mean, 0 if all rewards are 0 (MaxRL, arXiv 2602.02710); raises BatchError for a reward below 0."""
    if rewards.min() < 0:
        raise BatchError(
            f"loss.advantage='max_rl' divides by the mean reward of a group, and a reward is {rewards.min():g}: give "
            'rewards of at least 0, or use another advantage'
        )
    mean = rewards.mean()
    return (rewards - mean) / mean if mean else np.zeros_like(rewards)


def length_baseline(rewards: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """r - Σ n r / Σ n with n generated tokens: the optimal baseline if the norm of a gradient grows with n.

    OPO, arXiv 2505.23585, equation 7; without any token, r - the plain mean.
    """
    total = tokens.sum()
    return rewards - ((tokens * rewards).sum() / total if total else rewards.mean())


def optimal_value(rewards: np.ndarray, beta: float) -> np.ndarray:
    """r - V with the soft maximum V = β log mean exp(r / β), which grows as β shrinks. The sum of advantages is not 0.

    OAPL, arXiv 2602.19362, equation 2.
    """
    scaled = rewards / beta
    top = scaled.max()
    return rewards - beta * (top + np.log(np.exp(scaled - top).mean()))


def optimal_baseline(rewards: np.ndarray, log_weights: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """(r - b) / (std + 1e-6), b = Σ w² n r / Σ w² n: the baseline of least variance of Σ w (r - b) ∇log π.

    VCPO, arXiv 2602.17616, with the population's deviation; without any trained token b is the mean.

    Args:
      log_weights: log w; only differences matter.
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

    Groups may be partial. If advantages contrast answers, equal rewards and a group of one give exactly 0, whatever the
    rounding of the mean. Raises ValueError for an unknown estimator.
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
    """Returns the estimator of the advantages of all groups of an update; loss.whiten comes later, over loss tokens.

    An own function is loaded here, once. Raises UserError if it cannot be loaded.
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
      tokens: float64 [k], the number of tokens that have each value.
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
    """Per group float32 [its rows], from one call of an own function over all groups.

    Raises UserError if the function raises, or returns another shape or a number that is not finite.
    """
    if not groups:
        return []
    spec = choices.advantage
    sizes = [len(group.heads) for group in groups]
    known = zip(groups, _of_each(groups, passed), strict=True)
    rewards = np.hstack([_NOTHING, *(_rewards(group, choices, of) for group, of in known)])
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


# Advantages of packed loss tokens: the ones that need a pass before the first step (a critic, an optimal baseline, a KL
# in the reward), and all that are whitened. Whitening reads the loss tokens of all minibatches of the update, each
# once, and no others. `trajectory_ids` gives the answer of a token.


def generalized_advantages(
    values: np.ndarray,
    token_rewards: np.ndarray,
    last_rewards: np.ndarray,
    last_values: np.ndarray,
    loss_mask: np.ndarray,
    trajectory_ids: np.ndarray,
    *,
    discount: float,
    decay: float,
) -> np.ndarray:
    """A_t = δ_t + γλ A_{t+1} with δ_t = r_t + γ V_{t+1} - V_t over the trained tokens of each answer.

    Schulman et al., arXiv 1506.02438, equations 11 and 16. Tokens that are not trained are not steps: A and V of the
    next trained token are carried over them, so that no reward is lost. Nothing is carried from one answer to another.

    Args:
      values: V, [..., N], of the state before each token.
      token_rewards: [..., N].
      last_rewards: [..., N]; only the entry at the last trained token of an answer is read, and added to its reward.
      last_values: [..., N]; only the entry at that token is read, the value after it: 0 if the answer has ended.
      loss_mask: bool [..., N].
      trajectory_ids: int [..., N]; the tokens of an answer are contiguous.
      discount: γ.
      decay: λ.

    Returns:
      float64 [..., N]; 0 at masked tokens.
    """
    rows = lambda x, dtype=np.float64: np.where(loss_mask, x, 0).reshape(-1, loss_mask.shape[-1]).astype(dtype)
    v, r, ends, behind = map(rows, (values, token_rewards, last_rewards, last_values))
    mask, ids = loss_mask.reshape(v.shape), rows(trajectory_ids, np.int64)
    advantages = np.zeros_like(v)
    next_value, next_advantage, next_id = np.zeros(len(v)), np.zeros(len(v)), np.full(len(v), -1)
    for t in reversed(range(v.shape[-1])):
        trained, is_last = mask[:, t], ids[:, t] != next_id
        reward = r[:, t] + np.where(is_last, ends[:, t], 0.0)
        value = np.where(is_last, behind[:, t], next_value)
        advantage = reward + discount * value - v[:, t]
        advantage += discount * decay * np.where(is_last, 0.0, next_advantage)
        advantages[:, t] = np.where(trained, advantage, 0.0)
        next_value = np.where(trained, v[:, t], next_value)
        next_advantage = np.where(trained, advantage, next_advantage)
        next_id = np.where(trained, ids[:, t], next_id)
    return advantages.reshape(values.shape)


Known = Mapping[str, np.ndarray]  # of a minibatch, see Objective.token_advantages


def packed_advantages(
    choices: PolicyChoices,
    estimate: Estimator,
    groups: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    known: Sequence[Known],
) -> list[TokenAdvantages]:
    """The advantages of the tokens of each minibatch, 0 outside the loss.

    With the advantage 'gae', returns are A + V before whitening. With kl_in='reward', the reward of an answer is
    R - β Σ kₜ when its group is compared; with the advantages 'reward' and 'gae', token t has the reward -β kₜ, so that
    for 'reward' its advantage is the undiscounted return, R - β Σ kₛ over s >= t (REINFORCE++, arXiv 2501.03262). k
    estimates KL(behavior ‖ reference) from the log-probs of the policy that drew the tokens. If no pass is needed, the
    batches already have the advantages of `estimate`, which are only whitened.
    """
    divergences = [_divergences(choices, *of) for of in zip(batches, known, strict=True)]
    if choices.advantage == 'gae':
        return _of_critic(choices, groups, batches, known, divergences)
    if is_kl_in_reward(choices) and choices.advantage == 'reward':
        advantages = _returns(choices, groups, batches, divergences)
    else:
        sizes = [len(group.trajectories) for group in groups]
        if is_kl_in_reward(choices) or choices.advantage == 'optimal_baseline':
            estimated = estimate(groups, _measure_answers(choices, sizes, groups, batches, known, divergences))
            values = np.hstack([_NOTHING, *estimated])
        else:
            values = _of_rows(batches, sum(sizes))
        if choices.whiten == 'batch':
            values = whiten(values, _sum_rows(batches, [np.ones(b.loss_mask.shape) for b in batches], sum(sizes)))
        advantages = _spread(batches, values)
    return [TokenAdvantages(_trained(b, a)) for b, a in zip(batches, advantages, strict=True)]


def is_kl_in_reward(choices: PolicyChoices) -> bool:
    return bool(choices.kl_coefficient) and choices.kl_in == 'reward'


def squared_norms(logprobs: np.ndarray, collisions: np.ndarray) -> np.ndarray:
    """1 - 2 π + Σ_v π_v², at least 0: the squared norm of ∂ log π / ∂ logits of a token, from one forward pass.

    Args:
      logprobs: log π of the token.
      collisions: log Σ_v π_v².
    """
    return np.maximum(1 - 2 * np.exp(logprobs) + np.exp(collisions), 0.0)


def _measure_answers(
    choices: PolicyChoices,
    sizes: Sequence[int],
    groups: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    known: Sequence[Known],
    divergences: Sequence[np.ndarray],
) -> list[Passed]:
    """The input of `estimate` for each group: sums over the loss tokens of each answer, in all of its rows.

    Args:
      sizes: rows of each group.
    """
    of_rows = lambda arrays: np.split(_sum_rows(batches, arrays, sum(sizes)), np.cumsum(sizes))[:-1]
    by_group = lambda arrays: [sum_rows(*of) for of in zip(groups, of_rows(arrays), strict=True)]
    zeros = [np.zeros(batch.loss_mask.shape) for batch in batches]
    logs = norms = zeros
    if choices.advantage == 'optimal_baseline':
        logs = [of[POLICY] - batch.behavior_logprobs for batch, of in zip(batches, known, strict=True)]
        norms = [squared_norms(of[POLICY].astype(np.float64), of[COLLISION].astype(np.float64)) for of in known]
    penalties = [choices.kl_coefficient * values for values in divergences]
    return [Passed(*of) for of in zip(*map(by_group, (penalties, logs, norms)), strict=True)]


def _divergences(choices: PolicyChoices, batch: PackedBatch, known: Known) -> np.ndarray:
    """float64 [M, R, N]: k of each loss token; 0 without a divergence in the reward."""
    if not is_kl_in_reward(choices):
        return np.zeros(batch.loss_mask.shape)
    behavior, reference = (
        np.where(batch.loss_mask, x, 0.0).astype(np.float64) for x in (batch.behavior_logprobs, known[REFERENCE])
    )
    return np.asarray(estimate_kl(behavior - reference, choices.kl_estimator))


def _returns(
    choices: PolicyChoices,
    groups: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    divergences: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """R - β Σ kₛ at each loss token, over the loss tokens from it to the end of its answer; whitened if asked for."""
    rewards = _spread_rewards(choices, groups, batches)
    later = [_sum_later(*of) for of in zip(batches, divergences, strict=True)]
    returns = [r - choices.kl_coefficient * k for r, k in zip(rewards, later, strict=True)]
    return returns if choices.whiten == 'none' else _whiten(batches, returns)


def _of_critic(
    choices: PolicyChoices,
    groups: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    known: Sequence[Known],
    divergences: Sequence[np.ndarray],
) -> list[TokenAdvantages]:
    """Advantages and returns from a critic's values; each row's last trained token gets the reward of the answer."""
    rewards = _spread_rewards(choices, groups, batches)
    values = [_trained(batch, of[VALUES]).astype(np.float64) for batch, of in zip(batches, known, strict=True)]
    advantages = [
        generalized_advantages(
            v, -choices.kl_coefficient * k, r, of.get(END_VALUES, np.zeros_like(v)), b.loss_mask, b.trajectory_ids,
            discount=choices.discount, decay=choices.gae_lambda,
        )
        for b, v, k, r, of in zip(batches, values, divergences, rewards, known, strict=True)
    ]  # fmt: skip
    returns = [_trained(b, a + v) for b, a, v in zip(batches, advantages, values, strict=True)]
    if choices.whiten == 'batch':
        advantages = _whiten(batches, advantages)
    found = zip(batches, advantages, returns, strict=True)
    return [TokenAdvantages(_trained(batch, a), of) for batch, a, of in found]


def _trained(batch: PackedBatch, values: np.ndarray) -> np.ndarray:
    """float32: the values of the loss tokens, 0 elsewhere."""
    return np.where(batch.loss_mask, values, 0.0).astype(np.float32)


def _sum_rows(batches: Sequence[PackedBatch], arrays: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """float64 [rows of the update]: sums over the loss tokens of each."""
    add = lambda batch, values: np.bincount(
        batch.trajectory_ids[batch.loss_mask], values[batch.loss_mask].astype(np.float64), minlength=rows
    )
    return sum((add(*of) for of in zip(batches, arrays, strict=True)), np.zeros(rows))


def _of_rows(batches: Sequence[PackedBatch], rows: int) -> np.ndarray:
    """float64 [rows of the update]: the advantage of each row's loss tokens, 0 for a row without any."""
    found = np.zeros(rows)
    for batch in batches:
        found[batch.trajectory_ids[batch.loss_mask]] = batch.advantages[batch.loss_mask]
    return found


def _spread(batches: Sequence[PackedBatch], values: np.ndarray) -> list[np.ndarray]:
    """Spreads values [rows] over [M, R, N]: each loss token has the value of its row, the others 0."""
    return [np.where(b.loss_mask, values[np.where(b.loss_mask, b.trajectory_ids, 0)], 0.0) for b in batches]


def _spread_rewards(
    choices: PolicyChoices, groups: Sequence[TrajectoryGroup], batches: Sequence[PackedBatch]
) -> list[np.ndarray]:
    of_rows = [to_rows(group, shape_rewards(group, choices)) for group in groups]
    return _spread(batches, np.hstack([_NOTHING, *of_rows]))


def _sum_later(batch: PackedBatch, values: np.ndarray) -> np.ndarray:
    """At each loss token the sum over it and the later tokens of its answer, which are contiguous in a row."""
    by_row = lambda x: x.reshape(-1, x.shape[-1])
    mask, starts = by_row(batch.loss_mask), by_row(find_starts(batch.trajectory_ids))
    kept = np.where(mask, by_row(values), 0.0)
    before = np.cumsum(kept, axis=-1) - kept  # in the row
    of_answer = sequence_sums(kept, mask, starts)
    return (of_answer - before + np.take_along_axis(before, starts, axis=-1)).reshape(values.shape)


def _whiten(batches: Sequence[PackedBatch], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Whitens the values of the loss tokens of all batches together; [M, R, N] each, 0 elsewhere."""
    masks = [batch.loss_mask for batch in batches]
    trained = np.hstack([_NOTHING, *(v[mask] for v, mask in zip(values, masks, strict=True))])
    whitened, found = whiten(trained, np.ones(len(trained))), [np.zeros(mask.shape) for mask in masks]
    first = 0
    for array, mask in zip(found, masks, strict=True):
        array[mask] = whitened[first : first + mask.sum()]
        first += mask.sum()
    return found
