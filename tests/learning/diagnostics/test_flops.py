"""The operations of an update, counted by hand and against XLA's own count."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.learning import weights as trees
from areal_jax.learning.diagnostics.measurement import attention_flops, matrix_flops, work_metrics
from areal_jax.learning.packed_rows import decoder_cost
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import LayerKind, ModelConfig
from areal_jax.models.layer_parts import Experts
from areal_jax.models.weights import Lora, is_adapter
from areal_jax.types import Prompt, Segment, Trajectory, TrajectoryGroup
from tests.models import family_examples

SHAPE = ModelConfig(
    vocab_size=50, d_model=8, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=2, d_ff=10, rope_theta=1e4
)  # fmt: skip
# query and output 8 * 8 each, key and value 8 * 4 each, gate, up and down 8 * 10 each
LAYER = 2 * 64 + 2 * 32 + 3 * 80


def group(prompt: int, *answers: int) -> TrajectoryGroup:
    start = Prompt(0, np.ones(prompt, np.int32), 'toy', {})
    segment = lambda n: Segment(np.ones(n, np.int32), np.zeros(n, np.float32), 0)
    return TrajectoryGroup(
        0, tuple(Trajectory(start, i, (segment(n),), 0.0, 'stop', '', 0.0, 0.0) for i, n in enumerate(answers))
    )


def test_matrices_by_hand():
    assert matrix_flops(SHAPE) == (6 * 3 * LAYER, 6 * 50 * 8)  # the embedding lookup multiplies nothing
    assert matrix_flops(dataclasses.replace(SHAPE, tie_embeddings=False)) == matrix_flops(SHAPE)
    assert matrix_flops(dataclasses.replace(SHAPE, qkv_bias=True, qk_norm=True, family='qwen3')) == matrix_flops(SHAPE)


def test_experts_count_where_a_token_reaches_them():
    experts = Experts(16, 3, 5, dense_layers=(1,))
    shape = dataclasses.replace(SHAPE, family='qwen3_moe', experts=experts)
    # the router 8 * 16 and three experts of three matrices 8 * 5, in two of the three layers
    assert matrix_flops(shape)[0] == 6 * (3 * LAYER - 2 * 240 + 2 * (128 + 3 * 3 * 40))
    more = dataclasses.replace(shape, experts=dataclasses.replace(experts, count=32))
    assert matrix_flops(more)[0] - matrix_flops(shape)[0] == 6 * 2 * 128  # a larger router, and no expert more


def test_latent_attention_by_hand():
    # model 16 wide, 4 heads: queries and keys of 6 + 4, values of 6, a latent of 8; one of three layers has an MLP
    shape = family_examples.CONFIGS['glm4_moe_lite']
    attention = 16 * 4 * 10 + 16 * (8 + 4) + 8 * 4 * (6 + 6) + 4 * 6 * 16
    mixture = 16 * 6 + (2 + 1) * 3 * 16 * 12  # router; two experts and the shared one
    assert matrix_flops(shape) == (6 * (3 * attention + 3 * 16 * 24 + 2 * mixture), 6 * 300 * 16)
    assert attention_flops(shape, 7) == 3 * (2 * 4 * (10 + 6) * 7) * 3  # scores of 10 and values of 6, in 3 layers
    cost = decoder_cost(shape)
    assert cost.per_token == 6 * (3 * attention + 3 * 16 * 24 + 2 * mixture + 300 * 16)
    assert cost.per_pair == attention_flops(shape, 1)


def test_adapters_by_hand():
    # rank 2 on the query projection alone: A is 8 x 2 and B 2 x 8, in each of 3 layers; frozen weights get no gradient
    lora = Lora(2, 16.0, ('query',))
    assert matrix_flops(SHAPE, lora) == (3 * (4 * LAYER + 6 * (16 + 16)), 4 * 50 * 8)


def test_attention_by_hand():
    # scores and weighted values: 2 matrix products of 2 * H * D * T operations forward, twice that backward, 3 layers
    assert attention_flops(SHAPE, 7) == 3 * (2 * 2 * 4 * 2 * 7) * 3
    window = dataclasses.replace(
        SHAPE, kinds=(LayerKind(), LayerKind(5), LayerKind(5))
    )  # layers 1 and 2 see 5 of 7 tokens
    assert attention_flops(window, 7) == 12 * 4 * 2 * (7 + 5 + 5)


def test_an_update_by_hand():
    # a prompt of 5 tokens with answers of 3 and 4: read are 5 + 2 + 3, since the last token of an answer is not
    shared = work_metrics(SHAPE, None, [group(5, 3, 4)], 'shared_prompt', epochs=1)
    body, head = matrix_flops(SHAPE)
    spans = 5 * attention_flops(SHAPE, 5) + 2 * attention_flops(SHAPE, 7) + 3 * attention_flops(SHAPE, 8)
    assert shared == {'train/read_tokens': 10.0, 'train/model_flops': 10 * body + 7 * head + spans}
    # 'ordinary' reads the prompt for each answer: (5 + 2) + (5 + 3)
    ordinary = work_metrics(SHAPE, None, [group(5, 3, 4)], 'ordinary', epochs=2)
    spans = 7 * attention_flops(SHAPE, 7) + 8 * attention_flops(SHAPE, 8)
    assert ordinary == {'train/read_tokens': 30.0, 'train/model_flops': 2 * (15 * body + 7 * head + spans)}
    assert work_metrics(SHAPE, None, [], 'shared_prompt', epochs=1) == dict.fromkeys(shared, 0.0)


def dense(q, k, v, entry, window):
    """Attention of every token to every token: like the count, it does not halve the work for the causal mask."""
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    weights = jax.nn.softmax(jnp.einsum('qhd,khd->hqk', q, k))
    return jnp.einsum('hqk,khd->qhd', weights, v), entry


@pytest.mark.parametrize('rank', [0, 4])
def test_xla_counts_as_many_operations_in_a_training_pass(rank: int):
    """One sequence of 128 tokens that are all in the loss; beside matrices XLA counts norms, rotations and softmax."""
    shape = dataclasses.replace(SHAPE, vocab_size=512, d_model=128, n_heads=4, head_dim=32, d_ff=256)
    lora = Lora(rank, 16.0, ('query', 'up')) if rank else None
    decoder, length = Decoder(shape, lora=lora), 128
    trained, frozen = trees.split(decoder.abstract(), is_adapter if lora else lambda path: True)
    places = jax.ShapeDtypeStruct((length,), jnp.int32)

    def loss(trained, frozen, tokens):
        params = trees.join(trained, frozen)
        hidden, _ = decoder.hidden(params, tokens, jnp.arange(length), dense)
        return jnp.sum(jax.nn.logsumexp(decoder.logits(params, hidden), axis=-1))

    compiled = jax.jit(jax.grad(loss)).lower(trained, frozen, places).compile()
    body, head = matrix_flops(shape, lora)
    ours = length * (body + head + attention_flops(shape, length))
    assert compiled.cost_analysis()['flops'] == pytest.approx(ours, rel=0.05)
