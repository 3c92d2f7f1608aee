from __future__ import annotations

import copy
import json
import pickle

import pytest

from areal_jax.telemetry import names


def test_a_metric_is_its_name():
    assert names.REWARD_MEAN == 'reward/mean'
    assert json.loads(json.dumps({names.REWARD_MEAN: 1.0})) == {'reward/mean': 1.0}
    assert {'reward/mean': 2.0}[names.REWARD_MEAN] == 2.0


@pytest.mark.parametrize(
    'again', [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy], ids=['pickle', 'copy', 'deepcopy']
)
def test_a_metric_is_pickled_and_copied_with_what_it_says(again):
    found = again(names.REWARD_MEAN)
    assert type(found) is names.Metric
    assert (found, found.unit, found.description) == ('reward/mean', 'reward', names.REWARD_MEAN.description)


def test_every_metric_has_a_unit_and_a_description():
    assert len(names.METRICS) > 20
    for metric in names.METRICS.values():
        assert metric.unit, metric
        assert len(metric.description) > 10, metric


def test_what_is_declared():
    assert names.is_declared('groups/dropped/over_age')  # any reason
    assert names.is_declared('loss/clip_fraction')
    assert not names.is_declared('groups/dropped/')  # a reason is missing
    assert not names.is_declared('reward/meen')
