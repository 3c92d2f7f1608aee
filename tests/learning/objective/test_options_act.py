"""No option is dead: each choice of a combination changes a gradient, a group's advantages, or an aggregation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.counting import token_weights
from areal_jax.learning.objective.objective import (
    CLAMPED_ENTROPY,
    END_VALUES,
    REFERENCE,
    RETURNS,
    VALUES,
    LossTokens,
)
from areal_jax.learning.objective.objectives import PolicyObjective
from areal_jax.learning.packing import empty_batch
from tests.learning.examples import group
from tests.learning.objective.anchor_set import BEHAVIOR, POLICY, PROXIMAL
from tests.learning.objective.combinations import batch_of, draw_case, starts_of
from tests.learning.objective.tokens import make_tokens

_IDS = np.array([[0, 0, 0, 1, 1, 2]])  # two answers of one prompt, one of another
_PROMPTS = np.array([0, 0, 1])
_LINE = {
    'policy': np.r_[POLICY, -0.9, -2.2, -1.3], 'proximal': np.r_[PROXIMAL, -0.7, -1.1, -2.0],
    'behavior': np.r_[BEHAVIOR, -1.6, -0.9, -0.6], 'reference': np.full(6, -1.2),
    'advantages': np.r_[1, 1, 1, -2, -2, 0.7], 'versions': np.r_[4, 3, 1, 2, 0, 4], 'entropy': np.ones(6),
}  # fmt: skip
_RATIOS = ('token', 'sequence', 'geometric', 'geometric_token')
_IS_PG = {'surrogate': 'is_pg'}
_DELIGHT = {'surrogate': 'delight', 'ratio': 'none', 'correction': 'none'}
_MASK = {'correction': 'mask', 'correction_low': 0.5, 'correction_high': 5.0}
_TOKEN_SUMS = ('token_mean', 'sequence_mean', 'sequence_sum', 'constant', 'prompt_mean', 'token_sum')

# (what the others are, the axis, its values): every two of them differ
_AXES = [
    ({}, 'ratio', ('none', *_RATIOS)),
    ({}, 'ratio_denominator', ('proximal', 'behavior')),
    ({}, 'proximal', ('recompute', 'loglinear', 'behavior')),
    ({}, 'surrogate', ('clip', 'cispo', 'reinforce', 'is_pg', 'sapo', 'topr', 'quadratic', 'delight')),
    ({}, 'clip_epsilon', (0.1, 0.3)),
    ({}, 'clip_epsilon_high', (None, 0.9)),
    ({'surrogate': 'cispo'}, 'clip_epsilon', (0.1, 0.3)),
    ({'surrogate': 'cispo'}, 'clip_epsilon_high', (None, 0.9)),
    ({'surrogate': 'dual_clip', 'ratio_denominator': 'behavior'}, 'dual_clip', (1.1, 4.0)),
    ({'surrogate': 'sapo'}, 'sapo_positive', (1.0, 2.0)),
    ({'surrogate': 'sapo'}, 'sapo_negative', (1.0, 2.0)),
    ({'surrogate': 'quadratic'}, 'quadratic_weight', (0.1, 0.5)),
    ({'surrogate': 'oapl', 'ratio': 'sequence', 'ratio_denominator': 'behavior'}, 'oapl_beta', (1e-3, 0.5)),
    (_DELIGHT, 'delight_gate', ('sigmoid', 'bernoulli', 'kondo', 'additive')),
    (_DELIGHT, 'delight_temperature', (1.0, 0.5)),
    (_DELIGHT | {'delight_gate': 'kondo'}, 'delight_share', (0.2, 0.8)),
    (_DELIGHT | {'delight_gate': 'additive'}, 'delight_mix', (0.2, 0.8)),
    (_DELIGHT | {'delight_gate': 'bernoulli'}, 'seed', (0, 1)),
    (_IS_PG, 'correction', ('none', 'truncate', 'mask')),
    ({}, 'correction_level', ('token', 'sequence', 'geometric')),
    ({}, 'behavior_weight_cap', (None, 0.8)),
    (_MASK, 'correction_low', (0.5, 0.9)),
    (_MASK, 'correction_high', (5.0, 1.2)),
    (_IS_PG, 'veto', (None, 0.5)),
    (_IS_PG, 'gate', ('none', 'probability_shift', 'second_moment')),
    (_IS_PG | {'gate': 'probability_shift'}, 'gate_threshold', (0.05, 0.5)),
    (_IS_PG | {'gate': 'second_moment'}, 'gate_threshold', (0.2, 2.0)),
    ({'length_constant': 7}, 'aggregation', _TOKEN_SUMS),
    ({'aggregation': 'constant'}, 'length_constant', (2, 4)),
    ({}, 'entropy_coefficient', (0.0, 0.1)),
    ({'entropy_coefficient': 0.1}, 'entropy_clamp', (0.0, 0.3)),
    ({}, 'kl_coefficient', (0.0, 0.1)),
    ({'kl_coefficient': 0.1}, 'kl_estimator', ('k1', 'k2', 'k3', 'unbiased')),
]  # fmt: skip
_REWARD_AXES = [
    ({}, 'advantage', ('reward', 'group', 'group_mean', 'rloo', 'max_rl', 'optimal_value', 'length_baseline')),
    ({}, 'deviation', ('population', 'sample')),
    ({}, 'whiten', ('none', 'batch')),
    ({'advantage': 'optimal_value'}, 'oapl_value_beta', (1.0, 0.1)),
    ({'advantage': 'reward'}, 'reward_bias', (0.0, 0.5)),
    ({'advantage': 'reward'}, 'reward_scale', (1.0, 10.0)),
    ({'advantage': 'reward'}, 'reward_clip', (None, 0.5)),
    ({'longest_answer': 6}, 'overlong_tokens', (0, 4)),
    ({'longest_answer': 6, 'overlong_tokens': 4}, 'overlong_penalty', (1.0, 0.3)),
    ({'overlong_tokens': 4}, 'longest_answer', (6, 4)),
]
_CRITIC_AXES = [
    ({}, 'discount', (1.0, 0.8)),
    ({}, 'gae_lambda', (1.0, 0.5, 0.0)),
    ({}, 'truncated_value', ('zero', 'last')),
    ({}, 'value_clip', (0.0, 0.1, 0.5)),
]
_ELSEWHERE = {'kl_in', 'truncated_answers'}  # where a penalty counts; what is packed


def slopes(**choices):
    """Gradients by log-probs and entropies of six tokens."""
    tokens = draw_case(0)[1]
    tokens = dataclasses.replace(tokens, **_LINE_ARRAYS, ids=_IDS, mask=_IDS >= 0, version=4)
    objective, batch = PolicyObjective(PolicyChoices(**choices)), batch_of(tokens)
    weights, denominator = token_weights(
        batch, objective.aggregation, objective.length_constant, _PROMPTS
    )  # fmt: skip
    prepared = objective.prepare(batch, tokens.policy[None])
    known = {'proximal': tokens.proximal, REFERENCE: tokens.reference} | {k: v[0] for k, v in prepared.items()}

    def loss(policy, entropy):
        return objective.loss(
            LossTokens(
                policy_logprobs=policy, entropy=entropy, behavior_logprobs=tokens.behavior,
                advantages=tokens.advantages, loss_mask=tokens.mask, policy_versions=tokens.versions,
                sequence_starts=starts_of(_IDS), token_weights=weights[0], denominator=np.float32(denominator),
                version=np.int32(4), known={name: jnp.asarray(x) for name, x in known.items()},
                statistics={CLAMPED_ENTROPY: 0.9 * entropy},
            )
        )[0]  # fmt: skip

    return np.stack(jax.grad(loss, argnums=(0, 1))(jnp.asarray(tokens.policy), jnp.asarray(tokens.entropy)))


_LINE_ARRAYS = {name: np.asarray(x, np.int32 if name == 'versions' else np.float32)[None] for name, x in _LINE.items()}


def shaped_advantages(**choices):
    groups = [group([1], [[2], [2] * 3, [2] * 6, [2]], [1.0, 0.0, 0.25, 0.75]), group([1], [[2]] * 2, [0.0, 1.0])]
    objective, rows = PolicyObjective(PolicyChoices(**choices)), [0, *[1] * 3, *[2] * 6, 3, 4, 5]
    batch = empty_batch(1, 1, 20, len(rows))
    batch.trajectory_ids[0], batch.loss_mask[0] = rows, True
    batch.advantages[0] = np.concatenate(objective.advantages(groups))[rows]
    return (
        objective.token_advantages(groups, [batch], [{}])[0].advantages
        if objective.replaces_advantages
        else batch.advantages
    )


def of_critic(**choices):
    """Advantages of six tokens, and the gradient by their values; the first answer ended at its limit."""
    objective = PolicyObjective(PolicyChoices(advantage='gae', **choices))
    batch = empty_batch(1, 1, 16, 6)
    batch.trajectory_ids[0], batch.loss_mask[0] = _IDS, _IDS >= 0
    before = np.linspace(-0.4, 0.9, 6, dtype=np.float32)[None]
    groups = [group([1], [[2, 3, 4], [5, 6]], [1.0, 0.3]), group([1], [[7]], [0.7])]
    first = dataclasses.replace(groups[0].trajectories[0], finish_reason='length')
    groups[0] = dataclasses.replace(groups[0], trajectories=(first, groups[0].trajectories[1]))
    behind = {END_VALUES: np.where(_IDS == 0, np.float32(0.7), 0)[None]} if END_VALUES in objective.reads else {}
    ((advantages, returns),) = objective.token_advantages(groups, [batch], [{VALUES: before[None]} | behind])
    known = {VALUES: jnp.asarray(before), RETURNS: jnp.asarray(returns[0]), 'proximal': jnp.zeros((1, 6))}
    zeros, mask = jnp.zeros((1, 6)), jnp.ones((1, 6), bool)
    tokens = make_tokens(zeros, zeros, advantages[0], mask, 6.0, token_weights=jnp.ones((1, 6)), known=known)
    moved = jnp.asarray(before + np.array([[0.3, -0.3, 0.7, -0.7, 0.05, 0.0]], np.float32))
    slope = jax.grad(lambda values: objective.loss(dataclasses.replace(tokens, values=values))[0])(moved)
    return np.concatenate([advantages[0, 0], slope[0]])


def assert_all_differ(results):
    values = list(results)
    for i, (a, one) in enumerate(values):
        assert np.isfinite(one).all()
        for b, other in values[i + 1 :]:
            distance = np.abs(one - other).max() / max(np.abs(one).max(), np.abs(other).max())
            assert distance > 1e-3, f'{a} and {b} are the same'


_CHANGED = {slopes: _AXES, shaped_advantages: _REWARD_AXES, of_critic: _CRITIC_AXES}


@pytest.mark.parametrize(
    ('compute', 'others', 'axis', 'values'),
    [
        pytest.param(compute, *axis, id=f'{compute.__name__} {axis[1]}')
        for compute in _CHANGED
        for axis in _CHANGED[compute]
    ],
)
def test_a_choice_changes_gradient_advantages_or_what_a_critic_makes(compute, others, axis, values):
    assert_all_differ((value, compute(**others | {axis: value})) for value in values)


def test_each_field_of_a_combination_is_here():
    fields = {field.name for field in dataclasses.fields(PolicyChoices)}
    assert {axis for _, axis, _ in _AXES + _REWARD_AXES + _CRITIC_AXES} | _ELSEWHERE >= fields
