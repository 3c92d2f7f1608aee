"""Whole runs in roles: they survive their processes, and without a kill their weights are those of one process."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_jax.registry import read_entries
from checks.logs import check_with_commands
from checks.processes import is_alive

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = '--config=configs/tiny_cpu.py'
FIELDS = {
    'rollout.server': 'own', 'publication.channel': 'files', 'cluster.engines': '2 x tensor=1',
    'learner.rows_per_microbatch': 4, 'rollout.prefill_buckets': (256,),
    'telemetry.tensorboard': False, 'telemetry.plots': False, 'distributed.command_deadline_s': 300,
}  # fmt: skip
# importing jax raises ImportError in a controller
NO_JAX = """
import sys
with open('/proc/self/cmdline') as file:
    if '--role=controller' in file.read().split('\\0'):
        sys.modules['jax'] = None
"""


class Launched:
    """A run under launch.local; a context manager that leaves no process. A field of None is left out."""

    def __init__(self, workdir, *flags, devices=1, **fields):
        workdir.mkdir(exist_ok=True)
        self.workdir, modules = workdir, workdir.parent / 'modules'
        modules.mkdir(exist_ok=True)
        (modules / 'sitecustomize.py').write_text(NO_JAX)
        chosen = FIELDS | {name.replace('__', '.'): value for name, value in fields.items()}
        if 'hosts=' not in chosen['cluster.learner']:
            del chosen['distributed.command_deadline_s']
        overrides = [f'--config.{name}={value}' for name, value in chosen.items() if value is not None]
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'launch.local', CONFIG, f'--workdir={workdir}', *overrides, *flags],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={
                **os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(modules),
                'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
            },
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def finish(self, timeout_s=500):
        output, _ = self._process.communicate(timeout=timeout_s)
        return self._process.returncode, output

    def events(self, kind=None):
        path = self.workdir / 'events.jsonl'
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith('}')]
        return [event for event in found if kind in (None, event['kind'])]

    def await_publications(self, count, timeout_s=300):
        end_s = time.monotonic() + timeout_s
        while len(self.events('publish')) < count:
            assert self._process.poll() is None, self._process.stdout.read()
            assert time.monotonic() < end_s, f'waited for {count} publications'
            time.sleep(0.1)

    def kill(self, name, number=signal.SIGKILL):
        (entry,) = [entry for entry in read_entries(self.workdir) if entry.name == name]
        os.kill(entry.process, number)


@pytest.mark.slow
def test_a_run_survives_its_roles(tmp_path):
    fields = {'run__steps': 16, 'checkpoint__every': 2, 'evaluation__problems': 2, 'evaluation__samples': 2}
    with Launched(tmp_path / 'run', cluster__learner='hosts=2 x data=4', **fields) as run:
        run.await_publications(3)
        run.kill('engine-1')
        run.await_publications(5)
        run.kill('learner-1')
        run.await_publications(9)
        run.kill('controller-0')
        code, output = run.finish()
    assert code == 0, output
    assert json.loads((run.workdir / 'report.json').read_text())['steps'] == 16
    assert (run.workdir / 'export' / 'model.safetensors').exists()
    assert 'learner-1 was ended by SIGKILL' in output
    assert 'controller-0 was ended by SIGKILL' in output
    assert output.count('controller and learners are started again') == 2
    logs = {path.name for path in (run.workdir / 'logs').glob('*.log')}
    assert {'controller-0.3.log', 'learner-0.3.log', 'engine-1.2.log'} <= logs
    assert 'engine-0.2.log' not in logs  # it served on
    for restart in run.events('log'):  # nothing is generated before all engines hold the first weights
        later = [event for event in run.events() if event['seq'] > restart['seq']]
        first = next(event['seq'] for event in later if event['kind'] == 'route')
        states = [event for event in later if event['kind'] == 'engine_state' and event['seq'] < first]
        assert {event['engine'] for event in states if event['state'] == 'serving'} == {'engine/0', 'engine/1'}
    trained = [draw for event in run.events('consume') for draw in event['draws']]
    assert len(trained) == len(set(trained))
    assert [event['version'] for event in run.events('publish')] == list(range(1, 17))
    assert check_with_commands(run.workdir) == []
    assert not any(is_alive(entry.process) for entry in read_entries(run.workdir))


@pytest.mark.slow
def test_without_a_kill_the_weights_are_those_of_one_process(tmp_path):
    """To rounding: sums over processes are taken in another order than those over the devices of one.

    Adam divides a gradient by its size, so eps takes out the weights whose gradient is rounding.
    """
    fields = {'run__steps': 4, 'staleness__eta': 0, 'evaluation__problems': 0, 'optimizer__eps': 1e-4}
    exports = []
    for name, learner, devices in (('roles', 'hosts=2 x data=4', 1), ('one', 'data=4', 4)):
        with Launched(tmp_path / name, cluster__learner=learner, devices=devices, **fields) as run:
            code, output = run.finish()
        assert code == 0, output
        assert len(run.events('publish')) == 4
        exports.append(load_file(run.workdir / 'export' / 'model.safetensors'))
    in_roles, alone = exports
    assert in_roles.keys() == alone.keys()
    for name, weight in alone.items():  # four steps of Adam move a weight by up to 4e-3
        np.testing.assert_allclose(in_roles[name], weight, atol=4e-6, rtol=0, err_msg=name)


@pytest.mark.slow
def test_an_engine_that_is_evicted_comes_back(tmp_path, monkeypatch):
    """As on GKE: a signal ends it alone, and its code asks for another start."""
    monkeypatch.setenv('AREAL_JAX_STOPPED_CODE', '75')
    with Launched(tmp_path / 'run', cluster__learner='hosts=1 x data=1', run__steps=40) as run:
        run.await_publications(3)
        run.kill('engine-1', signal.SIGTERM)
        code, output = run.finish()
    assert code == 0, output
    assert 'server engine-1 ended with code 75' in output
    assert (run.workdir / 'logs' / 'engine-1.2.log').exists()


@pytest.mark.slow
def test_evaluation_and_export_run_beside_training(tmp_path):
    """Each in a process of its own; the scores of a version are those of its checkpoint."""
    fields = {
        'run__steps': 12, 'checkpoint__every': 2, 'run__export_every': 4, 'cluster__engines': '3 x tensor=1',
        'evaluation__problems': 8, 'evaluation__samples': 2, 'evaluation__every': 4, 'evaluation__every_problems': 8,
        'evaluation__engines': 1, 'checkpoint__keep': 9,
    }  # fmt: skip
    with Launched(tmp_path / 'run', cluster__learner='hosts=1 x data=1', **fields) as run:
        code, output = run.finish()
    assert code == 0, output
    assert {event['engine'] for event in run.events('route')} == {'engine/0', 'engine/1'}
    assert {event['engine'] for event in run.events('evaluation_receive')} == {'evaluation/2'}
    done = [event['version'] for event in run.events('evaluation_done')]
    assert done
    assert {path.name for path in (run.workdir / 'exports').iterdir()} == {'4', '8'}
    assert check_with_commands(run.workdir) == []
    curve = json.loads((run.workdir / 'report.json').read_text())['evaluation_curve']
    assert [row['version'] for row in curve] == done
    for row in curve:
        assert row['greedy']['mean'] == score_of_checkpoint(run.workdir, row['version'], tmp_path)
    assert not any(is_alive(entry.process) for entry in read_entries(run.workdir))


def score_of_checkpoint(workdir, version, folder):
    """Greedy accuracy of the version on the same problems."""
    out = folder / f'evaluation_{version}'
    command = [
        *(sys.executable, '-m', 'areal_jax.main_eval', CONFIG, f'--workdir={out}'),
        *(f'--model={workdir}/checkpoints/step_{version:08d}', '--config.evaluation.problems=8'),
        '--config.evaluation.samples=0',
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={**os.environ, 'JAX_PLATFORMS': 'cpu'})
    return json.loads((out / 'results.json').read_text())['metrics']['greedy']['mean']


@pytest.mark.slow
def test_weights_that_two_processes_send_train_as_their_files_do(tmp_path):
    """To rounding, which depends on which answers an engine prefills together; engines compute every digest again."""
    fields = {
        'run__steps': 4, 'staleness__eta': 0, 'evaluation__problems': 0, 'publication__dtype': 'bfloat16',
        'publication__verify': True, 'optimizer__eps': 1e-4, 'publication__base_every': 2,
        'cluster__learner': 'hosts=2 x data=2',
    }  # fmt: skip
    ways = {
        'files': {}, 'stream': {'publication__delta': True, 'publication__listen': 'own'},
        'shm': {'publication__delta': True},
    }  # fmt: skip
    exports = {}
    for channel, more in ways.items():
        with Launched(tmp_path / channel, publication__channel=channel, **fields, **more) as run:
            code, output = run.finish()
        assert code == 0, output
        exports[channel] = load_file(run.workdir / 'export' / 'model.safetensors')
        if more:
            sent = run.events('publish')
            assert [event['record'] for event in sent] == ['delta', 'whole', 'delta', 'whole'], sent
            assert all(event['bytes'] > 0 for event in sent)
    for name, weight in exports['files'].items():
        for channel in ('stream', 'shm'):
            np.testing.assert_allclose(exports[channel][name], weight, atol=4e-6, rtol=0, err_msg=f'{channel} {name}')
