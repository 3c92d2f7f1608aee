"""Published forms of config.json, read as transformers reads them; and what other forms are refused with."""

from __future__ import annotations

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.formats.hf_config import HfError, hf_config, read_hf_config
from areal_jax.models.rotary import rotary
from tests.formats.config_forms import FORMS, RECORDED

HYBRID = ('qwen3_5', 'qwen3_next')  # begin of their model_type


@functools.cache
def recorded():
    return json.loads(RECORDED.read_text())


def read(directory, fields):
    (directory / 'config.json').write_text(json.dumps(fields))
    return read_hf_config(directory)


def rope_of(config, layer):
    """(frequencies, factor of cosine and sine) of a layer with rotation."""
    cosine, sine = rotary(jnp.array([1]), config.rotary_dim or config.head_dim, config.rope(layer))
    return np.arctan2(sine[0], cosine[0]), np.hypot(cosine[0], sine[0])


@pytest.mark.parametrize('name', FORMS)
def test_every_field_is_the_one_that_transformers_reads(tmp_path, name):
    config, theirs = read(tmp_path, FORMS[name]), recorded()[name]
    fields = {
        'vocab_size': config.vocab_size, 'hidden_size': config.d_model, 'num_hidden_layers': config.n_layers,
        'num_attention_heads': config.n_heads, 'num_key_value_heads': config.n_kv_heads,
        'head_dim': config.latent.rotated_dim if config.latent else config.head_dim,
        'intermediate_size': config.d_ff if theirs['intermediate_size'] else None, 'rms_norm_eps': config.rms_eps,
        'tie_word_embeddings': config.tie_embeddings, 'max_position_embeddings': config.context_tokens,
    }  # fmt: skip
    assert fields == {key: theirs[key] for key in fields}
    layers = range(config.n_layers)
    assert [config.window(layer) for layer in layers] == theirs['windows']
    rotates = [bool(turns) for turns in theirs['rotates']]
    assert [config.rope(layer) is not None for layer in layers] == rotates
    for layer in [layer for layer in layers if rotates[layer]][:8]:
        rope = theirs['ropes'][theirs['rope_of_layer'][layer]]
        frequencies, magnitude = rope_of(config, layer)
        assert len(frequencies) == len(rope['frequencies'])
        np.testing.assert_allclose(frequencies, rope['frequencies'], rtol=1e-5)
        np.testing.assert_allclose(magnitude, rope['magnitude'], rtol=1e-6)
    if theirs['attention_bias'] is not None and name != 'qwen2':
        biased = theirs['attention_bias']
        assert (config.qkv_bias, config.output_bias) == (biased, biased and config.family != 'glm4_moe')
    gemma = theirs['hidden_activation'] is not None
    assert config.activation == ('gelu_tanh' if gemma else 'silu')
    scale = config.head_dim**-0.5 if config.score_scale is None else config.score_scale
    their_scale = theirs.get('scale') or (theirs['query_pre_attn_scalar'] or config.head_dim) ** -0.5
    assert scale == pytest.approx(their_scale, rel=1e-12)
    assert config.logit_cap == theirs['final_logit_softcapping']
    assert config.embedding_factor == (config.d_model**0.5 if gemma else 1.0)
    if config.experts:
        experts = theirs['num_local_experts'] or theirs['num_experts']
        assert (config.experts.count, config.experts.per_token) == (experts, theirs['num_experts_per_tok'])
        assert config.experts.d_shared == theirs.get('shared_expert', 0)
        assert config.experts.d_expert == (theirs['moe_intermediate_size'] or theirs['intermediate_size'])
        clamp = config.experts.swiglu
        assert (clamp and clamp.limit, clamp and clamp.alpha) == (theirs['swiglu_limit'], theirs['swiglu_alpha'])


@pytest.mark.parametrize('name', [name for name, fields in FORMS.items() if fields['model_type'].startswith(HYBRID)])
def test_the_fields_of_hybrids_are_those_that_transformers_reads(tmp_path, name):
    config, theirs = read(tmp_path, FORMS[name]), recorded()[name]
    assert [layer for layer in range(config.n_layers) if config.mixer(layer) == 'delta'] == theirs['delta_layers']
    if theirs['delta_layers']:
        delta = config.delta
        sizes = [delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.taps]
        assert sizes == theirs['delta']
    else:
        assert config.delta is None
    assert (config.gated_attention, config.qk_norm, config.centred_norms) == (True,) * 3
    if config.experts:
        normalised = theirs['norm_topk_prob']
        assert config.experts.normalised is (True if normalised is None else normalised)
        only_mlp, step = theirs['sparse']
        dense = [layer for layer in range(config.n_layers) if layer in only_mlp or (layer + 1) % step]
        assert list(config.experts.dense_layers) == dense
    assert config.rotary_dim == {'qwen3_5_yarn': 128, 'qwen3_5_whole_heads': None}.get(name, 64)


@pytest.mark.parametrize('name', [name for name, fields in FORMS.items() if fields['model_type'] == 'glm4_moe'])
def test_the_fields_of_sigmoid_routers_are_those_that_transformers_reads(tmp_path, name):
    config, theirs = read(tmp_path, FORMS[name]), recorded()[name]
    router, dense = config.experts.sigmoid, config.experts.dense_layers
    assert [router.groups, router.kept_groups, router.scale, len(dense), config.qk_norm] == theirs['sigmoid']
    assert dense == tuple(range(len(dense)))
    assert config.experts.normalised == theirs['norm_topk_prob']
    assert (config.rotary_dim or config.head_dim) == 2 * len(theirs['ropes'][0]['frequencies'])


@pytest.mark.parametrize('name', [name for name in FORMS if 'latent' in recorded().get(name, {})])
def test_the_fields_of_latent_attention_are_those_that_transformers_reads(tmp_path, name):
    config, theirs = read(tmp_path, FORMS[name]), recorded()[name]
    router, m = config.experts.sigmoid, config.latent
    assert [router.groups, router.kept_groups, router.scale] == theirs['sigmoid']
    assert list(config.experts.dense_layers) == theirs['dense']
    assert [m.rank, m.plain_dim, m.rotated_dim, m.value_dim, m.query_rank, m.interleaved] == theirs['latent']
    assert config.rotary_dim == m.rotated_dim
    assert config.experts.normalised == theirs['norm_topk_prob']


@pytest.mark.parametrize('name', FORMS)
def test_a_form_comes_back_from_the_file_that_is_written_of_it(tmp_path, name):
    config = read(tmp_path, FORMS[name])
    assert read(tmp_path, json.loads(json.dumps(hf_config(config)))) == config


def test_every_part_of_a_head_comes_back(tmp_path):
    # 44 * (30 / 44) is below 30
    form = FORMS['qwen3_5_defaults'] | {'num_hidden_layers': 1}
    for head_dim, rotated in ((44, 30), (46, 26), (52, 30), (256, 64), (44, 44)):
        config = read(
            tmp_path, form | {'head_dim': head_dim, 'partial_rotary_factor': min((rotated + 0.5) / head_dim, 1.0)}
        )
        assert (config.rotary_dim or head_dim) == rotated
        assert read(tmp_path, hf_config(config)) == config


def test_of_a_composite_model_the_whole_says_whether_the_head_is_tied(tmp_path):
    form = FORMS['gemma3']
    text = form['text_config'] | {'tie_word_embeddings': False}
    assert read(tmp_path, form | {'text_config': text}).tie_embeddings
    assert not read(tmp_path, form | {'tie_word_embeddings': False}).tie_embeddings
    assert read(tmp_path, form).family == 'gemma3_text'


@pytest.mark.parametrize(
    ('model_type', 'feature'),
    [
        ('gemma4', 'head sizes that differ by layer'),
        ('nemotron_h', r'state space layers \(Mamba 2\)'),
        ('glm_moe_dsa', 'sparse attention by an indexer'),
        ('kimi_linear', r'linear attention layers \(KDA\)'),
        ('phi3', 'longrope'),
        ('mistral3', 'queries are scaled by their positions'),
    ],
)
def test_models_that_are_not_read_are_refused_with_the_feature_that_is_missing(tmp_path, model_type, feature):
    said = rf'^\S+config\.json: model_type=\'{model_type}\' needs .*{feature}.*, which is not supported$'
    with pytest.raises(HfError, match=said):
        read(tmp_path, {'model_type': model_type})


@pytest.mark.parametrize(
    ('name', 'change', 'message'),
    [
        ('gemma3_text', {'attn_logit_softcapping': 50.0}, r'attn_logit_softcapping=50\.0 is not supported'),
        ('gemma3_text', {'use_bidirectional_attention': True}, 'use_bidirectional_attention=True is not supported'),
        ('gemma3_text', {'hidden_activation': 'silu'}, "hidden_activation='silu' is not supported"),
        ('gemma3_text', {'sliding_window': None}, 'there is no sliding_window: name its tokens'),
        ('gemma3_text', {'layer_types': ['chunked_attention'] * 18}, "18 entries of 'full_attention' or 'sliding_"),
        ('gemma3_text', {'rope_parameters': {'rope_theta': 1e6}}, r'rope_parameters\.rope_theta=1000000\.0'),
        (
            'olmo3_defaults',
            {'rope_parameters': {'full_attention': {'rope_type': 'yarn', 'factor': 2.0, 'truncate': False}}},
            r'rope_parameters\.full_attention\.truncate=False',
        ),
        ('qwen3_next', {'attention_bias': True}, 'attention_bias=True is not supported; supported: False'),
        ('qwen3_next', {'attn_output_gate': False}, 'attn_output_gate=False is not supported; supported: True'),
        ('qwen3_next', {'output_gate_type': 'sigmoid'}, "output_gate_type='sigmoid' is not supported; supported: 'swi"),
        ('qwen3_next', {'mamba_ssm_dtype': 'bfloat16'}, "mamba_ssm_dtype='bfloat16' is not supported; supported: 'flo"),
        ('qwen3_next', {'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported; supported: 'silu'"),
        ('qwen3_next', {'layer_types': ['sliding_attention'] * 48}, "48 entries of 'full_attention' or 'linear_att"),
        ('qwen3_next', {'layer_types': ['full_attention']}, "48 entries of 'full_attention' or 'linear_att"),
        ('qwen3_next', {'full_attention_interval': 0}, 'full_attention_interval=0 must be an integer of at least 1'),
        ('qwen3_next', {'sliding_window': 64}, 'sliding_window=64 is not supported; supported: null'),
        ('qwen3_next', {'linear_num_key_heads': 12}, 'linear_num_value_heads=32 is not a multiple of linear_num_key_'),
        ('qwen3_next', {'linear_conv_kernel_dim': 0}, 'linear_conv_kernel_dim=0 must be an integer of at least 1'),
        ('qwen3_next', {'shared_expert_intermediate_size': 0}, 'shared_expert_intermediate_size=0 must be an integer'),
        ('qwen3_next', {'partial_rotary_factor': 0.27}, r'partial_rotary_factor=0\.27 .* even number of the 256'),
        ('qwen3_next', {'partial_rotary_factor': 1.5}, r'partial_rotary_factor=1\.5 .* even number of the 256'),
        ('qwen3_next', {'partial_rotary_factor': 0}, 'partial_rotary_factor=0 must be a number above 0'),
        (
            'qwen3_5_text',
            {'rope_parameters': {'partial_rotary_factor': 0.001, 'rope_theta': 1e4}},
            r'rope_parameters\.partial_rotary_factor=0\.001 is not supported',
        ),
        ('qwen3_5_moe_defaults', {'norm_topk_prob': False}, 'norm_topk_prob=False is not supported; supported: True'),
        ('qwen3_5_moe_defaults', {'mlp_only_layers': [1]}, r'mlp_only_layers=\[1\] is not supported; supported: \[\]'),
        ('qwen3_5_moe_defaults', {'decoder_sparse_step': 2}, 'decoder_sparse_step=2 is not supported; supported: 1'),
        ('glm4_moe', {'scoring_func': 'softmax'}, "scoring_func='softmax' is not supported; supported: 'sigmoid'"),
        ('glm4_moe', {'topk_method': 'greedy'}, "topk_method='greedy' is not supported; supported: 'noaux_tc'"),
        ('glm4_moe', {'moe_layer_freq': 2}, 'moe_layer_freq=2 is not supported; supported: 1'),
        ('glm4_moe', {'num_experts': 8}, 'num_experts=8 is not supported; supported: 0'),
        ('glm4_moe', {'num_local_experts': 8}, 'n_routed_experts=160 and num_local_experts=8 are two numbers of exp'),
        ('glm4_moe', {'first_k_dense_replace': 92}, 'first_k_dense_replace=92 leaves no layer with experts'),
        ('glm4_moe', {'n_shared_experts': 0}, 'n_shared_experts=0 must be an integer of at least 1'),
        ('glm4_moe', {'n_group': 3}, '160 experts do not make 3 equal groups'),
        ('glm4_moe', {'n_group': 160}, '160 experts do not make 160 equal groups of two or more'),
        ('glm4_moe', {'n_group': 32}, 'of which 1 have the 8 that a token reaches'),
        ('glm4_moe', {'topk_group': 2}, 'a token cannot keep 2 of 1 groups of experts'),
        ('glm4_moe', {'quantization_config': {'quant_method': 'fp8'}}, 'quantization_config=.* supported: None'),
        ('qwen3', {'layer_types': ['linear_attention'] * 36}, 'layer_types=.* is not supported'),
        ('qwen3', {'partial_rotary_factor': 0.25}, r'partial_rotary_factor=0\.25 is not supported; supported: 1\.0'),
        ('qwen3', {'rope_scaling': {'type': 'longrope'}}, "rope_type='longrope' needs rotary frequencies that depend"),
        ('qwen3', {'rope_scaling': {'type': 'dynamic'}}, "rope_type='dynamic' needs rotary frequencies that depend"),
        ('smollm3', {'no_rope_layers': [1, 0]}, r'no_rope_layers=\[1, 0\] .* 36 entries'),
        ('gpt_oss', {'quantization_config': {'quant_method': 'fp8'}}, "supported: null, or quant_method 'mxfp4'"),
        ('qwen3', {'quantization_config': {'quant_method': 'mxfp4'}}, 'quantization_config=.* supported: None'),
    ],
)
def test_an_option_that_would_compute_something_else_is_refused(tmp_path, name, change, message):
    with pytest.raises(HfError, match=message):
        read(tmp_path, FORMS[name] | change)
