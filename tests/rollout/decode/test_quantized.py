"""Engines in 8 bits: what they record is what they generated with, whatever comes between; and what is refused."""

import jax
import numpy as np
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import Lora
from areal_jax.rollout.decode.jax_backend import JaxScoring
from areal_jax.rollout.scoring import ScoringRequest
from tests.models import family_examples
from tests.native import needs_kernels
from tests.rollout.decode.examples import (
    DECODER,
    PROMPT,
    WINDOWED,
    Decoding,
    backend,
    build,
    forward_logprobs,
    generate,
    request,
)


def decoding_of(requests, **changed):
    decoding = Decoding(backend(weights='int8', **changed))
    decoding.start(requests)
    return decoding


@needs_kernels
@pytest.mark.parametrize('stops_at', [1, 4, 7])
def test_an_interruption_under_equal_weights_changes_no_bit(stops_at):
    whole, whole_logprobs = generate(request(), weights='int8')
    decoding = decoding_of({0: request(), 2: request(5, prompt=[7, 7])})
    for _ in range(stops_at):
        decoding.decode(1)
    decoding.rebuild(0, 2)
    decoding.finish()
    assert decoding.answer(0) == whole
    np.testing.assert_array_equal(decoding.logprobs(0), whole_logprobs)


@pytest.mark.parametrize(('changed', 'devices'), [({}, 1), ({'attention': 'gather'}, 1), ({'devices': (0, 1)}, 2)])
def test_logprobs_are_near_those_of_the_published_weights_and_not_the_same(changed, devices):
    if devices > 1:
        changed = {'devices': tuple(jax.devices()[:devices])}
    decoding = decoding_of({0: request(), 1: request(1, prompt=PROMPT[::-1], temperature=0.7)}, **changed).finish()
    for name, heat in ((0, 1.0), (1, 0.7)):
        tokens = decoding.tokens(name)
        exact = forward_logprobs(tokens, len(PROMPT), temperature=heat)
        error = np.abs(decoding.logprobs(name) - exact)
        assert 1e-4 < error.max() < 0.5
        assert error.mean() < 0.1


@needs_kernels
@pytest.mark.parametrize('decoder', [DECODER, WINDOWED])
def test_scores_are_near_the_log_probs_of_decoding(decoder):
    one = build(decoder, weights='int8')
    decoding = Decoding(one)
    decoding.start({0: request()})
    decoding.finish()
    tokens = np.array(decoding.tokens(0), np.int32)
    scorer, asked = (
        JaxScoring(one),
        ScoringRequest('one', tokens, len(PROMPT), np.ones(len(tokens) - len(PROMPT), np.float32), 1),
    )
    [found] = scorer.score(scorer.program_for([len(tokens)], 1), decoding.params, [asked])
    # the norm before the head is XLA's there, which rounds otherwise: a few whole numbers differ by one
    np.testing.assert_allclose(found.logprobs, decoding.logprobs(0), atol=0.05)


@pytest.mark.parametrize(
    ('changed', 'message'),
    [
        ({'weights': 'int4'}, "weights='int4' is unknown; use one of published, int8"),
        ({'weights': 'int8', 'dtype': 'bfloat16'}, r"weights='int8' with dtype='bfloat16': .* use dtype='float32'"),
    ],
)
def test_what_cannot_be_quantized_is_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        build(**changed)


def test_adapters_are_refused():
    adapted = Decoder(DECODER.config, lora=Lora(rank=2, alpha=1.0, targets=('query',)))
    with pytest.raises(ConfigError, match=r"weights='int8' with adapters of rank 2: .* use 'published'"):
        build(adapted, weights='int8')


@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=[] if name in ('gemma3', 'qwen3_5') else [pytest.mark.slow])
        for name, config in family_examples.CONFIGS.items()
        if not config.experts
    ],
)
def test_dense_families_decode_what_their_layers_in_8_bits_compute(name):
    config = family_examples.CONFIGS[name]
    params = family_examples.draw(config)
    wanted = {0: request(prompt=np.arange(40, 51), new=10), 1: request(3, prompt=[7], new=12)}
    one = build(Decoder(config), weights='int8')
    decoding = Decoding(one, params)
    decoding.start(wanted)
    decoding.finish()
    plain = Decoder(config, tokens='int8_rows')
    for number, asked in wanted.items():
        about = decoding.tokens(number), len(asked.prompt_tokens)
        expected = forward_logprobs(*about, params=plain.prepare(params), decoder=plain)
        np.testing.assert_allclose(decoding.logprobs(number), expected, atol=2e-4)
        exact = forward_logprobs(*about, params=params, decoder=Decoder(config))
        assert np.abs(decoding.logprobs(number) - exact).max() > 1e-4


@pytest.mark.parametrize('name', [name for name, config in family_examples.CONFIGS.items() if config.experts])
def test_models_with_experts_are_refused(name):
    config = family_examples.CONFIGS[name]
    with pytest.raises(ConfigError, match=f"weights='int8' with {config.experts.count} experts: .* use 'published'"):
        build(Decoder(config), weights='int8')
