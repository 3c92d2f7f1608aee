"""A run on code: what its checks came to stands in events, metrics and report; resumed and replayed alike."""

from __future__ import annotations

import json

import pytest

from areal_jax import main_replay
from areal_jax.app.run import loop
from areal_jax.errors import ExitCode
from areal_jax.labels import CODE
from areal_jax.tasks.task import TaskError
from areal_jax.telemetry.metrics import read_metrics
from areal_jax.workers.sandbox.confinement import find_abi
from tests.app.run.test_sandboxed_run import RECORD
from tests.app.small import SmallRun, start_killed_and_resumed

pytestmark = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')
# every answer of the random model is a word: it is a name, and so it compiles, raises, or is no code
ROWS = [
    {'question': letter * 3, 'tests': [{'input': '', 'output': ''}], 'hidden_tests': [{'input': '', 'output': 'x'}]}
    for letter in 'abcdabcd'
]


@pytest.fixture
def fields(tmp_path, monkeypatch):
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, ROWS)))
    monkeypatch.setattr(loop, 'try_scorer_sandbox', lambda config, try_out: RECORD)
    return {
        'task__name': 'code', 'task__path': f'{tmp_path}/rows.jsonl', 'task__verifier': 'process',
        'task__held_out_fraction': 0.3, 'model__characters': 'abcdx=', 'run__steps': 3, 'run__clock': 'real',
        'checkpoint__every': 1,
    }  # fmt: skip


def test_a_problem_whose_checks_its_deadline_would_end_ends_the_start(fields, tmp_path):
    (tmp_path / 'rows.jsonl').write_text('\n'.join(json.dumps(row | {'time_limit_s': 10}) for row in ROWS))
    with pytest.raises(TaskError, match=r'rows.jsonl:1: time_limit_s=10 .*verifier_deadline_s=20 .* to 66.7 or more'):
        SmallRun(tmp_path / 'run', **fields)


@pytest.mark.slow
def test_a_killed_run_on_code_goes_on_and_is_replayed_without_running_any(fields, tmp_path, monkeypatch):
    workdir, out = tmp_path / 'run', tmp_path / 'out'
    run = start_killed_and_resumed(workdir, 2, **fields).train()
    found = run.report['code']
    assert sum(shares['mean'] for shares in found['labels'].values()) == pytest.approx(1.0)
    assert found['cpu_seconds'] > 0
    checks = [event for event in run.events if event['kind'] == 'check']
    assert len(checks) == sum(event['kind'] == 'reward' for event in run.events)
    measured = [line for line in read_metrics(workdir / 'metrics.jsonl') if 'code/cpu_s' in line]
    assert measured
    for line in measured:
        assert sum(line[f'code/{label}'] for label in ('ok', *CODE)) == pytest.approx(1.0)
    assert 'answers of code' in (workdir / 'report.md').read_text()
    monkeypatch.undo()
    refuse = lambda *arguments, **options: pytest.fail('a replay starts no process')
    monkeypatch.setattr('areal_jax.workers.worker_process.wrap_command', refuse)
    assert main_replay.main([f'--workdir={workdir}', f'--out={out}']) == ExitCode.FINISHED
    assert json.loads((out / 'report.json').read_text())['code'] == found
