"""Engines of unequal size in one process of eight virtual devices, under the virtual clock."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.config import validate
from areal_jax.config.fields import ConfigError
from tests.app.small import SmallRun, resume_killed, small_config

UNEQUAL = '1 x tensor=2 + 1 x tensor=1'
FIELDS = {'model__n_layers': 1, 'model__n_heads': 4, 'model__n_kv_heads': 2, 'checkpoint__every': 2}


def _answers(run):
    """(tokens, versions, log-probs) of every trained answer, by draw and sample."""
    return {
        (group.draw, one.sample): (one.tokens.tolist(), one.policy_versions.tolist(), one.behavior_logprobs)
        for groups in run.batches
        for group in groups
        for one in group.trajectories
    }


def _events(run):
    """Without what says on what an engine decodes, and digests of weights, which differ by rounding."""
    left_out = ('devices', 'hardware', 'manifest')
    return [{name: value for name, value in event.items() if name not in left_out} for event in run.events]


def test_a_run_with_an_engine_of_two_devices_and_one_of_one_is_that_with_equal_engines(tmp_path):
    """The virtual clock prices engines of any size alike, so routes are the same; sums over two devices are rounded
    otherwise, and noise is keyed by request and position, so tokens are the same too."""
    whole = SmallRun(tmp_path / 'whole', cluster__engines=UNEQUAL, **FIELDS).train()
    assert whole.report['devices']['engines'] == {'engine/0': [1, 2], 'engine/1': [3]}
    assert {event['engine'] for event in whole.events if event['kind'] == 'decode'} == {'engine/0', 'engine/1'}
    equal = SmallRun(tmp_path / 'equal', cluster__engines='2 x tensor=1', **FIELDS).train()
    assert _events(equal) == _events(whole)
    ours, theirs = _answers(whole), _answers(equal)
    assert ours.keys() == theirs.keys()
    for key, (tokens, versions, logprobs) in ours.items():
        assert (tokens, versions) == theirs[key][:2]
        np.testing.assert_allclose(logprobs, theirs[key][2], atol=1e-4)


@pytest.mark.slow
def test_a_run_with_unequal_engines_that_was_killed_goes_on_bit_for_bit(tmp_path):
    whole, resumed = resume_killed(tmp_path, cluster__engines=UNEQUAL, **FIELDS)
    assert resumed.report['devices'] == whole.report['devices']


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'cluster__reallocate': 'auto'}, "devices move between engines of one size; use cluster.reallocate='off'"),
        ({'simulation__prices': 'table.json'}, "is that of all engines; use simulation.prices='roofline'"),
    ],
)
def test_what_takes_equal_engines_alone_refuses_others(fields, message):
    with pytest.raises(ConfigError, match=message):
        validate(small_config(cluster__engines=UNEQUAL, **fields))


def test_devices_that_do_not_divide_the_heads_are_refused_with_both_numbers(tmp_path):
    message = 'tensor=2 of cluster.engines does not divide the 2 query heads and 1 key heads of the model'
    with pytest.raises(ConfigError, match=message):
        SmallRun(tmp_path, cluster__engines='2 x tensor=2', model__n_heads=2, model__n_kv_heads=1)
