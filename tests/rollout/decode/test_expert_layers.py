"""A decoder with experts generates what the pass over whole sequences says of it, whatever stands beside a row."""

from __future__ import annotations

import collections
import dataclasses
import re

import jax
import numpy as np
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.models.decoder import Decoder
from areal_jax.models.layer_parts import Experts
from areal_jax.native import compiled_library as library
from areal_jax.rollout.decode import generate
from areal_jax.sharding.placement import move_to
from tests.native import needs_kernels
from tests.rollout.decode.examples import (
    DECODER,
    PROMPT,
    Decoding,
    build,
    forward_logprobs,
    request,
)

CONFIG = dataclasses.replace(DECODER.config, family='qwen3_moe', qk_norm=True, experts=Experts(8, 2, 16))
MIXED = Decoder(dataclasses.replace(CONFIG, experts=Experts(8, 3, 16, dense_layers=(0,))))
OLMOE = Decoder(
    dataclasses.replace(CONFIG, family='olmoe', qk_norm=False, whole_qk_norm=True, experts=Experts(8, 2, 16, False))
)
REQUESTS = {0: request(0), 1: request(1, prompt=np.arange(10, 19), new=7), 2: request(2, prompt=[9])}


def start(decoder, **changed):
    decoding = Decoding(build(decoder=decoder, **changed), decoder.init(5, scale=2.0))
    decoding.start(REQUESTS)
    return decoding


@pytest.mark.parametrize('decoder', [MIXED, OLMOE], ids=['mixed', 'olmoe'])
def test_logprobs_are_those_of_the_whole_pass(decoder):
    decoding = start(decoder)
    decoding.decode(5)
    decoding.rebuild(0, 2)
    decoding.finish()
    for name, wanted in REQUESTS.items():
        about = decoding.tokens(name), len(wanted.prompt_tokens), decoder.init(5, scale=2.0)
        np.testing.assert_allclose(decoding.logprobs(name), forward_logprobs(*about, decoder=decoder), atol=1e-5)


@needs_kernels
@pytest.mark.parametrize('decoder', [MIXED, OLMOE], ids=['mixed', 'olmoe'])
def test_a_step_is_one_kernel_and_a_layer_of_a_prefill_two(decoder):
    engine = build(decoder=decoder)
    weights = engine.prepare(decoder.init(5))
    step, prefill = engine.lower_generate(weights, 4), engine.lower_prefill(weights, engine.declared_prefills[0])
    assert count_kernels(step) == {library.STEP: 1}
    # what only the states behind the last layer need is left out
    assert count_kernels(prefill) == {library.PROJECT: 2, library.WRITE: 2, library.ATTEND: 1, library.FINISH: 1}


def count_kernels(lowered):
    return collections.Counter(re.findall(r'custom_call @(areal_jax_\w+)', lowered.as_text()))


@needs_kernels  # XLA's products of another number of rows may differ in the last bit
@pytest.mark.parametrize('decoder', [MIXED, OLMOE], ids=['mixed', 'olmoe'])
def test_company_changes_no_bit(decoder):
    """Nor do rows that have ended: those of the other requests, which are shorter, and a row that stops at once."""
    requests = REQUESTS | {3: request(3, prompt=np.arange(2, 6), new=1)}
    together = Decoding(build(decoder=decoder), decoder.init(5, scale=2.0))
    together.start(requests)
    together.finish()
    alone = Decoding(build(decoder=decoder), decoder.init(5, scale=2.0))
    alone.start({0: REQUESTS[0]})
    alone.finish(3)
    assert alone.tokens(0) == together.tokens(0)
    np.testing.assert_array_equal(alone.logprobs(0), together.logprobs(0))


@needs_kernels
def test_a_rebuilt_sequence_goes_on_with_the_same_bits():
    """What a prefill computes of a token is what a step computed."""
    plain, rebuilt = start(MIXED), start(MIXED)
    for decoding in (plain, rebuilt):
        decoding.decode(5)
    rebuilt.rebuild(*REQUESTS)
    for name in REQUESTS:
        assert plain.finish().tokens(name) == rebuilt.finish().tokens(name)
        np.testing.assert_array_equal(plain.logprobs(name), rebuilt.logprobs(name))


def test_new_weights_need_a_rebuild_and_have_their_logprobs():
    decoding = start(MIXED)
    decoding.decode(5)
    decoding.params = decoding.backend.prepare(MIXED.init(6, scale=2.0))
    decoding.rebuild(0, 1)
    decoding.finish()
    expected = forward_logprobs(decoding.tokens(0), len(PROMPT), MIXED.init(6, scale=2.0), decoder=MIXED)
    np.testing.assert_allclose(decoding.logprobs(0)[5:], expected[5:], atol=2e-5, rtol=1e-5)


# of an expert's down, [8, 16, 16], and of the keys of a layer, whose two heads `tensor` alone cuts
@pytest.mark.parametrize(
    ('count', 'expert', 'down', 'cache_share'),
    [(2, 1, (8, 8, 16), 2), (2, 2, (4, 16, 16), 1), (4, 2, (4, 8, 16), 2)],
    ids=['tensor=2', 'expert=2', 'expert=2,tensor=2'],
)
def test_several_devices_decode_as_one(count, expert, down, cache_share):
    devices = jax.devices()[2 : 2 + count]
    engine = build(decoder=MIXED, devices=devices, expert=expert)
    cut = generate.weight_shardings(MIXED, devices, expert)
    decoding = Decoding(engine, move_to(MIXED.init(5, scale=2.0), cut))
    experts = decoding.params.params['layers']['1']['mlp']['experts']
    assert {shard.data.shape for shard in experts['down'].addressable_shards} == {down}
    assert all(leaf.size == cache_share * leaf.addressable_data(0).size for leaf in jax.tree.leaves(decoding.state))
    decoding.start(REQUESTS)
    decoding.finish()
    one = start(MIXED).finish()
    for name in REQUESTS:
        assert decoding.tokens(name) == one.tokens(name)
        np.testing.assert_allclose(decoding.logprobs(name), one.logprobs(name), atol=1e-5)


@pytest.mark.parametrize(
    ('decoder', 'count', 'expert', 'message'),
    [
        (DECODER, 2, 2, 'expert=2 of cluster.engines shares out the experts of a layer, and this model has none'),
        (MIXED, 3, 3, 'expert=3 of cluster.engines does not divide the 8 experts of the model; use a divisor'),
        (MIXED, 8, 2, 'tensor=4 of cluster.engines does not divide the 4 query heads and 2 key heads'),
    ],
)
def test_devices_without_a_part_are_refused(decoder, count, expert, message):
    with pytest.raises(ConfigError, match=message):
        build(decoder=decoder, devices=jax.devices()[:count], expert=expert)
    with pytest.raises(ConfigError, match=message):
        generate.weight_shardings(decoder, jax.devices()[:count], expert)


def test_experts_in_8_bits_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"weights='int8' with 8 experts: these are not quantized; use 'published'"):
        build(decoder=MIXED, weights='int8')
