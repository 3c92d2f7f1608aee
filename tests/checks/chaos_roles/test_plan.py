"""The deck of a pass deals every cell once and gives back what was missed; phases, told by logs written by hand."""

import collections
import random
import signal

import pytest

from checks.chaos_roles.plan import (
    CELLS,
    KINDS,
    PHASES,
    PROCESSES,
    RUNS,
    Cell,
    Deck,
    Strike,
    count_cells,
    find_missing,
    in_phase,
    order_cells,
)
from checks.chaos_roles.state import State

STEPS = 3


def deal(deck):
    runs = []
    while deck:
        runs.append(deck.draw())
    return runs


@pytest.mark.parametrize('seed', range(5))
def test_a_pass_meets_each_cell_once_in_its_runs(seed):
    runs = deal(Deck(seed))
    assert len(runs) == RUNS
    assert collections.Counter(strike.cell for run in runs for strike in run) == collections.Counter(CELLS)
    for run in runs:
        phases = [PHASES.index(strike.cell.phase) for strike in run]
        assert phases == sorted(set(phases))  # a run comes to its phases in this order, and strikes differ in theirs
        assert all(strike.process in PROCESSES[strike.cell.role] for strike in run)


@pytest.mark.parametrize('seed', range(5))
def test_three_runs_meet_every_kind(seed):
    met = [strike.cell for run in deal(Deck(seed))[:3] for strike in run]
    assert len(met) == 6  # there are five phases
    assert find_missing(met) == []


def test_a_seed_is_a_pass():
    assert deal(Deck(3)) == deal(Deck(3)) != deal(Deck(4))


def test_a_missed_cell_comes_again_but_not_for_ever():
    deck = Deck(0)
    missed = deck.draw()[0].cell
    tries = 1
    deck.give_back(missed)
    for _ in range(2 * RUNS):
        for strike in deck.draw() if deck else ():
            if strike.cell == missed:
                tries += 1
                deck.give_back(missed)
    assert tries == 3
    assert not deck


def test_what_was_not_met_is_named():
    assert find_missing([]) == list(KINDS)
    first = order_cells(random.Random(0))[0]
    assert set(find_missing([first])) == set(KINDS) - set(first.kinds)
    assert count_cells([first, first])[' '.join(first.kinds)] == 2
    assert sum(count_cells([first]).values()) == 1


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
