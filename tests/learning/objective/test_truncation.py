"""Tokens drawn from a cut softmax: refused, or trained with the log-probs of the full one and measured."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from areal_jax.config.ranges import ConfigError
from areal_jax.learning.objective.truncation import kept_mass_metrics
from areal_jax.types import TrajectoryGroup
from tests.learning.examples import group, segment, trajectory
from tests.learning.test_learner import make_learner, make_weights


def _cut(tokens, version, mass):
    """A segment whose tokens were drawn from the part of the softmax with these masses."""
    whole = segment(tokens, version)
    cut = whole.behavior_logprobs - np.log(mass).astype(np.float32)
    return dataclasses.replace(whole, columns={'sampling_logprobs': cut})


_MIXED = TrajectoryGroup(
    0,
    (
        trajectory([1], [_cut([2, 3], 4, [0.9, 0.8]), segment([5], -1)], reward=0.0),
        trajectory([1], [_cut([4], 2, [0.3]), _cut([4], 5, [0.7])], reward=1.0, sample=1),
    ),
)


def test_kept_mass_by_hand():
    metrics = kept_mass_metrics([_MIXED], None)
    np.testing.assert_allclose(metrics['sampling/kept_mass_mean'], (0.9 + 0.8 + 0.3 + 0.7) / 4, rtol=1e-6)
    np.testing.assert_allclose(metrics['sampling/kept_mass_min'], 0.3, rtol=1e-6)
    young = kept_mass_metrics([_MIXED], 3)  # the token with .3 is of version 2: not trained
    np.testing.assert_allclose(young['sampling/kept_mass_mean'], (0.9 + 0.8 + 0.7) / 3, rtol=1e-6)
    assert kept_mass_metrics([group([1], [[2], [3]])], None) == {}
    assert kept_mass_metrics([], None) == {}
    assert kept_mass_metrics([_MIXED], 9) == {}  # nothing is trained


def test_a_cut_is_refused_by_default_and_changes_nothing():
    learner = make_learner()
    before = make_weights(learner)
    expected = r"loss\.truncated_sampling='refuse', but engine/0 drew draw 0, sample 0 .* rollout\.top_k=0"
    with pytest.raises(ConfigError, match=expected):
        learner.update([_MIXED], version=5)
    np.testing.assert_array_equal(make_weights(learner)['embedding'], before['embedding'])


def test_the_full_softmax_is_what_is_trained_and_compared():
    # the same behavior log-probs with and without a cut beside them: the same update, bit for bit
    whole = dataclasses.replace(
        _MIXED,
        trajectories=tuple(
            dataclasses.replace(t, segments=tuple(dataclasses.replace(s, columns={}) for s in t.segments))
            for t in _MIXED.trajectories
        ),
    )
    one, other = make_learner(truncated_sampling='full_softmax'), make_learner()
    metrics, expected = one.update([_MIXED], version=5), other.update([whole], version=5)
    np.testing.assert_allclose(metrics['sampling/kept_mass_mean'], 0.675, rtol=1e-6)
    kept = {'sampling/kept_mass_mean', 'sampling/kept_mass_min'}
    assert {name: value for name, value in metrics.items() if name not in kept} == expected
    np.testing.assert_array_equal(make_weights(one)['embedding'], make_weights(other)['embedding'])
