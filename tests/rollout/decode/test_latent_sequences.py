"""Latents of an engine: whatever comes between, an answer is what its tokens alone give, in both forms."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from areal_jax.rollout.decode import generate as parallel
from areal_jax.sharding.placement import move_to
from tests.models.family_examples import CONFIGS
from tests.rollout.decode import delta_examples as examples
from tests.rollout.decode.delta_examples import (
    EXACT,
    PROMPT,
    answers,
    ask,
    assert_near,
    interrupted,
    joined,
    large,
    learner_logprobs,
    prefill_in_parts,
    run,
    small,
    token_by_token,
    weights,
)
from tests.rollout.decode.examples import Decoding
from tests.rollout.engine_rig import collect

CUTS = (1, 2, 3, 4, 5, 15, 16, 17, 32, 48, 63, 68)  # in blocks of 16 tokens, at their ends, behind one token
FORMS = [
    ('deepseek_v3', 'absorbed'),
    pytest.param('deepseek_v3', 'expanded', marks=pytest.mark.slow),
    pytest.param('glm4_moe_lite', 'absorbed', marks=pytest.mark.slow),
    pytest.param('glm4_moe_lite', 'expanded', marks=pytest.mark.slow),
]
in_both_forms = pytest.mark.parametrize(('name', 'mla'), FORMS)


def assert_as_learned(name, tokens, logprobs, first, version=0):
    """The log-probs are those of the learner's pass, which is always expanded."""
    config = CONFIGS[name]
    assert_near(logprobs, learner_logprobs(tokens, first, weights(version, config=config), Decoder(config)))


@in_both_forms
def test_a_prefill_that_is_cut_is_as_uncut(name, mla):
    decoding = Decoding(large(Decoder(CONFIGS[name]), mla=mla), weights(config=CONFIGS[name]))
    asked = ask(new=8)
    decoding.start({'whole': asked, **dict.fromkeys(CUTS, asked), 'all': asked})
    for cut in CUTS:
        prefill_in_parts(decoding, cut, (cut,))
    prefill_in_parts(decoding, 'all', CUTS)
    decoding.decode(8)
    tokens, whole = decoding.tokens('whole'), decoding.logprobs('whole')
    assert_as_learned(name, tokens, whole, len(PROMPT))
    for cut in (*CUTS, 'all'):
        assert decoding.tokens(cut) == tokens
        np.testing.assert_allclose(decoding.logprobs(cut), whole, rtol=0, atol=EXACT)


@in_both_forms
def test_a_group_that_shares_its_prompt_is_as_each_alone(name, mla):
    backend, config = large(Decoder(CONFIGS[name]), mla=mla), CONFIGS[name]
    group = [ask(sample) for sample in range(16)]
    together = answers(backend, group, config=config)
    for sample in (0, 7, 15):
        [(tokens, logprobs)] = answers(backend, [group[sample]], config=config)
        assert together[sample][0] == tokens
        np.testing.assert_allclose(together[sample][1], logprobs, rtol=0, atol=EXACT)
    for tokens, logprobs in together:
        assert_as_learned(name, [*PROMPT, *tokens], logprobs, len(PROMPT))


@in_both_forms
def test_a_turn_and_another_answer_to_a_part_of_the_prompt_go_on_from_latents(name, mla):
    async def script(rig):
        first = rig.engine.generate(ask(prompt=PROMPT[:65], new=20))
        await collect(first)
        said, found = first.tokens, []
        for draw, prompt in enumerate(([*said, 4, 5, 6], said[:65], [*said[:50], 9])):
            one = rig.engine.generate(ask(prompt=prompt, draw=draw))
            found.append((prompt, joined(await collect(one)), one.cached_tokens))
        return found

    found = run(large(Decoder(CONFIGS[name]), mla=mla), script, config=CONFIGS[name])
    assert [cached for *_, cached in found] == [84, 64, 48]  # of the third the whole blocks of 16
    for prompt, (tokens, logprobs), _ in found:
        assert_as_learned(name, [*prompt, *tokens], logprobs, len(prompt))


@in_both_forms
def test_preempted_answers_are_as_uninterrupted(name, mla):
    config, decoder = CONFIGS[name], Decoder(CONFIGS[name])
    requests = [ask(prompt=PROMPT[: 10 + draw], new=40, draw=draw) for draw in range(4)]

    async def script(rig):
        open_ = [rig.engine.generate(one) for one in requests]
        return [joined(await collect(one)) for one in open_], rig.kinds('preempt')

    found, preempted = run(small(decoder, mla=mla), script, config=config)
    assert len(preempted) >= 2
    for one, (tokens, logprobs) in zip(found, answers(large(decoder, mla=mla), requests, config=config), strict=True):
        assert one[0] == tokens
        np.testing.assert_allclose(one[1], logprobs, rtol=0, atol=EXACT)


@in_both_forms
def test_an_interruption_with_equal_weights_changes_nothing(name, mla):
    backend, config = large(Decoder(CONFIGS[name]), mla=mla), CONFIGS[name]
    whole = answers(backend, [ask(sample, new=24) for sample in range(3)], config=config)
    for policy in ('recompute', 'keep'):
        for segments, expected in zip(interrupted(backend, policy, 0, config=config), whole, strict=True):
            assert [one.policy_version for one in segments] == [0, 1]
            tokens, logprobs = joined(segments)
            assert tokens == expected[0]
            np.testing.assert_allclose(logprobs, expected[1], rtol=0, atol=EXACT)


@in_both_forms
def test_new_weights_go_on_from_latents_of_their_own_or_of_both_versions(name, mla):
    backend, config = large(Decoder(CONFIGS[name]), mla=mla), CONFIGS[name]
    for segments in interrupted(backend, 'recompute', 1, config=config):
        first = len(PROMPT) + len(segments[0].tokens)
        assert_as_learned(name, [*PROMPT, *joined(segments)[0]], segments[1].behavior_logprobs, first, version=1)
    for segments in interrupted(backend, 'keep', 1, config=config):
        tokens, logprobs = joined(segments)
        assert_near(logprobs, token_by_token(config.absorb() if mla == 'absorbed' else config, segments))
        recomputed = learner_logprobs([*PROMPT, *tokens], len(PROMPT), weights(1, config=config), Decoder(config))
        later = slice(len(segments[0].tokens), None)
        assert np.abs(logprobs - recomputed)[later].max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize('axes', [{'tensor': 2}, {'expert': 2}, {'expert': 2, 'tensor': 2}], ids=str)
@pytest.mark.parametrize('mla', ['absorbed', 'expanded'])
def test_engines_over_devices_give_what_one_device_gives(mla, axes):
    config, expert = CONFIGS['deepseek_v3'], axes.get('expert', 1)
    decoder, devices = Decoder(config), jax.devices()[: expert * axes.get('tensor', 1)]
    params = move_to(examples.weights(config=config), parallel.weight_shardings(decoder, devices, expert))
    found = []
    for one, given in (
        (small(decoder, mla=mla), weights(config=config)),
        (small(decoder, mla=mla, devices=devices, expert=expert), params),
    ):
        decoding = Decoding(one, given)
        decoding.start({0: ask(prompt=PROMPT[:20], new=12), 1: ask(1, prompt=PROMPT[:5], new=8)})
        prefill_in_parts(decoding, 0, (7,))
        found.append(decoding.finish(4).results())
    for (tokens, logprobs), (as_alone, expected) in zip(*(one.values() for one in reversed(found)), strict=True):
        assert tokens == as_alone
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=EXACT)
