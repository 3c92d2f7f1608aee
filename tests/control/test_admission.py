"""control/gate.py and slot_demand.py: groups by the need of the slots, whatever the lengths of the answers are."""

import math

import pytest

from areal_jax.report.aggregates import conservation
from tests.toys import PRICES, ToyRun

SLOW_DECODING = PRICES | {'train': 0.0005}


def open_answers(events):
    """(answers open before each admission, fields of its event), counted from groups and the ends of their answers."""
    begun = ended = 0
    for event in events:
        ended += event['kind'] == 'finish'
        if event['kind'] == 'admit':
            yield begun - ended, event
            begun += 2


@pytest.mark.parametrize('engines', [1, 3])
def test_a_group_is_admitted_while_the_slots_and_a_group_for_each_engine_want_answers(engines):
    run = ToyRun(steps=8, eta=math.inf, max_running=math.inf, engines=engines, prices=SLOW_DECODING).run()
    wanted = engines * (4 + 2)  # 4 slots and a group of 2 answers, of each engine
    found = list(open_answers(run.log.events))
    assert [(event['open'], event['wanted']) for _, event in found] == [(open_, wanted) for open_, _ in found]
    assert max(open_ for open_, _ in found) == wanted - 1  # nothing else held admission back
    assert conservation(run.log.events) == []


def test_no_slot_is_idle_while_groups_are_left_and_a_fixed_number_leaves_some():
    share = {}
    for max_running in (2, math.inf):
        run = ToyRun(steps=12, eta=math.inf, max_running=max_running, prices=SLOW_DECODING).run()
        last = max(event['seq'] for event in run.log.events if event['kind'] == 'admit')
        decodes = [e for e in run.log.events if e['kind'] == 'decode' and e['seq'] < last][1:]
        share[max_running] = sum(slot is not None for e in decodes for slot in e['slots']) / (4 * len(decodes))
        idle = sum(seconds for step in run.steps for bound, seconds in step.idle_slots_s.items() if bound != 'steps')
        assert (idle == 0) == math.isinf(max_running)
    assert share[math.inf] == 1
    assert share[2] < 0.8


def test_idle_slots_are_put_down_to_what_held_admission_back():
    run = ToyRun(steps=6, eta=0, max_running=math.inf, slots=8).run()
    idle = {}
    for step in run.steps:
        for bound, seconds in step.idle_slots_s.items():
            idle[bound] = idle.get(bound, 0.0) + seconds
    assert set(idle) == {'eta', 'steps'}
    # of 8 slots at most 6 have an answer of the batch of 3 groups of 2, so two at least are idle until the last update
    assert idle['eta'] >= 2 * run.steps[4].time_s


def test_a_fixed_number_says_nothing_of_slots_in_the_log():
    run = ToyRun(steps=2).run()
    assert not any('open' in event for event in run.log.events if event['kind'] == 'admit')
