"""Whole programs: `areal-serve` behind JetStream, a run that trains with it, and one whose server is killed."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.rollout.jetstream.rig import Talk, grpc_channel, needs_jetstream

pytestmark = [pytest.mark.slow, needs_jetstream]
ROOT = pathlib.Path(__file__).parents[2]
TINY = ['--config=configs/tiny_cpu.py', '--config.rollout.server=jetstream']
PLAIN = ['--config.telemetry.plots=False', '--config.telemetry.tensorboard=False']


def read_events(workdir, kind):
    path = workdir / 'events.jsonl'
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for line in lines if line.endswith('}') and (event := json.loads(line))['kind'] == kind]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('run') / 'run'
    flags = [*TINY, *PLAIN, '--config.publication.channel=files', '--config.run.steps=4', f'--workdir={workdir}']
    done = subprocess.run(
        [sys.executable, '-m', 'launch.local', *flags], cwd=ROOT, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    return done, workdir


def test_a_run_trains_with_a_server_behind_jetstream(trained):
    done, workdir = trained
    assert done.returncode == 0, done.stderr
    report = json.loads((workdir / 'report.json').read_text())
    assert report['finished']
    metrics = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    differences = [one['mismatch/mean_abs'] for one in metrics if 'mismatch/mean_abs' in one]
    assert differences
    assert max(differences) < 1e-5  # log-probs of the server against the learner's, on tokens of the current version


def test_areal_serve_answers_and_ends_when_it_is_told_to(tmp_path):
    command = [sys.executable, '-m', 'areal_jax.main_serve', *TINY, '--port=0']
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            lines = iter(server.stdout.readline, '')
            url = next(line for line in lines if line.startswith('serving')).split()[-1]

            async def script():
                async with asyncio.timeout(60), grpc_channel(url) as channel:
                    talk = Talk(channel)
                    return [await talk.read(talk.decode(text=text, new=5)) for text in ('ab=', 'ba=')]

            answers = asyncio.run(script())
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
        finally:
            server.kill()
    assert all(1 <= len(ids) <= 5 for ids, _ in answers)


def test_a_server_that_is_killed_comes_back_and_no_answer_is_lost(tmp_path):
    workdir = tmp_path / 'run'
    flags = [*TINY, *PLAIN, '--config.publication.channel=files', '--config.run.steps=12', f'--workdir={workdir}']
    with subprocess.Popen([sys.executable, '-m', 'launch.local', *flags], cwd=ROOT, stdout=subprocess.DEVNULL) as run:
        try:
            end_s = time.monotonic() + 120
            while len(read_events(workdir, 'consume')) < 2:
                assert time.monotonic() < end_s
                assert run.poll() is None
                time.sleep(0.05)
            (entry,) = (workdir / 'registry').glob('0.*.json')
            os.kill(json.loads(entry.read_text())['process'], signal.SIGKILL)
            assert run.wait(240) == 0
        finally:
            run.terminate()
    report = json.loads((workdir / 'report.json').read_text())
    assert report['finished']
    assert report['servers'][0]['starts'] == 2
    draws = [draw for event in read_events(workdir, 'consume') for draw in event['draws']]
    assert len(draws) == len(set(draws))  # every group once
