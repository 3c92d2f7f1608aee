"""What confined the code of a run: in its report when it has finished, was killed or resumed, and in its replay."""

from __future__ import annotations

import json

import pytest

from areal_jax import main_replay
from areal_jax.app.parts import task_builder
from areal_jax.app.run import loop
from areal_jax.app.run.reports import read_run, rebuild_report
from areal_jax.app.workdir.records import read_starts
from areal_jax.config import TrackedConfig
from areal_jax.errors import ExitCode
from areal_jax.report.pages.run_page import render_page
from areal_jax.report.report import build_report
from areal_jax.workers.sandbox.confinement import SandboxError, find_abi
from areal_jax.workers.sandbox.sandbox_trial import describe_sandbox, describe_unconfined
from tests.app.small import SmallRun, small_config, train_until_killed
from tests.telemetry.logs import two_facts, two_metrics, two_updates

SCORER = """
def score(problem, answer_text, finish_reason):
    try:
        open('/etc/passwd').close()
    except OSError:
        return float(finish_reason == 'stop')
    raise RuntimeError('nothing confines it')
"""
RECORD = {
    'level': 'landlock', 'landlock_abi': 7, 'user': 60_007, 'own_processes': False,
    'refused': ['list the root folder', 'open a socket'], 'allowed': ['fork'],
}  # fmt: skip
TOLD = (
    "The sandbox 'landlock' confines the code that the scorer runs (Landlock ABI 7, uid 60007). At the start it could "
    'not list the root folder, open a socket; it could fork.'
)


def test_a_report_tells_the_level_the_abi_and_the_self_test(tmp_path):
    report = build_report(two_updates(), two_metrics(), two_facts(sandbox=RECORD))
    assert report['sandbox'] == RECORD
    assert describe_sandbox(RECORD) == TOLD
    assert TOLD in render_page(report, [])
    for runners, words in (
        (['the tool python'], 'the code that the tool python runs (Landlock'),
        (['the scorer', 'the tool python'], 'the code that the scorer and the tool python run (Landlock'),
    ):
        assert words in describe_sandbox({**RECORD, 'runners': runners})
    assert build_report(two_updates(), two_metrics(), two_facts())['sandbox'] is None


@pytest.fixture
def fields(tmp_path, monkeypatch):
    """Of a run that is confined; the self-test is recorded, since it needs an interpreter that every user can read."""
    (tmp_path / 'scorer.py').write_text(SCORER)
    monkeypatch.setattr(loop, 'try_scorer_sandbox', lambda config, try_out: RECORD)
    return {
        'task__reward': f'{tmp_path}/scorer.py:score', 'task__sandbox': 'landlock', 'task__verifier': 'process',
        'run__steps': 3, 'run__clock': 'real', 'checkpoint__every': 1,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')
def test_a_run_that_was_killed_and_resumed_tells_it_and_a_replay_starts_no_process(fields, tmp_path, monkeypatch):
    workdir, out = tmp_path / 'run', tmp_path / 'out'
    train_until_killed(SmallRun(workdir, **fields), 2)
    rebuild_report(workdir, plots=False)
    assert read_run(workdir).report['sandbox'] == RECORD
    assert TOLD in (workdir / 'report.md').read_text()
    report = SmallRun(workdir, resume=True, **fields).train()
    assert json.loads((workdir / 'report.json').read_text())['sandbox'] == RECORD
    assert report.report['sandbox'] == RECORD
    monkeypatch.undo()
    refuse = lambda *arguments, **options: pytest.fail('a replay starts no process')
    for module in ('sandbox.sandbox_trial', 'worker_process'):
        monkeypatch.setattr(f'areal_jax.workers.{module}.wrap_command', refuse)
    assert main_replay.main([f'--workdir={workdir}', f'--out={out}']) == ExitCode.FINISHED
    assert json.loads((out / 'report.json').read_text())['sandbox'] == RECORD
    assert [start['sandbox'] for start in read_starts((out / 'starts.json').read_bytes(), '')] == [RECORD, RECORD]


def test_a_level_that_does_not_work_ends_the_start(tmp_path, monkeypatch):
    def refuse(level, packages):
        raise SandboxError(f'{level} is not here')

    (tmp_path / 'scorer.py').write_text(SCORER)
    monkeypatch.setattr(
        loop, 'try_scorer_sandbox', lambda config, try_out: task_builder.try_scorer_sandbox(config, refuse)
    )
    fields = {'task__reward': f'{tmp_path}/scorer.py:score', 'task__verifier': 'process'}
    with pytest.raises(SandboxError, match=r'^bubblewrap is not here$'):
        SmallRun(tmp_path / 'run', task__sandbox='bubblewrap', **fields)


def test_the_self_test_is_made_where_a_scorer_runs_code(capsys):
    def ask(**values):
        tried = []
        config = TrackedConfig(small_config(task__verifier='process', **values))
        record = task_builder.try_scorer_sandbox(
            config, lambda *asked: tried.append(asked) or {**RECORD, 'level': asked[0]}
        )
        return tried, record and record['level']

    assert ask() == ([], None)
    assert ask(task__reward='my.py:score') == ([], None)
    assert ask(task__reward='my.py:score', task__sandbox='bubblewrap') == ([('bubblewrap', ())], 'bubblewrap')
    assert ask(task__name='code') == ([('landlock', ('numpy',))], 'landlock')
    assert ask(task__name='code', task__packages=()) == ([('landlock', ())], 'landlock')
    assert ask(agent__tools=('python',)) == ([('landlock', ('numpy',))], 'landlock')
    assert ask(agent__tools=('python',), task__sandbox='bubblewrap') == ([('bubblewrap', ('numpy',))], 'bubblewrap')
    capsys.readouterr()
    assert ask(task__name='code', task__sandbox='none') == ([], 'none')
    assert capsys.readouterr().out == f'{describe_sandbox(describe_unconfined())}\n'
