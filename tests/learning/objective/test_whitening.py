"""One whitening: over the loss tokens of an update, with and without a pass, however they are masked and packed."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.objective import REFERENCE, VALUES
from areal_jax.learning.objective.objectives import PolicyObjective
from areal_jax.learning.packing import pack
from areal_jax.types import NOT_GENERATED, TrajectoryGroup
from tests.learning.examples import fork_rows, random_groups
from tests.learning.objective.test_advantages import learner_of

_OLDEST = 1  # tokens of version 0 are too old to train
MASKS = {'all': {}, 'truncated': {'masks_truncated': True}, 'old': {'oldest_version': _OLDEST}}
MASKS['both'] = MASKS['truncated'] | MASKS['old']
PACKINGS = {
    'one row each': {'mode': 'ordinary', 'fill': 'padded'},
    'shared prompts': {'mode': 'shared_prompt', 'fill': 'first_fit', 'n_minibatches': 3},
    'algorithm 1': {'mode': 'ordinary', 'fill': 'algorithm_1', 'n_minibatches': 2, 'rows_per_microbatch': 4},
}


def cut_answers() -> list[TrajectoryGroup]:
    """Ragged groups, some with rows beside the first, of which every third episode ended at its limit."""
    groups = [fork_rows(group, seed) for seed, group in enumerate(random_groups(5, 6))]
    ends = lambda row: dataclasses.replace(row, finish_reason='stop' if row.sample % 3 else 'length')
    return [dataclasses.replace(g, trajectories=tuple(map(ends, g.trajectories))) for g in groups]


GROUPS = cut_answers()


def packed(objective, masks, packing):
    shapes = {'row_tokens': 64, 'row_loss_tokens': 48, 'rows_per_microbatch': 2, 'n_minibatches': 1}
    return pack(GROUPS, objective.advantages(GROUPS), **shapes | PACKINGS[packing] | MASKS[masks])[0]


def whitened(masks, packing, *, kl=0.0, **choices) -> np.ndarray:
    """[rows]: the advantage of the loss tokens of each row, NaN where it has none."""
    choices = {'advantage': 'reward', 'whiten': 'batch', 'kl_coefficient': kl, 'kl_in': 'reward'} | choices
    objective = PolicyObjective(PolicyChoices(**choices))
    batches = packed(objective, masks, packing)
    far = lambda batch: batch.behavior_logprobs - np.float32(0.5)
    known = [{REFERENCE: far(b), VALUES: 0 * b.behavior_logprobs} for b in batches]
    found = np.full(sum(len(group.trajectories) for group in GROUPS), np.nan)
    for batch, (advantages, _) in zip(batches, objective.token_advantages(GROUPS, batches, known), strict=True):
        found[batch.trajectory_ids[batch.loss_mask]] = advantages[batch.loss_mask]
        assert (advantages[~batch.loss_mask] == 0).all()
    return found


def by_hand(masks) -> np.ndarray:
    """Rewards, repeated for each token that is trained: mean and deviation over these."""
    rows = [row for group in GROUPS for row in group.trajectories]
    oldest = MASKS[masks].get('oldest_version', 0)
    is_cut = lambda row: 'masks_truncated' in MASKS[masks] and row.finish_reason == 'length'
    count = [
        0 if is_cut(row) else sum(len(s.tokens) for s in row.segments if s.policy_version >= max(oldest, 0))
        for row in rows
    ]
    rewards = np.array([row.reward for row in rows])
    tokens = np.repeat(rewards, count)
    return np.where(count, (rewards - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8), np.nan)


@pytest.mark.parametrize('packing', PACKINGS)
@pytest.mark.parametrize('masks', MASKS)
def test_rewards_are_whitened_over_the_tokens_that_are_trained(masks, packing):
    expected = by_hand(masks)
    assert np.isnan(expected).any() == (masks != 'all')
    for kl in (0.0, 1e-12):
        np.testing.assert_allclose(whitened(masks, packing, kl=kl), expected, rtol=1e-6, atol=1e-6)
    # a critic that gives every state 0, without discount
    found = whitened(masks, packing, advantage='gae', discount=1.0, gae_lambda=1.0)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('advantage', ['group', 'group_mean', 'rloo', 'length_baseline'])
def test_a_divergence_of_nothing_changes_no_whitened_advantage(advantage):
    plain = whitened('both', 'shared prompts', advantage=advantage)
    for packing in PACKINGS:
        found = whitened('both', packing, kl=1e-12, advantage=advantage)
        np.testing.assert_allclose(found, plain, rtol=1e-6, atol=1e-6)


def test_without_masks_every_bit_is_that_of_the_weighted_mean_over_answers():
    rewards = np.array([row.reward for group in GROUPS for row in group.trajectories]).astype(np.float32).astype(float)
    rows = [row for group in GROUPS for row in group.trajectories]
    tokens = np.array(
        [sum(len(s.tokens) for s in row.segments if s.policy_version != NOT_GENERATED) for row in rows], float
    )
    mean = (tokens * rewards).sum() / tokens.sum()
    variance = (tokens * (rewards - mean) ** 2).sum() / (tokens.sum() - 1)
    expected = ((rewards - mean) / np.sqrt(variance + 1e-8)).astype(np.float32)
    np.testing.assert_array_equal(whitened('all', 'shared prompts').astype(np.float32), expected)


_NOTHING = {'kl_coefficient': 1e-12, 'kl_in': 'reward'}
_MESH = {'mesh': (2, 2), 'rows_per_microbatch': 4, 'packing': 'ordinary'}


@functools.cache
def loss_of_update(truncated_answers: str, divergence: bool = False, on_mesh: bool = False) -> float:
    choices = {'advantage': 'reward', 'whiten': 'batch', 'truncated_answers': truncated_answers}
    choices |= _NOTHING if divergence else {}
    learner = learner_of(choices=choices, max_token_age=1, over_age='mask', **(_MESH if on_mesh else {}))
    return learner.update(GROUPS, 2)['loss/value']


@pytest.mark.parametrize(
    'form',
    [
        ('masked', True),
        *(pytest.param(form, marks=pytest.mark.slow) for form in (('masked', False, True), ('masked', True, True))),
        *(pytest.param(form, marks=pytest.mark.slow) for form in (('trained', True), ('trained', True, True))),
    ],
    ids=str,
)
def test_a_loss_is_that_without_a_divergence_of_nothing_on_one_device(form):
    np.testing.assert_allclose(loss_of_update(*form), loss_of_update(form[0]), rtol=1e-6)
