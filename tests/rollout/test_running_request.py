"""A request inside the local engine: growing arrays, segments, the key of its prompt, and strings that end it."""

import asyncio
import dataclasses

import numpy as np
import pytest

from areal_jax import columns
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.rollout.running_request import GrowingArray, RunningRequest, StopSearch
from areal_jax.text.decoding import TokenBytes
from areal_jax.types import GenerationRequest, SamplingParams, Segment, concatenate, is_repeated, repeat
from tests.rollout.engine_rig import SAMPLING, Rig, collect, request
from tests.rollout.scripted import scripted
from tests.toys import STOP


def running(prompt=(1, 2, 3), prefix=(), top_k=0):
    request = GenerationRequest(0, 0, 0, np.array(prompt, np.int32), SamplingParams(99, 1.0, top_k, 1.0, ()), prefix)
    return RunningRequest(request, VirtualClock({}, EventLog(), {}), 'engine/0', 102)


def chunk(*tokens):
    return np.array(tokens, np.int32), -np.array(tokens, np.float32)


def test_an_array_grows_by_any_steps_and_leaves_earlier_views_and_its_source_alone():
    source = np.arange(3, dtype=np.int32)
    array, expected = GrowingArray(source), [0, 1, 2]
    for length in (0, 1, 5, 2, 40, 1):
        view, before = array.view(), list(expected)
        array.extend(np.arange(length, dtype=np.int32))
        expected += range(length)
        assert view.tolist() == before
        assert (len(array), array.view().tolist(), array.view(2).tolist()) == (len(expected), expected, expected[2:])
    assert source.tolist() == [0, 1, 2]


@pytest.mark.parametrize('start', [[], [7, 7], [1, 7]])
def test_an_array_of_one_value_keeps_its_length_alone_until_another_value_comes(start):
    source = repeat(7, len(start), np.int32) if start == [7, 7] else np.array(start, np.int32)
    array, expected = GrowingArray(source), list(start)
    for value, length in ((7, 1000), (7, 1), (8, 3), (8, 2), (7, 4)):
        array.extend(repeat(value, length, np.int32))
        expected += [value] * length
        assert (len(array), array.view().tolist(), array.view(2).tolist()) == (len(expected), expected, expected[2:])
        assert is_repeated(array.view()) == (len(set(expected)) == 1)


def test_arrays_of_one_value_are_joined_to_one():
    joined = concatenate([repeat(7, 2, np.int32), repeat(7, 3, np.int32)], np.int32)
    assert is_repeated(joined)
    assert joined.tolist() == [7] * 5
    assert concatenate([repeat(7, 2, np.int32), repeat(8, 1, np.int32)], np.int32).tolist() == [7, 7, 8]
    assert concatenate([np.array([7]), repeat(7, 1, np.int32)], np.int32).tolist() == [7, 7]


def test_segments_carry_what_was_generated_since_the_last_one():
    one = running(top_k=2)
    for tokens, version in (((4, 5), 0), ((6,), 0), ((7,), 1)):
        if version:
            one.flush()
        one.extend(*chunk(*tokens), version, {'sampling_logprobs': np.array(tokens, np.float32)})
    one.finish('stop')
    one.flush()  # nothing is left
    assert one.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    segments = asyncio.run(collect(one))
    assert [s.tokens.tolist() for s in segments] == [[4, 5, 6], [7]]
    assert [s.behavior_logprobs.tolist() for s in segments] == [[-4, -5, -6], [-7]]
    assert [s.columns['sampling_logprobs'].tolist() for s in segments] == [[4, 5, 6], [7]]
    assert [s.policy_version for s in segments] == [0, 1]
    assert {s.tokens.dtype for s in segments} == {np.dtype(np.int32)}
    assert {s.behavior_logprobs.dtype for s in segments} == {np.dtype(np.float32)}


def test_other_columns_begin_a_segment_and_one_that_is_needed_is_missed(monkeypatch):
    monkeypatch.setattr(columns, 'DECLARED', dict(columns.DECLARED))
    columns.declare(columns.Column('pair', 'int32', shape=(2,)))
    one, pair = running(), np.array([[1, 2]], np.int32)
    unasked = {'pair': -pair, 'sampling_logprobs': np.ones(1, np.float32)}  # the request has the full softmax
    for token, given in ((4, {}), (5, {'pair': pair}), (6, unasked), (7, {})):
        one.extend(*chunk(token), 0, given)
    one.flush()
    found = [(s.tokens.tolist(), {n: a.tolist() for n, a in s.columns.items()}) for s in one._undelivered]
    assert found == [([4], {}), ([5, 6], {'pair': [[1, 2], [-1, -2]]}), ([7], {})]
    with pytest.raises(columns.ColumnError, match=r"'sampling_logprobs' is not known of .* engine/0 .* request 0/0/0"):
        running(top_k=2).extend(*chunk(4), 0)


def test_a_segment_has_one_version():
    one = running()
    one.extend(*chunk(4), 0)
    with pytest.raises(RuntimeError, match='request 0/0/0: flush version 0 before 1'):
        one.extend(*chunk(5), 1)


def test_the_key_is_of_the_prompt_but_its_last_token():
    keys = [
        running(prompt, prefix).prompt_key
        for prompt in ((1, 2, 3), (1, 2, 8))
        for prefix in ((), (Segment(*chunk(4), 0),))
    ]
    assert len(set(keys)) == 1
    assert running((1, 3, 3)).prompt_key != keys[0]
    one = running()
    one.extend(*chunk(4, 5), 0)
    assert one.prompt_key == keys[0]
    assert running((1,)).prompt_key == running((2,)).prompt_key  # of no tokens


def test_an_answer_has_begun_when_it_has_a_token_here_or_from_elsewhere():
    one = running()
    assert not one.has_begun
    one.extend(*chunk(4), 0)
    assert one.has_begun
    assert running(prefix=(Segment(*chunk(4), 0),)).has_begun


def test_the_samples_of_a_group_share_the_prompt():
    prompt = np.arange(5, dtype=np.int32)
    request = GenerationRequest(0, 0, 0, prompt, SamplingParams(9, 1.0, 0, 1.0, ()))
    one = RunningRequest(request, VirtualClock({}, EventLog(), {}), 'engine/0', 14)
    assert np.shares_memory(one.tokens, prompt)
    one.extend(*chunk(7), 0)
    assert prompt.tolist() == [0, 1, 2, 3, 4]


# Stop strings by a toy tokenizer: a token is a byte of UTF-8, or from 256 on a word.


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


@scripted(Rig, decode_steps=8, token_bytes=NUMBERS)
async def test_a_stop_string_within_the_least_length_ends_nothing(rig):
    wanted = request(0, sampling=with_fields(stop_strings=(',',), min_new_tokens=3))
    running = rig.engine.generate(wanted)
    (segment,), matched = await collect(running), running.matched
    assert (len(segment.tokens), matched) == (4, ',')
