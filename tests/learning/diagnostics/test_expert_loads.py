"""Loads of experts that an update reports: by layer, along the routes of learner and engines, and by age."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from areal_jax.columns import ROUTED_EXPERTS
from areal_jax.learning.diagnostics.expert_loads import load_metrics
from areal_jax.learning.passes import StepResult, StepRoutes
from areal_jax.models.decoder import Decoder
from areal_jax.sharding.rules import make_mesh
from tests.learning import examples, test_router_state, test_routes
from tests.learning.diagnostics.test_measurement import batch

SOFTMAX = test_routes.CONFIG  # layer 1 has 8 experts, 2 a token; layer 0 is dense


def results(*loads):
    routes = [StepRoutes(np.zeros((1, 1, 1), np.int32), np.array(of, np.float32)) for of in loads]
    return [StepResult({}, [], np.zeros(0), routes=of) for of in routes]


def test_loads_are_summed_over_the_steps():
    found = load_metrics(SOFTMAX, [], results([[1, 2, 3, 0, 0, 0, 0, 0]], [[1, 0, 0, 0, 0, 0, 0, 4]]), 3)
    assert found == {'experts/loads/1': [2, 2, 3, 0, 0, 0, 0, 4]}
    assert load_metrics(SOFTMAX, [], [], 3) == {}


def test_ages_are_those_of_the_weights_that_chose_the_experts():
    packed = batch([4, 5, 6, 7, 8, 9], [0] * 6, versions=[3, 3, 2, 0, -1, 3])
    packed.loss_mask[...] = np.array([1, 1, 1, 1, 1, 0])
    packed.policy_versions[0, 0, 4] = 1  # age 2, without a record
    packed.sources[...] = np.array([5, 4, 3, 2, 1, 0])  # entry t of an input belongs to the token behind t
    routes = np.array([[7, 6], [255, 255], [4, 5], [0, 3], [0, 2], [0, 1]], np.uint8)
    packed = dataclasses.replace(packed, inputs={ROUTED_EXPERTS.name: routes[None, None, :, None, :]})
    found = load_metrics(SOFTMAX, [packed, packed], results([[0] * 8]), 3)
    del found['experts/loads/1']
    assert found == {
        'experts/loads_of_age/0/tokens': 4,
        'experts/loads_of_age/0/1': [4, 2, 2, 0, 0, 0, 0, 0],  # [0, 1] and [0, 2] of version 3, in two batches
        'experts/loads_of_age/1/tokens': 2,
        'experts/loads_of_age/1/1': [2, 0, 0, 2, 0, 0, 0, 0],
        'experts/loads_of_age/3-4/tokens': 2,
        'experts/loads_of_age/3-4/1': [0, 0, 0, 0, 2, 2, 0, 0],
    }


def test_a_softmax_router_without_preference_sends_everything_to_the_first_experts():
    blank = jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.zeros_like(leaf) if 'router' in jax.tree_util.keystr(path) else leaf, test_routes.PARAMS
    )
    decoder = Decoder(SOFTMAX)
    learner = examples.make_learner(
        make_mesh(), decoder=decoder, params=blank, row_tokens=48, rows_per_microbatch=1, packing='ordinary'
    )
    metrics = learner.update(test_routes.GROUPS, 2)
    read = [len(t.tokens) - 1 for group in test_routes.GROUPS for t in group.trajectories]  # the last is not read
    assert metrics['experts/loads/1'] == [sum(read), sum(read), 0, 0, 0, 0, 0, 0]
    assert (metrics['experts/load'], metrics['experts/dead']) == (4, 6)
    assert not [name for name in metrics if name.startswith('experts/loads_of_age/')]


def test_a_sigmoid_router_whose_correction_prefers_one_expert_sends_everything_there():
    config = test_router_state.CONFIG
    chosen, k = config.experts.count - 1, config.experts.per_token

    def correct(path, leaf):
        bias = np.zeros_like(leaf)
        bias[..., chosen] = 100.0
        return bias if 'correction' in jax.tree_util.keystr(path) else leaf

    learner = test_router_state.make_learner()
    saved = learner.save()
    learner.restore({**saved, 'params': jax.tree_util.tree_map_with_path(correct, saved['params'])})
    metrics = learner.update(test_router_state.GROUPS, 2)
    loads = {name: of for name, of in metrics.items() if name.startswith('experts/loads/')}
    assert list(loads) == ['experts/loads/1', 'experts/loads/2']  # the first layer is dense
    for of in loads.values():
        assert of[chosen] == max(of) == sum(of) / k  # every token


def test_loads_by_age_follow_the_record_whatever_the_learner_follows():
    found = [test_routes.make_learner(routes=routes).update(test_routes.FOREIGN, 2) for routes in ('replay', 'live')]
    of_age = [{name: of for name, of in m.items() if name.startswith('experts/loads_of_age/')} for m in found]
    assert of_age[0] == of_age[1]
    expected = np.zeros(8, int)
    for one in [t for group in test_routes.FOREIGN for t in group.trajectories]:
        own = test_routes.draw_routes(one)[one.loss_mask & (one.policy_versions == 2)]
        expected += np.bincount(own.ravel(), minlength=8)
    np.testing.assert_array_equal(of_age[0]['experts/loads_of_age/0/1'], expected)
    assert found[0]['experts/loads/1'] != found[1]['experts/loads/1']


@pytest.mark.parametrize('name', ['experts/loads', 'experts/loads_of_age'])
def test_a_dense_model_reports_none(name):
    metrics = examples.make_learner().update(examples.random_groups(2, 2), 2)
    assert not [one for one in metrics if one.startswith(name)]
