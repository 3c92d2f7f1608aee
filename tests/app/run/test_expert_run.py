"""Runs of a model with experts under the virtual clock: the floor of every run holds for them too."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import main_replay
from areal_jax.columns import ROUTED_EXPERTS
from areal_jax.formats.hf_directory import load_hf
from areal_jax.models.decoder import Decoder
from areal_jax.telemetry.metrics import read_metrics
from tests.app.small import SmallRun, equal, resume_killed, train_until_killed
from tests.rollout.decode.examples import whole_attention

EXPERTS = {
    'model__family': 'qwen3_moe', 'model__experts': 8, 'model__experts_per_token': 2, 'model__d_expert': 32,
}  # fmt: skip


REPLAY = EXPERTS | {'rollout__record_routes': True, 'learner__routes': 'replay'}


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    fields = REPLAY | {'learner__routes': 'live', 'run__export': True}
    return SmallRun(tmp_path_factory.mktemp('experts') / 'run', **fields).train()


def test_engine_and_learner_agree(run):
    rows = read_metrics(run.workdir / 'metrics.jsonl')
    assert max(row['mismatch/max_abs'] for row in rows if 'mismatch/max_abs' in row) < 1e-5
    assert not equal(run.final, run.weights[0])
    assert any(event['kind'] == 'interrupt' for event in run.events)


def test_the_routes_of_a_token_are_those_of_the_pass_that_gave_its_logprob(run):
    """Of interrupted answers each part has those of its own version; a prompt those of the first token's."""
    config, _ = load_hf(run.workdir / 'export')
    decoder, mixed = Decoder(config), 0
    live_of = jax.jit(
        lambda params, tokens: decoder.hidden_and_routes(params, tokens, jnp.arange(16), whole_attention)[2].live
    )
    for trajectory in [t for batch in run.batches for group in batch for t in group.trajectories]:
        found = trajectory.column_with_context(config.routes)
        versions = trajectory.policy_versions
        first = trajectory.segments[0].policy_version
        mixed += len(trajectory.segments) > 1
        padded = np.zeros(16, np.int32)
        padded[: len(versions)] = trajectory.tokens
        for version in {first, *versions[trajectory.loss_mask].tolist()}:
            live = np.moveaxis(np.asarray(live_of(run.weights[version], padded)), 0, 1)
            own = np.flatnonzero(np.where(trajectory.loss_mask, versions, first) == version)
            own = own[own > 0]
            np.testing.assert_array_equal(np.sort(found[own]), np.sort(live[own - 1]))
    assert mixed > 0
    assert ROUTED_EXPERTS.name in run.batches[0][0].trajectories[0].segments[0].columns


def test_metrics_tell_numerics_from_drift(run):
    rows = [row for row in read_metrics(run.workdir / 'metrics.jsonl') if 'routes/recorded' in row]
    assert {row['routes/recorded'] for row in rows} == {1.0}
    assert max(row.get('routes/of_age/0/sets_changed', 0) for row in rows) == 0
    assert max(row.get('routes/of_age/1/sets_changed', 0) for row in rows) > 0


def test_every_choice_is_counted_once_by_expert(run):
    loads, rows = (read_metrics(run.workdir / name) for name in ('expert_loads.jsonl', 'metrics.jsonl'))
    assert not [name for row in rows for name in row if name.startswith('experts/loads')]
    prefix = 'experts/loads_of_age/'
    for line, row in zip(loads, rows, strict=True):
        if not row['update/trained_tokens']:
            assert list(line) == ['step']
            continue
        layers = [line[f'experts/loads/{layer}'] for layer in range(2)]
        assert sum(of.count(0) for of in layers) == row['experts/dead']
        assert np.mean([8 * max(of) / sum(of) for of in layers]) == pytest.approx(row['experts/load'])
        ages = [name.removeprefix(prefix).split('/')[0] for name in line if name.endswith('/tokens')]
        tokens = {age: line[f'{prefix}{age}/tokens'] for age in ages}
        assert tokens == {age: row[f'routes/of_age/{age}/tokens'] for age in ages}
        assert sum(tokens.values()) == row['update/trained_tokens']
        for age, layer in itertools.product(ages, range(2)):
            assert sum(line[f'{prefix}{age}/{layer}']) == 2 * tokens[age]
    assert len(ages) > 0
    assert [row['age'] for row in run.report['experts']['ages']]


def test_a_run_that_was_killed_goes_on_bit_for_bit(tmp_path):
    resume_killed(tmp_path, checkpoint__every=1, **REPLAY)
    whole, killed = (read_metrics(tmp_path / name / 'expert_loads.jsonl') for name in ('whole', 'killed'))
    assert [line['step'] for line in whole] == [1, 2, 3, 4, 5]
    assert killed == whole


def test_a_run_of_the_real_clock_is_replayed_bit_for_bit(tmp_path):
    run = SmallRun(tmp_path / 'run', run__clock='real', run__steps=3, **REPLAY).train()
    assert main_replay.main([f'--workdir={run.workdir}', f'--out={tmp_path / "again"}']) == 0


@pytest.mark.slow
def test_a_run_over_several_devices_goes_on_on_one(tmp_path):
    fields = {**EXPERTS, 'checkpoint__every': 1, 'cluster__engines': '1 x expert=2', 'learner__rows_per_microbatch': 4}
    run = SmallRun(tmp_path, **fields, cluster__learner='fsdp=2,expert=2')
    train_until_killed(run, 3)
    rows = read_metrics(tmp_path / 'metrics.jsonl')
    assert max(row['mismatch/max_abs'] for row in rows if 'mismatch/max_abs' in row) < 1e-5
    resumed = SmallRun(tmp_path, resume=True, run__export=True, **fields)
    assert resumed.version_at_start in run.weights
    assert equal(resumed.weights[resumed.version_at_start], run.weights[resumed.version_at_start])
    resumed.train()
    assert resumed.report['steps'] == 5
    assert equal(load_hf(tmp_path / 'export')[1], resumed.final)


def test_the_export_has_the_experts(run):
    config, params = load_hf(run.workdir / 'export')
    assert (config.family, config.experts.count, config.experts.per_token) == ('qwen3_moe', 8, 2)
    assert equal(params, run.final)
