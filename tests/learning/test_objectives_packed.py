"""Whatever rows, micro-batches and devices an objective meets: the same loss and the same gradient."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.loss import CriticSection
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.objective import (
    CLAMPED_ENTROPY,
    FORWARD_KL,
    REVERSE_KL,
    STATISTICS,
    LossTokens,
    Objective,
)
from areal_jax.learning.objective.objectives import PolicyObjective
from areal_jax.learning.optimizer import add_critic_optimizer
from areal_jax.learning.weights import CRITIC, VALUE_HEAD
from areal_jax.sharding.rules import make_mesh
from areal_jax.types import TrajectoryGroup
from tests.learning.examples import make_learner, make_optimizer, random_groups, tiny_decoder

_DECODER = tiny_decoder(n_layers=1)
_PARAMS = _DECODER.init(seed=2, scale=2.0)
_HEAD = {'weight': np.linspace(-0.3, 0.4, 16, dtype=np.float32), 'bias': np.array(0.1, np.float32)}
_SGD = make_optimizer('sgd', clip_norm=0)
_RATE = 10.0  # the step of a weight, its gradient, is then far above the rounding of the weight


def _groups() -> list[TrajectoryGroup]:
    """Ragged, one of them partial; tokens of versions 0 to 2, of which 0 is too old to train."""
    groups = random_groups(5, 5)
    return [*groups[:-1], TrajectoryGroup(groups[-1].draw, groups[-1].trajectories[:2])]


GROUPS = _groups()
# the ratio to the behavior policy is not 1 in the first step
_BYPASS = {'ratio_denominator': 'behavior', 'correction': 'none', 'clip_epsilon_high': 0.4}
_DELIGHT = {'ratio': 'none', 'correction': 'none', 'surrogate': 'delight'}
OBJECTIVES = {
    'tokens': _BYPASS | {'ratio': 'token', 'aggregation': 'token_mean'},
    'geometric': _BYPASS | {'ratio': 'geometric', 'aggregation': 'sequence_mean'},
    'product': _BYPASS | {'ratio': 'sequence', 'aggregation': 'sequence_sum', 'surrogate': 'sapo'},
    'geometric token': _BYPASS | {'ratio': 'geometric_token', 'aggregation': 'constant', 'length_constant': 5},
    'veto': {'aggregation': 'prompt_mean', 'correction_level': 'sequence', 'veto': 0.5, 'behavior_weight_cap': 3.0},
    'second moment': _BYPASS
    | {'surrogate': 'is_pg', 'gate': 'second_moment', 'gate_threshold': 0.2, 'aggregation': 'token_mean'},
    'kondo': _DELIGHT | {'delight_gate': 'kondo', 'delight_share': 0.3, 'aggregation': 'token_sum'},
    'critic': {'advantage': 'gae', 'discount': 0.95, 'gae_lambda': 0.9, 'value_clip': 0.2, 'aggregation': 'token_mean'},
    'bernoulli': _DELIGHT | {'delight_gate': 'bernoulli', 'seed': 3},
}
_TEACHER = tiny_decoder(n_layers=2)
_TEACHER_PARAMS = _TEACHER.init(seed=4, scale=2.0)
ALONE = {
    'packing': 'ordinary',
    'row_tokens': 16,
    'row_loss_tokens': 12,
}  # a row is an answer or two, a micro-batch a row
_ROWS = {'row_tokens': 40, 'row_loss_tokens': 24}
FORMS = {
    'context=2 scan': _ROWS | {'rows_per_microbatch': 4, 'accumulate': 'scan', 'mesh': {'fsdp': 4, 'context': 2}},
    'shared prompts': _ROWS | {'rows_per_microbatch': 2},
    'scan': _ROWS | {'rows_per_microbatch': 3, 'accumulate': 'scan', 'max_microbatches': 4},
    'padded': _ROWS | {'packing': 'ordinary', 'fill': 'padded', 'rows_per_microbatch': 2},
    'context=2': _ROWS | {'rows_per_microbatch': 2, 'mesh': {'context': 2}},
}
_MESH = 'context=2 scan'
_STATISTICS = 'over the vocabulary'
# The form in which an objective is quick. Means and choices over all of a batch meet a mesh, which takes longest.
QUICK = {
    'tokens': 'padded', 'geometric': 'scan', 'product': 'shared prompts', 'second moment': _MESH, 'kondo': 'scan',
    'critic': _MESH, 'bernoulli': 'shared prompts', _STATISTICS: _MESH,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AllStatistics(Objective):
    """Of whole distributions, those of a teacher of another shape too."""

    entropy_clamp: float = 0.3
    reads: frozenset[str] = STATISTICS

    def loss(self, tokens: LossTokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        reverse, forward, entropy = (tokens.statistic(name) for name in (REVERSE_KL, FORWARD_KL, CLAMPED_ENTROPY))
        return tokens.mean(reverse + 0.3 * forward - 0.5 * entropy), {'kept_sum': tokens.total(entropy)}

    def metrics(self, merged: dict[str, float]) -> dict[str, float]:
        return {'loss/kept': merged['kept_sum'], 'loss/all': merged['entropy_sum']}


@dataclasses.dataclass(frozen=True)
class MicrobatchMean(Objective):
    """Divides by the tokens of its micro-batch, which no objective may."""

    def loss(self, tokens: LossTokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        count = tokens.count()
        loss = -tokens.total(tokens.policy_logprobs * tokens.advantages) / jnp.maximum(count, 1.0)
        return loss, {'token_count': count}


def updated(objective: Objective, form: dict[str, object]) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, gradient of each leaf) of one step."""
    settings = {'rows_per_microbatch': 1, 'max_token_age': 1, 'over_age': 'mask'} | form
    mesh, given, optimizer = settings.pop('mesh', {}), {}, _SGD
    if objective.trains_values:
        settings['critic'] = CriticSection(trunk_gradient=0.5)
        given = {'critic': {VALUE_HEAD: _HEAD}}
        optimizer = add_critic_optimizer(_SGD, _RATE)
    learner = make_learner(
        make_mesh(**mesh), params=_PARAMS, optimizer=optimizer, learning_rate=_RATE, objective=objective,
        parts={'teacher': (_TEACHER, _TEACHER_PARAMS), **given}, **settings,
    )  # fmt: skip
    loss = learner.update(GROUPS, version=2)['loss/value']
    before = _PARAMS | ({CRITIC: given['critic']} if given else {})
    steps = jax.tree.map(lambda after, before: (before - after) / _RATE, learner.save()['params'], before)
    leaves = jax.tree_util.tree_leaves_with_path(steps)
    return loss, {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@functools.cache
def alone(name: str) -> tuple[float, dict[str, np.ndarray]]:
    return updated(objective_of(name), ALONE)


def objective_of(name: str) -> Objective:
    return AllStatistics() if name == _STATISTICS else PolicyObjective(PolicyChoices(**OBJECTIVES[name]))


def assert_same(found: tuple, expected: tuple) -> None:
    (loss, gradient), (expected_loss, expected_gradient) = found, expected
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert gradient.keys() == expected_gradient.keys()
    for path, leaf in expected_gradient.items():
        assert np.linalg.norm(leaf) > 0, path
        assert np.linalg.norm(gradient[path] - leaf) <= 1e-4 * np.linalg.norm(leaf), path


@pytest.mark.parametrize(
    ('form', 'name'),
    [
        pytest.param(form, name, marks=[] if form == QUICK.get(name) else [pytest.mark.slow])
        for form in FORMS
        for name in (*OBJECTIVES, _STATISTICS)
    ],
)
def test_an_objective_does_not_depend_on_its_rows(name, form):
    assert_same(updated(objective_of(name), FORMS[form]), alone(name))


@pytest.mark.parametrize('form', ['shared prompts', pytest.param(_MESH, marks=pytest.mark.slow)])
def test_a_mean_over_a_microbatch_does(form):
    expected, found = updated(MicrobatchMean(), ALONE), updated(MicrobatchMean(), FORMS[form])
    with pytest.raises(AssertionError):
        assert_same(found, expected)
    distance = max(np.linalg.norm(found[1][path] - leaf) / np.linalg.norm(leaf) for path, leaf in expected[1].items())
    assert distance > 0.05


def test_the_objectives_have_each_aggregation_and_each_ratio():
    combinations = [PolicyChoices(**choices) for choices in OBJECTIVES.values()]
    assert {choices.ratio for choices in combinations} == {'none', 'token', 'sequence', 'geometric', 'geometric_token'}
    assert len({choices.aggregation for choices in combinations}) == 6
