"""Phases of runs, told by logs written by hand."""

import signal

import pytest

from tests.chaos_roles.phases import in_phase
from tests.chaos_roles.plan import Cell, Strike
from tests.chaos_roles.state import State

STEPS = 3


def strike(process, phase, fraction=0.0):
    return Strike(Cell(process.split('-')[0], signal.SIGKILL, phase), process, fraction)


def event(kind, engine=None, **fields):
    return {'kind': kind, **({} if engine is None else {'engine': f'engine/{engine}'}), **fields}


LOG, ROUTE = event('log'), event('route', 0)
SERVES = [event('engine_state', n, state='serving') for n in (0, 1)]
BEGUN = [LOG, *SERVES, ROUTE]
BEGINS, ENDS = event('run_start', work='publish'), event('run_done', work='publish')
PUBLISH = event('publish', version=1)


def stage(engine, phase, outcome='done'):
    return event('stage', engine, phase=phase, outcome=outcome, version=1)


def holds(process, phase, events, *, starts=1, **written):
    state = State(starts={process: starts}, events=events, **written)
    return in_phase(strike(process, phase), state, STEPS)


@pytest.mark.parametrize(('process', 'events', 'expected'), [
    ('learner-1', [], True),
    ('learner-1', [LOG], True),
    ('learner-1', BEGUN, False),
    ('learner-1', [*BEGUN, LOG], True),  # a new attempt
    ('engine-1', [LOG], True),
    ('engine-1', [LOG, *SERVES], False),  # it waits for nothing more, the run has not begun
    ('controller-0', [LOG, *SERVES], True),
])  # fmt: skip
def test_start_up_is_over_with_the_first_request(process, events, expected):
    assert holds(process, 'start-up', events) == expected
    assert not holds(process, 'start-up', events, starts=0)


@pytest.mark.parametrize(('events', 'expected'), [
    ([*BEGUN, BEGINS], True),
    ([*BEGUN, BEGINS, ENDS], False),
    ([*BEGUN, BEGINS, event('run_start', work='train')], True),
    ([*BEGUN, BEGINS, LOG], False),
])  # fmt: skip
def test_learners_stage_while_they_write_a_version(events, expected):
    assert holds('learner-0', 'staging', events, is_writing_version=True) == expected
    assert not holds('learner-0', 'staging', events, is_writing_version=False)


@pytest.mark.parametrize(('events', 'staging', 'swap'), [
    ([], False, False),
    ([PUBLISH], True, False),
    ([PUBLISH, stage(0, 'stage')], True, False),  # the other engine
    ([PUBLISH, stage(1, 'stage', 'refused')], False, False),
    ([PUBLISH, stage(1, 'stage')], False, True),
    ([PUBLISH, stage(1, 'stage'), stage(0, 'swap')], False, True),
    ([PUBLISH, stage(1, 'stage'), stage(1, 'swap')], False, True),
    ([PUBLISH, stage(1, 'stage'), stage(1, 'swap'), stage(1, 'acknowledge')], False, False),
    ([PUBLISH, stage(1, 'stage'), event('load', 1, version=1)], False, False),
    ([PUBLISH, stage(1, 'stage'), event('engine_state', 1, state='unknown')], False, False),
    ([event('engine_state', 1, state='gone'), PUBLISH], False, False),  # it gets no version
    ([PUBLISH, LOG], False, False),
])  # fmt: skip
def test_an_engine_stages_and_then_swaps(events, staging, swap):
    assert holds('engine-1', 'staging', BEGUN + events) == staging
    assert holds('engine-1', 'swap', BEGUN + events) == swap


def test_others_are_struck_while_any_engine_swaps():
    for engine in (0, 1):
        assert holds('controller-0', 'swap', [*BEGUN, PUBLISH, stage(engine, 'stage')])
    assert not holds('controller-0', 'swap', [*BEGUN, PUBLISH])


def test_a_strike_in_the_loop_waits_for_its_part_of_the_updates():
    state = State(starts={'engine-0': 1}, is_writing_checkpoint=True)
    for version in range(11):
        state.events = [*BEGUN, event('publish', version=version)]
        assert in_phase(strike('engine-0', 'save', 0.5), state, 10) == (version >= 3)  # 0.7 x 0.5 x 10


def test_a_save_is_seen_on_the_disk_and_the_end_by_the_last_version():
    assert holds('engine-0', 'save', BEGUN, is_writing_checkpoint=True)
    assert not holds('engine-0', 'save', BEGUN)
    last = event('publish', version=STEPS)
    assert holds('engine-0', 'end', [*BEGUN, last, LOG])  # also of a controller that came back
    assert not holds('engine-0', 'end', [*BEGUN, PUBLISH])
    assert not holds('engine-0', 'end', BEGUN)
