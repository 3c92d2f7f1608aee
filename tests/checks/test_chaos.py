"""The checks of checks.chaos on logs written by hand: each violation is reported, and a good log is not."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from checks import logs
from checks.chaos import __main__ as chaos
from checks.chaos import cases, full_disk
from checks.processes import MARK, Ending, RunningCommand, find_marked, marked, python

STEPS, GROUPS = 4, 2


def good_events():
    """Four updates of two groups; draw 2 was dropped."""
    events = []

    def write(kind, **fields):
        events.append({'seq': len(events), 'time': 0.0, 'lane': None, 'kind': kind, **fields})

    draws = iter(range(100))
    for update in range(1, STEPS + 1):
        batch = []
        while len(batch) < GROUPS:
            draw = next(draws)
            write('draw', draw=draw)
            write('admit', draw=draw)
            if draw == 2:
                write('drop', draw=draw, reason='verifier_failed', detail='timeout')
            else:
                write('buffer', draw=draw, partial=False)
                batch.append(draw)
        write('consume', update=update, draws=batch)
        write('publish', version=update, manifest='')
    return events


def write_lines(path, records):
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))


def renumber(events):
    return [event | {'seq': seq} for seq, event in enumerate(events)]


@pytest.fixture
def workdir(tmp_path):
    """Of a run that has finished well."""
    write_lines(tmp_path / 'events.jsonl', good_events())
    write_lines(tmp_path / 'metrics.jsonl', [{'step': step} for step in range(1, STEPS + 1)])
    (tmp_path / 'report.json').write_text('{}')
    for step in (STEPS - 1, STEPS):
        (tmp_path / 'checkpoints' / f'step_{step:08d}').mkdir(parents=True)
    return tmp_path


def check(workdir):
    return logs.check_finished(workdir, STEPS, GROUPS, has_events=True)


def change_events(workdir, change, *, number=True):
    events = change(good_events())
    write_lines(workdir / 'events.jsonl', renumber(events) if number else events)
    return ' '.join(check(workdir))


def test_a_good_log_holds(workdir):
    assert check(workdir) == []


def test_a_gap_in_the_log_is_reported(workdir):
    found = change_events(workdir, lambda events: [e for e in events if e['seq'] != 3], number=False)
    assert 'line 4 has seq 4, expected 3' in found


def test_a_draw_trained_twice_is_reported(workdir):
    def train_again(events):
        last = max(i for i, event in enumerate(events) if event['kind'] == 'consume')
        events[last] = events[last] | {'draws': [0, events[last]['draws'][1]]}
        return events

    found = change_events(workdir, train_again)
    assert 'draws trained more than once: 0' in found
    assert 'draw 0 goes from trained to trained' in found
    assert '7 groups were trained, expected 8' in found


def test_an_update_trained_twice_is_reported(workdir):
    def repeat(events):
        return events + [event for event in events if event['kind'] == 'publish'][-1:]

    assert 'published versions 1, 2, 3, 4, 4' in change_events(workdir, repeat)


def test_a_lost_update_is_reported(workdir):
    found = change_events(workdir, lambda events: [e for e in events if e.get('update') != 2 and e.get('version') != 2])
    assert 'batches were taken for the updates 1, 3, 4, expected 1 to 4' in found
    assert 'published versions 1, 3, 4' in found


@pytest.mark.parametrize('steps', [[1, 2, 4], [1, 2, 2, 3, 4], [1, 2, 3], []])
def test_metrics_that_do_not_have_each_update_once_are_reported(workdir, steps):
    write_lines(workdir / 'metrics.jsonl', [{'step': step} for step in steps])
    assert any('metrics.jsonl' in violation for violation in check(workdir))


def test_a_torn_line_is_reported(workdir):
    path = workdir / 'events.jsonl'
    path.write_text(path.read_text()[:-9])
    assert any('is not JSON' in violation for violation in check(workdir))


def test_a_finished_run_without_its_last_checkpoint_is_reported(workdir):
    (workdir / 'checkpoints' / f'step_{STEPS:08d}').rmdir()
    assert check(workdir) == [f'the newest checkpoint is of update {STEPS - 1}, the run finished {STEPS}']


@pytest.mark.parametrize('name', ['checkpoints/.step_00000009.partial', '.config.json.partial'])
def test_what_a_death_left_behind_is_reported(workdir, name):
    (workdir / name).mkdir()
    assert check(workdir) == [f'{pathlib.Path(name).name} was left behind']


@pytest.mark.parametrize(
    ('stdout', 'newest', 'holds'),
    [
        ('resumed after update 6 from x\n', 6, True),
        ('resumed after update 3 from x\n', 6, False),  # three updates lost
        ('compiled 13 programs in 3 s\n', 6, False),  # started again though there was a checkpoint
        ('compiled 13 programs in 3 s\n', None, True),
        ('resumed after update 3 from x\n', None, False),
    ],
)
def test_where_a_resumed_run_must_go_on(stdout, newest, holds):
    assert (logs.check_resumed(stdout, newest) == []) == holds


def test_a_repeated_checkpoint_of_one_update_is_known(workdir):
    (workdir / 'checkpoints' / 'step_00000004_1').mkdir()
    (workdir / 'checkpoints' / '.step_00000005.partial').mkdir()
    assert [update for update, _ in logs.checkpoints(workdir)] == [3, 4, 4]


def test_logs_that_a_new_start_overwrote_are_reported(workdir):
    before = logs.logs_with_updates(workdir)
    assert before == ['metrics.jsonl', 'events.jsonl']
    assert len(logs.check_kept_logs(workdir, before)) == 2
    for name in ('metrics', 'events'):
        (workdir / f'{name}.jsonl').rename(workdir / f'{name}.1.jsonl')
    assert logs.check_kept_logs(workdir, before) == []


def test_what_the_command_says_of_a_log_is_reported(workdir):
    (violation,) = logs.check_with_commands(workdir)
    assert violation.startswith('main_check_log: 2: error: ')


def ending(code, stderr=''):
    return Ending(code, 1.0, '', stderr)


@pytest.mark.parametrize(
    ('end', 'allowed', 'trouble', 'holds'),
    [
        (ending(0), (0,), '', True),
        (ending(1, 'x'), (0,), '', False),
        (ending(1, 'Traceback (most recent call last):\n'), (0,), 'traceback', False),
        (ending(0, 'Traceback (most recent call last):\n'), (0,), 'traceback', False),
        (ending(2, 'a warning\nerror: run.steps=0: use 1\n'), (2,), '', True),
        (ending(2, ''), (2,), '', False),
        (ending(2, 'error: a\nerror: b\n'), (2,), '', False),
        (ending(-signal.SIGSEGV), (0,), 'abort', False),
        (ending(134), (0,), 'abort', False),
        (ending(None), (0,), 'hang', False),
    ],
)
def test_endings(end, allowed, trouble, holds):
    assert end.trouble == trouble
    assert (end.violations(allowed) == []) == holds


def test_an_orphan_is_reported_and_ended(tmp_path):
    leave = 'import subprocess, sys; subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])'
    with RunningCommand(python('-c', leave), tmp_path) as run:
        assert run.wait().exit_code == 0
        [violation] = run.orphans(within_s=0.0)
        assert 'time.sleep(600)' in violation
    deadline = time.monotonic() + 30.0
    while marked(run.mark) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert marked(run.mark) == []


def test_a_process_of_another_mark_is_no_orphan(tmp_path):
    environment = {**os.environ, MARK: 'another'}
    other = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE, env=environment)
    try:
        with RunningCommand(python('-c', ''), tmp_path) as run:
            run.wait()
            assert run.orphans(within_s=0.0) == []
    finally:
        other.communicate()


def test_processes_of_a_command_are_found_by_their_words(tmp_path):
    with RunningCommand(python('-c', 'import time; time.sleep(600)', 'one', 'role'), tmp_path) as run:
        assert run.wait_for(lambda: find_marked(run.mark, {b'one', b'role'}) == [run.pid])
        assert find_marked(run.mark, {b'one'}, without={b'role'}) == find_marked(run.mark, {b'two'}) == []
        assert find_marked('another mark', {b'one'}) == []


def test_a_command_that_does_not_end_is_a_hang_and_shows_its_stacks(tmp_path):
    with RunningCommand(python('-c', 'import time; print("x", flush=True); time.sleep(600)'), tmp_path) as run:
        assert run.wait_for(lambda: run.stdout() == 'x\n')
        end = run.wait(timeout_s=0.1)
    assert end.trouble == 'hang'
    assert 'most recent call first' in end.violations((0,))[0]


FAILING_WRITES = """
import os, pathlib, sys
kept, done = pathlib.Path(sys.argv[1]), 0
try:
    (kept / 'directory').mkdir()
    done += 1
    with open(kept / 'file', 'w') as file:
        done += 1
        file.write('x')
        file.flush()
        done += 1
        os.fsync(file.fileno())
        done += 1
    (kept / 'file').rename(kept / 'other')
    done += 1
except OSError as error:
    print(type(error).__name__, error.errno)
print(done)
"""


@pytest.mark.parametrize(
    ('after', 'error', 'expected'),
    [
        (-1, 'ENOSPC', '5'),
        (0, 'ENOSPC', 'OSError 28\n0'),
        (1, 'ENOSPC', 'OSError 28\n1'),
        (2, 'ENOSPC', 'OSError 28\n2'),
        (3, 'ENOSPC', 'OSError 28\n3'),
        (4, 'ENOSPC', '5'),  # a full disk renames
        (3, 'EROFS', 'OSError 30\n4'),  # a read-only one does not, and has nothing to sync
    ],
)
def test_writes_fail_from_the_chosen_one_on(tmp_path, after, error, expected):
    (tmp_path / 'writes.py').write_text(FAILING_WRITES)
    (tmp_path / 'disk').mkdir()
    settings = {'below': str(tmp_path / 'disk'), 'after': after, 'error': error, 'report': str(tmp_path / 'calls')}
    environment = {**os.environ, 'PYTHONPATH': str(tmp_path)}
    with RunningCommand(
        python('-m', full_disk.__name__, json.dumps(settings), 'writes', str(tmp_path / 'disk')), tmp_path, environment
    ) as run:
        end = run.wait()
    assert (end.exit_code, end.stdout.strip()) == (0, expected), end.stderr
    if after == -1:
        assert int((tmp_path / 'calls').read_text()) == 4


def outcome(kind, detail='', trouble=''):
    return cases.Outcome(kind, 'case', 1.0, 0, detail, trouble)


def test_a_run_passes_only_if_everything_held_and_every_kind_ran():
    held, covered = [outcome('a'), outcome('b')], {'a': cases.Coverage(1, 5), 'b': cases.Coverage(1, 1)}
    assert cases.all_held(held, covered)
    assert not cases.all_held([*held, outcome('a', detail='wrong')], covered)
    assert not cases.all_held([*held, outcome('a', trouble='hang')], covered)
    assert not cases.all_held(held, covered | {'c': cases.Coverage(0, 1)})
    assert [c.complete for c in (*covered.values(), cases.Coverage(0, 0))] == [False, True, False]


def test_the_table_counts_each_trouble():
    found = [outcome('a'), outcome('a', 'x', 'hang'), outcome('a', 'x', 'abort'), outcome('a', 'x', 'traceback')]
    assert cases.table(found, {'a': cases.Coverage(4, 9)}).splitlines()[-1] == '| a | 4 of 9 | 1 | 3 | 1 | 1 | 1 |'
    assert cases.record(found, {'a': cases.Coverage(4, 9)}, {})['kinds']['a']['hangs'] == 1


def test_every_kind_has_cases_of_different_names():
    for kind, (_, list_cases) in chaos.KINDS.items():
        names = [case.name for case in list_cases()]
        assert len(set(names)) == len(names), kind


def test_the_minimum_of_a_kind_is_the_number_of_its_outcomes():
    minimum = chaos.Schedule(['disk'], seed=0, minutes=1).minimum
    assert minimum['kill'] == 100
    for kind in ('signal', 'disk', 'file', 'entry point'):
        assert minimum[kind] == len(chaos.KINDS[kind][1]())


def run_schedule(schedule, seconds_a_case, now=0.0):
    """Seconds and outcomes by kind; every case takes as long and has one outcome."""
    spent: dict[str, float] = {}
    while drawn := schedule.next(now):
        now += seconds_a_case
        spent[drawn[0]] = spent.get(drawn[0], 0.0) + seconds_a_case
        schedule.note(drawn[0], seconds_a_case, 1)
    return spent


def test_time_is_divided_over_the_kinds_and_each_runs_once():
    kinds = ['kill', 'signal', 'disk']
    spent = run_schedule(chaos.Schedule(kinds, seed=0, minutes=10), 10.0)
    assert sum(spent.values()) <= 600 + 10
    shares = {kind: chaos.KINDS[kind][0] / sum(chaos.KINDS[k][0] for k in kinds) for kind in kinds}
    for kind in kinds:
        assert abs(spent[kind] - shares[kind] * 600) <= 20
    assert set(run_schedule(chaos.Schedule(kinds, seed=0, minutes=1), 1.0, now=1e9)) == set(kinds)


def test_what_a_complete_run_still_misses_comes_first():
    kinds = ['kill', 'signal', 'disk']
    schedule = chaos.Schedule(kinds, seed=0, minutes=10)
    missing = sum(schedule.minimum[kind] for kind in kinds)
    spent = run_schedule(schedule, 600 / missing)  # just enough for all of them
    assert {kind: round(seconds * missing / 600) for kind, seconds in spent.items()} == {
        kind: schedule.minimum[kind] for kind in kinds
    }


def test_several_threads_share_one_schedule(tmp_path, monkeypatch):
    running, most, lock = 0, 0, threading.Lock()

    class Slow:
        def __init__(self, number):
            self.name = f'case {number}'

        def run(self, ground):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.05)
            with lock:
                running -= 1
            yield cases.Outcome('slow', self.name, 0.05, 0)

    monkeypatch.setattr(chaos, 'KINDS', {'slow': (1.0, lambda: [Slow(i) for i in range(12)])})
    monkeypatch.setattr(chaos, 'measure_lifetime', lambda ground: None)
    schedule = chaos.Schedule(['slow'], seed=0, minutes=1, jobs=3)
    found = chaos.run_schedule(schedule, cases.Ground(tmp_path, 0), lambda: 0.0, 3)
    assert sorted(outcome.case for outcome in found) == sorted(f'case {i}' for i in range(12))
    assert 2 <= most <= 3
