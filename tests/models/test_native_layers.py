"""Layers and steps as kernels against the decoder in JAX, and that a token's numbers are its own, bit for bit."""

from __future__ import annotations

import dataclasses
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from areal_jax.models.layer_parts import Experts
from areal_jax.models.logprobs import scale_logits, sum_blocks
from areal_jax.models.native_layers import Read
from areal_jax.models.weights import Lora, stack_layers
from areal_jax.native import compiled_library as library
from areal_jax.rollout.decode.attention.choose import NativeAttention
from tests.diagonal import diagonal
from tests.models.test_decoder import VARIANTS, assert_close, causal, hidden_of, logits_of, scattered
from tests.native import needs_kernels

pytestmark = needs_kernels
MIXTURES = {
    'mixed': dataclasses.replace(
        VARIANTS['everything'], family='qwen3_moe', experts=Experts(16, 3, 20, dense_layers=(1,))
    ),
    'mixtral': dataclasses.replace(VARIANTS['untied'], family='mixtral', experts=Experts(8, 2, 36)),
    'olmoe': dataclasses.replace(
        VARIANTS['untied'], family='olmoe', whole_qk_norm=True, experts=Experts(16, 8, 12, normalised=False)
    ),
}
ALL = VARIANTS | MIXTURES
MIXED_STACK = 'mixed', 'stacked'  # which layers of two kinds have not
BLOCK_TOKENS = 4
CHUNK_TOKENS = 960  # of the kernel


def make_decoders(name, vocab_size=32, tokens='native_columns'):
    """(with tokens as rows, as the kernels have them, weights): every matrix of the model can be cut into panels."""
    config = dataclasses.replace(ALL[name], vocab_size=vocab_size)
    rows, native = Decoder(config), Decoder(config, tokens=tokens)
    return rows, native, scattered(rows.init(5))


def make_batch(config, rows, seed=0):
    """(tokens, positions, cache, what a step reads of it): sequences of up to 16 tokens in blocks of their own."""
    rng = np.random.default_rng(seed)
    shape = (4 * rows + 1, BLOCK_TOKENS, config.n_kv_heads, config.head_dim)
    cache = tuple(
        tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)) for _ in range(config.n_layers)
    )
    tables = rng.permutation(4 * rows).reshape(rows, 4).astype(np.int32)
    tokens = rng.integers(0, config.vocab_size, rows).astype(np.int32)
    positions = np.sort(rng.integers(0, 16, rows))[::-1].astype(np.int32)
    blocks = np.take_along_axis(tables, positions[:, None] // BLOCK_TOKENS, 1)[:, 0]
    return tokens, positions, cache, Read(tables, positions + 1, blocks, positions % BLOCK_TOKENS)


def attend_with(read):
    attention = NativeAttention()

    def attend(q, k, v, layer, window):
        layer = attention.write(layer, k, v, read.blocks, read.offsets)
        return attention.attend(q, layer, read.tables, read.lengths, window), layer

    return attend


@pytest.mark.parametrize(
    ('name', 'layers'),
    [
        pytest.param(name, form, marks=[] if form == ('stacked' if place % 2 else 'list') else [pytest.mark.slow])
        for place, name in enumerate(sorted(ALL, key='mixed'.__ne__))
        for form in ('list', 'stacked')
        if (name, form) != MIXED_STACK
    ],
)
def test_layers_are_two_kernels_each_and_compute_what_those_of_xla_do(name, layers):
    rows, _, params = make_decoders(name)
    native = Decoder(rows.config, tokens='native_columns', layers=layers)
    given = params if layers == 'list' else stack_layers(params)
    run = logits_of(native)
    text = run.lower(native.prepare(given)).as_text()
    assert text.count(f'@{library.PROJECT}') == text.count(f'@{library.FINISH}') >= 1
    assert text.count(f'@{library.MULTIPLY}') == 1  # the head
    assert_close(run(native.prepare(given)), logits_of(rows)(params))


@pytest.mark.parametrize(('name', 'rows'), diagonal(ALL, (1, 57, 7, 8, 24, 40)))
def test_a_step_computes_what_the_layers_of_xla_do(name, rows):
    plain, native, params = make_decoders(name)
    tokens, positions, cache, read = make_batch(plain.config, rows)
    run = lambda p, c: plain.hidden_and_routes(p, tokens, positions, attend_with(read), c)
    hidden, written, routed = jax.jit(run)(params, cache)
    prepared = native.prepare(params)
    assert native.can_step(prepared)
    stepped = jax.jit(lambda p, c: native.step(p, tokens, positions, c, read, np.ones(rows)))(prepared, cache)
    assert stepped.logits.shape == (rows, 32)
    assert_close(stepped.logits, jax.jit(plain.logits)(params, hidden), of_range=5e-6)
    assert_close(stepped.cache, written, of_range=5e-6)
    if name in MIXTURES:
        np.testing.assert_array_equal(stepped.live, routed.live)
    else:
        assert stepped.live is None


def test_a_row_that_sees_nothing_reaches_no_expert():
    """Experts of its own are poisoned: the other rows keep their bits, and it has numbers."""
    _, native, params = make_decoders('mixed')
    tokens, positions, cache, read = make_batch(native.config, 13)
    ended = np.arange(13) % 3 > 0
    step = jax.jit(native.step)
    seen = read._replace(lengths=np.where(ended, 0, read.lengths))
    first = step(native.prepare(params), tokens, positions, cache, seen, np.ones(13))
    whole = step(native.prepare(params), tokens, positions, cache, read, np.ones(13))
    np.testing.assert_array_equal(first.logits[~ended], whole.logits[~ended])
    np.testing.assert_array_equal(first.live[:, ~ended], whole.live[:, ~ended])
    for place, layer in enumerate(('0', '2')):
        unused = np.setdiff1d(np.arange(16), first.live[place][~ended])
        assert set(unused) & set(np.ravel(first.live[place][ended]))
        experts = params['layers'][layer]['mlp']['experts']
        for name, leaf in experts.items():
            experts[name] = leaf.at[unused].set(jnp.nan)
    again = step(native.prepare(params), tokens, positions, cache, seen, np.ones(13))
    np.testing.assert_array_equal(again.logits, first.logits)
    np.testing.assert_array_equal(again.live, first.live)


@pytest.mark.parametrize('vocab_size', [256, 520])  # of blocks of 256
@pytest.mark.parametrize('rows', [1, 8, 13, 57])
def test_a_step_has_the_sums_of_its_logits_by_block(rows, vocab_size):
    _, native, params = make_decoders('tied', vocab_size)
    tokens, positions, cache, read = make_batch(native.config, rows)
    temperature = np.linspace(0.2, 3.0, rows).astype(np.float32)
    temperature[-1] = 0.0  # counts as 1
    _, logits, found, _ = jax.jit(native.step)(native.prepare(params), tokens, positions, cache, read, temperature)
    expected = jax.jit(lambda x, heat: sum_blocks(scale_logits(x, heat)))(logits, temperature)
    np.testing.assert_array_equal(found.largest[:, -1], expected.largest[:, -1])  # which a greedy row compares
    np.testing.assert_allclose(found.largest, expected.largest, rtol=3e-7)
    np.testing.assert_allclose(found.logsumexp, expected.logsumexp, atol=2e-6, rtol=3e-7)


def test_a_nan_in_the_weights_shows_in_the_sums_of_a_step():
    _, native, params = make_decoders('tied', 520)
    tokens, positions, cache, read = make_batch(native.config, 8)
    params['embedding'] = params['embedding'].at[300].set(jnp.nan)
    tokens[:] = 1
    sums = native.step(native.prepare(params), tokens, positions, cache, read, np.ones(8)).sums
    np.testing.assert_array_equal(np.isnan(sums.logsumexp), np.arange(3)[:, None] == np.ones(8))


IN_8_BITS = pytest.param('everything', 'native_int8_rows', id='everything in 8 bits')
FORMS = [*((name, 'native_columns') for name in ('everything', 'mixed', 'olmoe')), IN_8_BITS]


@pytest.mark.parametrize(
    ('name', 'form'), [(n, 'native_columns') for n in ('everything', 'mixed', 'olmoe')] + [IN_8_BITS]
)
def test_a_row_of_a_step_has_the_same_bits_in_any_company(name, form):
    _, native, params = make_decoders(name, 520, form)
    prepared = native.prepare(params)
    tokens, positions, cache, read = make_batch(native.config, 57)
    step = jax.jit(native.step)
    temperature = np.linspace(0.2, 3.0, 57).astype(np.float32)
    written, logits, sums, live = step(prepared, tokens, positions, cache, read, temperature)
    for part in (slice(0, 1), slice(3, 4), slice(0, 8), slice(5, 21), slice(2, 42), slice(1, 49)):
        some = Read(*(leaf[part] for leaf in read))
        wrote, alone, own, chosen = step(prepared, tokens[part], positions[part], cache, some, temperature[part])
        np.testing.assert_array_equal(alone, logits[part])
        if live is not None:
            np.testing.assert_array_equal(chosen, live[:, part])
        for one, whole in zip(own, sums, strict=True):
            np.testing.assert_array_equal(one, whole[:, part])
        for one, whole in zip(jax.tree.leaves(wrote), jax.tree.leaves(written), strict=True):
            np.testing.assert_array_equal(one[some.blocks, some.offsets], whole[some.blocks, some.offsets])


def rows_of_layers(native):
    """A program (weights, tokens, how many count) -> what each attention gets; tokens do not see each other."""
    attend = lambda q, k, v, entry, window: (q, (q, k, v))
    return jax.jit(lambda p, t, n: native.hidden(p, t, jnp.zeros_like(t), attend, wanted=n)[1])


@pytest.mark.parametrize(('name', 'form'), [*FORMS[:2], IN_8_BITS])
def test_a_token_of_a_layer_has_the_same_bits_in_any_chunk(name, form):
    _, native, params = make_decoders(name, tokens=form)
    prepared, run = native.prepare(params), rows_of_layers(native)
    tokens = np.random.default_rng(0).integers(0, 32, CHUNK_TOKENS + 100).astype(np.int32)
    whole = run(prepared, tokens, len(tokens))
    for part in (slice(0, 5), slice(900, 1000), slice(CHUNK_TOKENS, None), slice(7, CHUNK_TOKENS + 8)):
        found = run(prepared, tokens[part], len(tokens[part]))
        for one, all_of_them in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(one, all_of_them[part])


@pytest.mark.parametrize('wanted', [0, 3, 100, CHUNK_TOKENS, CHUNK_TOKENS + 1])
@pytest.mark.parametrize(('name', 'form'), [*FORMS[:2], IN_8_BITS])
def test_tokens_that_do_not_count_are_left_out(name, form, wanted):
    _, native, params = make_decoders(name, tokens=form)
    prepared, run = native.prepare(params), rows_of_layers(native)
    tokens = np.random.default_rng(0).integers(0, 32, CHUNK_TOKENS + 100).astype(np.int32)
    found, whole = run(prepared, tokens, wanted), run(prepared, tokens, len(tokens))
    for one, all_of_them in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one[:wanted], all_of_them[:wanted])
        assert not np.any(one[wanted:])


@pytest.mark.parametrize('name', ['everything', 'mixed'])
def test_steps_at_the_same_time_share_the_threads_and_change_no_bit(name):
    _, native, params = make_decoders(name)
    prepared = native.prepare(params)
    tokens, positions, cache, read = make_batch(native.config, 57)
    step = jax.jit(native.step)
    ones = np.ones(57)
    alone = np.asarray(step(prepared, tokens, positions, cache, read, ones)[1])
    with futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: step(prepared, tokens, positions, cache, read, ones)[1], range(40)))
    for logits in found:
        np.testing.assert_array_equal(logits, alone)


def test_what_a_step_does_not_see_has_no_influence():
    _, native, params = make_decoders('windows')
    tokens, positions, cache, read = make_batch(native.config, 9)
    seen = np.zeros((len(cache[0][0]), BLOCK_TOKENS), bool)
    for table, length in zip(read.tables, read.lengths, strict=True):
        for position in range(length):
            seen[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = True
    poisoned = jax.tree.map(lambda side: jnp.where(seen[..., None, None], side, jnp.nan), cache)
    step = jax.jit(native.step)
    prepared = native.prepare(params)
    expected = step(prepared, tokens, positions, cache, read, np.ones(9))[1]
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(step(prepared, tokens, positions, poisoned, read, np.ones(9))[1], expected)


def test_a_step_writes_the_cache_in_place():
    _, native, params = make_decoders('tied')
    tokens, positions, cache, read = make_batch(native.config, 64)
    step = jax.jit(native.step, donate_argnums=3)
    used = step.lower(native.prepare(params), tokens, positions, cache, read, np.ones(64)).compile().memory_analysis()
    size = sum(side.nbytes for side in jax.tree.leaves(cache))
    assert used.alias_size_in_bytes == size
    assert used.temp_size_in_bytes < size / 4


@pytest.mark.parametrize(
    ('changes', 'lora'),
    [({'d_ff': 41}, None), ({}, Lora(rank=2, alpha=1.0, targets=('query',))), ({'d_model': 20}, None)],
    ids=['width of the MLP', 'adapters', 'width'],
)
def test_what_has_no_panels_is_computed_by_xla(changes, lora):
    config = dataclasses.replace(VARIANTS['tied'], vocab_size=32, **changes)
    rows, native = Decoder(config, lora=lora), Decoder(config, lora=lora, tokens='native_columns')
    params = scattered(rows.init(5))
    prepared = native.prepare(params)
    assert not native.can_step(prepared)
    run = jax.jit(lambda p: hidden_of(native, p, attend=causal))
    assert library.PROJECT not in run.lower(prepared).as_text()
    assert_close(run(prepared).T, jax.jit(lambda p: hidden_of(rows, p))(params))


def test_a_head_without_panels_has_no_step():
    _, native, params = make_decoders('tied')
    native.config = dataclasses.replace(native.config, vocab_size=29)
    prepared = native.prepare({**params, 'embedding': params['embedding'][:29]})
    assert not native.can_step(prepared)
