"""Endpoints of an arm: areas by hand, over the range that every arm covers."""

import pytest

from areal_jax.app.sweep.endpoints import (
    common_horizon,
    endpoint_values,
    mean_of_line,
    mean_of_steps,
    read_record,
)


def lines(rewards, tokens=10, seconds=2.0):
    return [
        {'step': step, 'time': step * seconds, 'reward/mean': reward, 'tokens/trained': tokens}
        for step, reward in enumerate(rewards, start=1)
    ]


def interval(mean):
    return {'mean': mean, 'low': None, 'high': None, 'n': 1}


def test_the_mean_of_steps_by_hand():
    assert mean_of_steps([10, 20, 40], [1.0, 2.0, 3.0], 40) == (10 * 1 + 10 * 2 + 20 * 3) / 40
    assert mean_of_steps([10, 20, 40], [1.0, 2.0, 3.0], 25) == (10 * 1 + 10 * 2 + 5 * 3) / 25
    assert mean_of_steps([10, 20], [1.0, 2.0], 5) == 1.0
    assert mean_of_steps([10, 20], [1.0, 2.0], 30) == (10 * 1 + 20 * 2) / 30  # the last one holds on
    assert mean_of_steps([], [], 5) is None


def test_the_mean_of_lines_by_hand():
    assert mean_of_line([0, 10, 20], [0.0, 1.0, 1.0], 20) == (5 + 10) / 20
    assert mean_of_line([0, 10, 20], [0.0, 1.0, 1.0], 5) == 0.25
    assert mean_of_line([0, 10, 10, 20], [0.0, 1.0, 2.0, 2.0], 20) == (5 + 20) / 20  # an update that trained nothing
    assert mean_of_line([0], [1.0], 5) is None


def test_areas_end_where_the_shortest_arm_ends():
    long, short = read_record(lines([0.0, 1.0, 1.0, 1.0]), {}), read_record(lines([0.0, 1.0], seconds=1.0), {})
    horizon = common_horizon([long, short])
    assert (horizon.tokens, horizon.seconds) == (20, 2.0)
    assert endpoint_values(long, horizon)['reward_per_token'] == 0.5
    assert endpoint_values(long, horizon)['reward_per_second'] == 0.0  # 2 seconds: its first update
    assert endpoint_values(short, horizon)['reward_per_second'] == 0.5


def test_the_last_reward_is_that_of_the_last_tenth():
    record = read_record(lines([0.0] * 18 + [1.0, 3.0]), {})
    assert endpoint_values(record, common_horizon([record]))['reward_last'] == 2.0
    record = read_record(lines([1.0, 3.0]), {})
    assert endpoint_values(record, common_horizon([record]))['reward_last'] == 3.0


def test_updates_without_a_reward_keep_the_tokens_in_place():
    found = [*lines([1.0]), {'step': 2, 'time': 4.0, 'reward/mean': None, 'tokens/trained': 0}]
    found.append({'step': 3, 'time': 6.0, 'reward/mean': 4.0, 'tokens/trained': 10})
    record = read_record(found, {})
    assert (record.reward.updates, record.reward.tokens, record.reward.seconds) == ((1, 3), (10, 20), (2.0, 6.0))


def test_the_curve_of_evaluations_has_both_ends():
    scores = lambda value: {'greedy': interval(value), 'sampled': None}
    report = {
        'steps': 4,
        'evaluation_curve': [{'version': 2, **scores(0.5)}],
        'evaluation_curve_ends': {'greedy': {'before': interval(0.0), 'after': interval(1.0)}, 'sampled': {}},
    }
    record = read_record(lines([0.0] * 4), report)
    assert record.evaluation.tokens == (0, 20, 40)
    assert record.evaluation.values == (0.0, 0.5, 1.0)
    values = endpoint_values(record, common_horizon([record]))
    assert values['evaluation_per_token'] == pytest.approx(0.5)
    assert 'accuracy_greedy' not in values


def test_supervised_training_has_its_own_endpoint():
    report = {'steps': 2, 'held_out_nll': {'0': 3.0, '10': 1.0, '2': 2.0}}
    record = read_record([{'step': 1, 'time': 1.0, 'tokens/trained': 5}], report)
    values = endpoint_values(record, common_horizon([record]))
    assert values['held_out_nll'] == 1.0
    assert 'reward_last' not in values
