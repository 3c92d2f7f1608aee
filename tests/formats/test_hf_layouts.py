"""Composite directories, whose text part alone is read, and experts in 4 bits."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_jax.formats.hf_config import HfError
from areal_jax.formats.hf_directory import load_hf, map_hf_weights
from areal_jax.formats.hf_layouts import unpack_blocks
from tests.models import parity

VISION = {
    'vision_tower.vision_model.embeddings.patch_embedding.weight': np.ones((4, 3), np.float32),
    'vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight': np.ones((4, 4), np.float32),
    'multi_modal_projector.mm_input_projection_weight': np.ones((4, 4), np.float32),
}


def write_composite(directory, prefix, head, *, whole=None, tensors=None):
    """The tiny Gemma 3 with a head of its own, its text under a prefix, beside the tensors of images."""
    text = parity.weights('gemma3_capped') if tensors is None else tensors
    named = {
        head if name == 'lm_head.weight' else prefix + name.removeprefix('model.'): tensor
        for name, tensor in text.items()
    }
    save_file(named | VISION, directory / 'model.safetensors')
    config = {
        'architectures': ['Gemma3ForConditionalGeneration'],
        'model_type': 'gemma3',
        'text_config': parity.CONFIGS['gemma3_capped'],
        'vision_config': {},
        'tie_word_embeddings': False,
    }
    (directory / 'config.json').write_text(json.dumps(config | (whole or {})))


@pytest.mark.parametrize(
    ('prefix', 'head'),
    [
        ('language_model.model.', 'language_model.lm_head.weight'),  # published files
        ('model.language_model.', 'lm_head.weight'),  # as transformers 5 saves them
        ('model.', 'lm_head.weight'),  # the text part alone
    ],
)
def test_the_text_part_is_found_under_its_prefix(tmp_path, capsys, prefix, head):
    (tmp_path / 'composite').mkdir()
    write_composite(tmp_path / 'composite', prefix, head)
    parity.write(tmp_path / 'text', 'gemma3_capped')
    config, params = load_hf(tmp_path / 'composite')
    expected_config, expected = load_hf(tmp_path / 'text')
    assert config == expected_config
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    jax.tree.map(np.testing.assert_array_equal, map_hf_weights(tmp_path / 'composite', config), expected)
    said = 'tensors that are not part of the text model are not read: 1 of multi_modal_projector, 2 of vision_tower'
    assert said in capsys.readouterr().err


def test_layers_that_predict_several_tokens_are_left_out(tmp_path, capsys):
    parity.write(tmp_path, 'qwen3')
    own = parity.weights('qwen3')
    mtp = {'mtp.layers.0.mlp.up_proj.weight': np.ones((2, 2), np.float32), 'mtp.embed_tokens.weight': np.ones((2, 2))}
    save_file({**mtp, **own}, tmp_path / 'model.safetensors')
    load_hf(tmp_path)
    assert 'not read: 2 of mtp' in capsys.readouterr().err


def test_a_head_that_is_not_tied_and_not_there_is_refused(tmp_path):
    # transformers would start with a random one
    tensors = parity.weights('gemma3_capped')
    del tensors['lm_head.weight']
    write_composite(tmp_path, 'model.language_model.', '', tensors=tensors)
    with pytest.raises(HfError, match=r'missing lm_head\.weight'):
        load_hf(tmp_path)
    # the text part's own copy of the field does not count
    write_composite(tmp_path, 'model.language_model.', '', tensors=tensors, whole={'tie_word_embeddings': True})
    assert 'head' not in load_hf(tmp_path)[1]


# MXFP4.


def test_a_byte_has_two_numbers_and_32_share_a_scale():
    # 0x21: the low half 1 is 0.5, the high half 2 is 1; 2^(128 - 127) = 2. 0xF8: 8 is -0, 15 is -6
    blocks = np.zeros((1, 1, 2, 16), np.uint8)
    blocks[0, 0, :, 0] = 0x21, 0xF8
    values = unpack_blocks(blocks, np.array([[[128, 126]]], np.uint8))
    assert values.shape == (1, 64, 1)
    np.testing.assert_array_equal(values[0, :2, 0].astype(np.float32), [1, 2])
    np.testing.assert_array_equal(values[0, 32:34, 0].astype(np.float32), [0, -3])
    assert not values[0, 2:32, 0].any()


def packed_experts(config, layer, rng):
    """(tensors in 4 bits, the same as float32 tensors) of a layer; widths of 32 and 64."""
    d, width, experts = config['hidden_size'], config['intermediate_size'], config['num_local_experts']
    packed, plain = {}, {}
    for name, out, size in (('gate_up_proj', 2 * width, d), ('down_proj', d, width)):
        own = f'model.layers.{layer}.mlp.experts.{name}'
        blocks = rng.integers(0, 256, (experts, out, size // 32, 16), np.uint8)
        scales = rng.integers(120, 126, (experts, out, size // 32), np.uint8)
        packed |= {f'{own}_blocks': blocks, f'{own}_scales': scales}
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        values = np.empty((experts, size, out), np.float32)
        for e, o, i in np.ndindex(experts, out, size):
            byte = int(blocks[e, o, i // 32, i % 32 // 2])
            half = byte % 16 if i % 2 == 0 else byte // 16
            values[e, i, o] = table[half] * 2.0 ** (int(scales[e, o, i // 32]) - 127)
        plain[own] = values
    return packed, plain


def test_experts_in_4_bits_are_read_as_their_values(tmp_path):
    config = parity.CONFIGS['gpt_oss'] | {'intermediate_size': 32, 'num_hidden_layers': 2, 'num_local_experts': 3}
    rng = np.random.default_rng(0)
    shapes = parity.shapes(config)
    rest = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
        if not name.endswith(('up_proj', 'down_proj'))
    }
    layers = [packed_experts(config, layer, rng) for layer in range(2)]
    for kind, directory in enumerate((tmp_path / 'packed', tmp_path / 'plain')):
        directory.mkdir()
        tensors = rest | layers[0][kind] | layers[1][kind]
        save_file(tensors, directory / 'model.safetensors')
        quantized = {} if kind else {'quantization_config': {'quant_method': 'mxfp4'}}
        (directory / 'config.json').write_text(json.dumps(config | quantized))
    config, packed = load_hf(tmp_path / 'packed')
    assert (config, packed['embedding'].dtype) == (load_hf(tmp_path / 'plain')[0], np.float32)
    jax.tree.map(np.testing.assert_array_equal, packed, load_hf(tmp_path / 'plain')[1])
    mapped = map_hf_weights(tmp_path / 'packed', config)['layers']['1']['mlp']['experts']
    np.testing.assert_array_equal(
        mapped['gate_up'].astype(np.float32), layers[1][1]['model.layers.1.mlp.experts.gate_up_proj']
    )
    stacked = load_hf(tmp_path / 'packed', layers='stacked')[1]['layers']['mlp']['experts']['down']
    np.testing.assert_array_equal(stacked[1], packed['layers']['1']['mlp']['experts']['down'])


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda tensors, name: tensors.pop(f'{name}_scales'), '_blocks has no .*_scales: get the files again'),
        (
            lambda tensors, name: tensors.update({f'{name}_scales': np.ones((3, 2), np.uint8)}),
            r'blocks of 16 bytes with a scale each are read',
        ),
        (
            lambda tensors, name: tensors.update({f'{name}_blocks': np.ones((3, 64, 1, 16), np.int8)}),
            '_blocks has dtype I8',
        ),
    ],
)
def test_blocks_that_do_not_fit_are_named(tmp_path, change, message):
    config = parity.CONFIGS['gpt_oss'] | {'intermediate_size': 32, 'num_hidden_layers': 1, 'num_local_experts': 3}
    tensors = packed_experts(config, 0, np.random.default_rng(0))[0]
    change(tensors, 'model.layers.0.mlp.experts.gate_up_proj')
    save_file(tensors, tmp_path / 'model.safetensors')
    (tmp_path / 'config.json').write_text(json.dumps(config))
    with pytest.raises(HfError, match=message):
        load_hf(tmp_path)
