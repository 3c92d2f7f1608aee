"""A sweep of real runs, ended on the way: killed arms end with the weights of runs that were started one by one."""

import json
import signal
import subprocess
import sys

import pytest

from tests.app.sweep.test_main_sweep import wait_for
from tests.app.sweep.toy_sweep import ROOT
from tests.app.test_main_train import environment, train

FILE = 'configs/sweeps/tiny.py'
QUICK = ['--config.run.steps=12', '--config.checkpoint.every=3', '--config.evaluation.problems=0']
ARMS = ['eta0_seed1', 'eta4_seed1']


def start(workdir):
    command = [sys.executable, '-m', 'areal_jax.main_sweep', f'--config={FILE}', f'--workdir={workdir}', '--jobs=2']
    return subprocess.Popen(
        [*command, '--only=*_seed1', *QUICK],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
@pytest.mark.parametrize(('number', 'code'), [(signal.SIGINT, 75), (signal.SIGKILL, -9)], ids=['ctrl-c', 'kill -9'])
def test_a_sweep_that_was_ended_goes_on(tmp_path, number, code):
    sweep = tmp_path / 'sweep'
    process = start(sweep)
    wait_for(lambda: any((sweep / ARMS[1] / 'checkpoints').glob('step_*')), process)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    process = start(sweep)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert f'{ARMS[1]} goes on' in output
    for name, eta in zip(ARMS, (0, 4), strict=True):
        options = [*QUICK, f'--config.staleness.eta={eta}', '--config.run.seed=1']
        done = train(tmp_path / name, *options, config=FILE)
        assert done.returncode == 0, done.stderr
        single, arm = (json.loads((path / name / 'report.json').read_text()) for path in (tmp_path, sweep))
        assert arm['steps'] == single['steps'] == 12
        if number == signal.SIGKILL:  # Ctrl-C saves at a moment of its own, where generation pauses
            assert arm['weights_sha256'] == single['weights_sha256']
    page = (sweep / 'results.md').read_text()
    assert '6 arms, of which 2 have finished' in page
    assert '| not started | 0 of 12 |' in page
