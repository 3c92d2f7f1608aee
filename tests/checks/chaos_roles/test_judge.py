"""What is found in the workdir of a run that was struck, and in what its launcher said."""

import dataclasses
import json

import numpy as np
import pytest

from checks.chaos_roles import __main__ as chaos
from checks.chaos_roles.judge import (
    Calm,
    Judgement,
    check_end,
    check_first_requests,
    check_resumes,
    check_role_logs,
    compare_weights,
)
from checks.chaos_roles.plan import CELLS
from checks.chaos_roles.runs import Record
from checks.chaos_roles.state import Mark
from checks.processes import Ending

STEPS = 2


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A run that has finished well; its event log is checked elsewhere."""
    for name in ('logs', 'export', 'publication', f'checkpoints/step_{STEPS:08d}'):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / 'report.json').write_text('{}')
    (tmp_path / 'metrics.jsonl').write_text(''.join(f'{{"step": {step}}}\n' for step in (1, 2)))
    (tmp_path / 'export' / 'areal_jax.json').write_text(json.dumps({'step': STEPS}))
    (tmp_path / 'logs' / 'learner-1.1.log').write_text('error: the controller is gone\n')
    monkeypatch.setattr('checks.logs.check_events', lambda *_: [])
    monkeypatch.setattr('checks.logs.check_with_commands', lambda _: [])
    return Record(tmp_path, (), (), (), Ending(0, 60.0, 'learner-1 was ended by SIGKILL after 9 s', ''), ())


def test_a_good_end_holds(record):
    assert check_end(record, STEPS) == []


@pytest.mark.parametrize(('ending', 'says'), [
    (Ending(75, 60.0, '', ''), 'exit code 75, expected 0'),
    (Ending(None, 480.0, '', ''), 'no end after 480 s'),
    (Ending(0, 60.0, 'controller-0 ended with code 1 after 9 s: all start again', ''), 'the launcher says: controller'),
    (Ending(0, 60.0, 'learner-0 was ended by SIGABRT after 9 s', ''), 'the launcher says: learner-0 was ended by'),
])  # fmt: skip
def test_a_bad_end_is_named(record, ending, says):
    found = check_end(dataclasses.replace(record, ending=ending), STEPS)
    assert any(says in violation for violation in found), found


def test_an_orphan_is_named(record):
    assert check_end(dataclasses.replace(record, orphans=['orphan 7: python']), STEPS) == ['orphan 7: python']


@pytest.mark.parametrize(('change', 'says'), [
    (lambda workdir: (workdir / 'report.json').unlink(), 'report.json'),
    (lambda workdir: (workdir / 'publication' / '.v000002.partial').mkdir(), '.v000002.partial was left behind'),
    (lambda workdir: (workdir / 'checkpoints' / '.step_00000002.partial').mkdir(), '.step_00000002.partial was left'),
    (lambda workdir: (workdir / 'export' / 'areal_jax.json').write_text('{"step": 1}'), 'no export of update 2'),
    (lambda workdir: (workdir / 'metrics.jsonl').write_text('{"step": 1}\n' * 2), 'metrics.jsonl: updates 1, 1'),
    (lambda workdir: (workdir / 'checkpoints' / 'step_00000002').rmdir(), 'the newest checkpoint is of update None'),
])  # fmt: skip
def test_what_a_run_left_wrong_is_named(record, change, says):
    change(record.workdir)
    found = check_end(record, STEPS)
    assert any(says in violation for violation in found), found


@pytest.mark.parametrize('text', ['Traceback (most recent call last):\n  x\nKeyError: 3\n', 'terminate called\n'])
def test_a_role_that_broke_is_named(record, text):
    (record.workdir / 'logs' / 'engine-0.2.log').write_text(f'compiled\n{text}')
    (violation,) = check_role_logs(record.workdir)
    assert violation.startswith('engine-0.2.log: ')
    assert text.splitlines()[-1] in violation


def test_a_learner_that_jax_ended_is_none(record):
    said = 'F1123 client.h:80] Terminating process because the JAX distributed service detected fatal errors.'
    (record.workdir / 'logs' / 'learner-1.2.log').write_text(f'{said}\nFatal Python error: Aborted\n')
    assert check_role_logs(record.workdir) == []


def event(kind, **fields):
    return Mark(0.0, 'event', event={'kind': kind, 'seq': 5, **fields})


def test_a_request_before_all_engines_serve_is_named():
    serving = [event('engine_state', engine=f'engine/{n}', state='serving') for n in (0, 1)]
    gone = event('engine_state', engine='engine/0', state='gone')
    log, route = event('log'), event('route')
    assert check_first_requests([log, *serving, route, gone, route]) == []  # only the first request has to wait
    for early in ([log, serving[0], route], [log, *serving, gone, route], [log, *serving, route, log, route]):
        assert 'of 2 engines serve' in check_first_requests(early)[0]


def test_a_controller_that_lost_a_checkpoint_is_named(record):
    marks = [Mark(0.0, 'start', 'controller-0', 1), Mark(1.0, 'start', 'controller-0', 2, 3)]
    log = record.workdir / 'logs' / 'controller-0.2.log'
    log.write_text('resumed after update 3 from x\ncompiled 7 programs in 3 s\n')
    assert check_resumes(record.workdir, marks) == []
    log.write_text('compiled 7 programs in 3 s\n')
    assert check_resumes(record.workdir, marks)[0].startswith('start 2: it went on after update 0: updates lost')
    log.write_text('')  # it did not come so far
    assert check_resumes(record.workdir, marks) == []


def test_weights_that_differ_are_named():
    weights = {'a': np.zeros(3, np.float32), 'b': np.ones(2, np.float32)}
    assert compare_weights(weights, {name: w + np.float32(1e-6) for name, w in weights.items()}) == []
    for other in (weights | {'b': weights['b'] + 1e-5}, weights | {'b': weights['b'] * np.nan}):
        assert compare_weights(other, weights)[0].startswith('b differs from that of one process by')
    assert compare_weights({'a': weights['a']}, weights) == ["weights of other names: ['b']"]


def test_a_pass_is_green_when_all_held_and_each_kind_was_met(capsys):
    whole = chaos.Found(Calm(None, 1.0, True, []), [Judgement(60.0, 0, (), ())], list(CELLS), [])
    assert whole.passed
    assert whole.record()['complete']
    few = dataclasses.replace(whole, met=[cell for cell in CELLS if cell.phase != 'swap'])
    assert (few.passed, few.missing) == (False, ['swap'])
    uncompared = dataclasses.replace(whole, calm=Calm(None, 1.0, False, []))
    assert (uncompared.passed, uncompared.missing) == (False, [chaos.WEIGHTS])
    for broken in (dataclasses.replace(whole, runs=[Judgement(60.0, 1, (), ('x',))]),
                   dataclasses.replace(whole, calm=Calm(None, 1.0, True, ['x']))):  # fmt: skip
        assert not broken.passed


def test_no_time_covers_nothing_and_says_so(tmp_path, capsys):
    assert chaos.main(['--minutes=0', f'--json={tmp_path / "found.json"}']) == 1
    found = json.loads((tmp_path / 'found.json').read_text())
    assert (found['passed'], found['runs'], found['violations']) == (False, [], [])
    assert set(found['missing']) >= {'engine', 'SIGSTOP', 'save', chaos.WEIGHTS}
    assert 'not covered: controller, learner, engine' in capsys.readouterr().out
