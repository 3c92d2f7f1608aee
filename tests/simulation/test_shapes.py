"""simulation/prices.py: sizes against published ones, against the decoder's own weights, and experts by hand."""

import json
import math
import pathlib

import pytest
from jax import tree

from areal_jax.config.fields import ConfigError
from areal_jax.formats.hf_config import read_hf_config
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import Experts
from areal_jax.models.weights import weight_table
from areal_jax.simulation.prices import (
    H800,
    QWEN3_30B_A3B,
    R1_DISTILL_7B,
    SHAPES,
    ModelShape,
    Roofline,
    find_shape,
    shape_of,
)
from tests.models import family_examples

QWEN3_30B = pathlib.Path(__file__).parents[2] / 'configs' / 'shapes' / 'qwen3_30b_a3b'
TINY = {'vocab_size': 48, 'd_model': 32, 'n_layers': 3, 'n_heads': 4, 'n_kv_heads': 2, 'head_dim': 16, 'd_ff': 40}
SMOLLM2_135M = ModelConfig(49152, 576, 30, 9, 3, 64, 1536, 1e5)
CONFIGS = {
    'llama': ModelConfig(**TINY, rope_theta=1e4),
    'untied': ModelConfig(**TINY, rope_theta=1e4, tie_embeddings=False),
    'plain': ModelConfig(**TINY, rope_theta=1e4, plain=True, tie_embeddings=False, output_size=3, context_tokens=20),
    'qwen2': ModelConfig(**TINY, rope_theta=1e4, family='qwen2', qkv_bias=True),
    'qwen3': ModelConfig(**TINY, rope_theta=1e4, family='qwen3', qk_norm=True),
    'qwen3_moe': ModelConfig(
        **TINY, rope_theta=1e4, family='qwen3_moe', qk_norm=True, experts=Experts(6, 2, 24, dense_layers=(1,))
    ),
    'mixtral': ModelConfig(**TINY, rope_theta=1e4, family='mixtral', experts=Experts(6, 2, 24)),
    'smollm2': SMOLLM2_135M,
    'deepseek_v3': family_examples.CONFIGS['deepseek_v3'],
    'glm4_moe_lite': family_examples.CONFIGS['glm4_moe_lite'],
}


@pytest.mark.parametrize(
    ('name', 'billions', 'products', 'gigabytes', 'kv_bytes'),
    [
        ('R1-distill-Qwen-1.5B', 1.78, 1.54, 3.6, 28_672),
        ('R1-distill-Qwen-7B', 7.62, 7.07, 15.2, 57_344),
        ('R1-distill-Qwen-14B', 14.77, 13.99, 29.5, 196_608),
        ('R1-distill-Qwen-32B', 32.76, 31.98, 65.5, 262_144),
        ('Qwen3-0.6B', 0.60, 0.60, 1.2, 114_688),
        ('Qwen3-8B', 8.19, 7.57, 16.4, 147_456),
        ('Llama-3.1-8B', 8.03, 7.50, 16.1, 131_072),
    ],
)
def test_published_models_have_their_published_sizes(name, billions, products, gigabytes, kv_bytes):
    shape = find_shape(name)
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.005)
    assert shape.product_parameters / 1e9 == pytest.approx(products, abs=0.006)
    assert 2 * shape.parameters / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert shape.kv_bytes == kv_bytes


def test_the_model_of_experts_is_the_one_whose_config_is_here():
    assert shape_of('Qwen3-30B-A3B', read_hf_config(QWEN3_30B)) == QWEN3_30B_A3B
    assert QWEN3_30B_A3B.parameters / 1e9 == pytest.approx(30.5, abs=0.05)
    assert (QWEN3_30B_A3B.active_parameters + 151936 * 2048) / 1e9 == pytest.approx(3.3, abs=0.06)  # with the embedding


@pytest.mark.parametrize('name', CONFIGS)
def test_parameters_are_those_of_the_decoder(name):
    leaves = tree.leaves(Decoder(CONFIGS[name]).abstract())
    assert shape_of(name, CONFIGS[name]).parameters == sum(math.prod(leaf.shape) for leaf in leaves)


@pytest.mark.parametrize('name', CONFIGS)
def test_products_are_matrices_of_layers_and_the_head(name):
    """Counted once more, by the shapes of the table of weights: lookups, biases and norms are no products."""
    config, shape = CONFIGS[name], shape_of(name, CONFIGS[name])
    matrices = [spec for spec in weight_table(config).values() if spec.in_layers and len(spec.shape) > 1]
    head = (config.output_size or config.vocab_size) * config.d_model
    assert shape.head_parameters == head
    assert shape.product_parameters == head + sum(math.prod(spec.shape) * len(spec.layers) for spec in matrices)


def test_latent_attention_is_counted_by_hand(tmp_path):
    """DeepSeek-V3: a cache of 512 + 64 numbers, heads of (192 + 128) / 2 in training and of 576 in engines."""
    (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'deepseek_v3'}))  # transformers has its sizes
    shape = shape_of('DeepSeek-V3', read_hf_config(tmp_path))
    queries, latent, output = 7168 * 1536 + 1536 * 128 * 192, 7168 * 576, 128 * 128 * 7168
    attention = queries + latent + 512 * 128 * (128 + 128) + output
    expert, dense = 3 * 7168 * 2048, 3 * 7168 * 18432
    others = 61 * attention + 3 * dense + 58 * (7168 * 256 + expert) + 129280 * 7168
    assert shape.expert_parameters == 58 * 256 * expert
    assert shape.product_parameters == others + shape.expert_parameters
    assert shape.active_parameters == pytest.approx(others + 58 * 8 * expert, rel=1e-12)
    assert shape.parameters / 1e9 == pytest.approx(671, abs=0.1)  # arXiv 2412.19437, section 4.2
    assert (shape.active_parameters + 129280 * 7168) / 1e9 == pytest.approx(37.6, abs=0.1)  # with the embedding
    assert shape.kv_bytes == 61 * 576 * 2
    assert (shape.attention_width, shape.latent_width) == (128 * 160, 128 * 576)
    one = Roofline(H800, shape)
    more = lambda price: price(1.0, 1001.0) - price(1.0, 1.0)
    reached = one.reached
    assert more(one.prefill_s) == pytest.approx(4e3 * 61 * 128 * 576 / (reached.prefill * one.chip.flops), rel=1e-9)
    trained = more(lambda tokens, positions: one.train_s(tokens, positions, 3))
    assert trained == pytest.approx(3 * 4e3 * 61 * 128 * 160 / (reached.mfu * one.chip.flops), rel=1e-9)


def test_experts_that_no_token_reaches_are_not_read():
    """4 experts of 25 parameters, 2 for a token: one token reaches half of them, two reach three quarters."""
    shape = ModelShape('toy', 200, 150, 10, 1, 8, 4, 8, expert_parameters=100, experts=4, experts_per_token=2)
    assert shape.active_parameters == 50 + 50
    assert shape.read_parameters(1) == shape.active_parameters
    assert shape.read_parameters(2) == 50 + 75
    assert shape.read_parameters(1000) == pytest.approx(150)


def test_a_model_without_experts_is_read_whole():
    assert R1_DISTILL_7B.active_parameters == R1_DISTILL_7B.read_parameters(3) == R1_DISTILL_7B.product_parameters


def test_names_are_found_in_either_case_and_in_full():
    assert [find_shape(shape.name) for shape in SHAPES] == list(SHAPES)
    for name in ('r1-distill-7b', 'deepseek-ai/DeepSeek-R1-Distill-Qwen-7B', ' R1-Distill-Qwen-7B '):
        assert find_shape(name) is R1_DISTILL_7B


def test_an_unknown_model_is_refused_with_a_near_name():
    with pytest.raises(
        ConfigError, match=r"the model 'Qwen3-7B' is not known; did you mean qwen3-8b\?; use one of R1-"
    ):
        find_shape('Qwen3-7B')
