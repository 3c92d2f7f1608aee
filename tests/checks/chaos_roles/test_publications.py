"""Which processes the kills around publications meet, and what a run may not leave behind."""

import collections
import random
import signal

import pytest

from areal_jax.publication.carriers import shm_segment
from areal_jax.publication.carriers.shm_segment import name_run, segment_path
from checks.chaos_roles.plan import Cell, Strike, in_phase
from checks.chaos_roles.publications import LEADERS, ROLES, Found, draw_strikes, find_leftovers, role_of
from checks.chaos_roles.state import State

BEGUN = [{'kind': 'log'}, {'kind': 'route'}]


def test_each_part_is_struck_and_most_kills_are_at_publications():
    drawn = [strike for seed in range(200) for strike in draw_strikes(random.Random(seed), ROLES, LEADERS[seed % 2])]
    assert collections.Counter(map(role_of, drawn)) == dict.fromkeys(ROLES, 200)
    assert {strike.cell.signal for strike in drawn} == {signal.SIGKILL}
    assert sum(strike.cell.phase in ('sending', 'staging') for strike in drawn) > len(drawn) / 2
    leaders = {(strike.process, strike.cell.phase) for strike in drawn if role_of(strike) == 'leader'}
    assert leaders == {(each, phase) for each in ('learner-0', 'controller-0') for phase in ('sending', 'update')}
    runs = [draw_strikes(random.Random(seed), ROLES, 'learner-0') for seed in range(20)]
    assert {role_of(run[-1]) for run in runs} == {'receiver'}
    assert {role_of(run[0]) for run in runs} == {'sender', 'leader', 'follower'}
    assert all(run[n].fraction <= run[n + 1].fraction for run in runs for n in range(3))
    assert draw_strikes(random.Random(3), ROLES, 'learner-0') == runs[3]


def test_a_part_that_was_not_struck_is_missing_and_the_check_fails():
    *others, last = draw_strikes(random.Random(0), ROLES, 'learner-0')
    found = Found(met=others)
    assert found.missing == [role_of(last)]
    assert not found.passed
    found.met.append(last)
    assert found.passed
    found.violations.append('left')
    assert not found.passed


@pytest.mark.parametrize(('phase', 'work'), [('sending', 'publish'), ('update', 'train')])
def test_a_process_is_struck_while_the_work_is_under_way(phase, work):
    strike = Strike(Cell('learner', signal.SIGKILL, phase), 'learner-1', 0.0)
    begins, ends = ({'kind': kind, 'work': work} for kind in ('run_start', 'run_done'))
    other = {'kind': 'run_start', 'work': 'save'}
    cases = {(): False, ('begins',): True, ('begins', 'other'): True, ('begins', 'ends'): False, ('other',): False}
    for names, expected in cases.items():
        events = [*BEGUN, *({'begins': begins, 'ends': ends, 'other': other}[name] for name in names)]
        assert in_phase(strike, State(events=events), 12) == expected, names


def test_at_any_time_is_once_the_run_has_begun():
    strike = Strike(Cell('learner', signal.SIGKILL, 'loop'), 'learner-1', 0.0)
    assert in_phase(strike, State(events=BEGUN), 12)
    assert not in_phase(strike, State(events=[*BEGUN, {'kind': 'log'}]), 12)


def test_sockets_and_memory_of_the_run_are_left_not_those_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(shm_segment, 'DIRECTORY', tmp_path / 'shm')
    (tmp_path / 'shm').mkdir()
    workdir = tmp_path / 'run'
    assert find_leftovers(tmp_path, workdir) == []
    segment_path(name_run(tmp_path / 'other'), 'ab', tmp_path / 'shm').touch()
    assert find_leftovers(tmp_path, workdir) == []
    left = segment_path(name_run(workdir), 'ab', tmp_path / 'shm')
    left.touch()
    (tmp_path / 'areal_jax-weights-1x').mkdir()
    assert find_leftovers(tmp_path, workdir) == [
        f'{tmp_path}/areal_jax-weights-1x was left behind', f'{left} was left behind',
    ]  # fmt: skip
