"""A class of engines that adds nothing but age is left out and taken back: the rule by hand, and in a pool."""

from __future__ import annotations

import json

import pytest

from areal_jax.rollout.spare_engines import PUBLICATIONS, Change, SpareRule
from areal_jax.types import PublishedWeights
from tests.rollout.scripted import scripted
from tests.rollout.test_changing_pool import Rig, W, expected, request
from tests.toys import PRICES

SLOTS = {'fast': 8, 'slow': 8}


class Timeline:
    """Intervals of a rule: so many answers are open on each class from the first second to the last."""

    def __init__(self, rule):
        self.rule, self.now_s = rule, 0.0
        assert rule.judge(0.0) is None  # the first publication

    def pass_interval(self, fast, slow, seconds=10.0, rates=(10, 5)):
        """`rates`: tokens that an answer gets in a second."""
        return self.pass_any({'fast': (fast, rates[0]), 'slow': (slow, rates[1])}, seconds)

    def pass_any(self, classes, seconds=10.0):
        """`classes`: (open answers, tokens a second of one) by name."""
        for hardware, (answers, _) in classes.items():
            self.rule.note(hardware, answers, 0, self.now_s)
        for hardware, (answers, rate) in classes.items():
            self.rule.note(hardware, 0, int(answers * rate * seconds), self.now_s + seconds / 2)
        self.now_s += seconds
        for hardware, (answers, _) in classes.items():
            self.rule.note(hardware, -answers, 0, self.now_s)
        return self.rule.judge(self.now_s)


def test_a_slow_class_is_left_out_after_so_many_intervals_in_which_all_answers_fitted_elsewhere():
    timeline = Timeline(SpareRule(SLOTS))
    found = [timeline.pass_interval(3, 2) for _ in range(PUBLICATIONS)]
    # 3 + 2 answers, and 0.8 of the 8 slots of the fast class are 6.4; 5 tokens a second of an answer, where fast has 10
    assert found == [None, None, Change('start', 'slow', 'fits', 5.0, 8, 0.5, 10.0)]
    assert timeline.rule.spared == ['slow']


@pytest.mark.parametrize(
    ('fast', 'slow', 'rates', 'why'),
    [
        (6, 1, (10, 5), '7 answers are more than 6.4'),
        (3, 2, (10, 7), '0.7 of the speed of the fast class is not slow'),
        (5, 0, (10, 5), 'what has no answer has no speed'),
    ],
)
def test_a_class_that_adds_tokens_stays(fast, slow, rates, why):
    timeline = Timeline(SpareRule(SLOTS))
    assert [timeline.pass_interval(fast, slow, rates=rates) for _ in range(6)] == [None] * 6, why


def test_one_interval_without_room_begins_the_count_anew():
    timeline = Timeline(SpareRule(SLOTS))
    found = [timeline.pass_interval(*answers) for answers in [(3, 2)] * 2 + [(6, 2)] + [(3, 2)] * 3]
    assert [change is not None for change in found] == [False] * 5 + [True]


def test_it_is_taken_back_when_the_slots_of_the_others_are_full_and_not_before():
    timeline = Timeline(SpareRule(SLOTS))
    for _ in range(PUBLICATIONS):
        timeline.pass_interval(3, 2)
    assert [timeline.pass_interval(answers, 0) for answers in (7, 8)] == [None, None]  # 6.4 < 7 <= 8: hysteresis
    assert timeline.pass_interval(9, 0) == Change('done', 'slow', 'full', 9.0, 8, 0.5, 10.0)
    assert timeline.rule.spared == []


@pytest.mark.parametrize(('seconds', 'taken_back'), [(10.9, False), (11.1, True)])
def test_it_is_taken_back_where_updates_take_longer_without_it_and_then_needs_twice_as_many(seconds, taken_back):
    timeline = Timeline(SpareRule(SLOTS))
    for _ in range(PUBLICATIONS):
        timeline.pass_interval(3, 2)
    found = [timeline.pass_interval(5, 0, seconds) for _ in range(PUBLICATIONS)]
    assert [change and change.reason for change in found] == [None, None, 'slower' if taken_back else None]
    if taken_back:
        found = [timeline.pass_interval(3, 2) for _ in range(2 * PUBLICATIONS)]
        assert [change and change.mode for change in found] == [None] * (2 * PUBLICATIONS - 1) + ['start']
    else:  # the trial is over: later updates of longer answers say nothing of the class
        assert timeline.pass_interval(5, 0, 30.0) is None


def test_of_two_slow_classes_the_slowest_goes_first_and_comes_back_last():
    timeline = Timeline(SpareRule({'fast': 8, 'slow': 8, 'slowest': 8}))
    all_three = {'fast': (3, 10), 'slow': (2, 5), 'slowest': (1, 3)}
    found = [timeline.pass_any(all_three) for _ in range(PUBLICATIONS)]
    found += [timeline.pass_any(all_three | {'slowest': (0, 3)}) for _ in range(PUBLICATIONS)]
    assert [(change.mode, change.hardware, change.slots) for change in found if change] == [
        ('start', 'slowest', 16), ('start', 'slow', 8)
    ]  # fmt: skip
    found = [timeline.pass_any({'fast': (answers, 10), 'slow': (0, 5)}) for answers in (9, 17)]
    assert [change.hardware for change in found] == ['slow', 'slowest']


@pytest.mark.parametrize('at', range(1, 9))
def test_a_rule_that_goes_on_from_its_state_decides_as_the_other(at):
    intervals = [(3, 2)] * 4 + [(5, 0), (9, 0)] + [(3, 2)] * 4
    whole, before = Timeline(SpareRule(SLOTS)), Timeline(SpareRule(SLOTS))
    expected_changes = [whole.pass_interval(*answers, seconds=7.3) for answers in intervals]
    found = [before.pass_interval(*answers, seconds=7.3) for answers in intervals[:at]]
    after = SpareRule(SLOTS)
    after.restore(json.loads(json.dumps(before.rule.state(before.now_s))))
    before.rule = after
    found += [before.pass_interval(*answers, seconds=7.3) for answers in intervals[at:]]
    assert found == expected_changes
    assert after.state(before.now_s) == whole.rule.state(whole.now_s)


# In a pool of toys: engine/1 decodes at a third of the speed.

SLOW_PRICES = PRICES | {'decode': lambda lane, work: work.amount * (0.03 if lane == 'engine/1' else 0.01)}


@scripted(Rig, engines=2, slots=4, prices=SLOW_PRICES, hardware=('1 x fast', '1 x slow'), spare_slots=4)
async def test_a_pool_moves_what_a_class_has_with_every_token_and_takes_the_class_back_when_slots_are_full(rig):
    asked, served = [], []
    tasks = []
    for version in range(1, 10):
        new = [request(len(asked) + index) for index in range(2 if version < 7 else 8)]
        asked.extend(new)
        tasks += rig.start(*new)
        await rig.pass_time(0.2)
        await rig.pool.load_weights(PublishedWeights(version, '', (W, version)))
        served.append(rig.pool.serving_engines())
    for task in tasks:
        assert (await task).finish_reason == 'length'
    start, done = rig.of_kind('spare')
    assert (start['mode'], start['version']) == ('start', 4)
    assert (start['hardware'], start['engines']) == ('1 x slow', ['engine/1'])
    assert (done['mode'], done['reason']) == ('done', 'full')
    assert 0.25 < start['speed'] < 0.5
    assert served == [2] * 3 + [1] * (done['version'] - 4) + [2] * (10 - done['version'])
    moved = [event for event in rig.of_kind('move') if event['reason'] == 'spare']
    assert moved
    assert {event['from_engine'] for event in moved} == {'engine/1'}
    routes = rig.of_kind('route')
    assert {event['engine'] for event in routes if start['seq'] < event['seq'] < done['seq']} == {'engine/0'}
    assert {event['engine'] for event in routes if event['seq'] > done['seq']} >= {'engine/1'}
    for one in asked:
        assert rig.tokens(one) == expected(one)
    assert not any(event.get('discarded') for event in rig.of_kind('decode'))
    assert [event['hardware'] for event in rig.of_kind('join')] == ['1 x fast', '1 x slow']


def test_engines_of_one_class_tell_no_hardware_and_none_is_left_out():
    rig = Rig(engines=2, hardware=('1 x fast',) * 2, spare_slots=2)
    assert rig.pool.sparing is None
    assert not any('hardware' in event for event in rig.log.events)
