"""What is compiled ahead for devices without weights is not compiled again when the engine is there."""

from __future__ import annotations

import jax
import pytest

from areal_jax.app.parts.compilations import CompilationCounter
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.rollout.decode.generate import weight_shardings
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend, compile_ahead

CONFIG = ModelConfig(
    vocab_size=32, d_model=16, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24, rope_theta=100.0,
    tie_embeddings=True, qkv_bias=False, output_bias=False, qk_norm=True, family='qwen3',
)  # fmt: skip


def build(devices):
    return JaxDecodeBackend(
        Decoder(CONFIG), slots=2, context_tokens=16, block_tokens=8, prefill_buckets=(16,), decode_steps=2,
        filtered=False, dtype='float32', devices=devices,
    )  # fmt: skip


@pytest.mark.parametrize('each', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_on_other_devices_compiles_nothing_that_was_compiled_ahead(each):
    params, devices = Decoder(CONFIG).init(seed=0), jax.devices()
    places = [tuple(devices[start : start + each]) for start in (0, 4)]
    weights = [
        jax.device_put(params, place[0] if each == 1 else weight_shardings(Decoder(CONFIG), place, 1))
        for place in places
    ]
    first, second = map(build, places)
    compile_ahead(second, first.prepare(weights[0]))
    prepared = jax.block_until_ready(second.prepare(weights[1]))
    with CompilationCounter() as compilations:
        compilations.reset()
        second.warm_up(prepared)
    assert compilations.count == 0
