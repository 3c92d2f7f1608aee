"""Which shapes exist, and which layers have a window."""

from __future__ import annotations

import dataclasses

import pytest

from areal_jax.models.families import Llama3Scaling, ModelConfig

CONFIG = ModelConfig(
    vocab_size=29, d_model=24, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=40, rope_theta=100.0
)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'n_kv_heads': 3}, 'n_heads=4 is not a multiple of n_kv_heads=3'),
        ({'head_dim': 7}, 'head_dim=7 is odd'),
        (
            {'family': 'gpt2'},
            "family='gpt2' is unknown; use one of llama, qwen2, qwen3, mistral, qwen3_moe, mixtral, olmoe",
        ),
        ({'n_layers': 0}, 'n_layers=0 must be at least 1'),
        ({'n_kv_heads': 0}, 'n_kv_heads=0 must be at least 1'),
        ({'rope_theta': float('nan')}, 'rope_theta=nan must be above 0 and finite'),
        ({'rms_eps': -1e-5}, 'rms_eps=-1e-05 must not be negative'),
        ({'sliding_window': 0}, 'sliding_window=0 must be at least 1, or None'),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_a_stretch_without_a_span_to_blend_in_is_refused():
    with pytest.raises(ValueError, match=r'high_frequency_factor=1.0 must be above low_frequency_factor=1.0'):
        Llama3Scaling(8.0, 1.0, 1.0, 8192)


def test_a_stretch_by_no_number_is_refused():
    with pytest.raises(ValueError, match=r'factor=nan must be above 0'):
        Llama3Scaling(float('nan'), 1.0, 4.0, 8192)


def test_layers_have_the_window_from_the_first_that_is_named():
    windows = lambda **change: [dataclasses.replace(CONFIG, **change).window(layer) for layer in range(3)]
    assert windows() == [None, None, None]
    assert windows(sliding_window=5) == [5, 5, 5]
    assert windows(sliding_window=5, first_window_layer=2) == [None, None, 5]
    assert windows(first_window_layer=2) == [None, None, None]
