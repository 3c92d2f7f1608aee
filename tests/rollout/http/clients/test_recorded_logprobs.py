"""Recorded answers of SGLang, scored by a plain forward of the model that they are of: which softmax, which version."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from areal_jax.models.logprobs import logprob_of
from areal_jax.rollout.http.clients.sglang import SglangDialect
from tests.rollout.decode.examples import whole_attention
from tests.rollout.http.clients.checkpoints import CONFIG, make_params
from tests.rollout.http.clients.fake_server import noted
from tests.rollout.http.clients.test_dialects import generate

PROMPT = [5, 6, 7, 8, 9, 10]
LONGEST = 306
TOLERANCE = 3e-5
DECODER = Decoder(CONFIG)


@jax.jit
def score(params, tokens, temperature):
    """float32 [T - 1]: of each token but the first."""
    hidden, _ = DECODER.hidden(params, tokens, jnp.arange(len(tokens)), whole_attention)
    return logprob_of(DECODER.logits(params, hidden)[:-1], tokens[1:], temperature)


def differences(note, temperature=1.0):
    """[versions, A]: of the recorded log-probs from those of version 0 and of version 1; and the recorded versions."""
    file = 'generate' if temperature != 1.0 or note == 'sampled' else 'interrupted'
    answer = generate(SglangDialect(), noted(f'sglang/{file}', note))
    tokens = np.zeros(LONGEST, np.int32)  # one shape for all
    tokens[: len(PROMPT) + answer.n_tokens] = [*PROMPT, *answer.tokens]
    part = slice(len(PROMPT) - 1, len(PROMPT) - 1 + answer.n_tokens)
    scores = [np.asarray(score(make_params(seed), tokens, temperature))[part] for seed in (0, 1)]
    versions = [
        0 if piece.version == 'default' else int(piece.version) for piece in answer.pieces for _ in piece.tokens
    ]
    return np.abs(answer.logprobs - np.array(scores)), np.array(versions)


def test_logprobs_are_those_after_the_temperature():
    assert differences('sampled')[0][0].max() < TOLERANCE
    assert differences('temperature 0.7', 0.7)[0][0].max() < TOLERANCE
    assert differences('temperature 0.7', 1.001)[0][0].max() > 1e-2


@pytest.mark.parametrize('mode', ['retract', 'in_place'])
def test_each_token_around_an_update_is_of_the_version_that_its_span_says(mode):
    off, versions = differences(f'lived through a pause, mode {mode}, and an update')
    switch = int(np.flatnonzero(np.diff(versions))[0]) + 1
    before, after = versions[0], versions[-1]
    assert {before, after} == {0, 1}
    assert off[before, :switch].max() < TOLERANCE
    assert np.median(off[after, :switch]) > 0.1
    if mode == 'retract':
        assert off[after, switch:].max() < TOLERANCE
        assert off[before, switch] > TOLERANCE  # the first token after the switch is not of the old weights
    else:
        assert off[after, switch:].max() > 1e-2  # what it attends to is of the old weights


def test_what_an_aborted_answer_had_is_of_its_version():
    for note in ('cut by a pause, mode abort', 'retracted by a pause, then aborted'):
        off, versions = differences(note)
        assert len(set(versions)) == 1
        assert off[versions[0]].max() < TOLERANCE
