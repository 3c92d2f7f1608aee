"""How the entry point ends as a real process: bugs, nothing trained, a second run, signals while it builds."""

import importlib
import json
import signal
import subprocess
import sys
import time

import pytest

from areal_jax.app.process.ending import RESUME, end_command
from tests.app.test_main_train import QUICK, ROOT, command, environment, train

FEW = [*QUICK, '--config.run.steps=3']
# the learner fails in its second update, while the engine decodes
BROKEN = """
import sys
from areal_jax import main_train
from areal_jax.learning.learner import SpmdLearner

update = SpmdLearner.update

def fail(self, groups, version):
    if version == 1:
        raise RuntimeError('injected into the learner')
    return update(self, groups, version)

SpmdLearner.update = fail
main_train.run()
"""


@pytest.mark.slow
def test_a_bug_shows_its_traceback_and_ends_with_1(tmp_path):
    arguments = command(tmp_path, *FEW)[3:]
    done = subprocess.run(
        [sys.executable, '-c', BROKEN, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert 'RuntimeError: injected into the learner' in done.stderr
    assert 'in fail' in done.stderr  # the traceback of the lane's thread
    assert 'terminate called' not in done.stderr
    assert json.loads((tmp_path / 'events.jsonl').read_text().splitlines()[-1])['kind'] == 'error'


@pytest.mark.parametrize(
    ('applied', 'skipped', 'code', 'said'),
    [(3, 1, 0, ''), (0, 2, 3, 'all 2 were skipped'), (0, 0, 3, 'no update held a token to train')],
)
@pytest.mark.parametrize(
    'command', ['areal_jax.main_train', 'areal_jax.app.roles.controller_role']
)  # of a learner here, and of a controller
def test_a_finished_run_is_judged_by_its_optimizer_steps(capsys, command, applied, skipped, code, said):
    module = importlib.import_module(command)
    report = {'steps': 4, 'optimizer_steps': {'applied': applied, 'skipped': skipped}}
    assert module.judge_training(report) == code
    assert said in capsys.readouterr().err


def test_a_run_without_an_optimizer_step_says_so_and_ends_with_3(tmp_path):
    questions = tmp_path / 'unanswerable.jsonl'  # the model has no digits, so every reward is 0 and nothing is trained
    lines = [{'question': a + b + c + '=', 'answer': '1'} for a in 'ab' for b in 'ab' for c in 'ab']
    questions.write_text('\n'.join(json.dumps(line) for line in lines))
    task = ['--config.task.name=jsonl', f'--config.task.path={questions}']
    done = train(tmp_path / 'run', *FEW, *task)
    assert done.returncode == 3, done.stderr
    assert 'error: 3 updates made no optimizer step' in done.stderr


def test_a_second_run_in_a_workdir_is_refused_while_the_first_one_lives(tmp_path):
    first = subprocess.Popen(command(tmp_path, *QUICK), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / 'config.json').exists():
            assert first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGSTOP)  # it lives, and takes no time from the others
        for resume in ([], ['--resume']):
            second = train(tmp_path, *QUICK, *resume)
            assert second.returncode == 2
            assert f'is in use by process {first.pid} on' in second.stderr
    finally:
        first.kill()
        first.communicate()


@pytest.mark.parametrize('after_s', [0.5, 3.0])
def test_a_signal_while_it_builds_ends_it_with_75(tmp_path, after_s):
    process = subprocess.Popen(
        command(tmp_path, *FEW), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (75, '')


def test_a_process_whose_output_was_closed_keeps_its_exit_code():
    program = 'import sys; from areal_jax.app.process.ending import ProcessEnd; sys.exit(ProcessEnd().note(3))'
    done = subprocess.run(
        ['sh', '-c', 'exec "$@" >&-', 'sh', sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (3, '')


@pytest.mark.parametrize(('again', 'said'), [('', 'error: stopped\n'), (RESUME, f'error: stopped; {RESUME}\n')])
def test_a_command_that_was_stopped_at_once_names_resume_only_where_it_has_it(capsys, again, said):
    def stop():
        raise KeyboardInterrupt

    assert end_command(stop, doing='writing', again=again) == 75
    assert capsys.readouterr().err == said
