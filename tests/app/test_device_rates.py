"""Tokens per second and device, model FLOPs utilisation, and energy, in the metrics of a run."""

from __future__ import annotations

import pathlib

import pytest

from areal_jax.app.parts.part_settings import build_allocation, build_device_rates
from areal_jax.config import TrackedConfig
from areal_jax.report.event_log import lane_intervals
from areal_jax.telemetry import devices
from areal_jax.telemetry.devices import Peak
from areal_jax.telemetry.metrics import read_metrics
from tests.app.small import SmallRun, small_config


def test_rates_are_tokens_and_operations_by_the_seconds_of_the_update(tmp_path: pathlib.Path, monkeypatch):
    monkeypatch.setitem(devices.PEAKS, 'cpu', Peak(2e9, 1e9, 'made up'))
    monkeypatch.setattr('areal_jax.app.parts.host.POWERCAP', tmp_path / 'nothing')
    run = SmallRun(tmp_path, run__clock='real', run__steps=3, telemetry__energy='auto').train()
    seconds = [i.end - i.start for i in lane_intervals(run.events) if i.work == 'train']
    lines = read_metrics(tmp_path / 'metrics.jsonl')
    assert len(seconds) == len(lines) == 3
    trained = [(line, took) for line, took in zip(lines, seconds, strict=True) if line['update/trained_tokens']]
    assert trained
    for line, took in trained:
        assert line['learner/tokens_per_second_per_device'] == pytest.approx(line['train/read_tokens'] / took)
        assert line['learner/mfu'] == pytest.approx(line['train/model_flops'] / took / 1e9)  # it computes in float32
    for line in lines:  # one engine on one device
        rate = 'rollout/tokens_per_second_per_device'
        assert line[rate] == line['throughput/generate_tokens_per_second']
    require_seconds_without_joules(run, lines)
    assert run.report['throughput']['mfu'] in [line['learner/mfu'] for line, _ in trained] or len(trained) == 2


def require_seconds_without_joules(run: SmallRun, lines) -> None:
    """A CPU without a meter: seconds by state that fill the time of each update, one sentence, no joules."""
    energy = run.report['energy']
    (sentence,) = energy['sentences']
    assert sentence.startswith('No joules of 1 x cpu are known (RAPL: ')
    assert sentence in (run.workdir / 'report.md').read_text()
    assert (energy['joules'], energy['sources']) == (None, [])
    assert not [name for line in lines for name in line if 'joules' in name]
    updates = [i for i in lane_intervals(run.events) if i.work == 'train']
    trained = sum(i.end - i.start for i in updates)
    ended = {event['seq']: event['time'] for event in run.events if event['kind'] == 'run_done'}
    asked = sum(ended[i.done_seq] - i.given['time'] for i in updates)  # with the wait for the thread at both ends
    assert trained - 1e-6 <= energy['device_seconds']['train'] <= asked + 1e-6
    assert 0 < energy['device_seconds']['decode'] < sum(energy['device_seconds'].values())
    admitted = next(event['time'] for event in run.events if event['kind'] == 'admit')
    assert sum(energy['device_seconds'].values()) == pytest.approx(lines[-1]['time'] - admitted)
    for line in lines:
        assert 0 <= line['update/useful_tokens'] <= line['update/trained_tokens']


def test_no_utilisation_on_a_cpu_or_on_a_modelled_clock(monkeypatch):
    def rates(**fields):
        config = TrackedConfig(small_config(**fields))
        return build_device_rates(config, build_allocation(config))

    assert rates(run__clock='real').peak_flops is None
    monkeypatch.setitem(devices.PEAKS, 'cpu', Peak(2e9, 1e9, 'made up'))
    assert rates(run__clock='real').peak_flops == 1e9
    assert rates(run__clock='real', learner__dtype='bfloat16').peak_flops == 2e9
    assert rates(run__clock='virtual').peak_flops is None
