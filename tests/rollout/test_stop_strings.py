"""Stop strings by a toy tokenizer: a token is a byte of UTF-8, or from 256 on a word."""

import dataclasses

import numpy as np
import pytest

from areal_jax.rollout.running_request import StopSearch
from areal_jax.text.decoding import TokenBytes
from areal_jax.types import Segment
from tests.rollout.engine_rig import SAMPLING, Rig, collect, request
from tests.toys import STOP

WORDS = {256: 'stop', 257: ' it', 258: 'st', 259: 'op here', 260: ''}


def encode(*parts):
    """Strings byte by byte, numbers as they are."""
    return np.array([t for part in parts for t in (part.encode() if isinstance(part, str) else [part])], np.int32)


TOKEN_BYTES = TokenBytes(lambda token: WORDS[token].encode() if token in WORDS else bytes([token]))


def find(answer, strings, examined=0):
    """(tokens of the answer, the string)."""
    search = StopSearch(strings, TOKEN_BYTES)
    search.pass_over(answer[:examined].tolist())
    found = search.find(answer[examined:].tolist())
    return None if found is None else (examined + found[0], found[1])


@pytest.mark.parametrize(
    ('answer', 'strings', 'expected'),
    [
        (encode('a stop b'), ['stop'], (6, 'stop')),
        (encode('a sto'), ['stop'], None),
        (encode('a ', 258, 259, 'x'), ['stop'], (4, 'stop')),  # the token that completes it brings more text
        (encode('é'), ['é'], (2, 'é')),  # not before its second byte
        (encode('\n', '\n', 'x'), ['\n\n'], (2, '\n\n')),
        (encode('ab'), ['b', 'ab'], (2, 'ab')),  # both with one token: what begins first
        (encode('ab'), ['a', 'ab'], (1, 'a')),
        (encode(258, 259), ['here', 'op', 'op h'], (2, 'op')),  # both begin together: what is named first
        (encode('aa', 260, 'a'), ['aaa'], (4, 'aaa')),  # a token without text between
    ],
)
def test_an_answer_ends_with_the_token_that_completes_a_string(answer, strings, expected):
    assert find(answer, strings) == expected


def test_only_what_ends_behind_the_examined_tokens_counts():
    answer = encode('stop it, stop')
    assert find(answer, ['stop'], examined=4) == (13, 'stop')
    assert find(answer, ['stop'], examined=3) == (4, 'stop')
    assert find(answer, ['stop'], examined=12) == (13, 'stop')
    assert find(answer, ['stop'], examined=13) is None
    assert find(answer, ['stop'], examined=20) is None  # a least length beyond what there is


@pytest.mark.parametrize('size', [1, 2, 3, 7])
def test_any_division_into_dispatches_finds_the_same(size):
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(300):
        answer = rng.choice(encode('aé', 256, 258, 259, 260), 60)
        strings = [('aéa', 'stopop', 'aaé', 'ééa')[i] for i in rng.permutation(4)[:2]]
        whole = find(answer, strings)
        search = StopSearch(strings, TOKEN_BYTES)
        parts = ((end, search.find(answer[end : end + size].tolist())) for end in range(0, 60, size))
        by_parts = next(((end + hit[0], hit[1]) for end, hit in parts if hit), None)
        assert by_parts == whole
        found += whole is not None
    assert 30 < found < 300


def test_the_work_does_not_grow_with_the_answer():
    search = StopSearch(['stop'], TOKEN_BYTES)
    for _ in range(1000):
        assert search.find(encode('x' * 100).tolist()) is None
        assert max(len(kept) for kept in vars(search).values() if isinstance(kept, bytes)) == 3
    assert search.find(encode('stop').tolist()) == (4, 'stop')


def with_fields(**fields):
    return dataclasses.replace(SAMPLING, **fields)


NUMBERS = TokenBytes(lambda token: f'{token},'.encode())


@pytest.mark.parametrize('decode_steps', [1, 2, 3, 8])
@pytest.mark.parametrize('moved_at', [0, 1, 4])
def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(decode_steps, moved_at):
    async def whole(rig):
        return await collect(rig.engine.generate(request(0)))

    (answer,) = Rig().run(whole)
    assert len(answer.tokens) == 7
    string = NUMBERS.decode(answer.tokens[3:5].tolist())  # of the fourth and fifth token

    async def script(rig):
        first = np.split(answer.tokens, [moved_at])[0]
        prefix = (Segment(first, np.zeros(moved_at, np.float32), 0),) if moved_at else ()
        wanted = request(0, sampling=with_fields(stop_strings=('none', string)), prefix=prefix)
        running, neighbour = rig.engine.generate(wanted), rig.engine.generate(request(1))
        segments = await collect(running)
        assert await collect(neighbour)
        rig.check_blocks()
        status = rig.engine.status()
        return segments, running.finish_reason, running.matched, status.running, neighbour.matched

    rig = Rig(decode_steps=decode_steps, token_bytes=NUMBERS)
    segments, reason, matched, running, neighbour = rig.run(script)
    tokens = np.concatenate([segment.tokens for segment in segments])
    np.testing.assert_array_equal(tokens, answer.tokens[moved_at:5])
    assert sum(len(segment.behavior_logprobs) for segment in segments) == 5 - moved_at
    assert (reason, matched, running, neighbour) == ('stop', string, 0, STOP)


def test_a_stop_string_within_the_least_length_ends_nothing():
    async def script(rig):
        wanted = request(0, sampling=with_fields(stop_strings=(',',), min_new_tokens=3))
        running = rig.engine.generate(wanted)
        return await collect(running), running.matched

    (segment,), matched = Rig(decode_steps=8, token_bytes=NUMBERS).run(script)
    assert (len(segment.tokens), matched) == (4, ',')
