"""When engines were in the pool, and shares of the time in which they were."""

from __future__ import annotations

import math

import pytest

from areal_jax.report.aggregates import idle_slots
from areal_jax.report.engines.engine_presence import find_presence, restrict
from areal_jax.report.event_log import Window, window
from areal_jax.report.limit import busy_shares, measure_limit
from tests.telemetry.logs import event_log, publish, two_facts, work


def join(time, engine):
    return time, 'join', {'engine': engine}


def leave(time, engine):
    return time, 'leave', {'engine': engine}


def test_an_engine_is_there_from_join_to_leave_and_from_a_later_join_on():
    events = event_log(join(0, 'engine/0'), join(0, 'engine/1'), leave(4, 'engine/1'), join(7, 'engine/1'))
    assert find_presence(events) == {'engine/0': [(0, math.inf)], 'engine/1': [(0, 4), (7, math.inf)]}


def test_a_start_that_takes_an_engine_in_again_ends_no_span_and_one_that_does_not_does():
    start, restore = (5, 'log', {'version': 14}), (5, 'restore', {'update': 1})
    events = event_log(
        (0, 'log', {'version': 14}), join(0, 'engine/0'), join(0, 'engine/1'), start, join(5, 'engine/0'), restore,
        join(8, 'engine/1'),
    )  # fmt: skip
    assert find_presence(events) == {'engine/0': [(0, math.inf)], 'engine/1': [(0, 5), (8, math.inf)]}


def test_the_window_of_an_engine_ends_with_its_leave():
    presence = {'engine/1': [(0.0, 4.0), (7.0, math.inf)], 'engine/0': [(0.0, math.inf)]}
    within = Window(((2.0, 6.0), (8.0, 10.0)))
    assert restrict(within, presence, 'engine/1').spans == ((2.0, 4.0), (8.0, 10.0))
    assert restrict(within, presence, 'engine/0') is within
    assert restrict(within, presence, 'engine/9') is within  # a log that tells of no engine


@pytest.mark.parametrize('left', [True, False])
def test_an_engine_that_has_left_is_not_idle(left):
    """engine/0 works 8 of 10 s; engine/1 works 4 s, and leaves then or stays idle."""
    gone = [leave(5, 'engine/1')] if left else []
    events = event_log(
        join(0, 'engine/0'), join(0, 'engine/1'), (0, 'admit', {'draw': 0}),
        *work('engine/0', 'decode', 0, 8, 0), *work('engine/1', 'decode', 0, 4, 1), *gone, publish(10, 1),
    )  # fmt: skip
    # present: 8 of 10 and 4 of 5 seconds; without the leave 4 of 10
    assert busy_shares(events)['rollout'] == pytest.approx(12 / 15 if left else 12 / 20)
    # of an engine that is there all the time: 12 s of 1.5 engines; without the leave of 2
    assert measure_limit(events, 1, two_facts()).generate == pytest.approx(8 if left else 6)
    decoded = {'dispatch': 1, 'slots': [None, None], 'bucket': 1, 'steps': 1, 'tokens': 0, 'version': 0}
    of_slots = event_log(*((1, 'decode', {'engine': f'engine/{index}', **decoded}) for index in (0, 1)))
    found = idle_slots([{'admission/idle_slot_seconds/eta': 6.0}], [*events, *of_slots], window(events))
    assert found == {'eta': pytest.approx(6 / (30 if left else 40))}  # two slots for 10 s, and two for 5 s or 10 s
