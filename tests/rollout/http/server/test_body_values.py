"""What a body may have: the bound lets every legal request pass, and is counted before anything is parsed."""

import json

import numpy as np
import pytest

from areal_jax.rollout.http.server.limits import (
    MOST_VALUES,
    BodyBound,
    count_characters,
    count_values,
    parse_large,
)
from areal_jax.rollout.http.wire import completions, vllm
from areal_jax.rollout.http.wire.exchange import RequestError

BOUND = BodyBound(context_tokens=1000, in_token=2, longest_token=5)


def count(content, prompts=1, bound=BOUND):
    """How many slices were counted."""
    return sum(1 for _ in bound.count(content, prompts))


def test_the_bound_follows_from_the_context_the_prompts_and_the_vocabulary():
    assert BodyBound.of(1000, ['a', ',,', '[{,', 'hello']) == BodyBound(1000, 3, 5)
    assert BodyBound.of(7, []) == BodyBound(7, 1, 1)
    assert BOUND.most_values(0) == MOST_VALUES
    assert BOUND.most_values(3) == MOST_VALUES + 3 * 1000 * 2
    assert BOUND.most_text(1) == 1 << 20  # the least
    assert BOUND.most_text(100) == 4 * 100 * 1000 * 5


def test_a_text_of_nothing_but_commas_that_fits_the_context_passes():
    """1,000 tokens of two commas each, and as many values as a body may have besides."""
    content = b'"' + b',' * 2000 + b'"' + b'[' * MOST_VALUES
    assert count(content) == 1
    with pytest.raises(RequestError, match='has 67537 values') as caught:
        count(content + b'{')
    assert (caught.value.field, caught.value.status) == ('body', 413)
    assert str(caught.value) == (
        'the body has 67537 values ("[", "{" and ","), and a request of this route for a context of 1000 tokens has '
        '67536 at most: send less at once, or flatter schemas'
    )


def test_what_cannot_reach_the_bound_is_not_counted_and_what_can_in_slices():
    assert count(b'[' * BOUND.most_values(1)) == 0
    assert count(b' ' * (3 << 20)) == 3
    assert count(b' ' * ((3 << 20) + 1)) == 4
    with pytest.raises(RequestError):
        count(b' ' * (1 << 20) + b',' * (1 << 20))  # on both sides of a cut


def test_ids_of_all_prompts_of_a_batch_pass():
    ids = json.dumps({'prompt': [[1] * 1000] * 300}).encode()
    assert count(ids, prompts=300) == 1
    call = parse_large(completions.parse, BOUND, BOUND.most_text(300), ids)
    assert len(call.prompts) == 300
    np.testing.assert_array_equal(call.prompts[7], np.ones(1000, np.int32))


def test_values_are_those_besides_token_ids():
    assert count_values({'input_ids': [1, 2, 3], 'a': [1, 2, 3], 'b': {'c': [[]]}}) == 3 + 3 + 1 + 1
    assert count_values({'prompt': [[1, 2], [3]], 'tokens': [[1], ['x', 2]]}) == 2 + 2
    assert count_values({'tokens': [[]] * 5000}) == 1 + 5000  # more lists than prompts
    assert count_values([1, [2]]) == 3
    assert count_values(7) == 0


def test_schemas_with_lists_of_numbers_have_values():
    body = {'tools': [{'type': 'function', 'function': {'name': 'f', 'parameters': {'enum': [1] * (MOST_VALUES + 1)}}}]}
    with pytest.raises(RequestError, match=r'has 6\d{4} values besides token ids, and .* has 65536 at most'):
        parse_large(vllm.parse, BOUND, 1 << 20, json.dumps(body).encode())


def test_text_has_a_bound_of_its_own():
    assert count_characters({'ab': ['cde', {'f': 'g'}], 'ids': [1, 2]}) == 2 + 3 + 1 + 1 + 3
    body = {'metadata': {'x': 'a' * (1 << 20)}}
    with pytest.raises(RequestError, match=r'has 1048585 characters of text, and .* has 1048576 at most'):
        parse_large(vllm.parse, BOUND, 1 << 20, json.dumps(body).encode())
    assert parse_large(len, BOUND, BOUND.most_text(0), json.dumps(body).encode()) == 1  # of a route without prompts
    BOUND.require_text('a' * (1 << 20), 'prompt')
    with pytest.raises(RequestError, match='prompt of 1048577 characters does not fit the context of 1000 tokens'):
        BOUND.require_text('a' * ((1 << 20) + 1), 'prompt')


def test_what_the_parser_refuses_is_refused_in_its_words():
    with pytest.raises(RequestError, match='body must be JSON'):
        parse_large(vllm.parse, BOUND, 1 << 20, b'{')
    with pytest.raises(RequestError, match='nested too deep'):
        parse_large(vllm.parse, BOUND, 1 << 20, b'[' * 100_000)
    with pytest.raises(RequestError, match='token_ids'):
        parse_large(vllm.parse, BOUND, 1 << 20, b'{}')
