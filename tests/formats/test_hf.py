"""Names of the interchange form: nothing is lost or mixed up on the way there and back."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from areal_jax.formats.hf_directory import WeightsError, from_hf_names, hf_tensors, to_hf_names
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import LayerKind, ModelConfig
from areal_jax.models.weights import Lora
from areal_jax.sharding.rules import path_name
from tests.models import family_examples

TIED = ModelConfig(
    vocab_size=11, d_model=6, n_layers=11, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=10, rope_theta=500.0
)
UNTIED = ModelConfig(
    vocab_size=11, d_model=6, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=10, rope_theta=500.0,
    tie_embeddings=False,
)  # fmt: skip

FAMILIES = [
    TIED,
    dataclasses.replace(TIED, family='qwen2', qkv_bias=True),
    dataclasses.replace(TIED, family='qwen3', qk_norm=True),
    dataclasses.replace(TIED, family='mistral', kinds=(LayerKind(3),)),
    *family_examples.CONFIGS.values(),
]


def numpy_params(config):
    return jax.tree.map(np.asarray, Decoder(config).init(0))


@pytest.mark.parametrize('config', [TIED, UNTIED], ids=['tied', 'untied'])
@pytest.mark.parametrize('form', ['numpy', 'jax'])
def test_there_and_back_is_bit_equal(config, form):
    params = numpy_params(config) if form == 'numpy' else Decoder(config).init(0)
    back = from_hf_names(to_hf_names(params, config), config)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_names_are_those_of_llama():
    assert list(to_hf_names(numpy_params(UNTIED), UNTIED)) == [
        'model.embed_tokens.weight',
        'model.layers.0.input_layernorm.weight',
        'model.layers.0.self_attn.q_proj.weight',
        'model.layers.0.self_attn.k_proj.weight',
        'model.layers.0.self_attn.v_proj.weight',
        'model.layers.0.self_attn.o_proj.weight',
        'model.layers.0.post_attention_layernorm.weight',
        'model.layers.0.mlp.gate_proj.weight',
        'model.layers.0.mlp.up_proj.weight',
        'model.layers.0.mlp.down_proj.weight',
        'model.norm.weight',
        'lm_head.weight',
    ]
    assert 'lm_head.weight' not in to_hf_names(numpy_params(TIED), TIED)


def test_matrices_turn_and_tables_do_not():
    params = numpy_params(TIED)
    named = to_hf_names(params, TIED)
    layer = params['layers']['10']
    np.testing.assert_array_equal(
        named['model.layers.10.mlp.up_proj.weight'], layer['mlp']['up']['weight'].T
    )  # [out, in]
    np.testing.assert_array_equal(
        named['model.layers.10.self_attn.o_proj.weight'], layer['attention']['output']['weight'].T
    )
    np.testing.assert_array_equal(named['model.layers.10.input_layernorm.weight'], layer['attention_norm'])
    np.testing.assert_array_equal(named['model.embed_tokens.weight'], params['embedding'])


def test_wrong_tensors_are_named():
    named = to_hf_names(numpy_params(UNTIED), UNTIED)
    lacking = {name: tensor for name, tensor in named.items() if 'k_proj' not in name}
    with pytest.raises(WeightsError, match=r'missing model\.layers\.0\.self_attn\.k_proj\.weight$'):
        from_hf_names(lacking, UNTIED)
    with pytest.raises(WeightsError, match=r'surplus model\.layers\.1\.bias$'):
        from_hf_names({**named, 'model.layers.1.bias': np.zeros(3)}, UNTIED)
    turned = {**named, 'model.layers.0.mlp.up_proj.weight': named['model.layers.0.mlp.up_proj.weight'].T}
    with pytest.raises(WeightsError, match=r'up_proj\.weight has shape \[6, 10\] instead of \[10, 6\]'):
        from_hf_names(turned, UNTIED)
    # 12 tensors, none of them there: 8 are named and 4 counted
    with pytest.raises(WeightsError, match=r'missing model\.embed_tokens\.weight; .* and 4 more'):
        from_hf_names({}, UNTIED)


def test_adapters_are_refused():
    with pytest.raises(WeightsError, match=r'layers/0/attention/query/lora_a belongs to an adapter'):
        to_hf_names(Decoder(TIED, lora=Lora(2, 4.0, ('query',))).init(0), TIED)


def test_every_leaf_of_every_family_has_a_name():
    for config in FAMILIES:
        named = to_hf_names(numpy_params(config), config)
        paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(Decoder(config).abstract())]
        assert {tensor.path for tensor in hf_tensors(config)} == set(paths)
        module = f'model.layers.{next(filter(lambda i: config.mixer(i) == "attention", range(3)))}.self_attn'
        assert (f'{module}.q_norm.weight' in named) == (config.qk_norm or config.whole_qk_norm)
        biased = 'kv_a_proj_with_mqa' if config.latent else 'k_proj'
        assert (f'{module}.{biased}.bias' in named) == config.qkv_bias
