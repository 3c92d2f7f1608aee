"""Latent attention in engines: both forms are the learner's, over pieces and devices, and what their caches hold."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.models.attention.backends import AttentionError
from areal_jax.models.decoder import Decoder
from areal_jax.rollout.decode import generate as parallel
from areal_jax.rollout.decode.attention.choose import (
    IMPLEMENTATIONS,
    TABLE_BLOCKS,
    Demand,
    choose_implementation,
    self_check,
)
from areal_jax.sharding.placement import move_to
from tests.models.family_examples import CONFIGS, draw
from tests.rollout.decode.examples import Decoding, build, forward_logprobs, request

NAMES = ('deepseek_v3', 'glm4_moe_lite')
REQUESTS = {0: request(prompt=np.arange(40, 51), new=10), 1: request(3, prompt=[7], new=12)}


def decode(name, devices=None, **options):
    """The requests' answers from an engine in float32, and the tokens with their prompts."""
    decoder, params = Decoder(CONFIGS[name]), draw(CONFIGS[name])
    if devices is not None:
        options['devices'] = devices
        params = move_to(params, parallel.weight_shardings(decoder, devices))
    engine = build(decoder, **options)
    decoding = Decoding(engine, params)
    decoding.start(REQUESTS)
    decoding.finish()
    return engine, decoding


FORMS = [('absorbed', 'gather'), ('absorbed', 'loops'), ('absorbed', 'native'), ('expanded', 'auto')]


@pytest.mark.parametrize(('mla', 'attention'), FORMS)
@pytest.mark.parametrize('name', NAMES)
def test_an_engine_gives_the_log_probs_of_the_learner_s_form(name, mla, attention):
    _, decoding = decode(name, mla=mla, attention=attention)
    for number, asked in REQUESTS.items():
        expected = forward_logprobs(
            decoding.tokens(number), len(asked.prompt_tokens), draw(CONFIGS[name]), decoder=Decoder(CONFIGS[name])
        )
        np.testing.assert_allclose(decoding.logprobs(number), expected, atol=1e-5)


def test_heads_over_two_devices_share_the_latents():
    _, alone = decode('deepseek_v3')
    engine, over_two = decode('deepseek_v3', devices=jax.devices()[:2])
    for number in REQUESTS:
        assert over_two.tokens(number) == alone.tokens(number)
        np.testing.assert_allclose(over_two.logprobs(number), alone.logprobs(number), atol=1e-5)
    (latents,) = engine.initial_state().layers[0]
    assert latents.sharding.shard_shape(latents.shape) == latents.shape


@pytest.mark.parametrize('name', NAMES)
def test_a_cache_holds_the_latent_and_one_rotated_key_a_token(name):
    config = CONFIGS[name]
    sizes = {}
    for mla in ('absorbed', 'expanded'):
        engine = build(Decoder(config), mla=mla)
        positions = (engine.cache_blocks + 1) * engine.block_tokens
        sizes[mla] = engine.state_bytes / (positions * config.n_layers * 4)
    latent = config.latent
    assert sizes['absorbed'] == latent.rank + latent.rotated_dim == config.absorb().cached_numbers
    assert sizes['expanded'] == 2 * config.n_heads * config.head_dim == config.cached_numbers


@pytest.mark.parametrize('attention', ['gather', 'loops', 'native'])
def test_each_attention_has_the_numbers_of_one_head_of_latents(attention):
    """Rows of several lengths over blocks with NaN where no row reads, against a dense softmax in float64."""
    demand = Demand(6, 1, 20, 4, TABLE_BLOCKS, 'float32', windows=True, latents=True)
    assert self_check(IMPLEMENTATIONS[attention].make(demand), demand, jax.devices()[0]) < 1e-6


def test_attention_that_has_no_cache_of_latents_is_refused_by_name():
    demand = Demand(4, 1, 20, 4, 6, 'bfloat16', windows=False, latents=True)
    tpu = types.SimpleNamespace(platform='tpu', device_kind='TPU v5e')
    message = r"rollout\.attention='pallas_tpu' has no cache of latents .* use 'gather'"
    with pytest.raises(AttentionError, match=message):
        choose_implementation('pallas_tpu', demand, tpu)
    assert choose_implementation('auto', demand, tpu) == 'gather'
    assert choose_implementation('auto', demand, jax.devices()[0]) == 'loops'
    one = dataclasses.replace(demand, dtype='float32')
    assert choose_implementation('auto', one, jax.devices()[0]) == 'native'


@pytest.mark.parametrize('name', NAMES)
def test_weights_in_8_bits_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=r"weights='int8' with 6 experts: these are not quantized; use 'published'"):
        build(Decoder(CONFIGS[name]), weights='int8')
