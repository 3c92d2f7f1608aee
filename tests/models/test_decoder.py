"""The decoder against arithmetic by hand, a float64 numpy decoder and what must hold of any causal model."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from areal_jax.config.fields import ConfigError
from areal_jax.models.decoder import REMAT, Decoder, rms_norm
from areal_jax.models.families import LayerKind, ModelConfig
from areal_jax.models.ropes import Llama3Scaling
from areal_jax.models.weights import TARGETS, Lora, stack_layers, unstack_layers
from areal_jax.native import compiled_library as library
from tests.models import reference
from tests.native import needs_kernels

CONFIG = ModelConfig(
    vocab_size=29, d_model=24, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=40, rope_theta=100.0
)
UNTIED = ModelConfig(
    vocab_size=29, d_model=24, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=4, d_ff=40, rope_theta=50.0,
    rms_eps=0.1, tie_embeddings=False,
)  # fmt: skip
# of the frequencies 1, 1/3.2, 1/10 and 1/31.6 the first is kept, the last two divided, the second blended
SCALING = Llama3Scaling(factor=4.0, low_frequency_factor=1.0, high_frequency_factor=3.0, original_context_tokens=30)
VARIANTS = {
    'tied': CONFIG,
    'untied': UNTIED,
    'qkv_bias': dataclasses.replace(CONFIG, qkv_bias=True),
    'output_bias': dataclasses.replace(CONFIG, output_bias=True),
    'qk_norm': dataclasses.replace(CONFIG, qk_norm=True),
    'rope_scaling': dataclasses.replace(CONFIG, rope_scaling=SCALING),
    'window': dataclasses.replace(CONFIG, kinds=(LayerKind(3),)),
    'windows': dataclasses.replace(CONFIG, kinds=(LayerKind(), LayerKind(2), LayerKind(2))),
    'everything': dataclasses.replace(
        UNTIED, qkv_bias=True, output_bias=True, qk_norm=True, rope_scaling=SCALING, n_layers=3,
        kinds=(LayerKind(), LayerKind(), LayerKind(4)),
    ),
}  # fmt: skip
TOKENS = np.array([3, 1, 4, 15, 9, 2, 6, 5, 28], np.int32)  # all different
POSITIONS = np.arange(len(TOKENS), dtype=np.int32)
PROJECTIONS = {
    'attn_q': ('attention', 'query'),
    'attn_k': ('attention', 'key'),
    'attn_v': ('attention', 'value'),
    'attn_output': ('attention', 'output'),
    'ffn_gate': ('mlp', 'gate'),
    'ffn_up': ('mlp', 'up'),
    'ffn_down': ('mlp', 'down'),
}
NORMS = {
    'attn_norm': ('attention_norm',),
    'ffn_norm': ('mlp_norm',),
    'attn_q_norm': ('attention', 'query_norm'),
    'attn_k_norm': ('attention', 'key_norm'),
}


def scores(q, k, window):
    seen = jnp.tril(jnp.ones((len(q), len(q)), bool))
    if window is not None:
        seen = jnp.triu(seen, 1 - window)
    products = jnp.einsum('qhd,khd->hqk', q, repeated(k, q), preferred_element_type=jnp.float32)
    return jnp.where(seen, products * q.shape[-1] ** -0.5, -jnp.inf)


def repeated(k, q):
    return jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)


def causal(q, k, v, entry, window):
    """One sequence; the cache's entries pass through."""
    weights = jax.nn.softmax(scores(q, k, window), axis=-1).astype(v.dtype)
    return jnp.einsum('hqk,khd->qhd', weights, repeated(v, q)), entry


def hidden_of(decoder, params, tokens=TOKENS, attend=causal):
    return decoder.hidden(params, tokens, jnp.arange(len(tokens)), attend)[0]


def logits_of(decoder, tokens=TOKENS):
    """A program: weights -> logits of the tokens."""
    return jax.jit(lambda params: decoder.logits(params, hidden_of(decoder, params, tokens)))


def scattered(params, seed=1):
    """Norm scales and biases that are neither 1 nor 0."""
    rng = np.random.default_rng(seed)
    change = lambda leaf: leaf + np.asarray(rng.uniform(-0.5, 1.0, leaf.shape), leaf.dtype) if leaf.ndim == 1 else leaf
    return jax.tree.map(change, params)


def loss_of(decoder, attend=causal):
    return lambda params: jnp.sum(jnp.sin(decoder.logits(params, hidden_of(decoder, params, attend=attend))))


def assert_close(actual, expected, of_range=3e-6):
    """Every leaf to a part of its largest value."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=of_range * max(np.abs(b).max(), 1e-6))


def equations(jaxpr):
    """How often each primitive stands in a program, loops and calls included."""
    counted = collections.Counter(equation.primitive.name for equation in jaxpr.eqns)
    for equation in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            counted += equations(inner)
    return counted


# What is computed.


def test_rms_norm_by_hand():
    # mean of 3^2, 4^2 = 12.5; 12.5 + 3.5 = 16: divide by 4.  3/4 * 1 = .75, 4/4 * 2 = 2
    np.testing.assert_allclose(rms_norm(jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0]), 3.5), [[0.75, 2.0]], rtol=1e-6)


@pytest.mark.parametrize('name', VARIANTS)
def test_logits_equal_the_numpy_decoder(name):
    config = VARIANTS[name]
    decoder = Decoder(config)
    params = scattered(decoder.init(5))

    def weight(named):
        if named in ('token_embd', 'output'):
            return np.asarray(decoder.head(params) if named == 'output' else params['embedding'])
        if named == 'output_norm':
            return np.asarray(params['final_norm'])
        _, layer, short = named.split('.')
        name, bias = short.removesuffix('_bias'), short.endswith('_bias')
        path = NORMS.get(name) or (*PROJECTIONS[name], 'bias' if bias else 'weight')
        leaf = functools.reduce(lambda tree, key: tree[key], path, params['layers'][layer])
        return np.asarray(leaf).T  # [out, in]; a vector is its own

    frequencies = None
    if config.rope_scaling:
        frequencies = reference.llama3_frequencies(
            config.head_dim, config.rope_theta, factor=4.0, low=1.0, high=3.0, original_context=30
        )
    expected = reference.forward(
        weight, TOKENS, n_layers=config.n_layers, n_heads=config.n_heads, n_kv_heads=config.n_kv_heads,
        theta=config.rope_theta, eps=config.rms_eps, interleaved=False, qkv_bias=config.qkv_bias,
        output_bias=config.output_bias, qk_norm=config.qk_norm, frequencies=frequencies,
        windows=[config.kinds[layer % len(config.kinds)].window for layer in range(config.n_layers)],
    )  # fmt: skip
    logits = logits_of(decoder)(params)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, atol=2e-5)


def test_no_hidden_state_depends_on_a_later_token_or_one_outside_its_windows():
    # all tokens differ, so row TOKENS[s] of the embedding's gradient is the influence of position s alone.
    # Layers of window w reach w - 1 back each: two of window 3 reach 4; one that sees all reaches everything.
    for windows, reach in (((None, None), 9), ((3, 3), 4), ((None, 3), 9), ((3, None), 9)):
        config = dataclasses.replace(CONFIG, n_layers=2, kinds=tuple(map(LayerKind, windows)))
        decoder = Decoder(config)
        params = decoder.init(0)

        def states(embedding, decoder=decoder, params=params):
            return jnp.sum(jnp.sin(hidden_of(decoder, {**params, 'embedding': embedding})), axis=1)

        influence = np.abs(jax.jit(jax.jacrev(states))(params['embedding'])).max(axis=2)[:, TOKENS]
        back = POSITIONS[:, None] - POSITIONS
        np.testing.assert_array_equal(influence > 0, (back >= 0) & (back <= reach))


def test_every_layer_gets_its_own_entry_of_the_cache_and_its_window():
    config = dataclasses.replace(CONFIG, kinds=(LayerKind(2), LayerKind(), LayerKind(5)))
    decoder = Decoder(config)
    windows = []

    def attend(q, k, v, entry, window):
        windows.append(window)
        return q, entry * 10

    _, cache = decoder.hidden(decoder.init(0), jnp.array([1]), jnp.array([0]), attend, [1, 2, 3])
    assert cache == (10, 20, 30)
    assert windows == [2, None, 5]
    with pytest.raises(ValueError, match='cache has 2 entries, the decoder 3 layers'):
        decoder.hidden(decoder.init(0), jnp.array([1]), jnp.array([0]), attend, [1, 2])


@pytest.mark.parametrize('layers', ['list', 'stacked'])
def test_the_residual_stream_is_constrained_after_the_embedding_and_every_layer(layers):
    # a constraint that doubles what it gets: with projections of 0, x = embedding * 2^(1 + 3), which the norm undoes
    decoder = Decoder(dataclasses.replace(CONFIG, rms_eps=1.0), layers=layers)
    params = jax.tree.map(lambda leaf: jnp.ones_like(leaf), decoder.init(0, scale=0.0))
    params['layers'] = jax.tree.map(jnp.zeros_like, params['layers'])
    double = lambda x: 2 * x
    state, _ = decoder.hidden(params, TOKENS, POSITIONS, lambda q, k, v, e, w: (q, e), constrain=double)
    # 16 / sqrt(16^2 + 1)
    np.testing.assert_allclose(state, 16 / 257**0.5, rtol=1e-6)


@pytest.mark.parametrize('tokens', ['rows', 'columns'])
def test_a_plain_decoder_adds_positions_and_has_relu_and_no_final_norm(tokens):
    """Against one layer written out, whose attention returns its queries."""
    config = dataclasses.replace(CONFIG, plain=True, context_tokens=20, n_layers=1, qkv_bias=False, output_bias=False)
    plain = Decoder(config, tokens=tokens)
    params = plain.init(seed=3)
    places = POSITIONS[::-1] + 5
    layer = jax.tree.map(np.asarray, params['layers']['0'])
    normal = lambda x, scale: x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.rms_eps) * scale
    x = np.asarray(params['embedding'][TOKENS] + params['positions'][places])
    x = (
        x
        + normal(x, layer['attention_norm'])
        @ layer['attention']['query']['weight']
        @ layer['attention']['output']['weight']
    )
    inner = normal(x, layer['mlp_norm']) @ layer['mlp']['up']['weight']
    x = x + np.maximum(inner, 0) @ layer['mlp']['down']['weight']

    def hidden(positions):
        return jax.jit(
            lambda p: plain.hidden(plain.prepare(p), TOKENS, positions, lambda q, k, v, entry, window: (q, entry))[0]
        )(params)

    expected = x if tokens == 'rows' else x.T
    np.testing.assert_allclose(hidden(places), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(hidden(POSITIONS) - expected).max() > 0.1


def test_the_head_is_the_embedding_when_tied():
    tied, untied = Decoder(CONFIG), Decoder(UNTIED)
    params = tied.init(0)
    assert tied.head(params) is params['embedding']
    params = untied.init(0)
    assert untied.head(params) is params['head']
    hidden = np.random.default_rng(0).normal(size=(2, 24)).astype(np.float32)
    np.testing.assert_allclose(untied.logits(params, hidden), hidden @ np.asarray(params['head']).T, atol=1e-5)


@pytest.mark.parametrize(
    ('layers', 'dtype'), [('list', jnp.bfloat16), ('stacked', jnp.bfloat16), ('list', jnp.float16)]
)
def test_activations_have_the_dtype_of_the_weights_and_logits_are_float32(layers, dtype):
    config = VARIANTS['everything']
    decoder = Decoder(config, layers=layers)
    params = scattered(decoder.init(5))
    seen = []

    def attend(q, k, v, entry, window):
        seen.extend(x.dtype for x in (q, k, v))
        return causal(q, k, v, entry, window)

    def constrain(x):
        seen.append(x.dtype)
        return x

    def logits(params):
        hidden, _ = decoder.hidden(params, TOKENS, POSITIONS, attend, constrain=constrain)
        seen.append(hidden.dtype)
        return decoder.logits(params, hidden)

    exact = jax.jit(logits)(params)
    seen.clear()
    rounded = jax.jit(logits)(jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    assert set(seen) == {jnp.dtype(dtype)}
    assert rounded.dtype == jnp.float32
    # a handful of roundings of 2^-9 (bfloat16) or 2^-12 (float16) of the range
    error = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert 0 < error < (0.03 if dtype == jnp.bfloat16 else 0.004)


# Tokens as rows or as columns.


_ADAPTERS = Lora(rank=3, alpha=6.0, targets=TARGETS)
_QUICK = {(name, None, 'list') for name in VARIANTS} | {
    ('everything', _ADAPTERS, 'list'),
    ('everything', None, 'stacked'),
}


@pytest.mark.parametrize(
    ('name', 'lora', 'layers'),
    [
        pytest.param(*case, marks=() if case in _QUICK else pytest.mark.slow)
        for case in itertools.product(VARIANTS, (None, _ADAPTERS), ('list', 'stacked'))
    ],
)
def test_tokens_as_columns_compute_what_rows_do(name, lora, layers):
    rows, columns = (Decoder(VARIANTS[name], layers=layers, lora=lora, tokens=tokens) for tokens in ('rows', 'columns'))
    params = scattered(rows.init(5))
    rng = np.random.default_rng(0)  # adapters that are not 0
    params = jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32), params)

    @functools.partial(jax.jit, static_argnums=0)
    def run(decoder, params):
        prepared = decoder.prepare(params)
        state = hidden_of(decoder, prepared)
        return state, decoder.logits(prepared, state)

    (state, expected), (turned, logits) = run(rows, params), run(columns, params)
    assert turned.shape == (rows.config.d_model, len(TOKENS))
    assert_close(turned.T, state)
    assert_close(logits, expected)


@needs_kernels
@pytest.mark.parametrize('name', ['untied', 'everything'])
def test_native_products_compute_what_those_of_xla_do(name):
    lora = Lora(rank=8, alpha=6.0, targets=TARGETS)  # whose layers are not kernels as a whole
    config = dataclasses.replace(VARIANTS[name], vocab_size=32)  # a kernel's matrices have multiples of 8 rows
    rows, native = (Decoder(config, lora=lora, tokens=tokens) for tokens in ('rows', 'native_columns'))
    params = scattered(rows.init(5))
    tokens = TOKENS[:8]
    run = logits_of(native, tokens)
    calls = run.lower(native.prepare(params)).as_text().count(f'@{library.MULTIPLY}')
    adapted = 2 * 7  # products in turn for each of the seven matrices
    assert calls == native.config.n_layers * (4 + adapted) + 1
    assert_close(run(native.prepare(params)), logits_of(rows, tokens)(params))


@pytest.mark.parametrize('lora', [None, Lora(rank=3, alpha=6.0, targets=('query', 'down'))], ids=['whole', 'lora'])
@pytest.mark.parametrize('layers', ['list', 'stacked'])
def test_prepared_weights_are_transposed_matrices_bit_for_bit(layers, lora):
    rows, columns = (
        Decoder(VARIANTS['everything'], layers=layers, lora=lora, tokens=tokens) for tokens in ('rows', 'columns')
    )
    params = rows.init(5)
    assert jax.tree.leaves(rows.prepare(params)) == jax.tree.leaves(params)  # the same arrays
    turned = []
    for (path, leaf), before in zip(
        jax.tree_util.tree_leaves_with_path(columns.prepare(params)), jax.tree.leaves(params), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        is_matrix = name.startswith('layers') and name.endswith(('/weight', '/lora_a', '/lora_b'))
        turned += [name] * is_matrix
        np.testing.assert_array_equal(leaf, np.swapaxes(before, -1, -2) if is_matrix else before)
    assert len(turned) == (7 + (4 if lora else 0)) * (3 if layers == 'list' else 1)


def test_no_product_of_columns_has_the_tokens_on_the_left():
    # a product with the weights on the right packs them anew in every call
    decoder = Decoder(VARIANTS['untied'], tokens='columns')
    weights = jax.eval_shape(decoder.prepare, decoder.abstract())
    attend = lambda q, k, v, entry, window: (q + repeated(k + v, q), entry)
    run = lambda p: decoder.logits(p, hidden_of(decoder, p, attend=attend))
    compiled = jax.jit(run).lower(weights).compile().as_text()
    products = re.findall(r'f32\[(\d+),(\d+)\]\S* dot\(', compiled)
    assert len(products) == 2 * 7 + 1
    assert {int(columns) for _, columns in products} == {len(TOKENS)}


def test_an_unknown_form_of_activations_is_refused():
    with pytest.raises(ConfigError, match="tokens='diagonal' is unknown; use one of rows, columns, native_columns"):
        Decoder(CONFIG, tokens='diagonal')


# Layers stacked or listed, and what the gradient keeps.


@pytest.mark.parametrize('name', ['tied', 'everything'])  # one run of layers, and two
def test_stacked_layers_compute_what_listed_ones_do(name):
    config = VARIANTS[name]
    listed, stacked = Decoder(config), Decoder(config, layers='stacked')
    params = scattered(listed.init(5))
    run = lambda decoder: jax.jit(jax.value_and_grad(loss_of(decoder)))
    value, gradient = run(listed)(params)
    stacked_value, stacked_gradient = run(stacked)(stack_layers(params))
    np.testing.assert_allclose(stacked_value, value, rtol=1e-6)
    assert_close(unstack_layers(stacked_gradient, config.n_layers), gradient)


@pytest.mark.parametrize('name', ['tied', 'windows'])  # one run of layers, and two
def test_entries_of_the_cache_are_stacked(name):
    listed, stacked = Decoder(VARIANTS[name]), Decoder(VARIANTS[name], layers='stacked')
    params = listed.init(5)
    rng = np.random.default_rng(0)
    cache = tuple({'k': rng.normal(size=(9, 2, 8)), 'n': np.float32(layer)} for layer in range(3))

    def attend(q, k, v, entry, window):
        out, _ = causal(q, k, v, None, window)
        return out, {'k': entry['k'] + k, 'n': entry['n'] + 1, 'window': jnp.int32(window or 0)}

    run = jax.jit(lambda d, p, c: d.hidden(p, TOKENS, POSITIONS, attend, c)[1], static_argnums=0)
    expected = stack_layers({'layers': {str(i): entry for i, entry in enumerate(run(listed, params, cache))}})['layers']
    written = run(stacked, stack_layers(params), jax.tree.map(lambda *leaves: np.stack(leaves), *cache))
    assert written['k'].shape == (3, 9, 2, 8)
    np.testing.assert_array_equal(written['n'], [1, 2, 3])
    assert_close(written, expected)
    with pytest.raises(ValueError, match=r'leaf \(4, 2\); its first axis must be 3 layers'):
        stacked.hidden(stack_layers(params), TOKENS, POSITIONS, attend, np.zeros((4, 2)))


def test_a_stacked_program_does_not_grow_with_depth():
    def sizes(n_layers, layers):
        decoder = Decoder(dataclasses.replace(CONFIG, n_layers=n_layers), layers=layers)
        traced = jax.jit(jax.grad(loss_of(decoder))).trace(decoder.abstract())
        return equations(traced.jaxpr.jaxpr).total(), traced.lower()

    (few, shallow), (same, deep), (many, _) = sizes(3, 'stacked'), sizes(7, 'stacked'), sizes(3, 'list')
    assert few == same
    assert few < many
    # nor does what the compiler makes of it: it unrolls no loop
    assert shallow.compile().as_text().count(' = ') == deep.compile().as_text().count(' = ')


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def tagged_attention(q, k, v, window):
    return tagged_forward(q, k, v, window)[0]


def tagged_forward(q, k, v, window):
    z = scores(q, k, window)
    lse = checkpoint_name(jax.nn.logsumexp(z, axis=-1), 'attention_lse')
    out = jnp.einsum('hqk,khd->qhd', jnp.exp(z - lse[..., None]), repeated(v, q))
    out = checkpoint_name(out, 'attention_output')
    return out, (q, k, v, out, lse)


def tagged_backward(window, saved, d_out):
    # five products: the scores again, d_weights, d_q, d_k and d_v
    q, k, v, out, lse = saved
    weights = jnp.exp(scores(q, k, window) - lse[..., None])
    d_weights = jnp.einsum('qhd,khd->hqk', d_out, repeated(v, q))
    d_scores = weights * (d_weights - jnp.sum(d_out * out, axis=-1).T[..., None]) * q.shape[-1] ** -0.5
    together = lambda x: x.reshape(len(x), k.shape[1], -1, x.shape[-1]).sum(axis=2)
    d_q = jnp.einsum('hqk,khd->qhd', d_scores, repeated(k, q))
    d_k = together(jnp.einsum('hqk,qhd->khd', d_scores, q))
    return d_q, d_k, together(jnp.einsum('hqk,qhd->khd', weights, d_out))


tagged_attention.defvjp(tagged_forward, tagged_backward)


def tagged(q, k, v, entry, window):
    return tagged_attention(q, k, v, window), entry


@pytest.mark.parametrize('layers', ['list', pytest.param('stacked', marks=pytest.mark.slow)])
def test_remat_changes_neither_value_nor_gradient(layers):
    config = dataclasses.replace(CONFIG, n_layers=2 if layers == 'stacked' else 1)
    params = Decoder(config, layers=layers).init(5)
    run = lambda remat: jax.jit(jax.value_and_grad(loss_of(Decoder(config, layers=layers, remat=remat), tagged)))
    value, gradient = run('none')(params)
    for remat in set(REMAT) - {'none'}:
        again, same = run(remat)(params)
        np.testing.assert_allclose(again, value, rtol=1e-6)
        assert_close(same, gradient)


@pytest.mark.parametrize(
    ('remat', 'kept', 'recomputed'),
    [
        # beside the layer's input; q, k, v, output, gate and up come out of products, down is not needed
        ('dots', {'q': 1, 'kv': 2, 'd': 1, 'd_ff': 2, 'out': 1, 'lse': 1}, 0),
        ('attention', {'out': 1, 'lse': 1}, 6),
        ('full', {}, 6 + 2),
    ],
)
def test_remat_keeps_what_it_says_and_computes_the_rest_again(remat, kept, recomputed):
    decoder = Decoder(CONFIG, layers='stacked', remat=remat)
    params = decoder.abstract()
    shapes = {'q': (3, 9, 32), 'kv': (3, 9, 16), 'd': (3, 9, 24), 'd_ff': (3, 9, 40), 'out': (3, 9, 4, 8)}
    shapes['lse'] = (3, 4, 9)
    saved = jax.eval_shape(lambda p: jax.vjp(loss_of(decoder, tagged), p)[1], params)
    weights = {leaf.shape for leaf in jax.tree.leaves(params)}
    found = collections.Counter(leaf.shape for leaf in jax.tree.leaves(saved) if leaf.shape not in weights)
    expected = collections.Counter({shapes[name]: n for name, n in kept.items()}) + collections.Counter([(3, 9, 24)])
    assert {shape: n for shape, n in found.items() if shape[0] == 3} == expected
    # a layer has 7 products forward and 14 backward, its attention 2 and 5; the head 1 and 2
    for layers, runs in (('stacked', 1), ('list', 3)):
        one = Decoder(CONFIG, layers=layers, remat=remat)
        program = jax.make_jaxpr(jax.grad(loss_of(one, tagged)))(one.abstract())
        assert equations(program.jaxpr)['dot_general'] == runs * (21 + 7 + recomputed) + 3


# Weights.


def test_parameters_by_hand():
    # embedding 29 * 24 = 696; a layer: norms 2 * 24 = 48, q and o 2 * 24 * 32 = 1536, k and v 2 * 24 * 16 = 768,
    # mlp 3 * 24 * 40 = 2880, together 5232; final norm 24:  696 + 3 * 5232 + 24 = 16416
    assert Decoder(CONFIG).parameter_count() == 16416
    # q and o 2 * 24 * 24, k and v 2 * 24 * 8, so a layer has 48 + 1152 + 384 + 2880 = 4464; two tables of 696
    assert Decoder(UNTIED).parameter_count() == 2 * 696 + 2 * 4464 + 24
    # biases of q 32, k and v 16 each, output 24; norms of q and k 8 each
    more = dataclasses.replace(CONFIG, qkv_bias=True, output_bias=True, qk_norm=True)
    assert Decoder(more).parameter_count() == 16416 + 3 * (64 + 24 + 16)


@pytest.mark.parametrize('name', ['untied', 'everything'])
def test_either_form_is_initialised_with_the_same_bits_in_the_stated_shapes(name):
    listed, stacked = Decoder(VARIANTS[name]), Decoder(VARIANTS[name], layers='stacked')
    params = stacked.init(3)
    jax.tree.map(np.testing.assert_array_equal, params, stack_layers(listed.init(3)))
    for decoder, tree in ((listed, listed.init(3)), (stacked, params)):
        shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
        assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), decoder.abstract())
    assert listed.parameter_count() == stacked.parameter_count()


def test_completion_keeps_what_is_given_and_makes_the_rest_as_init_would():
    given = Decoder(CONFIG).init(7)
    larger = Decoder(CONFIG, lora=Lora(2, 4.0, ('up',)))
    fresh, completed = larger.init(8), larger.complete(given, 8)
    assert jax.tree.structure(completed) == jax.tree.structure(larger.abstract())
    assert completed['layers']['1']['mlp']['up']['weight'] is given['layers']['1']['mlp']['up']['weight']
    for layer in '012':
        for name in ('lora_a', 'lora_b'):
            ours, made = (tree['layers'][layer]['mlp']['up'][name] for tree in (completed, fresh))
            np.testing.assert_array_equal(ours, made)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'layers': 'looped'}, r"learner.layers='looped' is unknown; use one of list, stacked"),
        ({'remat': 'half'}, r"learner.remat='half' is unknown; use one of none, dots, attention, full"),
    ],
)
def test_unknown_choices_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Decoder(CONFIG, **change)
