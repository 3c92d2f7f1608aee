"""A critic among the trained weights: what it changes of the policy, and what of it leaves the learner."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.loss import CriticSection
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.objective.objective import END_VALUES, VALUES
from areal_jax.learning.objective.objectives import PolicyObjective
from areal_jax.learning.optimizer import add_critic_optimizer
from areal_jax.learning.packing import pack
from areal_jax.learning.weights import (
    CRITIC,
    VALUE_HEAD,
    CriticError,
    make_value_head,
    policy_leaves,
    scale_gradient,
    score_states,
)
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import Lora
from areal_jax.sharding.rules import make_mesh
from areal_jax.types import NOT_GENERATED, PackedBatch, TrajectoryGroup
from tests.learning import examples
from tests.learning.examples import make_optimizer, random_groups, segment, tiny_decoder, trajectory

_DECODER = tiny_decoder(n_layers=1)
_PARAMS = _DECODER.init(seed=2, scale=2.0)
_GROUPS = random_groups(5, 3)
_ROWS = {'row_tokens': 40, 'row_loss_tokens': 24, 'rows_per_microbatch': 2}
_HEAD = {'weight': np.linspace(-0.3, 0.4, 16, dtype=np.float32), 'bias': np.float32(0.1) * np.ones(())}


def make_learner(
    trunk_gradient=1.0,
    *,
    own=None,
    head=_HEAD,
    mesh=None,
    decoder=_DECODER,
    rate=0.1,
    critic_rate=0.1,
    name='sgd',
    **changes,
) -> SpmdLearner:
    """`own`: weights of a model of its own."""
    optimizer = add_critic_optimizer(make_optimizer(name, clip_norm=0), critic_rate)
    critic = CriticSection(model='trunk' if own is None else 'copy', trunk_gradient=trunk_gradient)
    return examples.make_learner(
        make_mesh(**(mesh or {})), decoder=decoder, params=decoder.complete(_PARAMS, 0), optimizer=optimizer,
        learning_rate=rate, parts={'critic': {**(own or {}), VALUE_HEAD: head}},
        advantage='gae', critic=critic, **(_ROWS | changes),
    )  # fmt: skip


def trained(learner: SpmdLearner, updates: int = 1) -> dict[str, np.ndarray]:
    """Leaves by path after updates on the same groups, of which the policy is not published."""
    for version in range(updates):
        learner.update(_GROUPS, 2 + version)
    leaves = jax.tree_util.tree_leaves_with_path(learner.state.params)
    return {jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(leaf) for path, leaf in leaves}


def test_a_head_is_an_affine_function_and_its_gradient_is_scaled_on_the_way_back():
    states = jnp.array([[1.0, 2.0], [3.0, -1.0]])
    head = {'weight': jnp.array([0.5, 0.25]), 'bias': jnp.array(1.0)}
    np.testing.assert_allclose(score_states(head, states), [2.0, 2.25])
    for factor in (0.0, 0.25, 1.0):
        value, slope = jax.value_and_grad(lambda x, c=factor: scale_gradient(x, c) ** 2)(3.0)
        assert (value, slope) == (9.0, 6.0 * factor)


def test_the_trunk_gets_the_chosen_share_of_the_gradient_of_the_values():
    before = jax.tree.map(np.asarray, _PARAMS)['layers']['0']['mlp']['up']['weight']
    path = 'layers/0/mlp/up/weight'
    none, half, whole = (trained(make_learner(share))[path] - before for share in (0.0, 0.5, 1.0))
    assert np.abs(whole - none).max() > 1e-4
    np.testing.assert_allclose(half - none, (whole - none) / 2, atol=2e-7)


def test_a_model_of_its_own_leaves_the_policy_what_a_head_without_gradient_makes_of_it():
    """Both begin with the same values, so that the first update has the same advantages."""
    trunk, own = (trained(make_learner(0.0, own=weights)) for weights in (None, _PARAMS))
    for path, leaf in trunk.items():
        np.testing.assert_allclose(leaf, own[path], atol=1e-6, err_msg=path)
    moved = own[f'{CRITIC}/layers/0/mlp/up/weight'] - np.asarray(_PARAMS['layers']['0']['mlp']['up']['weight'])
    assert np.abs(moved).max() > 1e-5


def test_the_critic_steps_at_its_own_rate():
    slow, fast = (trained(make_learner(0.0, critic_rate=rate))['critic/value_head/weight'] for rate in (0.01, 0.02))
    np.testing.assert_allclose(fast - _HEAD['weight'], 2 * (slow - _HEAD['weight']), atol=1e-6)


def test_values_come_to_predict_the_returns():
    learner = make_learner(own=_PARAMS, head=make_value_head(16), rate=1e-9, critic_rate=0.02, name='adamw')
    explained = [learner.update(_GROUPS, 2)['critic/explained_variance'] for _ in range(30)]
    assert abs(explained[0]) < 1e-5
    assert explained[-1] > 0.7


@pytest.mark.parametrize('own', [None, _PARAMS], ids=['trunk', 'own'])
def test_versions_have_no_critic_and_checkpoints_restore_it_to_the_bit(own):
    learner = make_learner(0.5, own=own, name='adamw', n_minibatches=2)
    learner.update(_GROUPS, 2)
    assert sorted(learner.publish(3)) == sorted(policy_leaves(_PARAMS))
    saved = learner.save()
    assert set(saved['params']) == {*_PARAMS, CRITIC}
    again = make_learner(0.5, own=own, head=make_value_head(16), name='adamw', n_minibatches=2)
    again.restore(saved)
    both = [trained(one) for one in (learner, again)]
    assert both[0].keys() == both[1].keys()
    for path, leaf in both[0].items():
        np.testing.assert_array_equal(leaf, both[1][path], err_msg=path)


def test_stacked_layers_have_the_same_values_and_checkpoints():
    stacked = Decoder(_DECODER.config, layers='stacked')
    listed, other = (make_learner(0.5, own=_PARAMS, decoder=decoder) for decoder in (_DECODER, stacked))
    for learner in (listed, other):
        learner.update(_GROUPS, 2)
    first, second = (jax.tree_util.tree_leaves_with_path(one.save()['params']) for one in (listed, other))
    for (path, leaf), (_, again) in zip(first, second, strict=True):
        np.testing.assert_allclose(leaf, again, atol=1e-6, err_msg=str(path))


def test_a_model_of_its_own_is_cut_over_the_mesh_like_the_policy():
    mesh = {'fsdp': 4, 'context': 2}
    one, many = make_learner(own=_PARAMS), make_learner(own=_PARAMS, mesh=mesh, strategy='fsdp', rows_per_microbatch=4)
    leaf, policy = (
        tree['layers']['0']['mlp']['up']['weight'] for tree in (many.state.params[CRITIC], many.state.params)
    )
    assert leaf.sharding == policy.sharding
    assert not leaf.sharding.is_fully_replicated
    found, expected = trained(many), trained(one)
    for path, values in expected.items():
        np.testing.assert_allclose(found[path], values, atol=2e-6, err_msg=path)


def test_a_checkpoint_without_a_critic_is_refused_in_one_sentence():
    learner = make_learner()
    saved = learner.save()
    with pytest.raises(CriticError, match=r'holds no critic.*loss\.objective'):
        learner.restore(saved | {'params': policy_leaves(saved['params'])})


def test_adapters_narrow_dtypes_and_a_reference_go_with_it():
    decoder = Decoder(_DECODER.config, lora=Lora(2, 4.0, ('query', 'value')))
    learner = make_learner(0.5, own=_PARAMS, decoder=decoder, dtype='bfloat16', kl_coefficient=0.1, kl_in='reward')
    before = learner.save()['params']
    metrics = learner.update(_GROUPS, 2)
    after = learner.save()['params']
    np.testing.assert_array_equal(before['embedding'], after['embedding'])
    assert np.abs(after[CRITIC]['embedding'] - before[CRITIC]['embedding']).max() > 0
    assert {'critic/loss', 'update/critic_grad_norm', 'loss/clip_fraction'} <= metrics.keys()


def test_settings_and_objective_agree_on_a_critic():
    with pytest.raises(ValueError, match='trains_values'):
        dataclasses.replace(make_learner()._settings, critic=None)


# Answers that ended at their limit.


def halves() -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
    """Rollouts that went on, and the same ones cut at their limit, some before and some behind tokens of a tool."""
    whole, cut = [], []
    for draw, behind in enumerate(((), (NOT_GENERATED,))):
        rows = [
            trajectory(
                [1, 2 + draw],
                [segment([3, 4 + sample], 1), *(segment([9], version) for version in behind), segment([5, 6], 2)],
                sample=sample, draw=draw,
            )
            for sample in range(2)
        ]  # fmt: skip
        whole.append(TrajectoryGroup(draw, tuple(rows)))
        ends = lambda row: dataclasses.replace(row, segments=row.segments[:-1], finish_reason='length')
        cut.append(TrajectoryGroup(draw, tuple(map(ends, rows))))
    return whole, cut


def values_of(learner: SpmdLearner, groups: list[TrajectoryGroup]) -> tuple[PackedBatch, np.ndarray]:
    zeros = [np.zeros(len(group.trajectories)) for group in groups]
    (batch,), _ = pack(groups, zeros, mode='ordinary', fill='first_fit', n_minibatches=1, **_ROWS)
    return batch, learner.parts[0].passes.values(learner.state, batch, 2)[1]


def advantages_of(learner: SpmdLearner, groups: list[TrajectoryGroup]) -> list[np.ndarray]:
    """Per row those of its tokens, with lambda = 0 and no discount."""
    batch, values = values_of(learner, groups)
    ends = learner.parts[0].passes.end_values(learner.state, groups, 2)
    known = {VALUES: values, END_VALUES: ends[np.maximum(batch.trajectory_ids, 0)]}
    objective = PolicyObjective(PolicyChoices(advantage='gae', gae_lambda=0.0, truncated_value='last'))
    ((found, _),) = objective.token_advantages(groups, [batch], [known])
    return [found[batch.trajectory_ids == row] for row in range(batch.trajectory_ids.max() + 1)]


@pytest.mark.parametrize(
    'form',
    [{}, pytest.param({'mesh': {'fsdp': 2}, 'packing': 'ordinary', 'accumulate': 'scan'}, marks=pytest.mark.slow)],
)
def test_behind_a_limit_is_the_value_that_the_rollout_has_where_it_goes_on(form):
    learner = make_learner(truncated_value='last', **form)
    compiled = learner.warm_up()
    whole, cut = halves()
    batch, values = values_of(learner, whole)
    next_values = [
        values[batch.trajectory_ids == row][2] for row in range(4)
    ]  # before the first token behind the limit
    assert np.unique(next_values).size == 4
    behind = lambda groups: learner.parts[0].passes.end_values(learner.state, groups, 2)
    np.testing.assert_allclose(behind(cut), next_values, atol=1e-6)
    np.testing.assert_array_equal(behind(whole), 0)
    # an advantage with lambda = 0 reads the next value alone, so that tokens do not feel that the rollout was cut
    for short, long in zip(advantages_of(learner, cut), advantages_of(learner, whole), strict=True):
        np.testing.assert_allclose(short, long[:2], atol=1e-6)
        assert abs(short[-1]) > 1e-3  # the value before the last token would make it 0
    learner.update([*whole, *cut], 2)
    assert len(learner.programs.compiled) == compiled
