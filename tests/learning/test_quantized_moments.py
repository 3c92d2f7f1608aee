"""Adam in fewer bits: codes by hand, means that rounding keeps, and the directions of a plain numpy Adam."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.learning import optimizer as quantized
from areal_jax.learning.optimizer import MOMENT_DTYPES, block_size, scale_by_adam

B1, B2, EPS = 0.9, 0.95, 1e-8
quantize, dequantize = (jax.jit(f, static_argnames='signed') for f in (quantized.quantize, quantized.dequantize))


@pytest.mark.parametrize(
    ('size', 'block'),
    [
        (4096, 256), (5120, 160), (1536, 96), (896, 56), (576, 36),  # a multiple of 16 blocks
        (128, 128), (768, 48), (288, 144), (1000, 250),  # 128 and 1000 have no such divisor above 31, 288 neither
        (1009, 1009), (24, 24), (1, 1),  # no divisor from 32 to 256 at all
    ],
)  # fmt: skip
def test_blocks_lie_between_cuts(size, block):
    assert block_size(size) == block


def test_codes_by_hand():
    # scale 16: root of 16/16 is 1 -> 127; of 1/16 is 1/2 -> 63.5, between 63 and 64; of -81/256 is 3/4 -> 95.25
    values = jnp.array([16.0, 1.0, -16 * 81 / 256, 0.0])
    for noise, codes in ((0, [127, 64, -96, 0]), (2**16 - 1, [127, 63, -95, 0])):
        found, scale = quantize(values, jnp.full(4, noise), signed=True)
        np.testing.assert_array_equal(found, codes)
        np.testing.assert_array_equal(scale, [16.0])
        expected = 16 * np.sign(codes) * (np.array(codes) / 127) ** 4
        np.testing.assert_allclose(dequantize(found, scale, signed=True), expected, rtol=1e-5)
    # never negative: 255 levels, stored minus 128; 127.5 between 127 and 128
    for noise, codes in ((0, [127, 0, -128]), (2**16 - 1, [127, -1, -128])):
        found, _ = quantize(jnp.array([16.0, 1.0, 0.0]), jnp.full(3, noise), signed=False)
        np.testing.assert_array_equal(found, codes)


@pytest.mark.parametrize('signed', [True, False])
def test_the_mean_over_all_roundings_is_the_value(signed):
    # 512 rows of the same block, each with another of 512 equally spaced noises: the mean is exact to 1/512 of a step
    row = np.random.default_rng(0).normal(size=256) * np.logspace(0, -5, 256)
    row = row if signed else np.abs(row)
    values = jnp.asarray(np.tile(row, (512, 1)), jnp.float32)
    noise = jnp.broadcast_to(jnp.arange(512)[:, None] * 128, values.shape)
    decoded = np.asarray(dequantize(*quantize(values, noise, signed=signed), signed=signed), np.float64)
    levels = 127 if signed else 255
    root = np.floor(levels * (np.abs(row) / np.abs(row).max()) ** 0.25)
    step = np.abs(row).max() * ((root + 1) ** 4 - root**4) / levels**4
    assert (np.abs(decoded - row) <= 1.01 * step).all()
    assert (np.abs(decoded.mean(axis=0) - row) <= step / 200).all()


def test_small_positive_values_stay_above_zero_and_zero_stays():
    values = jnp.array([1.0, 1e-12, 1e-30, 0.0])
    codes, scale = quantize(values, jnp.full(4, 2**16 - 1), signed=False)
    np.testing.assert_array_equal(dequantize(codes, scale, signed=False) > 0, [True, True, True, False])
    nothing = quantize(jnp.zeros((3, 64)), jnp.zeros((3, 64), jnp.uint32), signed=True)
    np.testing.assert_array_equal(dequantize(*nothing, signed=True), np.zeros((3, 64)))


def numpy_directions(gradients):
    mu, nu, directions = 0.0, 0.0, []
    for n, g in enumerate(np.asarray(gradients, np.float64), start=1):
        mu, nu = B1 * mu + (1 - B1) * g, B2 * nu + (1 - B2) * g * g
        directions.append(mu / (1 - B1**n) / (np.sqrt(nu / (1 - B2**n)) + EPS))
    return np.stack(directions), mu, nu


@pytest.mark.parametrize(
    ('moment_dtype', 'tolerance'),
    # spacing 0.4% to 0.8% in bfloat16, 3% and 1.6% and more in int8; roundings of some 10 steps add up as their squares
    [('float32', 1e-5), ('bfloat16', 1e-2), ('int8', 7e-2)],
)
def test_directions_are_those_of_numpy(moment_dtype, tolerance):
    # 40 steps, gradients of very unlike sizes; the relative distance of all directions of a step
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(size=(8, 512)))
    gradients = ((0.5 + rng.normal(size=(40, 8, 512))) * sizes).astype(np.float32)
    transform = scale_by_adam(B1, B2, EPS, moment_dtype)
    step = jax.jit(transform.update)
    state, found = transform.init({'w': gradients[0]}), []
    for g in gradients:
        direction, state = step({'w': g}, state)
        found.append(np.asarray(direction['w']))
    expected, _, _ = numpy_directions(gradients)
    errors = [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(found, expected, strict=True)]
    assert max(errors) < tolerance
    assert moment_dtype == 'float32' or max(errors) > tolerance / 10  # the bound says something
    assert int(state.step) == 40
    assert state.mu['w'].dtype == state.nu['w'].dtype == moment_dtype
    assert (state.mu_scale is None) == (moment_dtype != 'int8')


@pytest.mark.parametrize('moment_dtype', MOMENT_DTYPES)
def test_a_slow_second_moment_decays(moment_dtype):
    # b2 = .999: after 1000 steps without a gradient v is e^-1 of what it was. To the nearest number it would not have
    # moved in bfloat16 or, beside a neighbour that keeps the block's scale, in int8.
    transform = scale_by_adam(0.9, 0.999, EPS, moment_dtype)
    gradients = jnp.ones(4096).at[::128].set(2.0)  # a larger one in every block

    @jax.jit
    def second_moments():
        _, state = transform.update(gradients, transform.init(gradients))
        still = jnp.where(gradients > 1, 2.0, 0.0)
        after = jax.lax.fori_loop(0, 1000, lambda _, s: transform.update(still, s)[1], state)
        return [s.nu if s.nu_scale is None else dequantize(s.nu, s.nu_scale, signed=False) for s in (state, after)]

    before, after = (np.asarray(nu, np.float64)[np.asarray(gradients) == 1] for nu in second_moments())
    np.testing.assert_allclose(after.mean() / before.mean(), np.exp(-1), rtol=0.03)


def test_a_quadratic_is_minimised():
    # curvatures over two decades; AdamW in float32 and int8 come as near with the same falling rate
    rng = np.random.default_rng(1)
    target, curvature = rng.normal(size=(2, 16, 96))
    curvature = np.exp(curvature)
    loss = lambda w: 0.5 * jnp.sum(curvature * (w - target) ** 2)

    def final(moment_dtype):
        transform = scale_by_adam(B1, B2, EPS, moment_dtype)

        def step(n, carry):
            w, state = carry
            direction, state = transform.update(jax.grad(loss)(w), state)
            return w - 0.1 * (1 - n / 400) * direction, state

        w = jnp.zeros(target.shape)
        return float(loss(jax.jit(lambda w: jax.lax.fori_loop(0, 400, step, (w, transform.init(w))))(w)[0]) / loss(w))

    assert final('float32') < 1e-6
    assert final('int8') < 1e-4


def test_rounding_differs_between_steps_leaves_and_places():
    # the same gradient at 4096 places of two leaves, twice: about half the bfloat16 moments round up each time
    transform = scale_by_adam(B1, B2, EPS, 'bfloat16')
    gradients = {'a': jnp.full((64, 64), 1 / 3), 'b': jnp.full((64, 64), 1 / 3)}
    step, state = jax.jit(transform.update), transform.init(gradients)
    first, later = (step(gradients, state._replace(step=jnp.int32(n)))[1] for n in (0, 5))
    bits = [np.asarray(nu, np.float32) for nu in (first.nu['a'], first.nu['b'], later.nu['a'])]
    low, high = min(b.min() for b in bits), max(b.max() for b in bits)
    ups = [b == high for b in bits]
    share = (0.05 / 9 - low) / (high - low)
    for index, up in enumerate(ups):
        np.testing.assert_allclose(up.mean(), share, atol=0.03)
        assert ((bits[index] == low) | up).all()
        both = (up & ups[index - 1]).mean()
        np.testing.assert_allclose(both, share**2, atol=0.03)  # independent
    np.testing.assert_allclose((ups[0][:, 1:] & ups[0][:, :-1]).mean(), share**2, atol=0.03)


def test_unknown_dtype_is_named():
    with pytest.raises(
        ValueError, match=r"optimizer.moment_dtype='int4' is unknown; use one of float32, bfloat16, int"
    ):
        scale_by_adam(B1, B2, EPS, 'int4')
