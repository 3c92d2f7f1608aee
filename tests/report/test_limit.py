from __future__ import annotations

import pytest

from areal_jax.report.event_log import lane_intervals, window
from areal_jax.report.limit import busy_shares, explain_gap, fill_seconds, measure_limit
from tests.telemetry.logs import event_log, publish, two_facts, two_updates, work


def test_lanes_with_their_own_devices():
    # 20 s and 2 updates; engine 18 s, learner 9.5 s, publish 2 s: 9, 4.75, 1 of 10 s an update; the engine bounds
    limit = measure_limit(two_updates(), 2, two_facts(lanes_own_devices=True))
    assert (limit.generate, limit.train, limit.publish) == pytest.approx((9, 4.75, 1))
    assert (limit.ideal, limit.achieved, limit.bound) == (pytest.approx(9), pytest.approx(10), 'engine/0')
    assert limit.ideal_rule.startswith('lanes own their devices')


def test_lanes_on_virtual_devices_share_the_cores():
    # Two engines and the learner have a virtual CPU device each and are busy 9, 8 and 9 of 10 s: on 2 cores that is
    # more than the cores gave, since a lane that waits for a core is busy too. 16 CPU seconds on 2 cores are 8 s; alone
    # the busiest engine needed 4 s and the learner 3 s.
    lanes = [('engine/0', 'decode', 0, 9), ('engine/1', 'decode', 0, 8), ('learner', 'train', 1, 10)]
    entries = [entry for run, (*lane, start, end) in enumerate(lanes) for entry in work(*lane, start, end, run)]
    events = event_log((0, 'admit', {'draw': 0}), *entries, publish(10, 1))
    facts = {'alone_seconds': {'generate': 4.0, 'train': 3.0}, 'cpu_seconds': 16.0, 'cores': 2}
    shared = measure_limit(events, 1, two_facts(**facts, lanes_own_devices=False))
    assert (shared.ideal, shared.achieved, shared.bound) == (pytest.approx(8), pytest.approx(10), 'CPU seconds / cores')
    owned = measure_limit(events, 1, two_facts(**facts, lanes_own_devices=True))
    assert (owned.ideal, owned.bound) == (pytest.approx(9), 'engine/0')


def test_publication_lanes_count_by_the_busiest():
    entries = [
        *work('publish', 'publish', 0, 1, 0),
        *work('publish/1', 'load', 1, 4, 1),
        *work('publish/0', 'load', 1, 3, 2),
    ]
    events = event_log((0, 'admit', {'draw': 0}), *entries, publish(10, 1))
    assert measure_limit(events, 1, two_facts(lanes_own_devices=True)).publish == pytest.approx(3)


@pytest.mark.parametrize(
    ('cpu_seconds', 'ideal', 'bound'),
    [(32.0, 8.0, 'CPU seconds / cores'), (16.0, 6.0, 'generate alone'), (None, 6.0, 'generate alone')],
)
def test_lanes_that_share_cores(cpu_seconds: float | None, ideal: float, bound: str):
    # 32 CPU seconds on 2 cores in 2 updates are 8 s an update, 16 are 4; generation alone takes 6 s, training 3 s
    limit = measure_limit(two_updates(), 2, two_facts(cpu_seconds=cpu_seconds))
    assert (limit.ideal, limit.bound) == (pytest.approx(ideal), bound)
    assert limit.ideal_rule.startswith('lanes share the cores')


ON_ONE_GPU = {
    'hardware': {'devices': ['cuda:0']},
    'devices': {'learner': [0], 'engines': {'engine/0': [0], 'engine/1': [0]}},
    'lanes_own_devices': False,
}


def test_lanes_on_one_accelerator_run_one_after_the_other():
    # generation alone takes 6 s, training 3 s: 9 of the 10 s; cores have nothing to do with it
    limit = measure_limit(two_updates(), 2, two_facts(**ON_ONE_GPU))
    assert (limit.ideal, limit.achieved) == (pytest.approx(9), pytest.approx(10))
    assert limit.ideal_rule.startswith('lanes share one accelerator')
    assert limit.cause.endswith('1 s is the accelerator without a program, and programs that are slower beside others.')
    unknown = measure_limit(two_updates(), 2, two_facts(**ON_ONE_GPU, alone_seconds={'generate': 6.0, 'train': None}))
    assert unknown.ideal is None


@pytest.mark.parametrize(
    'other',
    [
        {'hardware': {'devices': ['cpu:0']}},
        {'hardware': {'devices': []}},
        {'devices': {'learner': [0, 1], 'engines': {'engine/0': [0]}}},
    ],
)
def test_cpus_and_several_devices_are_not_one_accelerator(other):
    limit = measure_limit(two_updates(), 2, two_facts(**(ON_ONE_GPU | other)))
    assert limit.ideal_rule.startswith('lanes share the cores')


def test_virtual_seconds_are_not_compared_with_processor_seconds():
    limit = measure_limit(two_updates(), 2, two_facts(clock='virtual'))
    assert limit.ideal == pytest.approx(9)
    assert limit.ideal_rule.startswith('virtual clock')


def test_nothing_measured_alone_is_no_ideal():
    limit = measure_limit(two_updates(), 2, two_facts(cpu_seconds=None, alone_seconds={'generate': None}))
    assert limit.ideal is None
    assert limit.achieved == pytest.approx(10)
    assert limit.cause.startswith('No ideal could be computed')


def test_no_update_no_times():
    limit = measure_limit(two_updates()[:8], 0, two_facts())
    assert (limit.generate, limit.ideal, limit.achieved) == (None, None, None)


def test_several_engines_count_by_their_mean_and_bound_by_the_busiest():
    # engine/0 works 4 s, engine/1 8 s of 10 s in one update: mean 6, bound 8
    entries = [*work('engine/0', 'decode', 0, 4, 0), *work('engine/1', 'decode', 0, 8, 1)]
    events = event_log((0, 'admit', {'draw': 0}), *entries, publish(10, 1))
    limit = measure_limit(events, 1, two_facts(lanes_own_devices=True))
    assert (limit.generate, limit.ideal, limit.bound) == (pytest.approx(6), pytest.approx(8), 'engine/1')
    assert busy_shares(events) == {'rollout': pytest.approx(0.6), 'learner': None}


def test_a_lane_of_publication_for_each_engine_counts_as_publication():
    # in one update the transfer takes 1 s, and the engines fetch in 2 s and 4 s at the same time: the busiest lane, 4 s
    entries = [
        *work('publish', 'publish', 0, 1, 0),
        *work('publish/0', 'load', 1, 3, 1),
        *work('publish/1', 'load', 1, 5, 2),
    ]
    events = event_log((0, 'admit', {'draw': 0}), *entries, publish(10, 1))
    assert measure_limit(events, 1, two_facts(lanes_own_devices=True)).publish == pytest.approx(4)


def test_the_pipeline_fills_until_the_first_training():
    # the window opens at 10 s, the learner first trains at 18 s
    assert fill_seconds(lane_intervals(two_updates()), window(two_updates())) == pytest.approx(8)


def test_the_cause_of_the_gap_adds_up():
    # 10 - 6 = 4 s: 1 s of filling and 3 s of waiting
    assert explain_gap(6.0, 10.0, 'learner', 1.0) == (
        'Achieved 10 s an update against an ideal of 6 s (60%, bound by learner): of the gap of 4 s, 1 s is the '
        'pipeline filling before the first update and 3 s is the learner waiting for finished groups.'
    )
    assert explain_gap(9.9, 10.0, 'learner', 1.0).endswith('no gap to speak of.')
    assert 'filling' not in explain_gap(6.0, 10.0, 'engine/0', 1.0)  # engines work while the pipeline fills
    whole = explain_gap(6.0, 10.0, 'learner', 9.0)  # filling explains the whole gap, no more
    assert whole.endswith(': the gap of 4 s is the pipeline filling before the first update.')


def test_publication_takes_what_the_busiest_engine_takes():
    # publish/0 transfers 2 s and fetches 1 s, publish/1 fetches 5 s, in one update
    entries = [
        *work('publish/0', 'publish', 0, 2, 0),
        *work('publish/0', 'load', 2, 3, 1),
        *work('publish/1', 'load', 2, 7, 2),
    ]
    events = event_log((0, 'admit', {'draw': 0}), *entries, publish(10, 1))
    assert measure_limit(events, 1, two_facts()).publish == pytest.approx(5)
