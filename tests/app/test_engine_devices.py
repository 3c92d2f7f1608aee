"""Runs whose engines have several devices each."""

import pytest

from areal_jax.config.fields import ConfigError
from tests.app.small import SmallRun, equal

PAIRS = {'cluster__engines': '2 x tensor=2', 'run__steps': 2}


@pytest.mark.slow
def test_two_engines_over_two_devices_each_train(tmp_path):
    run = SmallRun(tmp_path, **PAIRS, model__n_heads=4, model__n_kv_heads=2).train()
    assert run.report['devices'] == {
        'learner': [0],
        'engines': {'engine/0': [1, 2], 'engine/1': [3, 4]},
    }
    assert {event['engine'] for event in run.events if event['kind'] == 'decode'} == {'engine/0', 'engine/1'}
    assert len(run.batches) == 2
    assert not equal(run.weights[0], run.final)


def test_devices_that_do_not_divide_the_heads_are_refused_with_both_numbers(tmp_path):
    message = 'tensor=2 of cluster.engines does not divide the 2 query heads and 1 key heads of the model'
    with pytest.raises(ConfigError, match=message):
        SmallRun(tmp_path, **PAIRS, model__n_heads=2, model__n_kv_heads=1)
