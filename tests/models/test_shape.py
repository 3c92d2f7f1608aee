"""Which shapes exist, and which layers have a window."""

from __future__ import annotations

import dataclasses
import math

import pytest

from areal_jax.models.families import LayerKind, ModelConfig, default_kinds
from areal_jax.models.ropes import LinearScaling, Llama3Scaling, Rope, YarnScaling

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
            "family='gpt2' is unknown; use one of llama, qwen2, qwen3, mistral, qwen3_moe, mixtral, olmoe, olmo3",
        ),
        ({'n_layers': 0}, 'n_layers=0 must be at least 1'),
        ({'n_kv_heads': 0}, 'n_kv_heads=0 must be at least 1'),
        ({'rope_theta': float('nan')}, 'rope_theta=nan must be above 0 and finite'),
        ({'rms_eps': -1e-5}, 'rms_eps=-1e-05 must not be negative'),
        ({'kinds': (LayerKind(), LayerKind(4))}, 'kinds has 2 entries: give one, or one for each of 3 layers'),
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


def test_a_window_without_tokens_is_refused():
    with pytest.raises(ValueError, match='window=0 must be at least 1, or None'):
        LayerKind(0)


@pytest.mark.parametrize('family', ['gemma3_text', 'smollm3', 'gpt_oss'])
def test_layers_that_differ_are_not_listed_for_hours(family):
    with pytest.raises(ValueError, match=rf"n_layers={2**31 - 1} must be below 1024 for family='{family}'"):
        default_kinds(family, 2**31 - 1, 5)


def test_a_layer_has_its_kind_or_the_kind_of_all_layers():
    config = lambda *kinds: dataclasses.replace(CONFIG, kinds=kinds)
    windows = lambda *kinds: [config(*kinds).window(layer) for layer in range(3)]
    full, near = LayerKind(), LayerKind(5)
    assert windows(full) == [None, None, None]
    assert windows(near) == windows(near, near, near) == [5, 5, 5]
    assert windows(near, full, near) == [5, None, 5]
    assert config(near, near, near) == config(near)  # the same model


def test_a_layer_may_have_another_rope_or_none():
    other = Rope(7.0, LinearScaling(8.0))
    kinds = (LayerKind(), LayerKind(4, rope=other), LayerKind(rotates=False))
    config = dataclasses.replace(CONFIG, kinds=kinds)
    assert [config.rope(layer) for layer in range(3)] == [Rope(100.0), other, None]
    with pytest.raises(ValueError, match='rotates nothing has no rope'):
        LayerKind(rotates=False, rope=other)


def test_the_magnitude_of_yarn_is_the_one_that_is_named_or_follows_from_its_factor():
    yarn = lambda **fields: YarnScaling(4.0, 32768, **fields).magnitude
    assert yarn() == pytest.approx(0.1 * math.log(4) + 1)  # 1.1386294
    assert yarn(attention_factor=2.5) == 2.5
    assert yarn(mscale=1.0, mscale_all_dim=1.0) == 1.0
    # (0.1 * 2 * 1.3862944 + 1) / (0.1 * 1.3862944 + 1) = 1.2772589 / 1.1386294
    assert yarn(mscale=2.0, mscale_all_dim=1.0) == pytest.approx(1.2772589 / 1.1386294)
    assert YarnScaling(0.5, 32768).magnitude == 1.0
    with pytest.raises(ValueError, match=r'beta_fast=1\.0 must be above beta_slow=1\.0'):
        YarnScaling(4.0, 32768, beta_fast=1.0)
