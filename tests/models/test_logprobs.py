"""Log-probs by hand; the tiled form against the whole one, and over a mesh against one device, with gradients."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from areal_jax.models.logprobs import (
    VOCABULARY_BLOCK,
    cap_logits,
    logprob_of,
    rank_tokens,
    sharded_token_logprobs,
    sum_blocks,
    sum_blocks_over,
    token_collisions,
    token_logprobs,
)

N, D, V = 9, 6, 101  # chunks of 32 leave 5 columns over
CHUNKS = (None, 1, 32, 50, 101, 1000)
compiled_logprobs = jax.jit(token_logprobs, static_argnames='chunk')
compiled_logprob = jax.jit(logprob_of)  # operation by operation, every shape takes 40 programs


def example(scale=1.0):
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(N, D)) * scale, rng.normal(size=(V, D))
    targets = np.array([0, 31, 32, 63, 64, 95, 96, 100, 50])  # first and last columns of every tile of 32
    return hidden.astype(np.float32), head.astype(np.float32), targets


def by_numpy(hidden, head, targets, temperature):
    z = hidden.astype(np.float64) @ head.T.astype(np.float64) / temperature
    z = z - z.max(axis=1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    return np.log(p[np.arange(len(z)), targets]), -(p * np.log(p)).sum(axis=1)


def whole(hidden, head, targets, temperature):
    """The same with all logits at once, for automatic differentiation."""
    logp = jax.nn.log_softmax(hidden @ head.T / jnp.reshape(temperature, (-1, 1)))
    return jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=1)


def test_logprob_by_hand():
    # softmax of (0, ln 3) is (1/4, 3/4); at temperature 2 of (0, ln sqrt 3): 1 / (1 + sqrt 3) and the rest
    logits = jnp.array([0.0, math.log(3)])
    assert float(logprob_of(logits, jnp.array(0), 1.0)) == pytest.approx(math.log(1 / 4), rel=1e-6)
    assert float(logprob_of(logits, jnp.array(1), 1.0)) == pytest.approx(math.log(3 / 4), rel=1e-6)
    assert float(logprob_of(logits, jnp.array(0), 2.0)) == pytest.approx(-math.log(1 + math.sqrt(3)), rel=1e-6)


def test_temperature_zero_is_greedy_with_the_logprobs_of_one():
    hidden, head, targets = example()
    logits = hidden @ head.T
    np.testing.assert_array_equal(logprob_of(logits, targets, 0.0), logprob_of(logits, targets, 1.0))
    for ours, one in zip(*(compiled_logprobs(hidden, head, targets, t) for t in (0.0, 1.0)), strict=True):
        np.testing.assert_array_equal(ours, one)


@pytest.mark.parametrize('vocabulary', [1, 255, 256, 257, 600])  # of blocks of 256, the last one padded
def test_blocks_of_the_vocabulary_do_not_show(vocabulary):
    logits = np.random.default_rng(vocabulary).normal(0, 30, (vocabulary, vocabulary)).astype(np.float32)
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    expected = np.diag(shifted) - np.log(np.exp(shifted).sum(axis=1))
    np.testing.assert_allclose(compiled_logprob(logits, jnp.arange(vocabulary), 1.0), expected, atol=3e-5)


def test_the_sum_of_a_block_by_hand():
    # 257 logits of log 2, in blocks of 256 and 1: log(256 * 2) and log 2
    largest, logsumexp = sum_blocks(jnp.full((3, 257), math.log(2)))
    np.testing.assert_allclose(logsumexp, np.log([[512] * 3, [2] * 3]), rtol=1e-6)
    np.testing.assert_allclose(largest, np.full((2, 3), math.log(2)))


def test_every_row_may_have_its_own_temperature():
    hidden, head, targets = example()
    temperature = np.linspace(0.5, 2.0, N).astype(np.float32)
    expected, entropy = zip(
        *(by_numpy(hidden[i : i + 1], head, targets[i : i + 1], temperature[i]) for i in range(N)), strict=True
    )
    np.testing.assert_allclose(compiled_logprob(hidden @ head.T, targets, temperature), np.ravel(expected), atol=1e-5)
    tiled = compiled_logprobs(hidden, head, targets, temperature, chunk=32)
    np.testing.assert_allclose(tiled[0], np.ravel(expected), atol=1e-5)
    np.testing.assert_allclose(tiled[1], np.ravel(entropy), atol=1e-5)


def test_leading_axes_and_half_precision():
    hidden, head, targets = example()
    logits = (hidden @ head.T).reshape(3, 3, V)
    expected = by_numpy(hidden, head, targets, 0.7)[0].reshape(3, 3)
    np.testing.assert_allclose(compiled_logprob(logits, targets.reshape(3, 3), 0.7), expected, atol=1e-5)
    half = compiled_logprob(jnp.asarray(logits, jnp.bfloat16), targets.reshape(3, 3), 0.7)
    assert half.dtype == jnp.float32
    exact = jnp.asarray(logits, jnp.bfloat16).astype(jnp.float32)  # only the input is rounded, not the arithmetic
    np.testing.assert_allclose(half, compiled_logprob(exact, targets.reshape(3, 3), 0.7), atol=1e-6)


@pytest.mark.parametrize('chunk', CHUNKS)
@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_tiled_equals_numpy(chunk, temperature):
    hidden, head, targets = example()
    logprobs, entropy = compiled_logprobs(hidden, head, targets, temperature, chunk=chunk)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    expected = by_numpy(hidden, head, targets, temperature)
    np.testing.assert_allclose(logprobs, expected[0], atol=1e-5)
    np.testing.assert_allclose(entropy, expected[1], atol=1e-5)


@pytest.mark.parametrize('temperature', [0.7, np.linspace(0.5, 2.0, N, dtype=np.float32)], ids=['one', 'each'])
@pytest.mark.parametrize('chunk', [None, 32, 50])
@pytest.mark.parametrize(('of_logprobs', 'of_entropy'), [(1, 0), (0, 1), (1, 0.3)], ids=['logprobs', 'entropy', 'both'])
def test_gradients_equal_those_of_the_whole(temperature, chunk, of_logprobs, of_entropy):
    hidden, head, targets = example()
    a, b = np.random.default_rng(1).normal(size=(2, N))

    def gradients(compute):
        def loss(hidden, head):
            logprobs, entropy = compute(hidden, head, targets, temperature)
            return of_logprobs * jnp.sum(a * logprobs) + of_entropy * jnp.sum(b * entropy)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, head)

    tiled = gradients(lambda *x: token_logprobs(*x, chunk=chunk))
    for ours, plain in zip(tiled, gradients(whole), strict=True):
        np.testing.assert_allclose(ours, plain, atol=2e-5)


def test_equal_logits_have_the_entropy_of_all_choices():
    # every head row alike: p = 1/101, log-prob -ln 101, entropy ln 101, and no direction raises the entropy
    hidden, _, targets = example()
    head = np.ones((V, D), np.float32)
    logprobs, entropy = compiled_logprobs(hidden, head, targets, 1.0, chunk=32)
    np.testing.assert_allclose(logprobs, -math.log(V), rtol=1e-5)
    np.testing.assert_allclose(entropy, math.log(V), rtol=1e-5)
    gradient = jax.grad(lambda h: compiled_logprobs(h, head, targets, 1.0, chunk=32)[1].sum())(hidden)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-5)


@pytest.mark.parametrize('chunk', [32, None])
def test_extreme_logits_stay_finite(chunk):
    # logits of about +-1e5: one token has all the mass, entropy 0, the others log-probs of minus their distance
    hidden, head, targets = example(scale=3e4)
    values = compiled_logprobs(hidden, head, targets, 1.0, chunk=chunk)
    z = hidden.astype(np.float64) @ head.T.astype(np.float64)
    np.testing.assert_allclose(values[0], z[np.arange(N), targets] - z.max(axis=1), rtol=1e-5, atol=0.1)
    np.testing.assert_allclose(values[1], 0.0, atol=1e-3)
    gradients = jax.grad(
        lambda *x: sum(v.sum() for v in compiled_logprobs(*x, targets, 1.0, chunk=chunk)), argnums=(0, 1)
    )
    assert all(np.isfinite(g).all() for g in gradients(hidden, head))


def test_the_logits_are_never_whole():
    # 512 tokens, 8192 columns: all logits take 16 MB; a tile of 256 columns 0.5 MB
    hidden, head = jax.ShapeDtypeStruct((512, 16), jnp.float32), jax.ShapeDtypeStruct((8192, 16), jnp.float32)
    targets = jax.ShapeDtypeStruct((512,), jnp.int32)

    def temporary_bytes(compute):
        loss = lambda hidden, head, targets: sum(jnp.sum(x * x) for x in compute(hidden, head, targets, 1.0))
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(whole) > 12e6
    assert temporary_bytes(lambda *x: token_logprobs(*x, chunk=256)) < 4e6


@pytest.mark.parametrize('chunk', [32, None])
def test_nan_stays_with_its_token(chunk):
    hidden, head, targets = example()
    clean = compiled_logprobs(hidden, head, targets, 1.0, chunk=chunk)
    poisoned = hidden.copy()
    poisoned[3, 2] = np.nan
    for ours, expected in zip(compiled_logprobs(poisoned, head, targets, 1.0, chunk=chunk), clean, strict=True):
        np.testing.assert_array_equal(ours, np.where(np.arange(N) == 3, np.nan, expected))
    # one logit only, in the last, smaller tile: token 3 alone reads column 100 there
    only_3 = np.zeros((N, V), np.float32)
    only_3[3, 100] = np.nan
    logits = hidden @ head.T + only_3
    np.testing.assert_array_equal(np.isnan(logprob_of(logits, targets, 1.0)), np.arange(N) == 3)


TOKENS, ROWS = 16, 104  # over 8 devices: slices of 13 rows
MESHES = {'fsdp 4 x tensor 2': (1, 4, 2, 1), 'tensor 8': (1, 1, 8, 1), 'three axes': (2, 1, 2, 2)}
TOKEN_AXES = ('data', 'fsdp', 'context')


def make_mesh(shape):
    return jax.make_mesh(shape, ('data', 'fsdp', 'tensor', 'context'), axis_types=(AxisType.Auto,) * 4)


def sharded_example(dtype=np.float32):
    rng = np.random.default_rng(2)
    hidden, head = rng.normal(size=(TOKENS, D)), rng.normal(size=(ROWS, D))
    targets = np.array([0, 12, 13, 25, 26, 38, 39, 51, 52, 64, 65, 77, 78, 90, 91, 103])  # both ends of every slice
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), targets


def values_and_gradients(compute, hidden, head, targets):
    """Of a loss whose every token has its own weight and temperature, and whose hidden states are a product."""
    a, b = np.random.default_rng(3).normal(size=(2, TOKENS)).astype(np.float32)
    temperature = np.linspace(0.5, 2.0, TOKENS, dtype=np.float32)

    def loss(hidden, head):
        logprobs, entropy = compute(jnp.tanh(hidden), head, targets, temperature)
        return jnp.sum(a * logprobs) + jnp.sum(b * entropy**2), (logprobs, entropy)

    (value, values), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)
    return value, *values, *gradients


def assert_near(ours, expected, tolerance):
    for x, y in zip(ours, expected, strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y)


def over(mesh, token_axes=TOKEN_AXES, **settings):
    return lambda *args: sharded_token_logprobs(
        *args, mesh=mesh, token_axes=token_axes, vocab_axis='tensor', **settings
    )


@pytest.mark.parametrize('chunk', [None, 5])
@pytest.mark.parametrize('shape', MESHES.values(), ids=MESHES)
def test_over_a_mesh_equals_one_device(shape, chunk):
    mesh, (hidden, head, targets) = make_mesh(shape), sharded_example()
    expected = values_and_gradients(token_logprobs, hidden, head, targets)
    hidden = jax.device_put(hidden, NamedSharding(mesh, PartitionSpec(TOKEN_AXES)))
    head = jax.device_put(head, NamedSharding(mesh, PartitionSpec('tensor')))
    assert_near(values_and_gradients(over(mesh, chunk=chunk), hidden, head, targets), expected, 2e-6)


STORED = {
    'columns over fsdp': ((1, 2, 2, 2), PartitionSpec('tensor', 'fsdp')),
    'columns, data too': ((2, 2, 1, 2), PartitionSpec(None, 'fsdp')),
    'rows over fsdp': ((1, 4, 1, 2), PartitionSpec('fsdp')),
}


@pytest.mark.parametrize(('shape', 'stored'), STORED.values(), ids=STORED)
def test_the_gradient_of_a_stored_head_leaves_as_a_reduce_scatter(shape, stored):
    mesh, (hidden, head, targets) = make_mesh(shape), sharded_example()
    expected = values_and_gradients(token_logprobs, hidden, head, targets)
    assert_near(values_and_gradients(over(mesh, stored=(stored,)), hidden, head, targets), expected, 2e-6)
    shards = NamedSharding(mesh, stored)
    loss = lambda head: over(mesh, stored=(stored,))(hidden, head, targets, 0.7)[0].sum()
    program = jax.jit(jax.grad(loss), in_shardings=shards, out_shardings=shards).lower(head).compile().as_text()
    found = {
        kind: re.findall(rf'= f32\[(\d+),(\d+)\]\S* {kind}\(', program) for kind in ('reduce-scatter', 'all-reduce')
    }
    held = tuple(map(str, shards.shard_shape(head.shape)))
    assert found['reduce-scatter'] == [held]
    assert set(found['all-reduce']) <= {held}  # over the other axes of tokens, after it


def test_axes_that_cut_nothing_hold_replicas():
    mesh, example = make_mesh((2, 2, 2, 1)), sharded_example()
    expected = values_and_gradients(token_logprobs, *example)
    assert_near(values_and_gradients(over(mesh, token_axes=('fsdp',)), *example), expected, 2e-6)


@pytest.mark.parametrize('shape', [(1, 4, 2, 1), (1, 1, 8, 1)])
def test_half_precision_over_a_mesh_is_summed_in_float32(shape):
    hidden, head, targets = sharded_example(jnp.bfloat16)
    ours = values_and_gradients(over(make_mesh(shape)), hidden, head, targets)
    assert [x.dtype for x in ours] == [jnp.float32] * 3 + [jnp.bfloat16] * 2
    exact = values_and_gradients(token_logprobs, hidden, head, targets)
    assert_near(ours[:3], exact[:3], 1e-6)
    assert_near(ours[3:], exact[3:], 2e-2)  # gradients are rounded to 8 bits on each device and in their sum


def test_gradients_inside_a_shard_map_are_parts_to_be_summed():
    # each device differentiates the sum of its own results; hidden reaches them through every slice of the head
    mesh, (hidden, head, targets) = make_mesh((1, 1, 8, 1)), sharded_example()

    def parts(hidden, head):
        loss = lambda *x: token_logprobs(*x, targets, 0.7, axis_name='tensor')[0].sum() / 8
        d_hidden, d_head = jax.grad(loss, argnums=(0, 1))(hidden, head)
        return jax.lax.psum(d_hidden, 'tensor'), d_head

    specs = (PartitionSpec(), PartitionSpec('tensor'))
    ours = jax.jit(jax.shard_map(parts, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False))(hidden, head)
    whole = jax.grad(lambda *x: compiled_logprobs(*x, targets, 0.7)[0].sum(), argnums=(0, 1))(hidden, head)
    assert_near(ours, whole, 2e-6)


def test_replication_checks_refuse_instead_of_giving_a_wrong_gradient():
    mesh, (hidden, head, targets) = make_mesh((1, 1, 8, 1)), sharded_example()
    compute = jax.shard_map(
        lambda *x: token_logprobs(*x, targets, 1.0, axis_name='tensor')[0],
        mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec('tensor')), out_specs=PartitionSpec(), check_vma=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match='manual axis types do not match'):
        jax.eval_shape(jax.grad(lambda *x: compute(*x).sum()), hidden, head)


@pytest.mark.parametrize('where', ['hidden', 'head'])
def test_nan_over_a_mesh(where):
    # a NaN in one token: that token on every device; in one row of the head: all tokens, on all devices
    hidden, head, targets = sharded_example()
    compute = jax.jit(over(make_mesh((1, 4, 2, 1))))
    clean = compute(hidden, head, targets, 1.0)
    hit = np.arange(TOKENS) == 9 if where == 'hidden' else np.ones(TOKENS, bool)
    if where == 'hidden':
        hidden = hidden.at[9, 0].set(jnp.nan)
    else:
        head = head.at[101, 0].set(jnp.nan)
    for ours, expected in zip(compute(hidden, head, targets, 1.0), clean, strict=True):
        for shard in ours.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.where(hit, np.nan, expected)[shard.index])


def test_the_head_is_never_gathered():
    mesh = make_mesh((1, 4, 2, 1))
    place = lambda shape, dtype, *spec: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    hidden, head = place((512, 64), jnp.float32, TOKEN_AXES), place((8192, 64), jnp.float32, 'tensor')
    targets = place((512,), jnp.int32, TOKEN_AXES)
    loss = lambda *x: sum(jnp.sum(v * v) for v in over(mesh, chunk=256)(*x, 1.0))
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head, targets).compile()
    assert 'all-gather' not in compiled.as_text()
    # a device holds 128 tokens and 4096 rows: d_head takes 1 MB, all its logits 2 MB, a tile 128 KB
    assert compiled.memory_analysis().temp_size_in_bytes < 2.5e6


def test_what_does_not_divide_is_named():
    hidden, head, targets = sharded_example()
    with pytest.raises(ValueError, match=r'101 rows of the head .* do not divide over tensor=2'):
        over(make_mesh((1, 4, 2, 1)))(hidden, head[:101], targets, 1.0)
    with pytest.raises(ValueError, match=r'15 tokens do not divide over data=1 x fsdp=4 x context=1'):
        over(make_mesh((1, 4, 2, 1)))(hidden[:15], head, targets[:15], 1.0)


def collisions_by_numpy(hidden, head, targets, temperature):
    z = hidden.astype(np.float64) @ head.T.astype(np.float64) / temperature
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return np.log(p[np.arange(len(z)), targets]), np.log((p**2).sum(axis=1))


@pytest.mark.parametrize('chunk', CHUNKS)
@pytest.mark.parametrize('scale', [1.0, 30.0])
def test_the_probability_of_equal_draws_is_summed_tile_by_tile(chunk, scale):
    arguments = example(scale)
    found = jax.jit(token_collisions, static_argnames='chunk')(*arguments, 0.7, chunk=chunk)
    for a, b in zip(found, collisions_by_numpy(*arguments, 0.7), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(found[0], compiled_logprobs(*arguments, 0.7, chunk=chunk)[0])


@pytest.mark.parametrize('shape', [(1, 1, 8, 1), (2, 2, 2, 1)])
def test_the_probability_of_equal_draws_over_a_mesh(shape):
    mesh, arguments = make_mesh(shape), sharded_example()
    found = jax.jit(
        lambda *args: sharded_token_logprobs(
            *args, 1.3, mesh=mesh, token_axes=('data', 'fsdp'), vocab_axis='tensor', chunk=3, compute=token_collisions
        )
    )(*arguments)
    for a, b in zip(found, collisions_by_numpy(*arguments, 1.3), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(('devices', 'vocabulary'), [(2, 600), (4, 4 * 300), (8, 8 * 1000), (4, 4 * 512), (4, 64)])
def test_blocks_that_cross_devices_have_the_sums_of_one_device(devices, vocabulary):
    mesh = make_mesh((8 // devices, 1, devices, 1))
    z = np.random.default_rng(3).normal(size=(5, vocabulary)).astype(np.float32)
    z[2, 7] = -np.inf
    placed = jax.device_put(z, NamedSharding(mesh, PartitionSpec(None, 'tensor')))
    program = jax.jit(sum_blocks_over(mesh, 'tensor', vocabulary)).lower(placed).compile()
    found, expected = program(placed), jax.jit(sum_blocks)(z)
    np.testing.assert_array_equal(found.largest, expected.largest)
    np.testing.assert_allclose(found.logsumexp, expected.logsumexp, rtol=3e-7)
    if vocabulary // devices % VOCABULARY_BLOCK and vocabulary > VOCABULARY_BLOCK:
        gathered = re.findall(r'= f32\[([\d,]+)\]\S* all-gather\(', program.as_text())
        assert gathered
        assert all(math.prod(map(int, sizes.split(','))) < z.size / 8 for sizes in gathered)


# Capped logits.


@pytest.mark.parametrize('chunk', [None, 32])
def test_capped_logits_are_those_of_the_whole_with_gradients(chunk):
    hidden, head, targets = example(2.0)
    temperature, cap = np.linspace(0.5, 2.0, N, dtype=np.float32), 3.0  # the logits reach 12
    a, b = np.random.default_rng(1).normal(size=(2, N))

    def capped(hidden, head):
        z = cap * jnp.tanh(hidden @ head.T / cap) / temperature[:, None]
        logp = jax.nn.log_softmax(z)
        return jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=1)

    tiled = lambda hidden, head: token_logprobs(hidden, head, targets, temperature, chunk=chunk, cap=cap)
    loss = lambda found: jnp.sum(a * found[0]) + jnp.sum(b * found[1])
    run = lambda compute: (
        *jax.jit(compute)(hidden, head),
        *jax.jit(jax.grad(lambda *x: loss(compute(*x)), argnums=(0, 1)))(hidden, head),
    )
    for ours, plain in zip(run(tiled), run(capped), strict=True):
        np.testing.assert_allclose(ours, plain, atol=2e-5)
    ranked = rank_tokens(hidden, head, targets, temperature, 3, chunk, cap=cap)
    np.testing.assert_allclose(ranked.logprobs, capped(hidden, head)[0], atol=1e-5)
    doubled = token_collisions(hidden, head, targets, temperature, chunk=chunk, cap=cap)
    np.testing.assert_allclose(doubled[0], capped(hidden, head)[0], atol=1e-5)


def test_a_cap_by_hand():
    # 30 tanh(30 / 30) = 30 * 0.76159416
    np.testing.assert_allclose(cap_logits(jnp.array([0.0, 30.0, -1e9]), 30.0), [0, 22.847825, -30], rtol=1e-6)
