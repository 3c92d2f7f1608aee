"""A machine that is lost: train, kill -9, delete its directory, resume, evaluate and export from S3 (moto's server)."""

from __future__ import annotations

import importlib
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from areal_jax.checkpoint.mirror import Mirror
from areal_jax.checkpoint.store import CheckpointStore
from tests.app.workdir.s3_server import FAULTS, serve_s3

pytestmark = pytest.mark.slow
for _package in ('moto.server', 's3fs'):
    pytest.importorskip(_package, reason='bash launch/test_mirror.sh installs moto and s3fs, and runs this file')

ADDRESS = 's3://bucket/runs/tiny'
_STEPS = 6
_FIELDS = (
    *(
        'run.clock=virtual',
        f'run.steps={_STEPS}',
        'checkpoint.every=1',
        f'run.mirror={ADDRESS}',
    ),
    *('telemetry.plots=False', 'telemetry.progress=False'),
)
_SECONDS = 900.0  # of a process, on a machine that does other things too


@pytest.fixture
def server(monkeypatch):
    logging.getLogger('werkzeug').setLevel(logging.ERROR)  # a line a request
    importlib.import_module('s3fs').S3FileSystem.clear_instance_cache()  # one has the server of another test
    with serve_s3() as faulty:
        for name, value in {
            'AWS_ENDPOINT_URL': faulty.url,
            'AWS_ACCESS_KEY_ID': 'a',
            'AWS_SECRET_ACCESS_KEY': 'b',
            'AWS_DEFAULT_REGION': 'us-east-1',
        }.items():
            monkeypatch.setenv(name, value)
        yield faulty


def start(program, *words, **settings):
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    return subprocess.Popen([sys.executable, '-m', f'areal_jax.{program}', *words], **pipes, **settings)


def run(program, *words, **settings):
    process = start(program, *words, **settings)
    output, errors = process.communicate(timeout=_SECONDS)
    return process.returncode, output, errors


def train_words(workdir, *words):
    fields = [f'--config.{field}' for field in _FIELDS]
    return ['--config=configs/tiny_cpu.py', f'--workdir={workdir}', *fields, *words]


def await_true(condition, process):
    end_s = time.monotonic() + _SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.02)


def read_report(workdir):
    return json.loads((workdir / 'report.json').read_text())


def test_a_run_whose_machine_is_lost_continues_from_s3(server, tmp_path):
    workdir, cache = tmp_path / 'run', {**os.environ, 'XDG_CACHE_HOME': str(tmp_path / 'cache')}
    (tmp_path / 'cache' / 'areal_jax').mkdir(parents=True)
    for kernels in (pathlib.Path.home() / '.cache' / 'areal_jax').glob('*.so'):  # compiled in a minute
        (tmp_path / 'cache' / 'areal_jax' / kernels.name).symlink_to(kernels)
    process = start('main_train', *train_words(workdir))
    await_true(lambda: len(Mirror(ADDRESS).steps()) > 1, process)
    process.kill()
    process.wait()
    newest = Mirror(ADDRESS).steps()[-1]
    assert int(newest.split('_')[1]) < _STEPS
    local = shutil.copytree(workdir, tmp_path / 'local')
    for _, path in CheckpointStore(local / 'checkpoints').saves():
        if path.name > newest:
            shutil.rmtree(path)
    shutil.rmtree(workdir)

    code, output, errors = run('main_train', *train_words(workdir, '--resume'))
    assert (code, errors) == (0, '')
    assert f'fetched {newest} from {ADDRESS}' in output
    code, _, errors = run('main_train', *train_words(local, '--resume', '--config.run.mirror='))
    assert (code, errors) == (0, '')
    assert read_report(workdir)['weights_sha256'] == read_report(local)['weights_sha256']
    for name in ('events.jsonl', 'metrics.jsonl'):
        assert (workdir / name).read_bytes() == (local / name).read_bytes()

    shutil.rmtree(workdir)
    out = tmp_path / 'export'
    code, _, errors = run('main_export', f'--workdir={ADDRESS}', f'--out={out}', env=cache)
    assert code == 0, errors
    assert (out / 'model.safetensors').read_bytes() == (local / 'export' / 'model.safetensors').read_bytes()
    scores = []
    for model in (ADDRESS, str(local)):
        place = tmp_path / f'scores{len(scores)}'
        words = ('--config=configs/tiny_cpu.py', f'--workdir={place}', f'--model={model}')
        code, _, errors = run('main_eval', *words, env=cache)
        assert code == 0, errors
        scores.append([json.loads(line) for line in (place / 'answers.jsonl').read_text().splitlines()])
    assert [row['answers'] for row in scores[0]] == [row['answers'] for row in scores[1]]


@pytest.mark.parametrize('fault', FAULTS)
def test_a_run_continues_while_uploads_fail_and_its_mirror_is_whole_at_the_end(server, tmp_path, fault):
    server.fault, errors = fault, tmp_path / 'errors'
    with errors.open('w') as file:
        process = subprocess.Popen(
            [sys.executable, '-m', 'areal_jax.main_train', *train_words(tmp_path / 'run')], stderr=file
        )
    await_true(lambda: 'lacks' in errors.read_text(), process)
    assert Mirror(ADDRESS).steps() == []
    server.fault = ''
    assert process.wait(_SECONDS) == 0
    lines = errors.read_text().splitlines()
    print(*lines, sep='\n')
    assert all(line.startswith(f'warning: run.mirror={ADDRESS} lacks step_') for line in lines)
    assert all(line.endswith('; the run goes on, and the next checkpoint tries again') for line in lines)
    assert Mirror(ADDRESS).steps()[-1] == f'step_{_STEPS:08d}'
    assert Mirror(ADDRESS).read_record('finished').step == _STEPS


def test_a_bucket_that_is_not_there_is_a_warning_and_at_the_end_an_error(server, tmp_path):
    words = train_words(tmp_path / 'run', '--config.run.mirror=s3://other/run', '--config.run.steps=1')
    code, _, errors = run('main_train', *words)
    *warnings, error = errors.splitlines()
    print(errors)
    assert code == 2
    assert all('The specified bucket does not exist' in line for line in warnings)
    assert error.startswith('error: the run has finished and its report is in')
    assert read_report(tmp_path / 'run')['steps'] == 1
