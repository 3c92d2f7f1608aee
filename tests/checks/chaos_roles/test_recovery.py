"""Recoveries by hand: each run is a list of marks a second apart."""

import signal

import pytest

from checks.chaos_roles.plan import Cell, Strike
from checks.chaos_roles.recovery import (
    TOGETHER,
    Baseline,
    Bounds,
    check_restarts,
    judge,
    longest_update_s,
    measure_baseline,
)
from checks.chaos_roles.state import Mark

STEPS = 4
BOUNDS = Bounds(engine_s=8.0, learners_s=12.0, end_s=20.0)


def strike(process='engine-1', number=signal.SIGKILL, phase='swap'):
    return Strike(Cell(process.split('-')[0], number, phase), process, 0.5)


def marks(*described, pauses=()):
    """'start engine-1', 'publish 3', 'serving engine/1', ...; `pauses` are seconds before the mark of that number."""
    found, now = [], 0.0
    for n, text in enumerate(described):
        now += dict(pauses).get(n, 1.0)
        what, _, rest = text.partition(' ')
        if what in ('start', 'registered', 'built', 'struck', 'gone', 'end'):
            number = 1 + sum(mark.what == 'start' and mark.process == rest for mark in found)
            found.append(Mark(now, what, rest, number))
            continue
        event = {'publish': {'kind': 'publish', 'version': int(rest or 0)} if what == 'publish' else {}}.get(what)
        event = event or {'kind': 'engine_state' if what == 'serving' else what, 'engine': rest, 'state': what}
        found.append(Mark(now, 'event', event=event))
    return found


STARTS = [f'start {name}' for name in (*TOGETHER, 'engine-0', 'engine-1')]
REGISTERED = [f'registered {name}' for name in (*TOGETHER, 'engine-0', 'engine-1')]
BEFORE = [*STARTS, *REGISTERED, 'route engine/0', 'publish 1', 'publish 2']
AGAIN = [f'start {name}' for name in TOGETHER]


def judge_one(struck, *after, pauses=(), before=BEFORE):
    first = len(before)
    found = marks(*before, f'struck {struck.process}', *after, pauses={first + n: s for n, s in pauses})
    (recovery,) = judge([struck], found, BOUNDS, STEPS)
    return recovery


ENGINE = ['gone engine-1', 'start engine-1', 'register engine/1', 'serving engine/1', 'end']


def test_an_engine_comes_back_alone():
    recovery = judge_one(strike(), *ENGINE)
    assert recovery.violations == []
    assert (recovery.noticed_s, recovery.back_s) == (1.0, 3.0)  # gone, start, register, serving
    assert recovery.moment == 'registered, version 2'


@pytest.mark.parametrize(('after', 'pauses', 'says'), [
    (ENGINE, [(4, 7.0)], 'recovery took 9.0 s, allowed are 8.0'),  # 1 + 1 + 7
    (ENGINE, [(1, 6.0)], 'the process was there for 6.0 s more, allowed are 5.0'),
    (['gone engine-1', 'serving engine/1', *ENGINE[1:]], [(5, 8.0)], 'recovery took 11.0 s'),  # not the old one
    (['gone engine-1', 'start engine-1', 'register engine/1', 'serving engine/0', 'end'], [(5, 7.0)], 'recovery took'),
    ([*ENGINE[:-1], 'start engine-1', 'end'], [], 'engine-1 twice started again, expected engine-1'),
    ([*ENGINE[:-1], 'start learner-0', 'end'], [], 'engine-1, learner-0 started again, expected engine-1'),
    (['gone engine-1', 'end'], [], 'nobody started again, expected engine-1'),
])  # fmt: skip
def test_what_is_wrong_with_the_recovery_of_an_engine_is_named(after, pauses, says):
    found = judge_one(strike(), *after, pauses=pauses).violations
    assert any(says in violation for violation in found), found


def test_an_engine_that_never_served_is_back_when_it_is_built():
    before = [*STARTS, *REGISTERED[:-1]]
    after = ['gone engine-1', 'start engine-1', 'registered engine-1', 'built engine-1', 'end']
    recovery = judge_one(strike(phase='start-up'), *after, before=before, pauses=[(5, 50.0)])
    assert recovery.violations == []
    assert recovery.back_s == 3.0
    assert recovery.moment == 'not yet registered'


LEARNER = ['gone learner-0', *AGAIN, 'publish 1', 'publish 2', 'publish 3', 'end']


def test_controller_and_learners_come_back_together_to_the_version_that_was_published():
    for process in TOGETHER:
        recovery = judge_one(strike(process), *LEARNER)
        assert recovery.violations == []
        assert recovery.back_s == 5.0  # three starts, versions 1 and 2


@pytest.mark.parametrize(('after', 'pauses', 'says'), [
    (LEARNER, [(6, 9.0)], 'recovery took 13.0 s, allowed are 12.0'),  # three starts, version 1, 9 s
    (['gone learner-0', 'publish 2', *AGAIN, 'publish 1', 'end'], [(6, 9.0)], 'recovery took 14.0 s'),  # before it
    (['gone learner-0', *AGAIN[:2], 'publish 2', 'end'], [], 'controller-0, learner-0 started again, expected'),
    ([*LEARNER[:-1], 'start engine-0', 'end'], [], 'engine-0, learner-0, learner-1 started again, expected'),
])  # fmt: skip
def test_what_is_wrong_with_the_recovery_of_learners_is_named(after, pauses, says):
    found = judge_one(strike('learner-0'), *after, pauses=pauses).violations
    assert any(says in violation for violation in found), found


def test_an_engine_that_hangs_is_not_missed_by_a_run_that_ends_first():
    hangs = strike(number=signal.SIGSTOP)
    ended = ['publish 3', f'publish {STEPS}', 'gone engine-1', 'end']
    assert judge_one(hangs, *ended).violations == []
    for after in (['publish 3', 'gone engine-1', 'end'], ['publish 3', 'gone engine-1', f'publish {STEPS}', 'end']):
        assert 'nobody started again, expected engine-1' in judge_one(hangs, *after).violations[0]
    [said] = judge_one(strike('learner-0', signal.SIGSTOP), *ended[:2], 'gone learner-0', 'end').violations
    assert 'nobody started again' in said  # the run waits for a learner


def test_before_the_first_version_learners_are_back_with_the_first_request():
    before = [*STARTS, *REGISTERED]
    recovery = judge_one(strike('learner-1', phase='start-up'), 'gone learner-1', *AGAIN, 'route engine/0', 'end',
                         before=before)  # fmt: skip
    assert (recovery.violations, recovery.back_s) == ([], 4.0)


def test_at_the_end_a_run_may_end_before_anybody_comes_back():
    before = [*BEFORE, 'publish 4']
    at_end = lambda process: strike(process, phase='end')
    assert judge_one(at_end('learner-0'), 'gone learner-0', 'end', before=before).violations == []
    recovery = judge_one(at_end('controller-0'), 'gone controller-0', *AGAIN, 'end', before=before)
    assert (recovery.violations, recovery.back_s) == ([], 4.0)
    late = judge_one(at_end('controller-0'), 'gone controller-0', *AGAIN, 'end', before=before, pauses=[(5, 18.0)])
    assert 'recovery took 21.0 s, allowed are 20.0' in late.violations[0]


@pytest.mark.parametrize(('before', 'seconds', 'holds'), [
    (BEFORE, 70.0, True), (BEFORE, 80.0, False), ([*STARTS, *REGISTERED[:-1]], 80.0, True),
    ([*STARTS, *REGISTERED[:-1]], 136.0, False), ([*BEFORE, 'start engine-1'], 80.0, True),
])  # fmt: skip
def test_a_process_that_hangs_is_noticed_by_its_heartbeat_or_waited_for_until_the_deadline(before, seconds, holds):
    recovery = judge_one(strike(number=signal.SIGSTOP), *ENGINE, before=before, pauses=[(1, seconds)])
    assert (recovery.violations == []) == holds


def test_each_strike_is_judged_by_what_followed_it():
    second = ['struck learner-0', *LEARNER]
    found = marks(*BEFORE, 'struck engine-1', *ENGINE[:-1], *second)
    assert [r.violations for r in judge([strike(), strike('learner-0')], found, BOUNDS, STEPS)] == [[], []]
    assert check_restarts(strike(), found[len(BEFORE) :], STEPS) != []


def test_a_run_that_nothing_was_done_to_has_no_recoveries():
    assert judge([], marks(*BEFORE, 'end'), BOUNDS, STEPS) == []


def test_the_parts_of_an_undisturbed_run():
    found = marks(*STARTS, 'built engine-1', 'built engine-0', 'route engine/0', *(f'publish {n}' for n in (1, 2, 3)),
                  'end', pauses={9: 3.0, 11: 5.0})  # fmt: skip
    # engine-0 is started 4th and built 7th, engine-1 5th and 6th; the request is 8th
    assert measure_baseline(found) == Baseline(engine_start_s=3.0, run_start_s=7.0, update_s=3.0, end_s=5.0)
    with pytest.raises(ValueError, match='0 publications'):
        measure_baseline(found[:8])


def test_updates_beside_a_strike_are_not_measured():
    found = marks('publish 1', 'publish 2', 'struck engine-0', 'publish 3', 'gone engine-0', 'publish 4', 'publish 5',
                  pauses={3: 20.0, 5: 20.0, 6: 2.0})  # fmt: skip
    assert longest_update_s(found) == 2.0


def test_a_baseline_is_widened_by_starts_alone():
    baseline = Baseline(engine_start_s=5.0, run_start_s=20.0, update_s=2.0, end_s=7.0)
    late = marks('start engine-1', 'built engine-1', 'route engine/1', 'publish 1', 'publish 2', 'struck engine-1',
                 pauses={1: 6.0, 2: 19.0, 4: 9.0})  # fmt: skip
    assert baseline.widen(late) == Baseline(engine_start_s=6.0, run_start_s=25.0, update_s=2.0, end_s=7.0)
    assert baseline.widen([late[-1], *late[:-1]]) == baseline


def test_bounds_are_start_up_and_a_checkpoint():
    baseline = Baseline(engine_start_s=5.0, run_start_s=20.0, update_s=2.0, end_s=7.0)
    assert Bounds.of(baseline, [], 3) == Bounds(15.0, 26.0, 33.0)  # 3 x 5; 20 + 3 x 2; 26 + 7
    assert Bounds.of(baseline, [], 3, deadline_s=9.0) == Bounds(24.0, 35.0, 42.0)  # who waits for the dead
    slower = marks('publish 1', 'publish 2', pauses={1: 4.0})
    assert Bounds.of(baseline, slower, 3).learners_s == 32.0  # 20 + 3 x 4
    late = marks('start engine-1', 'built engine-1', 'route engine/1', 'struck engine-1', pauses={1: 6.0, 2: 19.0})
    assert Bounds.of(baseline, late, 3) == Bounds(18.0, 31.0, 38.0)  # 3 x 6; 6 + 19 + 3 x 2; 31 + 7
    assert Bounds.of(baseline, [late[3], *late[:3]], 3) == Bounds(15.0, 26.0, 33.0)  # a start after a strike is none


def test_a_first_start_after_the_strike_is_no_restart():
    """The launcher may not yet have started the engines when a learner is struck."""
    before, first = STARTS[:-1], ['start engine-1', *LEARNER[:-1], 'end']
    recovery = judge_one(strike('learner-0', phase='start-up'), 'gone learner-0', *first, before=before)
    assert not any('started again' in violation for violation in recovery.violations)
