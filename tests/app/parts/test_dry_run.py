"""A run that is only described: the shapes and shardings of its leaves, and what a device would hold."""

from __future__ import annotations

import pytest

from areal_jax.app.command_line import load_config
from areal_jax.app.parts.dry_run import describe_run
from areal_jax.models.decoder import Decoder


def rows_of(text):
    return {line.split('  ')[0]: ' '.join(line.split()) for line in text.splitlines()}


def test_qwen3_30b_is_cut_over_experts_and_fsdp_and_nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(Decoder, 'init', lambda *_: pytest.fail('weights were drawn'))
    config = load_config('configs/qwen3_30b_a3b.py')
    config.cluster.learner, config.cluster.engines = 'fsdp=2,expert=2', '1 x expert=4'
    config.learner.rows_per_microbatch = 4
    rows = rows_of(text := describe_run(config))
    assert '30.53 billion weights, a token reaches 3.35 billion; learner fsdp=2, expert=2, 1 engines' in text
    assert rows['layers/*/mlp/experts/down'].endswith('48 [128, 768, 2048] expert, -, fsdp [64, 768, 1024]')
    assert rows['layers/*/mlp/router/weight'].endswith('48 [2048, 128] fsdp [1024, 128]')
    experts = 48 * 128 * 3 * 2048 * 768  # cut by four, all else by two
    size = 4 * (experts / 4 + (30.532e9 - experts) / 2) / 1e9
    assert rows['weights'] == f'weights {size:.4g} GB'
    assert rows['optimizer'] == f'optimizer {2 * size:.4g} GB'
    # 48 layers, keys and values of 4 heads of 128 in bfloat16, 32 sequences of 9,216 and one block for padding
    assert rows['KV cache'] == f'KV cache {2 * 48 * 4 * 128 * 2 * (32 * 9216 + 64) / 1e9:.4g} GB'


def test_a_dense_model_that_learns_from_data_has_no_engines():
    config = load_config('configs/sft_tiny.py')
    text = describe_run(config)
    assert 'learner 1 device, 0 engines' in text
    assert 'engine, of a device' not in text
    assert rows_of(text)['layers/*/mlp/gate/weight'].endswith('2 [64, 128] - [64, 128]')
