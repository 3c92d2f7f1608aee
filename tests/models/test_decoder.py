"""The decoder against arithmetic by hand, a float64 numpy decoder and what must hold of any causal model."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Decoder, rms_norm
from areal_jax.models.hf import to_hf_names
from areal_jax.models.rotary import rotary, rotate
from areal_jax.models.shape import ModelConfig
from tests.models import reference

CONFIG = ModelConfig(
    vocab_size=29, d_model=24, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=40, rope_theta=100.0
)
UNTIED = ModelConfig(
    vocab_size=29, d_model=24, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=4, d_ff=40, rope_theta=50.0,
    rms_eps=0.1, tie_embeddings=False,
)  # fmt: skip
TOKENS = np.array([3, 1, 4, 15, 9, 2, 6, 5, 28], np.int32)  # all different
GGUF_NAMES = {
    'embed_tokens': 'token_embd',
    'input_layernorm': 'attn_norm',
    'q_proj': 'attn_q',
    'k_proj': 'attn_k',
    'v_proj': 'attn_v',
    'o_proj': 'attn_output',
    'post_attention_layernorm': 'ffn_norm',
    'gate_proj': 'ffn_gate',
    'up_proj': 'ffn_up',
    'down_proj': 'ffn_down',
    'norm': 'output_norm',
    'lm_head': 'output',
}


def causal_hidden(decoder, params, tokens):
    ones = jnp.ones(len(tokens), jnp.int32)

    def attend(q, k, v, cache, window):
        return packed_attention(q, k, v, ones, ones, scale=q.shape[-1] ** -0.5), cache

    return decoder.hidden(params, tokens, jnp.arange(len(tokens)), attend)[0]


def test_rms_norm_by_hand():
    # mean of 3^2, 4^2 = 12.5; 12.5 + 3.5 = 16: divide by 4.  3/4 * 1 = .75, 4/4 * 2 = 2
    np.testing.assert_allclose(rms_norm(jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0]), 3.5), [[0.75, 2.0]], rtol=1e-6)


def test_angles_by_hand():
    # D = 4, theta = 100: frequencies 100^(-0/4) = 1 and 100^(-2/4) = .1; position 3 turns by 3 and .3
    cosine, sine = rotary(jnp.array([0, 3]), 4, 100.0)
    np.testing.assert_allclose(cosine, [[1, 1], [math.cos(3), math.cos(0.3)]], rtol=1e-6)
    np.testing.assert_allclose(sine, [[0, 0], [math.sin(3), math.sin(0.3)]], rtol=1e-6)


def test_rotation_by_hand():
    # pairs (1, 3) by 90 degrees: (-3, 1); (2, 4) by 180: (-2, -4). Firsts, then seconds.
    turned = rotate(jnp.array([[[1.0, 2.0, 3.0, 4.0]]]), jnp.array([[0.0, -1.0]]), jnp.array([[1.0, 0.0]]))
    np.testing.assert_allclose(turned, [[[-3, -2, 1, -4]]])


def test_scores_depend_on_the_distance_of_positions_alone():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 8))

    def score(at_q, at_k):
        turned = [rotate(jnp.array([x]), *rotary(jnp.array([at]), 8, 100.0)) for x, at in ((q, at_q), (k, at_k))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 4) == pytest.approx(score(103, 100), abs=1e-4)
    assert abs(score(7, 4) - score(4, 7)) > 1e-2


@pytest.mark.parametrize('config', [CONFIG, UNTIED], ids=['tied', 'untied'])
def test_logits_equal_the_numpy_decoder(config):
    decoder = Decoder(config)
    params = decoder.init(5)
    scales = np.random.default_rng(1).uniform(0.5, 2.0, 1000)  # norms that are not 1
    params = jax.tree.map(lambda leaf: leaf * scales[: leaf.size] if leaf.ndim == 1 else leaf, params)
    named = {}
    for name, tensor in to_hf_names(params, config).items():
        parts = name.removeprefix('model.').split('.')
        layer = f'blk.{parts[1]}.' if parts[0] == 'layers' else ''
        named[layer + GGUF_NAMES[parts[-2]]] = np.asarray(tensor)
    named.setdefault('output', named['token_embd'])
    expected = reference.forward(
        named.__getitem__, TOKENS, n_layers=config.n_layers, n_heads=config.n_heads, n_kv_heads=config.n_kv_heads,
        theta=config.rope_theta, eps=config.rms_eps, interleaved=False,
    )  # fmt: skip
    logits = jax.jit(lambda p: decoder.logits(p, causal_hidden(decoder, p, TOKENS)))(params)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, atol=2e-5)


def test_no_hidden_state_depends_on_a_later_token():
    # all tokens differ, so row TOKENS[s] of the embedding's gradient is the influence of position s alone
    decoder = Decoder(CONFIG)
    params = decoder.init(0)

    def state(embedding, t):
        return jnp.sum(jnp.sin(causal_hidden(decoder, {**params, 'embedding': embedding}, TOKENS)[t]))

    influence = jax.jit(jax.grad(state))
    for t in range(len(TOKENS)):
        size = np.abs(influence(params['embedding'], t)).max(axis=1)[TOKENS]
        assert (size[: t + 1] > 0).all()
        assert (size[t + 1 :] == 0).all()


def test_token_by_token_with_a_cache_equals_the_whole():
    decoder = Decoder(CONFIG)
    params = decoder.init(0)

    def attend(q, k, v, cache, window):
        k, v = (
            x if cache is None else jnp.concatenate([c, x]) for c, x in zip(cache or (None, None), (k, v), strict=True)
        )
        scores = jnp.einsum('nkgd,skd->nkgs', q.reshape(1, 2, 2, 8), k) * 8**-0.5
        return jnp.einsum('nkgs,skd->nkgd', jax.nn.softmax(scores), v).reshape(q.shape), (k, v)

    cache, states, tokens = None, [], TOKENS[:4]
    for t, token in enumerate(tokens):
        state, cache = decoder.hidden(params, jnp.array([token]), jnp.array([t]), attend, cache)
        states.append(state[0])
    assert [layer[0].shape for layer in cache] == [(4, 2, 8)] * 3
    np.testing.assert_allclose(states, causal_hidden(decoder, params, tokens), atol=1e-5)


def test_every_layer_gets_its_own_entry_of_the_cache():
    decoder = Decoder(CONFIG)
    attend = lambda q, k, v, entry, window: (q, entry * 10)
    _, cache = decoder.hidden(decoder.init(0), jnp.array([1]), jnp.array([0]), attend, [1, 2, 3])
    assert cache == (10, 20, 30)
    with pytest.raises(ValueError, match='cache has 2 entries, the decoder 3 layers'):
        decoder.hidden(decoder.init(0), jnp.array([1]), jnp.array([0]), attend, [1, 2])


def test_parameters_by_hand():
    # embedding 29 * 24 = 696; a layer: norms 2 * 24 = 48, q and o 2 * 24 * 32 = 1536, k and v 2 * 24 * 16 = 768,
    # mlp 3 * 24 * 40 = 2880, together 5232; final norm 24:  696 + 3 * 5232 + 24 = 16416
    assert Decoder(CONFIG).parameter_count() == 16416
    # q and o 2 * 24 * 24, k and v 2 * 24 * 8, so a layer has 48 + 1152 + 384 + 2880 = 4464; two tables of 696
    assert Decoder(UNTIED).parameter_count() == 2 * 696 + 2 * 4464 + 24


def test_parameters_are_a_plain_dict_with_one_subtree_per_layer():
    decoder = Decoder(CONFIG)
    params = decoder.init(0)
    assert type(params) is dict
    assert sorted(params) == ['embedding', 'final_norm', 'layers']
    assert sorted(params['layers']) == ['0', '1', '2']
    assert params['layers']['2']['attention']['key']['weight'].shape == (24, 16)  # [in, out]
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), decoder.abstract())


def test_random_weights_follow_seed_and_scale():
    decoder = Decoder(CONFIG)
    first, again, other, double = decoder.init(3), decoder.init(3), decoder.init(4), decoder.init(3, 2.0)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    for path, leaf in jax.tree_util.tree_leaves_with_path(first):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        values = {'other': other, 'double': double}
        for key in name.split('/'):
            values = {seed: tree[key] for seed, tree in values.items()}
        if leaf.ndim == 1:
            np.testing.assert_array_equal(leaf, 1.0)
            np.testing.assert_array_equal(values['double'], 1.0)
        else:
            np.testing.assert_allclose(values['double'], 2 * leaf, rtol=1e-6)
            assert abs(np.corrcoef(leaf.ravel(), values['other'].ravel())[0, 1]) < 0.2
    same_shape = [np.asarray(layer['attention']['query']['weight']) for layer in first['layers'].values()]
    assert not np.array_equal(same_shape[0], same_shape[1])


def test_random_weights_have_the_stated_deviation():
    # fan in 24 for query and embedding: 1/sqrt(24); down reads 40 and is damped for 3 layers: 1/sqrt(40)/sqrt(6)
    params = Decoder(CONFIG).init(0)
    layer = params['layers']['1']
    for leaf, deviation in (
        (params['embedding'], 24**-0.5),
        (layer['attention']['query']['weight'], 24**-0.5),
        (layer['attention']['output']['weight'], 32**-0.5 * 6**-0.5),
        (layer['mlp']['gate']['weight'], 24**-0.5),
        (layer['mlp']['down']['weight'], 40**-0.5 * 6**-0.5),
    ):
        assert float(jnp.std(leaf)) == pytest.approx(deviation, rel=0.12)  # 3 standard errors of 696 values: .08


def test_the_head_is_the_embedding_when_tied():
    tied, untied = Decoder(CONFIG), Decoder(UNTIED)
    params = tied.init(0)
    assert tied.head(params) is params['embedding']
    params = untied.init(0)
    assert untied.head(params) is params['head']
    hidden = np.random.default_rng(0).normal(size=(2, 24)).astype(np.float32)
    np.testing.assert_allclose(untied.logits(params, hidden), hidden @ np.asarray(params['head']).T, atol=1e-5)


@pytest.mark.parametrize(
    ('change', 'message'),
    [({'n_kv_heads': 3}, 'n_heads=4 is not a multiple of n_kv_heads=3'), ({'head_dim': 7}, 'head_dim=7 is odd')],
)
def test_impossible_shapes_are_refused(change, message):
    values = {**CONFIG.__dict__, **change}
    with pytest.raises(ValueError, match=message):
        ModelConfig(**values)
