"""Rotary positions by hand, and stretched ones against Llama 3.1's rule and the numbers of another implementation."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.ropes import LinearScaling, Llama3Scaling, Rope, YarnScaling
from areal_jax.models.rotary import frequencies, no_rotation, rotary, rotate, stretch
from tests.models import reference

# transformers 5.23.0, ROPE_INIT_FUNCTIONS['llama3'] for the numbers of Llama 3.1 8B: frequency of pair j
LLAMA_31 = Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context_tokens=8192)
RECORDED = {
    0: 1.0, 10: 0.12868738, 28: 0.0032114461, 29: 0.0021665706, 31: 0.00085675146, 34: 0.00017850779,
    35: 9.5562122e-05, 63: 3.0689259e-07,
}  # fmt: skip


def test_angles_by_hand():
    # D = 4, theta = 100: frequencies 100^(-0/4) = 1 and 100^(-2/4) = .1; position 3 turns by 3 and .3
    cosine, sine = rotary(jnp.array([0, 3]), 4, Rope(100.0))
    np.testing.assert_allclose(cosine, [[1, 1], [math.cos(3), math.cos(0.3)]], rtol=1e-6)
    np.testing.assert_allclose(sine, [[0, 0], [math.sin(3), math.sin(0.3)]], rtol=1e-6)


def test_rotation_by_hand():
    # pairs (1, 3) by 90 degrees: (-3, 1); (2, 4) by 180: (-2, -4). Firsts, then seconds.
    turned = rotate(jnp.array([[[1.0, 2.0, 3.0, 4.0]]]), jnp.array([[0.0, -1.0]]), jnp.array([[1.0, 0.0]]))
    np.testing.assert_allclose(turned, [[[-3, -2, 1, -4]]])


def test_scores_depend_on_the_distance_of_positions_alone():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 8))

    def score(at_q, at_k):
        turned = [rotate(jnp.array([x]), *rotary(jnp.array([at]), 8, Rope(100.0))) for x, at in ((q, at_q), (k, at_k))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 4) == pytest.approx(score(103, 100), abs=1e-4)
    assert abs(score(7, 4) - score(4, 7)) > 1e-2


def test_a_rotation_in_bfloat16_turns_by_float32_angles():
    # 1001 in bfloat16, whose mantissa has 8 bits, is 1000: an angle wrong by 1
    x = jnp.array([[[1.0, 0.0]]], jnp.bfloat16)
    turned = rotate(x, *rotary(jnp.array([1001]), 2, Rope(100.0)))
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_allclose(turned.astype(np.float32)[0, 0], [math.cos(1001), math.sin(1001)], atol=4e-3)


def test_a_long_a_short_and_a_wavelength_between_by_hand():
    # turns in the original context of 160: 160 f / 2pi = 25.46, 2.546 and .2546
    #   1 turns more than 4 times: kept.   .01 less than once: / 8 = .00125
    #   .1 is (2.5465 - 1) / (4 - 1) = .51549 of the way: .1 (.51549 + .48451 / 8) = .0576055
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 160)
    np.testing.assert_allclose(
        stretch(np.array([1.0, 0.1, 0.01]), 100.0, scaling), [1.0, 0.0576055, 0.00125], rtol=1e-5
    )


def test_llama_31_turns_as_its_rule_and_another_implementation_say():
    # position 1 turns by the frequency itself
    cosine, sine = rotary(jnp.array([1]), 128, Rope(500000.0, LLAMA_31))
    turned = np.arctan2(sine[0], cosine[0])
    rule = reference.llama3_frequencies(128, 500000.0, factor=8.0, low=1.0, high=4.0, original_context=8192)
    np.testing.assert_allclose(turned, rule, rtol=1e-6)
    np.testing.assert_allclose(turned[list(RECORDED)], list(RECORDED.values()), rtol=1e-6)


# transformers 5.23.0, ROPE_INIT_FUNCTIONS['yarn']: frequency of pair j, and the factor of cosine and sine
YARN = {
    'gpt-oss': (64, Rope(150000.0, YarnScaling(32.0, 4096, truncate=False)), 1.3465736,
                {0: 1.0, 8: 0.0508133, 16: 4.56484e-4, 20: 1.81883e-5, 31: 3.02351e-7}),
    'qwen3': (128, Rope(1e6, YarnScaling(4.0, 32768)), 1.1386294,
              {16: 0.0316228, 32: 6.02941e-4, 40: 4.4457e-5, 63: 3.10234e-7}),
    'deepseek': (64, Rope(10000.0, YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)), 1.0,
                 {8: 0.1, 16: 0.0055, 20: 7.90569e-4}),
}  # fmt: skip


@pytest.mark.parametrize('name', YARN)
def test_yarn_turns_as_another_implementation_says(name):
    dim, rope, magnitude, recorded = YARN[name]
    np.testing.assert_allclose(frequencies(dim, rope)[list(recorded)], list(recorded.values()), rtol=3e-6)
    cosine, sine = rotary(jnp.array([1]), dim, rope)
    np.testing.assert_allclose(np.hypot(cosine, sine), magnitude, rtol=1e-6)
    np.testing.assert_allclose(np.arctan2(sine[0], cosine[0]), frequencies(dim, rope), rtol=1e-5)


def test_linear_scaling_divides_every_frequency():
    # 100^(-0/4) / 8 and 100^(-2/4) / 8
    np.testing.assert_allclose(frequencies(4, Rope(100.0, LinearScaling(8.0))), [0.125, 0.0125])


def test_no_rotation_changes_no_bit():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 8)), jnp.float32)
    np.testing.assert_array_equal(rotate(x, *no_rotation(jnp.arange(3), 8)), x)
