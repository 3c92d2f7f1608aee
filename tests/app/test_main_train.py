"""The entry point as its user meets it: the tiny run, Ctrl-C and kill -9 with --resume, and bad input."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import areal_jax
from areal_jax.errors import UserError
from tests.control.test_controller import assert_conserved

ROOT = pathlib.Path(__file__).parents[2]
QUICK = [
    '--config.evaluation.problems=2', '--config.evaluation.samples=2', '--config.telemetry.plots=False',
    '--config.telemetry.tensorboard=False',
]  # fmt: skip


def command(workdir, *arguments, config='configs/tiny_cpu.py'):
    return [sys.executable, '-m', 'areal_jax.main_train', f'--config={config}', f'--workdir={workdir}', *arguments]


def environment():
    """One device, as a user has; what is started compiles as quickly as the tests."""
    flags = [flag for flag in os.environ.get('XLA_FLAGS', '').split() if 'device_count' not in flag]
    return os.environ | {'XLA_FLAGS': ' '.join(flags)}


def train(workdir, *arguments, **options):
    return subprocess.run(
        command(workdir, *arguments, **options),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def wait_for_steps(workdir, steps, process):
    """And for a whole checkpoint."""
    end = time.monotonic() + 120
    metrics = workdir / 'metrics.jsonl'
    while (
        not metrics.exists()
        or len(metrics.read_text().splitlines()) < steps
        or not any((workdir / 'checkpoints').glob('step_*'))
    ):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def events(workdir):
    return [json.loads(line) for line in (workdir / 'events.jsonl').read_text().splitlines()]


REPORT_KEYS = {
    'steps', 'wall_seconds', 'groups', 'tokens', 'reward', 'accuracy', 'token_age', 'versions_per_trajectory',
    'interruptions', 'steps_with_interruption', 'publish_pause_seconds', 'mismatch', 'throughput', 'busy', 'time',
    'compilations', 'peak_memory_bytes', 'event_loop_lag_seconds', 'weights_sha256', 'git_commit', 'versions',
}  # fmt: skip


def test_the_tiny_run_learns_and_leaves_what_it_promises(tmp_path):
    done = train(tmp_path, '--config.run.steps=50')  # of 200
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / 'report.json').read_text())
    assert report.keys() >= REPORT_KEYS
    assert report['accuracy']['sampled']['gain']['mean'] > 0.15  # 0.3 to 0.5; 4 problems make its interval wide
    assert report['reward']['last'] > report['reward']['first'] + 0.2
    assert report['interruptions'] > 0
    assert report['compilations'] == 0
    assert report['mismatch']['max'] < 1e-3
    assert_conserved(events(tmp_path))
    assert (
        report['groups']['trained'] + report['groups']['filtered']
        == 8 * report['steps']
        == sum(e['kind'] == 'draw' for e in events(tmp_path)) - sum(report['groups']['dropped'].values())
    )
    for name in ['config.json', 'metrics.jsonl', 'timeline.json', 'report.md', 'plots/reward.png', 'tensorboard']:
        assert (tmp_path / name).exists(), name
    assert 'step' in done.stdout
    assert '# ' in done.stdout  # ends with the report


@pytest.mark.slow
@pytest.mark.parametrize('end', [signal.SIGINT, signal.SIGKILL], ids=['ctrl-c', 'kill -9'])
def test_a_run_that_was_ended_resumes(tmp_path, end):
    options = [*QUICK, '--config.run.steps=60', '--config.checkpoint.every=5']
    process = subprocess.Popen(
        command(tmp_path, *options), cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE
    )
    wait_for_steps(tmp_path, 8, process)
    process.send_signal(end)
    output, _ = process.communicate(timeout=60)
    if end == signal.SIGINT:
        assert process.returncode == 75
        assert '--resume goes on from' in output
    done = train(tmp_path, '--resume', *options)
    assert done.returncode == 0, done.stderr
    assert 'resumed after update' in done.stdout
    metrics = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert [m['step'] for m in metrics] == list(range(1, 61))
    counts = assert_conserved(events(tmp_path))
    assert counts == {'trained': 60 * 8}
    assert [e['seq'] for e in events(tmp_path)] == list(range(len(events(tmp_path))))


BAD = {
    'unread field': (['--config.task.datasets=("chain_sum",)'], 'set but never read: task.datasets'),
    'mesh too large': (
        ['--config.cluster.learner=fsdp=4', '--config.learner.rows_per_microbatch=4'],
        "cluster.learner='fsdp=4' needs 4 devices; the platform 'cpu' has",
    ),
}


@pytest.mark.parametrize('case', ['unread field', pytest.param('mesh too large', marks=pytest.mark.slow)])
def test_bad_input_is_one_sentence_and_a_failing_exit_code(tmp_path, case):
    arguments, message = BAD[case]
    done = train(tmp_path, *arguments)
    assert done.returncode == 2, done.stdout
    error = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
    assert len(error) == 1
    assert message in error[0]
    assert 'Traceback' not in done.stderr


def test_a_workdir_with_a_run_is_not_overwritten(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n')
    with pytest.raises(UserError, match='holds a run already'):
        areal_jax.train('tiny_cpu', tmp_path)
    assert (tmp_path / 'metrics.jsonl').read_text() == '{"step": 1}\n'


@pytest.mark.slow
def test_a_workdir_can_be_used_again_once_the_config_is_mended(tmp_path):
    assert train(tmp_path, '--config.task.datasets=("chain_sum",)').returncode == 2
    done = train(tmp_path, *QUICK, '--config.run.steps=2')
    assert done.returncode == 0, done.stderr
    assert events(tmp_path)[0]['seq'] == 0
    assert_conserved(events(tmp_path))


def test_resuming_with_another_config_names_the_fields(tmp_path):
    (tmp_path / 'config.json').write_text('{"run": {"seed": 7}}')
    with pytest.raises(UserError, match=r'run\.seed: 7 -> 0'):
        areal_jax.train('tiny_cpu', tmp_path, resume=True)
