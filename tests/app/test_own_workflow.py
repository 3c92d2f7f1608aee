"""A workflow of two turns, end to end: what is trained, under which log-probs, and that a resume is exact."""

import json
import pathlib

import numpy as np
import pytest

from areal_jax.tasks.scoring.verifier import InlineVerifier
from areal_jax.types import NOT_GENERATED
from tests.app.small import SmallRun, open_episodes, require_same, resume_at
from tests.app.test_session import logprob_gaps

TWO_TURNS = f'{pathlib.Path(__file__).parents[2]}/configs/templates/two_turns.py:build'
FIELDS = {
    'rollout__workflow': TWO_TURNS, 'rollout__max_new_tokens': 11,
    'checkpoint__every': 1, 'checkpoint__keep': 6, 'run__steps': 5,
}  # fmt: skip
EOS, QUESTION = 0, 3  # of the tokens of token_reversal with two symbols: <eos> a b =


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    return SmallRun(tmp_path_factory.mktemp('run') / 'whole', **FIELDS).train()


def trajectories(run):
    return [t for groups in run.batches for g in groups for t in g.trajectories]


def test_the_second_turn_follows_tokens_that_no_policy_generated(whole):
    two = [t for t in trajectories(whole) if not t.loss_mask[len(t.prompt.tokens) :].all()]
    assert len(two) > 10
    for t in two:
        (place,) = np.flatnonzero(~t.loss_mask[len(t.prompt.tokens) :])  # one token of the environment
        answer = t.answer_tokens
        assert answer[place] == QUESTION
        assert answer[place - 1] == EOS  # the first turn had ended by itself
        assert t.behavior_logprobs[len(t.prompt.tokens) + place] == 0
        assert (answer[place + 1 :] == EOS).sum() <= 1
        assert len(answer) <= 11
        assert t.finish_reason == ('stop' if answer[-1] == EOS else 'length')
    assert any(len({s.policy_version for s in t.segments} - {NOT_GENERATED}) > 1 for t in two)  # interrupted


def test_recomputed_logprobs_equal_the_recorded_ones_in_both_turns(whole):
    gaps, later = logprob_gaps(whole)
    assert len(gaps) == sum(t.loss_mask.sum() for t in trajectories(whole))
    assert len(later) > 5
    assert gaps.max() < 1e-5
    assert whole.report['mismatch']['max'] < 1e-4


def test_generated_tokens_alone_are_trained(whole):
    lines = [json.loads(line) for line in (whole.workdir / 'metrics.jsonl').read_text().splitlines()]
    trained = [line['update/trained_tokens'] for line in lines]
    has_signal = lambda group: len({t.reward for t in group.trajectories}) > 1
    expected = [
        sum(t.loss_mask.sum() for g in groups if has_signal(g) for t in g.trajectories) for groups in whole.batches
    ]
    assert trained == expected


def test_noise_is_not_repeated_in_the_second_turn(whole):
    pairs = []
    for t in trajectories(whole):
        ends = np.flatnonzero(~t.loss_mask[len(t.prompt.tokens) :])
        if len(ends):
            pairs.append((t.answer_tokens[: ends[0]].tolist(), t.answer_tokens[ends[0] + 1 :].tolist()))
    assert np.mean([first == second for first, second in pairs]) < 0.5


@pytest.mark.parametrize('step', [1, 3])
def test_a_resumed_run_is_the_same_bit_for_bit_within_both_turns(whole, tmp_path, step):
    resumed = resume_at(whole, tmp_path / 'at', step, **FIELDS)
    turns = [any(s.policy_version == NOT_GENERATED for s in e.segments) for e in open_episodes(resumed)]
    require_same(resumed.train(), whole)
    assert any(turns)  # some answers were in their second turn


def test_evaluation_runs_the_same_workflow(tmp_path, monkeypatch):
    fields = {**FIELDS, 'checkpoint__every': 0, 'run__steps': 1, 'evaluation__problems': 4, 'evaluation__samples': 4}
    run = SmallRun(tmp_path, **fields)
    asked = []
    verify = InlineVerifier.verify

    async def remember(verifier, prompt, tokens, reason, describe_episode):
        asked.append(tokens.tolist())
        return await verify(verifier, prompt, tokens, reason, describe_episode)

    monkeypatch.setattr(InlineVerifier, 'verify', remember)
    run.train()
    assert any(EOS in answer[:-1] and QUESTION in answer for answer in asked[:20])  # evaluated before training
