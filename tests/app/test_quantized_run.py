"""Runs whose engines decode in 8 bits: they repeat bit for bit, and every update says how far that is from float32."""

import json

import pytest

from areal_jax.telemetry import names
from tests.app.small import SmallRun, equal

MEASURED = (names.MISMATCH_KL, names.MISMATCH_SAMPLE_SIZE, names.MISMATCH_RATIO_SHARE)


@pytest.fixture(scope='module')
def quantized(tmp_path_factory):
    return SmallRun(tmp_path_factory.mktemp('int8'), rollout__weights='int8').train()


def metrics_of(run):
    return [json.loads(line) for line in (run.workdir / 'metrics.jsonl').read_text().splitlines()]


def test_two_runs_in_8_bits_are_equal_bit_for_bit(quantized, tmp_path):
    again = SmallRun(tmp_path, rollout__weights='int8').train()
    assert again.events == quantized.events
    assert equal(again.final, quantized.final)
    assert quantized.report['interruptions'] > 0


def test_every_update_with_tokens_of_its_version_says_how_far_the_engines_are(quantized):
    lines = [line for line in metrics_of(quantized) if line['mismatch/n']]
    assert lines
    for line in lines:
        assert 1e-5 < line['mismatch/mean_abs'] < 0.5
        assert 0 < line[names.MISMATCH_KL] < 0.1
        assert 0.9 < line[names.MISMATCH_SAMPLE_SIZE] < 1
        assert line[names.MISMATCH_RATIO_SHARE] > 0
    found = quantized.report['mismatch']['quantized']
    assert set(found) == {'kl', 'effective_sample_size', 'ratio_share'}
    assert 0.9 < found['effective_sample_size'] < 1


def test_a_run_with_weights_as_published_has_none_of_it(quantized, tmp_path):
    published = SmallRun(tmp_path).train()
    assert not any(name in line for line in metrics_of(published) for name in MEASURED)
    assert 'quantized' not in published.report['mismatch']
    assert published.report['mismatch']['max'] < 1e-5
    assert not equal(published.final, quantized.final)
