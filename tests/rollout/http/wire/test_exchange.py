"""The neutral form: spans, usage, ids and tokenization."""

import numpy as np
import pytest

from areal_jax.columns import SAMPLING_LOGPROBS
from areal_jax.rollout.http.wire.exchange import (
    Answer,
    Call,
    CallSampling,
    Message,
    Piece,
    Reasoning,
    RequestError,
    Span,
    ToolCall,
    count_usage,
    join_pieces,
    name_answers,
    tokenize_call,
)
from tests.rollout.http.wire.calls import PROMPT, answer


def call(prompts=(PROMPT,), n=1, ids=('',)):
    return Call(prompts, 'prompt', (CallSampling(4),) * len(prompts), ids, n=n)


def piece(tokens, version):
    return Piece(np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), version)


def test_pieces_of_one_version_are_one_span():
    found = Answer('r', PROMPT, pieces=[piece(2, '3'), piece(1, '3'), piece(0, '4'), piece(3, '5'), piece(1, '5')])
    assert found.spans == [Span('3', 0, 3), Span('5', 3, 7)]
    assert Answer('r', PROMPT).spans == []
    assert answer().spans == [Span('3', 0, 2), Span('4', 2, 5)]


def test_an_answer_is_the_sum_of_its_pieces():
    assert answer().tokens.tolist() == [21, 22, 23, 24, 2]
    assert answer().logprobs.tolist() == [-0.5, -1.25, -2.0, -0.125, -0.75]
    drawn = answer().column(SAMPLING_LOGPROBS)  # where nothing was cut: of the full softmax
    assert drawn.tolist() == [-0.25, -0.5, -2.0, -0.125, -0.75]
    assert (answer().text, answer().n_tokens, answer().tokens.dtype) == ('abcd', 5, np.int32)


def test_pieces_that_are_joined_keep_reasoning_and_calls_in_their_places():
    one = lambda text, **more: Piece(np.array([1], np.int32), np.zeros(1, np.float32), '3', text=text, **more)
    added = ToolCall('c', 'f', '{}', after=1)
    given = [one('', reasoning='Hm.'), one('a'), one('bc', calls=(added,))]
    (joined,) = join_pieces(given)
    assert joined.parts == [Reasoning('Hm.'), 'ab', ToolCall('c', 'f', '{}', after=2), 'c']
    assert [part for piece in given for part in piece.parts] == [Reasoning('Hm.'), 'a', 'b', added, 'c']


def test_the_prompt_of_several_answers_is_counted_once():
    both = count_usage(call((PROMPT, PROMPT), n=2), [answer() for _ in range(4)])
    assert both == {'prompt_tokens': 6, 'completion_tokens': 20, 'total_tokens': 26}


def test_answers_without_an_id_get_one():
    assert name_answers(call(ids=('a',)), 'x').request_ids == ('a',)
    assert name_answers(call(), 'x').request_ids == ('x',)
    assert name_answers(call(n=2, ids=('', '')), 'x').request_ids == ('x_0', 'x_1')


def test_texts_and_messages_become_ids():
    prompts = (PROMPT, 'ab', (Message('user', 'c'),))
    found = tokenize_call(call(prompts), lambda text: list(text.encode()), lambda turns, tools: [len(turns), 7])
    assert [prompt.tolist() for prompt in found.prompts] == [[11, 12, 13], [97, 98], [1, 7]]
    assert {prompt.dtype for prompt in found.prompts} == {np.dtype(np.int32)}


def test_a_text_without_a_token_is_refused():
    with pytest.raises(RequestError, match=r'^prompt has no token: send at least one$'):
        tokenize_call(call((' ',)), lambda text: [], lambda turns, tools: [])
