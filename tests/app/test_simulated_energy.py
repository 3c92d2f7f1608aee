"""Modelled joules of a simulated run: its seconds by state times the watts of its chips."""

from __future__ import annotations

import pathlib

import pytest

from areal_jax.app.simulate.simulated_site import build_simulation
from areal_jax.report.event_log import lane_intervals, load_events
from areal_jax.telemetry.energy_meters import POWER
from areal_jax.telemetry.metrics import read_metrics
from tests.app.small import small_config

FIELDS = {
    'simulation__prices': 'roofline', 'simulation__chip': 'H100', 'simulation__model': 'R1-distill-Qwen-1.5B',
    'simulation__answers': 'constant(8)', 'simulation__prompts': 'constant(8)', 'simulation__join': False,
    'cluster__learner': 'data=2', 'cluster__engines': '3 x tensor=1', 'telemetry__energy': 'auto', 'run__steps': 3,
    'learner__rows_per_microbatch': 2,
}  # fmt: skip


def test_joules_of_a_simulated_run_by_its_log(tmp_path: pathlib.Path):
    with build_simulation(small_config(**FIELDS), tmp_path) as run:
        report = run.train()
    energy = report['energy']
    assert [(s['meter'], s['devices']) for s in energy['sources']] == [('modelled', '5 x H100 SXM')]
    seconds, lines = energy['device_seconds'], read_metrics(tmp_path / 'metrics.jsonl')
    events = load_events(tmp_path / 'events.jsonl')
    admitted = next(event['time'] for event in events if event['kind'] == 'admit')
    until = lines[-1]['time']
    assert sum(seconds.values()) == pytest.approx(5 * (until - admitted))
    for work, devices in (('train', 2), ('decode', 1), ('prefill', 1)):  # an engine is one device
        spent = sum(min(i.end, until) - i.start for i in lane_intervals(events) if i.work == work and i.start < until)
        assert seconds[work] == pytest.approx(devices * spent, rel=1e-6), work
    power = POWER['H100 SXM']
    low = sum(power.draw(state, energy['decode_activity']).low * spent for state, spent in seconds.items())
    high = sum(power.draw(state, energy['decode_activity']).high * spent for state, spent in seconds.items())
    assert (energy['joules']['low'], energy['joules']['high']) == (pytest.approx(low), pytest.approx(high))
    assert low < high
