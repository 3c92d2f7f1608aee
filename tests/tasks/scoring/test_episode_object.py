"""What a scorer with a parameter `episode` gets, inline and in a worker; others get nothing more."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from areal_jax.tasks.scoring.score_call import score_answer
from areal_jax.tasks.scoring.verifier import InlineVerifier, ProcessVerifier, TaskScoring, VerifierError
from areal_jax.tasks.scoring.worker import takes_episode
from areal_jax.types import Prompt
from tests.tasks.fake_clock import FakeClock

PROMPT = Prompt(5, np.array([104, 105], np.int32), 'own', {'answer': 'ab'})
ASKED = Prompt(5, np.array([104, 105], np.int32), 'own', {'question': 'which?'})
FOUND = {'label': 'turns', 'turns': 2, 'messages': [{'role': 'user', 'content': 'é\ud800'}], 'tools': []}
SCORER = 'tests.tasks.scoring.test_episode_object:score'
seen = []


def score(problem, text, finish_reason, episode):
    """The length of what it got as JSON, which a worker can send back; at the trial 0."""
    seen.append(episode)
    return float(len(json.dumps(episode, sort_keys=True))) if text else 0.0


def decode(tokens):
    return ''.join(map(chr, tokens))


def verify(judge, prompt=PROMPT, describe=None):
    return asyncio.run(judge.verify(prompt, np.array([97, 98], np.int32), 'stop', describe))


@pytest.mark.parametrize(('prompt', 'asked'), [(PROMPT, 'hi'), (ASKED, 'which?')])
def test_one_turn_is_a_question_and_an_answer(prompt, asked):
    seen.clear()
    assert verify(InlineVerifier(score, decode), prompt).reward > 0
    messages = [{'role': 'user', 'content': asked}, {'role': 'assistant', 'content': 'ab'}]
    assert seen == [{'label': 'stop', 'turns': 1, 'messages': messages, 'conversations': [messages], 'tools': []}]


def test_inline_and_in_a_worker_a_scorer_gets_the_same():
    judge = ProcessVerifier(
        FakeClock(), {'': TaskScoring(SCORER, trial={'question': 'q'}, with_episode=True)}, decode, workers=1,
        deadline_s=30.0, attempts=1, memory_mb=2048,
    )  # fmt: skip
    judge.start()
    try:
        for describe in (None, lambda: FOUND):
            inline = verify(InlineVerifier(score, decode), describe=describe)
            assert verify(judge, describe=describe) == inline
            assert inline.reward > 0
    finally:
        judge.close()
    assert seen[-1] == FOUND


def test_a_scorer_cannot_change_the_episode():
    def spoil(problem, text, finish_reason, *, episode):
        episode['messages'].clear()
        return 1.0

    assert verify(InlineVerifier(spoil, decode), describe=lambda: FOUND).reward == 1.0
    assert FOUND['messages']


def test_the_episode_of_other_scorers_is_not_described():
    def refuse():
        raise AssertionError

    plain = InlineVerifier(lambda problem, text, finish_reason: 1.0, decode)
    assert verify(plain, describe=refuse).reward == 1.0
    assert not takes_episode(len)
    assert not takes_episode(lambda problem, text, finish_reason, **episode: 1.0)
    assert score_answer(lambda problem, text, finish_reason, episode: episode, {}, '', 'stop', 1) == 1.0


def test_the_trial_has_an_episode():
    def fails(problem, text, finish_reason, episode):
        return float(episode['messages'][-1]['content'])

    with pytest.raises(VerifierError, match='could not convert string to float'):
        InlineVerifier(fails, decode, {'question': 'q'}, 'fails').start()
