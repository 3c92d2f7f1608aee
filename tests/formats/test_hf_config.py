"""config.json of every family, as transformers 4 and 5 write it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from areal_jax.formats.hf_config import HfError, hf_config, read_hf_config
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import LayerKind, ModelConfig
from areal_jax.models.ropes import Llama3Scaling, Rope

# the files of the published models, without what says nothing of the shape
QWEN_1_5B = {
    'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2', 'hidden_act': 'silu', 'hidden_size': 1536,
    'intermediate_size': 8960, 'max_position_embeddings': 131072, 'max_window_layers': 21, 'num_attention_heads': 12,
    'num_hidden_layers': 28, 'num_key_value_heads': 2, 'rms_norm_eps': 1e-6, 'rope_theta': 10000,
    'sliding_window': 4096, 'tie_word_embeddings': False, 'torch_dtype': 'bfloat16', 'use_cache': True,
    'use_mrope': False, 'use_sliding_window': False, 'vocab_size': 151936,
}  # fmt: skip
QWEN_7B = QWEN_1_5B | {
    'hidden_size': 3584, 'intermediate_size': 18944, 'num_attention_heads': 28, 'num_key_value_heads': 4,
    'vocab_size': 152064,
}  # fmt: skip
QWEN_14B = QWEN_1_5B | {
    'hidden_size': 5120, 'intermediate_size': 13824, 'max_window_layers': 48, 'num_attention_heads': 40,
    'num_hidden_layers': 48, 'num_key_value_heads': 8, 'rms_norm_eps': 1e-5, 'rope_theta': 1000000.0,
    'sliding_window': 131072, 'vocab_size': 152064,
}  # fmt: skip
QWEN_32B = QWEN_14B | {'intermediate_size': 27648, 'max_window_layers': 64, 'num_hidden_layers': 64}
LLAMA_8B = {
    'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'attention_bias': False, 'hidden_act': 'silu',
    'hidden_size': 4096, 'intermediate_size': 14336, 'max_position_embeddings': 131072, 'mlp_bias': False,
    'num_attention_heads': 32, 'num_hidden_layers': 32, 'num_key_value_heads': 8, 'pretraining_tp': 1,
    'rms_norm_eps': 1e-5, 'rope_theta': 500000.0, 'tie_word_embeddings': False, 'torch_dtype': 'bfloat16',
    'vocab_size': 128256, 'rope_scaling': {
        'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 8192,
        'rope_type': 'llama3',
    },
}  # fmt: skip
QWEN3_0_6B = {
    'architectures': ['Qwen3ForCausalLM'], 'model_type': 'qwen3', 'attention_bias': False, 'head_dim': 128,
    'hidden_act': 'silu', 'hidden_size': 1024, 'intermediate_size': 3072, 'max_position_embeddings': 40960,
    'max_window_layers': 28, 'num_attention_heads': 16, 'num_hidden_layers': 28, 'num_key_value_heads': 8,
    'rms_norm_eps': 1e-6, 'rope_scaling': None, 'rope_theta': 1000000, 'sliding_window': None,
    'tie_word_embeddings': True, 'torch_dtype': 'bfloat16', 'use_sliding_window': False, 'vocab_size': 151936,
}  # fmt: skip
QWEN3_8B = QWEN3_0_6B | {
    'hidden_size': 4096, 'intermediate_size': 12288, 'max_window_layers': 36, 'num_attention_heads': 32,
    'num_hidden_layers': 36, 'tie_word_embeddings': False,
}  # fmt: skip
SMOLLM2 = {
    'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'attention_bias': False, 'hidden_act': 'silu',
    'hidden_size': 576, 'intermediate_size': 1536, 'is_llama_config': True, 'max_position_embeddings': 8192,
    'mlp_bias': False, 'num_attention_heads': 9, 'num_hidden_layers': 30, 'num_key_value_heads': 3,
    'pretraining_tp': 1, 'rms_norm_eps': 1e-5, 'rope_interleaved': False, 'rope_scaling': None, 'rope_theta': 100000,
    'tie_word_embeddings': True, 'torch_dtype': 'bfloat16', 'vocab_size': 49152,
}  # fmt: skip
MISTRAL = {
    'architectures': ['MistralForCausalLM'], 'model_type': 'mistral', 'hidden_size': 32, 'intermediate_size': 48,
    'num_attention_heads': 16, 'num_hidden_layers': 3, 'vocab_size': 64,
}  # fmt: skip
SHAPE = ModelConfig(
    vocab_size=64, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=48, rope_theta=5e5, rms_eps=1e-6
)
SHAPES = {
    'llama': SHAPE,
    'llama3': dataclasses.replace(SHAPE, tie_embeddings=False, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 512)),
    'llama_bias': dataclasses.replace(SHAPE, qkv_bias=True, output_bias=True),
    'qwen2': dataclasses.replace(SHAPE, family='qwen2', qkv_bias=True),
    'qwen2_window': dataclasses.replace(
        SHAPE, family='qwen2', qkv_bias=True, kinds=(LayerKind(), LayerKind(7), LayerKind(7)), tie_embeddings=False
    ),
    'qwen3': dataclasses.replace(SHAPE, family='qwen3', qk_norm=True),
    'qwen3_bias': dataclasses.replace(SHAPE, family='qwen3', qk_norm=True, qkv_bias=True, output_bias=True),
    'mistral': dataclasses.replace(SHAPE, family='mistral', kinds=(LayerKind(7),)),
    'mistral_full': dataclasses.replace(SHAPE, family='mistral', context_tokens=99),
}


def read(tmp_path, fields):
    (tmp_path / 'config.json').write_text(json.dumps(fields))
    return read_hf_config(tmp_path)


# A layer has, with q = heads * head_dim and kv = kv_heads * head_dim, 2 q d (query, output), 2 kv d (key, value),
# 3 d d_ff (mlp), 2 d (norms), and the biases q + 2 kv of Qwen2 or the norms 2 head_dim of Qwen3.
# Beside the layers: the embedding V d, a head of as many where it is not tied, and the last norm d.
@pytest.mark.parametrize(
    ('fields', 'layer', 'rest', 'total'),
    [
        pytest.param(
            QWEN_1_5B, 2*1536*1536 + 2*256*1536 + 3*1536*8960 + 2*1536 + 1536 + 2*256, 2*151936*1536 + 1536,
            1_777_088_000, id='R1-Distill-Qwen-1.5B',
        ),
        pytest.param(
            QWEN_7B, 2*3584*3584 + 2*512*3584 + 3*3584*18944 + 2*3584 + 3584 + 2*512, 2*152064*3584 + 3584,
            7_615_616_512, id='R1-Distill-Qwen-7B',
        ),
        pytest.param(
            QWEN_14B, 2*5120*5120 + 2*1024*5120 + 3*5120*13824 + 2*5120 + 5120 + 2*1024, 2*152064*5120 + 5120,
            14_770_033_664, id='R1-Distill-Qwen-14B',
        ),
        pytest.param(
            QWEN_32B, 2*5120*5120 + 2*1024*5120 + 3*5120*27648 + 2*5120 + 5120 + 2*1024, 2*152064*5120 + 5120,
            32_763_876_352, id='R1-Distill-Qwen-32B',
        ),
        pytest.param(
            LLAMA_8B, 2*4096*4096 + 2*1024*4096 + 3*4096*14336 + 2*4096, 2*128256*4096 + 4096,
            8_030_261_248, id='Llama-3.1-8B',
        ),
        pytest.param(
            QWEN3_0_6B, 2*2048*1024 + 2*1024*1024 + 3*1024*3072 + 2*1024 + 2*128, 151936*1024 + 1024,
            596_049_920, id='Qwen3-0.6B',
        ),
        pytest.param(
            QWEN3_8B, 2*4096*4096 + 2*1024*4096 + 3*4096*12288 + 2*4096 + 2*128, 2*151936*4096 + 4096,
            8_190_735_360, id='Qwen3-8B',
        ),
        pytest.param(
            SMOLLM2, 2*576*576 + 2*192*576 + 3*576*1536 + 2*576, 49152*576 + 576,
            134_515_008, id='SmolLM2-135M',
        ),
    ],
)  # fmt: skip
def test_published_sizes(tmp_path, fields, layer, rest, total):
    assert fields['num_hidden_layers'] * layer + rest == total
    config = read(tmp_path, fields)
    assert Decoder(config).parameter_count() == Decoder(config, layers='stacked').parameter_count() == total
    assert Decoder(dataclasses.replace(config, n_layers=1)).parameter_count() == layer + rest


def test_windows_of_published_files_are_off(tmp_path):
    # sliding_window is a number there, use_sliding_window false
    assert read(tmp_path, QWEN_1_5B).windows == {None}


@pytest.mark.parametrize('name', SHAPES)
def test_a_shape_comes_back_from_its_file(tmp_path, name):
    said = json.loads(json.dumps(hf_config(SHAPES[name])))
    assert read(tmp_path, said) == SHAPES[name]
    # either half alone is what one version of transformers writes
    for others in (('rope_parameters', 'dtype'), ('rope_theta', 'rope_scaling', 'torch_dtype')):
        assert read(tmp_path, {key: value for key, value in said.items() if key not in others}) == SHAPES[name]


def test_defaults_of_the_families(tmp_path):
    config = read(tmp_path, MISTRAL)  # 8 key heads, head_dim 32 / 16, a window of 4096
    assert (config.n_kv_heads, config.head_dim, config.windows) == (8, 2, {4096})
    assert (config.rope_theta, config.rms_eps, config.tie_embeddings) == (10000.0, 1e-6, False)
    config = read(tmp_path, MISTRAL | {'sliding_window': None, 'num_key_value_heads': None})
    assert (config.n_kv_heads, config.windows) == (16, {None})
    llama = {**MISTRAL, 'architectures': ['LlamaForCausalLM'], 'model_type': 'llama'}
    assert read(tmp_path, llama).n_kv_heads == 16
    qwen3 = read(tmp_path, {**QWEN3_0_6B, 'head_dim': None})
    assert (qwen3.head_dim, qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (128, False, False, True)
    qwen2 = read(tmp_path, QWEN_1_5B)
    assert (qwen2.head_dim, qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (128, True, False, False)


def test_layer_types_say_where_windows_begin(tmp_path):
    windowed = QWEN_1_5B | {'num_hidden_layers': 3, 'use_sliding_window': True, 'sliding_window': 9}
    full, sliding = 'full_attention', 'sliding_attention'
    config = read(tmp_path, windowed | {'max_window_layers': 1})
    assert [config.window(layer) for layer in range(3)] == [None, 9, 9]
    config = read(tmp_path, windowed | {'max_window_layers': 1, 'layer_types': [full, full, sliding]})
    assert [config.window(layer) for layer in range(3)] == [None, None, 9]
    assert read(tmp_path, windowed | {'layer_types': [full] * 3}).windows == {None}
    assert read(tmp_path, windowed | {'max_window_layers': 3}).windows == {None}
    assert read(tmp_path, MISTRAL | {'layer_types': [sliding] * 3}).window(0) == 4096


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'model_type': 'gpt2'}, r"model_type='gpt2' is not supported; supported: llama, qwen2, qwen3, mistral"),
        ({'model_type': None}, r'model_type=None is not supported'),
        (
            {'architectures': ['Qwen2ForSequenceClassification']},
            r"architectures=.*Classification'\] is not .*Qwen2ForCausalLM",
        ),
        ({'hidden_act': 'gelu'}, r"hidden_act='gelu' is not supported; supported: 'silu'"),
        ({'mlp_bias': True}, r'mlp_bias=True is not supported; supported: False'),
        ({'partial_rotary_factor': 0.5}, r'partial_rotary_factor=0.5'),
        ({'pretraining_tp': 2}, r'pretraining_tp=2'),
        ({'quantization_config': {'bits': 4}}, r"quantization_config=\{'bits': 4\}"),
        (
            {'rope_scaling': {'type': 'ntk', 'factor': 4.0}},
            r"rope_scaling\.rope_type='ntk' .*'default', 'linear', 'llama3', 'yarn'",
        ),
        (
            {'rope_parameters': {'rope_type': 'longrope'}},
            r"rope_parameters\.rope_type='longrope' needs rotary frequencies that depend on the length reached",
        ),
        ({'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}, r"rope_scaling\.rope_type='dynamic' needs rotary freq"),
        ({'rope_parameters': {'partial_rotary_factor': 0.5}}, r'rope_parameters\.partial_rotary_factor=0\.5'),
        ({'rope_parameters': {'full_attention': {}}}, r'rope_parameters=.* one object for all layers'),
        ({'rope_scaling': {'type': 'llama3', 'factor': 8.0}}, r'rope_scaling\.low_freq_factor=None must be a number'),
        (
            {'rope_scaling': LLAMA_8B['rope_scaling'] | {'high_freq_factor': 1.0}},
            r'high_frequency_factor=1\.0 must be above',
        ),
        ({'layer_types': ['sliding_attention'] + ['full_attention'] * 27}, r'layer_types=.* 28 entries, first every'),
        ({'layer_types': ['full_attention']}, r'layer_types=.* 28 entries'),
        ({'layer_types': ['sliding_attention'] * 28}, r'layer_types=.* qwen2 model with sliding_window=None computes'),
        ({'hidden_size': None}, r'hidden_size=None must be an integer of at least 1'),
        ({'num_hidden_layers': '28'}, r"num_hidden_layers='28' must be an integer"),
        ({'rms_norm_eps': 'small'}, r"rms_norm_eps='small' must be a number above 0"),
        ({'tie_word_embeddings': 'no'}, r"tie_word_embeddings='no' must be true or false"),
        ({'num_attention_heads': 7}, r'hidden_size=1536 is not a multiple of num_attention_heads=7'),
        ({'num_key_value_heads': 5}, r'n_heads=12 is not a multiple of n_kv_heads=5'),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, change, message):
    with pytest.raises(HfError, match=rf'^{tmp_path}/config\.json: {message}'):
        read(tmp_path, QWEN_1_5B | change)


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf'), 10**400, 0, 0.0, -1e-6, True])
@pytest.mark.parametrize('name', ['rope_theta', 'rms_norm_eps', 'rope_parameters.rope_theta'])
def test_numbers_that_no_model_computes_with_are_named(tmp_path, name, value):
    section, _, key = name.rpartition('.')
    with pytest.raises(HfError, match=rf'^{tmp_path}/config\.json: {name}=.* must be a number above 0 and finite$'):
        read(tmp_path, QWEN_1_5B | ({section: {key: value}} if section else {key: value}))


@pytest.mark.parametrize('value', [0, -1, 2**31, 2.0, float('nan'), True])
@pytest.mark.parametrize(
    'name',
    ['vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads', 'num_key_value_heads', 'head_dim',
     'intermediate_size', 'max_position_embeddings'],
)  # fmt: skip
def test_sizes_that_no_model_has_are_named(tmp_path, name, value):
    with pytest.raises(
        HfError, match=rf'^{tmp_path}/config\.json: {name}=.* must be an integer of at least 1 and below'
    ):
        read(tmp_path, QWEN_1_5B | {name: value})


@pytest.mark.parametrize('value', [['qwen2'], {'qwen2': 1}, 2])
def test_a_model_type_that_is_no_string_is_named(tmp_path, value):
    with pytest.raises(HfError, match=rf'^{tmp_path}/config\.json: model_type=.* is not supported; supported: llama'):
        read(tmp_path, QWEN_1_5B | {'model_type': value})


# of Granite, Gemma 2, Cohere, Mixtral, OLMo and others: a value that changes nothing of what is computed, and another
@pytest.mark.parametrize(
    ('name', 'neutral', 'other'),
    [
        ('partial_rotary_factor', 1, 0.5), ('rotary_pct', 1.0, 0.25), ('logit_scale', 1, 0.0625),
        ('logits_scaling', 1, 8.0), ('embedding_multiplier', 1.0, 12.0), ('residual_multiplier', 1.0, 0.22),
        ('attention_multiplier', None, 1.0), ('query_pre_attn_scalar', None, 224), ('is_causal', True, False),
        ('final_logit_softcapping', None, 30.0), ('attn_logit_softcapping', None, 50.0), ('clip_qkv', None, 8.0),
        ('dual_chunk_attention_config', None, {'chunk_size': 8192}), ('attention_chunk_size', None, 8192),
        ('no_rope_layers', None, [1, 0]), ('num_experts', 0, 8), ('num_local_experts', 0, 8),
        ('n_routed_experts', 0, 64),
    ],
)  # fmt: skip
def test_options_of_other_families_are_refused_unless_they_change_nothing(tmp_path, name, neutral, other):
    plain = read(tmp_path, QWEN_1_5B)
    assert read(tmp_path, QWEN_1_5B | {name: neutral}) == read(tmp_path, QWEN_1_5B | {name: None}) == plain
    with pytest.raises(HfError, match=rf'^{tmp_path}/config\.json: {name}=.* is not supported; supported: '):
        read(tmp_path, QWEN_1_5B | {name: other})


def test_windows_of_a_llama_model_are_refused(tmp_path):
    with pytest.raises(HfError, match='sliding_window=64 is not supported; supported: null'):
        read(tmp_path, LLAMA_8B | {'sliding_window': 64})


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(HfError, match=rf'{tmp_path}/config\.json cannot be read \(No such file'):
        read_hf_config(tmp_path)
    for content, said in (('{"vocab', 'is no JSON'), ('[]', 'holds a list, not an object')):
        (tmp_path / 'config.json').write_text(content)
        with pytest.raises(HfError, match=rf'config\.json {said}'):
            read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ('name', 'change', 'message'),
    [
        ('llama', {'qk_norm': True}, "qk_norm=True cannot be written for family='llama'"),
        ('llama', {'qkv_bias': True}, 'output_bias=False cannot'),
        ('llama', {'kinds': (LayerKind(4),)}, r'windows of \[4\] tokens cannot'),
        ('qwen2', {'qkv_bias': False}, 'qkv_bias=False cannot'),
        ('qwen3', {'qk_norm': False}, 'qk_norm=False cannot'),
        ('mistral', {'kinds': (LayerKind(), *[LayerKind(7)] * 2)}, r'windows=\[None, 7, 7\] cannot'),
        ('qwen2', {'kinds': (LayerKind(7), *[LayerKind()] * 2)}, r'windows=\[7, None, None\] cannot'),
        ('llama', {'kinds': (LayerKind(rotates=False),)}, 'a layer without rotary positions cannot'),
        ('mistral', {'kinds': (LayerKind(7, rope=Rope(1e4)),)}, 'another rope for window layers cannot'),
        ('llama', {'logit_cap': 30.0}, 'logit_cap=30.0 cannot'),
    ],
)
def test_a_shape_outside_its_family_is_not_written(name, change, message):
    with pytest.raises(HfError, match=message):
        hf_config(dataclasses.replace(SHAPES[name], **change))


def test_the_file_says_the_dtype():
    said = hf_config(SHAPE, 'bfloat16')
    assert said['dtype'] == said['torch_dtype'] == 'bfloat16'


def test_a_pipe_in_the_place_of_the_file_is_refused_at_once(tmp_path, at_once):
    os.mkfifo(tmp_path / 'config.json')
    with pytest.raises(HfError, match=r'config\.json cannot be read \(it is no regular file\); a checkpoint'):
        read_hf_config(tmp_path)
