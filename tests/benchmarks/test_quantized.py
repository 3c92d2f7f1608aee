"""Policies of which a part is in 8 bits, against the decoder in 8 bits, and the options."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.app.model.model import Model
from areal_jax.models.decoder import Decoder
from areal_jax.models.quantized import Int8Rows
from benchmarks.quantized import quartile, read_options
from benchmarks.quantized_parts import POLICIES, RoundedRows, mismatches
from tests.models.test_decoder import VARIANTS


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_rounded_numbers_give_the_product_of_whole_ones():
    x, w, form = normal(0, 5, 24), normal(1, 24, 16), Int8Rows()
    [expected] = form.multiply(x, form.stored(w))
    rounded = RoundedRows().stored(w)
    np.testing.assert_allclose(RoundedRows().multiply(x, rounded)[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(RoundedRows().logits(x, w.T), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(RoundedRows(group=8).multiply(x, rounded)[0] - expected).max() > 1e-3


def test_the_less_is_rounded_the_nearer_is_a_policy():
    decoder = Decoder(dataclasses.replace(VARIANTS['tied'], vocab_size=64, d_model=64, d_ff=64, head_dim=16))
    model = Model(decoder, decoder.init(0, scale=2.0), None)
    rng = np.random.default_rng(0)
    answers = [(rng.integers(0, 64, 20).astype(np.int32), np.zeros(12)) for _ in range(8)]
    found = mismatches(model, answers, 24)
    assert list(found) == ['engine', *POLICIES]
    sizes = {name: np.abs(values).mean() for name, values in found.items()}
    assert 0 < sizes['float32 activations'] < sizes['float32 head and embedding'] < sizes['all in 8 bits'] < 1
    assert len(found['engine']) == 8 * 12
    behind = jax.nn.log_softmax(jnp.zeros(64))  # the engine's log-probs were 0 here
    assert np.abs(found['engine'].mean() + behind[0]) < 2


def test_milliseconds_are_those_of_a_step():
    calls = [{'cpu_s': seconds, 'checks': {'tokens': 8}} for seconds in (0.008, 0.016, 0.024)]
    assert quartile(calls, 'cpu_s', 50) == pytest.approx(2.0)


def test_the_command_can_be_made_smaller():
    assert read_options([]).turns == 9
    assert read_options(['--small']).turns == read_options(['--small']).repeats == 1
