"""Every draw is in one state and only moves forward."""

from __future__ import annotations

import pytest

from areal_jax.report.aggregates import conservation, ledger
from tests.telemetry.logs import event_log, two_updates


def test_every_draw_ends_in_one_state():
    found = ledger(two_updates())
    assert found.states == {0: 'trained', 1: 'trained', 2: 'dropped', 3: 'running', 4: 'pending'}
    assert found.reasons == {2: 'over_age'}
    assert [found.count(state) for state in ('pending', 'running', 'buffered', 'trained', 'dropped')] == [1, 1, 0, 2, 1]
    assert conservation(two_updates()) == []


LIFE = [
    ('draw', {'draw': 5}),
    ('admit', {'draw': 5}),
    ('buffer', {'draw': 5}),
    ('consume', {'update': 1, 'draws': [5]}),
]


@pytest.mark.parametrize('missing', range(4))
def test_a_step_that_is_left_out_is_a_violation(missing: int):
    steps = [step for index, step in enumerate(LIFE) if index != missing]
    events = event_log(*((float(t), kind, fields) for t, (kind, fields) in enumerate(steps)))
    assert len(conservation(events)) == (missing < 3)  # without its last step the draw just is not trained yet


@pytest.mark.parametrize('repeated', range(4))
def test_a_step_that_comes_twice_is_a_violation(repeated: int):
    events = event_log(*((float(t), kind, fields) for t, (kind, fields) in enumerate([*LIFE, LIFE[repeated]])))
    (violation,) = conservation(events)
    assert violation.startswith(f'event 4 ({LIFE[repeated][0]}): draw 5 goes from trained to')


@pytest.mark.parametrize(('steps', 'allowed'), [(0, False), (1, True), (2, True), (3, True), (4, False)])
def test_a_draw_is_dropped_before_it_is_trained(steps: int, allowed: bool):
    drop = ('drop', {'draw': 5, 'reason': 'over_age', 'detail': ''})
    events = event_log(*((float(t), kind, fields) for t, (kind, fields) in enumerate([*LIFE[:steps], drop])))
    assert (conservation(events) == []) is allowed
