"""Learner and engines on devices of their own, in one process of eight virtual devices; the real clock."""

from __future__ import annotations

import json
import pathlib

import jax
import pytest

from areal_jax.app.library import LoopRun, build_run
from areal_jax.config.fields import ConfigError
from tests.app.small import SmallRun, equal, small_config, to_host
from tests.host_reads import record_reads

_OWN = {
    'model__n_layers': 1,
    'cluster__learner': 'fsdp=4',
    'cluster__engines': '2 x tensor=1',
    'learner__rows_per_microbatch': 4,
    'run__stall_timeout_s': 120.0,
}


def _devices(tree):
    return {device.id for leaf in jax.tree.leaves(tree) for device in leaf.devices()}


def _decodes_with(engine, weights):
    return equal(to_host(engine.params), to_host(engine._backend.prepare(weights)))


def _assert_apart(session: LoopRun):
    """The learner, and weights and cache of every engine, are where the report says, and nowhere twice."""
    learner = _devices(session.site.learner.state.params) | _devices(session.site.learner.state.optimizer)
    generating = session.program.parts.generation.rollout.engines
    engines = [(_devices(engine.params), _devices(engine.stream._state)) for engine in generating]
    assert learner == {0, 1, 2, 3}
    assert engines == [({4}, {4}), ({5}, {5})]
    report = json.loads((session.context.workdir / 'report.json').read_text())
    assert report['devices'] == {'learner': [0, 1, 2, 3], 'engines': {'engine/0': [4], 'engine/1': [5]}}
    # virtual devices share the cores: no lane may be counted as if it had its own
    assert report['time']['ideal_rule'].startswith('lanes share the cores')


def _assert_trained(session: LoopRun, steps: int):
    lines, events = (
        [json.loads(line) for line in (session.context.workdir / name).read_text().splitlines()]
        for name in ('metrics.jsonl', 'events.jsonl')
    )
    assert [line['step'] for line in lines] == list(range(1, steps + 1))
    assert session.site.compilations.count == 0  # warm-up compiled for every device
    assert {event['engine'] for event in events if event['kind'] == 'decode'} == {'engine/0', 'engine/1'}
    for name in ('engine/0', 'engine/1'):
        loaded = [event['version'] for event in events if event['kind'] == 'load' and event['engine'] == name]
        assert loaded[-1] == steps


@pytest.mark.slow
def test_learner_and_engines_on_devices_of_their_own(tmp_path):
    session = build_run(small_config(run__clock='real', run__steps=10, **_OWN), tmp_path)
    with record_reads() as reads:
        session.train()
    _assert_apart(session)
    _assert_trained(session, 10)
    final = to_host(session.site.learner.publish(10))
    assert all(_decodes_with(engine, final) for engine in session.program.parts.generation.rollout.engines)
    # The host reads the sharded `gate` and `up` for the last checkpoint (weights and two moments) and for the checksum
    # in the report: 2 x 4 reads. Each of the 11 publications would add 2.
    assert 0 < reads.count(final['layers']['0']['mlp']['gate']['weight'].shape) <= 8


@pytest.mark.slow
def test_a_hundred_updates_without_a_stall(tmp_path):
    session = build_run(small_config(run__clock='real', run__steps=100, publication__verify=True, **_OWN), tmp_path)
    session.train()
    _assert_apart(session)
    _assert_trained(session, 100)


def test_where_engines_decode_changes_no_bit(tmp_path):
    # virtual clock: the same interleaving; the same programs on other devices
    fields = {'run__steps': 3, 'model__n_layers': 1}
    shared = SmallRun(tmp_path / 'shared', **fields, cluster__engines='2 x shared').train()
    apart = SmallRun(tmp_path / 'apart', **fields, cluster__engines='2 x tensor=1').train()
    assert shared.report['devices']['engines'] == {'engine/0': [0], 'engine/1': [0]}
    assert apart.report['devices']['engines'] == {'engine/0': [1], 'engine/1': [2]}
    assert equal(shared.final, apart.final)
    assert _events(tmp_path / 'shared') == _events(tmp_path / 'apart')


def _events(workdir: pathlib.Path) -> list[dict[str, object]]:
    """Without what the engines say of their devices."""
    lines = [json.loads(line) for line in (workdir / 'events.jsonl').read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != 'devices'} for line in lines]


@pytest.mark.parametrize(
    'fields',
    [{'publication__channel': 'files'}, pytest.param({'staleness__schedule': 'fixed(2)'}, marks=pytest.mark.slow)],
)
def test_files_and_earlier_versions_reach_every_engine(tmp_path, fields):
    run = SmallRun(tmp_path, run__steps=3, model__n_layers=1, cluster__engines='2 x tensor=1', **fields).train()
    assert [_devices(engine.params) for engine in run.session.program.parts.generation.rollout.engines] == [{1}, {2}]
    assert all(_decodes_with(engine, run.final) for engine in run.session.program.parts.generation.rollout.engines)


def test_too_few_devices_are_refused_before_anything_is_made(tmp_path):
    config = small_config(cluster__learner='data=7', cluster__engines='2 x tensor=1', learner__rows_per_microbatch=7)
    with pytest.raises(ConfigError, match=r"cluster.learner='data=7' needs 7 .* needs 2, 9 together; .* has 8: lower"):
        build_run(config, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()
