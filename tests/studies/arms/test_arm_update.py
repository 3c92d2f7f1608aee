"""What the program computes with arrays where a single run decides on the host."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.advantages import CONTRASTS, ESTIMATORS, group_advantages
from areal_jax.learning.packing import split_minibatches
from areal_jax.studies.arms.arm_update import advantages, split_groups
from areal_jax.types import Prompt, Segment, Trajectory, TrajectoryGroup


def group_of(rewards):
    prompt = Prompt(0, np.array([1], np.int32), '', {})
    segment = Segment(np.array([1], np.int32), np.zeros(1, np.float32), 0)
    answers = [Trajectory(prompt, i, (segment,), float(r), 'length', '', 0.0, 0.0) for i, r in enumerate(rewards)]
    return TrajectoryGroup(0, tuple(answers))


@pytest.mark.parametrize('estimator', ESTIMATORS)
def test_advantages_are_those_of_a_single_run(estimator):
    right = np.random.default_rng(0).integers(0, 11, (6, 10))
    right[2] = 7  # all equal
    setting = types.SimpleNamespace(answer_tokens=10, choices=PolicyChoices(advantage=estimator))
    constants = types.SimpleNamespace(advantage=list(ESTIMATORS).index(estimator))
    found = advantages(setting, constants, jnp.asarray(right))
    expected = np.stack([group_advantages(group_of(row / 11), setting.choices) for row in right])
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=3e-7 if estimator == 'optimal_value' else 0)
    assert (np.asarray(found[2]) == 0).all() or estimator not in CONTRASTS


@pytest.mark.parametrize('kept', ['1111111', '1011010', '0000100', '0000000'])
@pytest.mark.parametrize('n_minibatches', [1, 3, 4])
def test_minibatches_have_the_groups_of_a_single_run(kept, n_minibatches):
    kept = np.array([letter == '1' for letter in kept])
    setting = types.SimpleNamespace(
        groups=len(kept), minibatches=n_minibatches, minibatch_groups=-(-len(kept) // n_minibatches)
    )
    found = split_groups(setting, jnp.asarray(kept))
    members = [list(map(int, row[filled])) for row, filled in zip(found.groups, np.asarray(found.filled), strict=True)]
    expected = split_minibatches([40] * int(kept.sum()), n_minibatches)  # indices among the kept ones
    names = np.flatnonzero(kept)
    assert [m for m in members if m] == [[int(names[i]) for i in minibatch] for minibatch in expected]
