"""What an engine records of routes is what the pass over whole sequences chooses, wherever a token was computed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import columns
from areal_jax.columns import ROUTED_EXPERTS, Column
from areal_jax.config.fields import ConfigError
from areal_jax.models import experts, native_layers
from areal_jax.models.families import ModelConfig
from areal_jax.rollout.backend import DecodeRow, PrefillPiece
from areal_jax.rollout.decode.jax_backend import share_backend
from tests.rollout.decode import examples
from tests.rollout.decode.examples import CONTEXT, DECODER, PROMPT, Decoding, build, request, whole_attention
from tests.rollout.decode.test_expert_layers import MIXED, OLMOE

PARAMS = MIXED.init(5, scale=2.0)
REQUESTS = {0: request(0), 1: request(1, prompt=np.arange(10, 19), new=7), 2: request(2, prompt=[9])}


@functools.partial(jax.jit, static_argnums=2)
def _routes(params, tokens, decoder):
    return decoder.hidden_and_routes(params, tokens, jnp.arange(len(tokens)), whole_attention)[2].live


def routes_of_pass(tokens, params=PARAMS, decoder=MIXED):
    """[T, L, k] of a column: entry t is what token t - 1 chose, entry 0 none."""
    padded = np.zeros(CONTEXT, np.int32)
    padded[: len(tokens)] = tokens
    live = np.moveaxis(np.asarray(_routes(params, padded, decoder)), 0, 1)[: len(tokens) - 1]
    return np.concatenate([np.full_like(live[:1], 255), live]).astype(np.uint8)


def decode_all(decoding, requests):
    """{name: [T, L, k]}, context and generated tokens together."""
    decoding.start(requests)
    found = {
        name: [decoding.backend.read_context(decoding.state, one.blocks, len(one.request.prompt_tokens))]
        for name, one in decoding.sequences.items()
    }
    found = {name: [context[ROUTED_EXPERTS.name]] for name, (context,) in found.items()}
    while names := [name for name, sequence in decoding.sequences.items() if sequence.live]:
        output = decoding.decode(3)
        for place, name in enumerate(names):
            found[name].append(output.columns[ROUTED_EXPERTS.name][output.valid[:, place], place])
    return {name: np.concatenate(parts) for name, parts in found.items()}


@pytest.mark.parametrize('attention', ['auto', 'gather'])  # of the step in C++, and of programs of XLA
@pytest.mark.parametrize('decoder', [MIXED, OLMOE], ids=['mixed', 'olmoe'])
def test_recorded_routes_are_those_of_the_whole_pass(decoder, attention):
    params = decoder.init(5, scale=2.0)
    decoding = Decoding(build(decoder=decoder, attention=attention, records_routes=True), params)
    found = decode_all(decoding, REQUESTS)
    for name, routes in found.items():
        expected = routes_of_pass(decoding.tokens(name), params, decoder)
        assert (routes.dtype, routes.shape[1:]) == (np.uint8, decoder.config.routes.shape)
        np.testing.assert_array_equal(routes, expected)
        assert len(np.unique(routes[1:])) > 3  # the routers do choose


def test_recording_changes_no_bit():
    recorded = Decoding(build(decoder=MIXED, records_routes=True), PARAMS)
    decode_all(recorded, REQUESTS)
    plain = Decoding(build(decoder=MIXED), PARAMS)
    plain.start(REQUESTS)
    while any(sequence.live for sequence in plain.sequences.values()):
        plain.decode(3)
    assert plain.results() == recorded.results()


def test_copied_blocks_have_their_routes():
    engine = build(decoder=MIXED, records_routes=True)
    weights, state = engine.prepare(PARAMS), engine.initial_state()
    state = engine.prefill(weights, state, [PrefillPiece(np.asarray(PROMPT), 0, [0, 1])])
    state = engine.copy(state, [(1, 5)])
    first = engine.read_context(state, [0, 1], len(PROMPT) + 1)[ROUTED_EXPERTS.name]
    copied = engine.read_context(state, [0, 5], len(PROMPT) + 1)[ROUTED_EXPERTS.name]
    np.testing.assert_array_equal(copied, first)
    np.testing.assert_array_equal(first, routes_of_pass([*PROMPT, 0]))


def test_an_answer_that_goes_on_finds_the_routes_of_the_turn_before():
    engine = build(decoder=MIXED, records_routes=True)
    decoding = Decoding(engine, PARAMS)
    decode_all(decoding, {0: request(0, new=6)})
    one = decoding.sequences[0]
    tokens = [*one.tokens, 7, 8]
    held = len(one.tokens) - 1
    following = [PrefillPiece(np.array(tokens[held:-1], np.int32), held, [*one.blocks, 9])]
    state = engine.prefill(decoding.params, decoding.state, following)
    row = DecodeRow(request(0, prompt=tokens, new=1), tokens[-1], len(tokens) - 1, len(tokens) + 1, [*one.blocks, 9])
    state, _ = engine.generate(decoding.params, state, [row], 1)
    found = engine.read_context(state, [*one.blocks, 9], len(tokens))[ROUTED_EXPERTS.name]
    np.testing.assert_array_equal(found, routes_of_pass(tokens))


def test_what_else_a_model_tells_of_each_token_is_recorded_without_a_change_of_the_engine(monkeypatch):
    best = Column('best_expert', 'int16', (MIXED.config.n_expert_layers,), fill=-1, published=False, packed=False)
    monkeypatch.setattr(columns, 'DECLARED', columns.DECLARED | {best.name: best})
    tell = experts.columns_of_pass
    for module in (experts, native_layers):
        monkeypatch.setattr(module, 'columns_of_pass', lambda live: tell(live) | {best.name: live[:, :, 0].T})
    monkeypatch.setattr(ModelConfig, 'columns', property(lambda config: (config.routes, best)))
    monkeypatch.setattr(examples, 'share_backend', share_backend.__wrapped__)  # one of its own
    engine = build(decoder=MIXED, records_routes=True)
    decoding = Decoding(engine, PARAMS)
    decoding.start(REQUESTS)
    for name, one in decoding.sequences.items():
        context = engine.read_context(decoding.state, one.blocks, len(one.request.prompt_tokens))
        assert (context[best.name].dtype, context[best.name][0].tolist()) == (np.int16, [-1] * len(best.blank(1)[0]))
        np.testing.assert_array_equal(context[best.name][1:], context[ROUTED_EXPERTS.name][1:, :, 0], str(name))
    output = decoding.decode(3)
    assert output.valid[0].all()
    np.testing.assert_array_equal(
        output.columns[best.name][output.valid], output.columns[ROUTED_EXPERTS.name][output.valid][:, :, 0]
    )


def test_a_dense_model_records_none():
    with pytest.raises(ConfigError, match=r'rollout\.record_routes=True needs a model with experts; set it to False'):
        build(decoder=DECODER, records_routes=True)
