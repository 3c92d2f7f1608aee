"""A run whose answers come from servers in processes of their own, started by launch.local."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from areal_jax import main_check_log
from areal_jax.report.aggregates import conservation
from areal_jax.rollout.servers.server_entries import read_registry
from checks.chaos_roles.pauses import StrangersClient
from tests.app.test_main_train import ROOT, environment, wait_for_steps

STEPS = 3
OWN = [
    '--config=configs/tiny_cpu.py', '--config.rollout.server=own', '--config.publication.channel=files',
    '--config.telemetry.tensorboard=False', '--config.telemetry.plots=False', '--config.run.export=False',
    '--config.evaluation.samples=8',
]  # fmt: skip


def launch(workdir, *flags):
    command = [sys.executable, '-m', 'launch.local', *OWN, f'--workdir={workdir}', *flags]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def read_lines(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def finish(process, workdir, seconds=180):
    output, _ = process.communicate(timeout=seconds)
    logs = ''.join(path.read_text()[-2000:] for path in (workdir / 'servers').glob('*.log'))
    assert process.returncode == 0, output + logs
    return read_lines(workdir / 'events.jsonl'), read_lines(workdir / 'metrics.jsonl')


def check_whole(events, metrics, steps):
    """Every update is trained on sound answers, and no draw is lost or trained twice."""
    assert [line['step'] for line in metrics] == list(range(1, steps + 1))
    assert conservation(events) == []
    trained = [draw for event in events if event['kind'] == 'consume' for draw in event['draws']]
    assert len(trained) == len(set(trained)) == 8 * steps
    compared = sum(line['mismatch/n'] for line in metrics)
    assert compared > 0
    assert max(line.get('mismatch/max_abs', 0) for line in metrics) < 1e-4


def test_a_run_trains_with_servers_of_its_own(tmp_path):
    process = launch(tmp_path, f'--config.run.steps={STEPS}', '--config.cluster.engines=2 x shared')
    events, metrics = finish(process, tmp_path)
    check_whole(events, metrics, STEPS)
    serving = [e['engine'] for e in events if e['kind'] == 'engine_state' and e['state'] == 'serving']
    routed = {event['engine'] for event in events if event['kind'] == 'route'}
    assert set(serving) == {'engine/0', 'engine/1'}
    assert routed
    assert routed <= set(serving)  # on a loaded machine one of them may be silent all the time
    probes = [event for event in events if event['kind'] == 'probe']
    assert {event['engine'] for event in probes if event['outcome'] == 'passed'} == {'engine/0', 'engine/1'}
    # a learner that has moved on can not judge an answer, and a server that was slow to reply is asked again
    assert {event['outcome'] for event in probes} <= {'passed', 'undecided'}
    for engine in ('engine/0', 'engine/1'):
        loads = [event['version'] for event in events if event['kind'] == 'load' and event['engine'] == engine]
        assert loads == sorted(set(loads))
        assert loads[-1] == STEPS
    assert {entry.name for entry in read_registry(tmp_path)} == {'0', '1'}
    assert read_scores(tmp_path) == read_scores(train_in_process(tmp_path / 'in_process'))


def train_in_process(workdir):
    """One update."""
    flags = [flag for flag in OWN if 'server' not in flag and 'channel' not in flag]
    command = [sys.executable, '-m', 'areal_jax.main_train', *flags, f'--workdir={workdir}', '--config.run.steps=1']
    subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, check=True)
    return workdir


def read_scores(workdir):
    """Of the answers before training, greedy and sampled: equal weights and noise give equal answers."""
    return json.loads((workdir / 'evaluations.json').read_text())['before']


@pytest.mark.slow
def test_a_learner_follows_the_experts_that_servers_recorded(tmp_path):
    experts = {'family': 'qwen3_moe', 'experts': 8, 'experts_per_token': 2, 'd_expert': 32}
    flags = [f'--config.model.{field}={value}' for field, value in experts.items()]
    flags += ['--config.rollout.record_routes=True', '--config.learner.routes=replay', '--config.run.steps=2']
    events, metrics = finish(launch(tmp_path, *flags), tmp_path)
    check_whole(events, metrics, 2)
    assert min(line['routes/recorded'] for line in metrics) > 0.5  # a prompt that answers share has one record
    assert metrics[0]['routes/of_age/0/sets_changed'] == 0  # the servers had the weights of the learner
    assert metrics[1]['routes/sets_changed'] > 0


@pytest.mark.slow
def test_a_server_that_is_killed_comes_back_and_nothing_is_lost(tmp_path):
    steps = 100  # enough left when the log shows the update: it is written in parts
    process = launch(tmp_path, f'--config.run.steps={steps}', '--config.cluster.engines=2 x shared')
    events, end_s = tmp_path / 'events.jsonl', time.monotonic() + 120
    while not events.exists() or '"update":2,' not in events.read_text():
        assert time.monotonic() < end_s
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    os.kill(next(entry for entry in read_registry(tmp_path) if entry.name == '0').process, signal.SIGKILL)
    found, metrics = finish(process, tmp_path)
    check_whole(found, metrics, steps)
    # what it had when it died has moved; that may be nothing
    lost = next(e for e in found if e['kind'] == 'engine_state' and e['state'] in ('unknown', 'gone'))
    before = [e for e in found if e['seq'] < lost['seq'] and e.get('engine') == lost['engine']]
    had = {e['request'] for e in before if e['kind'] == 'route'} - {
        e['request'] for e in before if e['kind'] == 'receive'
    }
    assert had <= {e['request'] for e in found if e['kind'] == 'move'}


def find_trainer(workdir):
    """The process that holds the pauses, which the launcher has started."""
    words = {b'areal_jax.main_train', f'--workdir={workdir}'.encode()}
    for entry in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
        try:
            own = set(entry.read_bytes().split(b'\0'))
        except OSError:
            continue
        if words <= own and b'launch.keeper' not in own:
            return int(entry.parent.name)
    raise AssertionError('there is no trainer')


@pytest.fixture
def stop_in_a_pause(tmp_path, monkeypatch):
    """Starts a run and stops its trainer (SIGSTOP) while that has paused the server.

    Returns a client of somebody else, and a function that lets the run go on to its end and returns its events.
    """
    monkeypatch.setenv('AREAL_JAX_API_KEY', 'of the test')
    stopped = []

    def go_on():
        os.kill(stopped.pop(), signal.SIGCONT)

    def stop(lease_s, steps=12):
        fields = {'run.steps': steps, 'checkpoint.every': 1, 'checkpoint.keep': 2, 'rollout.pause_lease_s': lease_s}
        flags = [f'--config.{name}={value}' for name, value in fields.items()]
        process = launch(tmp_path, *flags, '--config.cluster.engines=1 x shared')
        wait_for_steps(tmp_path, 2, process)
        stranger, trainer = StrangersClient(tmp_path, 'of the test'), find_trainer(tmp_path)
        while not stopped:
            assert process.poll() is None, process.communicate()[0]
            if stranger.look():
                os.kill(trainer, signal.SIGSTOP)
                stopped.append(trainer)
                time.sleep(0.5)  # what it has sent arrives
                if not stranger.look():
                    go_on()

        def end():
            go_on()
            events, metrics = finish(process, tmp_path, 300)
            check_whole(events, metrics, steps)
            assert main_check_log.main([str(tmp_path)]) == 0
            return events

        return stranger, end

    yield stop
    if stopped:
        go_on()


@pytest.mark.slow
def test_a_run_that_stands_still_for_a_minute_in_a_pause_goes_on_as_if_nothing_had_been(stop_in_a_pause):
    stranger, end = stop_in_a_pause(lease_s=90)
    time.sleep(60)
    (pause,) = stranger.look()
    assert pause['paused_seconds'] > 60
    assert pause['lease_seconds'] > 0
    events = end()
    assert [event['kind'] for event in events].count('fence') == 1  # when it joined


@pytest.mark.slow
def test_a_run_that_stands_still_for_longer_than_its_lease_is_fenced_and_loads_its_weights_again(stop_in_a_pause):
    stranger, end = stop_in_a_pause(lease_s=4)
    assert stranger.generate(4 + 10) < time.monotonic()  # an answer: the server serves others
    assert stranger.look() == []
    events = end()
    lapsed = next(e for e in events if e['kind'] == 'engine_state' and e['state'] == 'unknown')
    assert 'lease' in lapsed['reason']
    later = [event['kind'] for event in events if event['seq'] > lapsed['seq']]
    assert 'load' in later[later.index('fence') :]
