"""Turns of an episode: what a turn asks the pool for, how many tokens are left, and what a resumed one goes on with."""

import asyncio

import numpy as np
import pytest

from areal_jax.control.episode import Episode, Row
from areal_jax.rollout.workflow import append_environment, count_turns, generate_turn
from areal_jax.types import NOT_GENERATED, Prompt, SamplingParams, Segment

SAMPLING = SamplingParams(max_new_tokens=6, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=(9,))


class Pool:
    """Answers every request with the tokens given, under version 3; remembers the requests."""

    def __init__(self, *tokens, reason='stop'):
        self.tokens, self.reason, self.requests = tokens, reason, []

    def generate(self, request, prefer=''):
        self.requests.append(request)
        return Generation(self.tokens, self.reason)


class Generation:
    engine = 'engine/0'

    def __init__(self, tokens, reason):
        self.left, self.finish_reason = [generated(*tokens)] if tokens else [], reason

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.left:
            raise StopAsyncIteration
        return self.left.pop()


def generated(*tokens, version=3):
    return Segment(np.array(tokens, np.int32), np.full(len(tokens), -1.0, np.float32), version)


def begun(*segments):
    return Episode(0, rows=[Row(segments=list(segments))])


def turn(pool, episode, context_tokens=50):
    prompt = Prompt(5, np.array([1, 2], np.int32), 'task', {})
    return asyncio.run(generate_turn(pool, prompt, episode, SAMPLING, seed=7, context_tokens=context_tokens))


def test_the_second_turn_reads_all_that_came_before_and_has_what_is_left_of_the_tokens():
    pool, episode = Pool(4, 9), Episode(0)
    assert turn(pool, episode) == 'stop'
    append_environment(episode, [8])
    assert turn(pool, episode) == 'stop'
    first, second = pool.requests
    assert first.prompt_tokens.tolist() == [1, 2]
    assert second.prompt_tokens.tolist() == [1, 2, 4, 9, 8]
    assert (first.sampling.max_new_tokens, second.sampling.max_new_tokens) == (6, 4)  # 6 - 2 generated
    assert second.prefix == ()
    assert [segment.policy_version for segment in episode.segments] == [3, NOT_GENERATED, 3]
    assert (count_turns(episode), episode.engine) == (1, 'engine/0')


def test_a_resumed_episode_goes_on_within_its_turn():
    pool, episode = Pool(5, 9), begun(generated(4, 9, version=1), generated(6, version=2))
    append_environment(episode, [8])
    episode.append(generated(5, version=3))
    turn(pool, episode)
    (request,) = pool.requests
    assert request.prompt_tokens.tolist() == [1, 2, 4, 9, 6, 8]
    assert request.prefix_tokens.tolist() == [5]
    assert request.sampling.max_new_tokens == 3  # of the turn, its prefix included


@pytest.mark.parametrize(('generated_before', 'environment', 'left'), [(4, 3, 1), (4, 4, 0), (5, 1, 1), (6, 1, 0)])
def test_a_turn_without_a_token_left_in_answer_or_context_ends_by_its_length(generated_before, environment, left):
    pool, episode = Pool(5), begun(generated(*[4] * generated_before))
    append_environment(episode, [8] * environment)
    assert turn(pool, episode, context_tokens=10) == ('stop' if left else 'length')
    assert [request.sampling.max_new_tokens for request in pool.requests] == [left] * bool(left)


@pytest.mark.parametrize('tokens', [[], [[1]], 3])
def test_environment_tokens_are_a_row_of_ids(tokens):
    with pytest.raises(ValueError, match='must be a row of at least one id'):
        append_environment(Episode(0), tokens)
