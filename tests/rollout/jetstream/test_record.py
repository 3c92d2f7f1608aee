"""The record behind an answer and the settings in front: what goes in comes out, what is broken is refused."""

import asyncio
import dataclasses
import json
import struct

import numpy as np
import pytest

from areal_jax.rollout.http.wire import vllm
from areal_jax.rollout.http.wire.exchange import Answer, Call, CallSampling, Finish, Piece, ReplyError, RequestError
from areal_jax.rollout.http.wire.reply import Reply
from areal_jax.rollout.jetstream import control
from areal_jax.rollout.jetstream.client import JetstreamDialect
from areal_jax.rollout.jetstream.record import (
    LARGEST_TRAILER,
    decode_record,
    encode_record,
    read_settings,
    render_settings,
)
from tests.changed_json import broken_texts, changed

VOCABULARY = 50
CALL = Call(
    (np.array([3, 4], np.int32),), 'prompt',
    (CallSampling(7, temperature=0.25, top_k=5, top_p=0.75, stop_tokens=(9,), ignore_eos=True, seed=11,
                  skip_special_tokens=False),),
    ('3/1/2',), stream=True, logprobs=True, columns=('sampling_logprobs',), draw=3, sample=1,
)  # fmt: skip


def piece(tokens, version, seed=0):
    random = np.random.default_rng(seed)
    logprobs = -random.exponential(size=len(tokens)).astype(np.float32)
    return Piece(np.array(tokens, np.int32), logprobs, version, {'sampling_logprobs': logprobs / 2})


def answer(*pieces, reason='length'):
    found = Answer('3/1/2', CALL.prompts[0], finish=Finish(reason, 9 if reason == 'stop' else None), version='2')
    for one in pieces:
        found.add(one)
    return found


def test_settings_come_back_as_the_call_that_was_made():
    settings = render_settings(CALL)
    assert 'token_ids' not in json.loads(settings)  # JetStream's message has them
    assert settings.isascii()
    found = vllm.parse(read_settings(settings, [3, 4], 7))
    same = dataclasses.replace(CALL, prompt_field='token_ids')
    assert dataclasses.replace(found, prompts=()) == dataclasses.replace(same, prompts=())
    assert found.prompts[0].tolist() == [3, 4]


def test_a_client_without_settings_gets_the_greedy_answer():
    found = vllm.parse(read_settings(None, [3, 4], 6))
    assert found.sampling == (CallSampling(6, temperature=0.0),)
    assert found.stream
    assert not found.logprobs


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ('{', 'body must be JSON: Expecting property name'),
        ('[1]', r'areal-call=\[1\] must be a JSON object in whose sampling_params is one'),
        ('{"sampling_params": 1}', 'areal-call=.* must be a JSON object in whose sampling_params is one'),
        ('{"sampling_params": {"temperatur": 1}}', 'temperatur'),
        ('{"sampling_params": {"temperature": -1}}', r'sampling_params.temperature=-1 must be'),
    ],
)
def test_settings_that_cannot_be_read_are_refused_by_name(settings, message):
    with pytest.raises(RequestError, match=message):
        vllm.parse(read_settings(settings, [1], 1))


@pytest.mark.parametrize('reason', ['length', 'stop', 'abort'])
def test_an_answer_comes_back_bit_for_bit(reason):
    given = answer(piece([1, 2, 3], '1', seed=1), piece([4, 49], '2', seed=2), reason=reason)
    pieces, word, version = decode_record(encode_record(CALL, given), given.tokens, CALL.columns, VOCABULARY)
    assert (word, version) == (reason, '2')
    assert [(one.version, one.tokens.tolist()) for one in pieces] == [('1', [1, 2, 3]), ('2', [4, 49])]
    for one, original in zip(pieces, given.pieces, strict=True):
        assert one.logprobs.dtype == np.float32
        assert one.logprobs.tobytes() == original.logprobs.tobytes()
        assert one.columns['sampling_logprobs'].tobytes() == original.columns['sampling_logprobs'].tobytes()


def test_an_answer_without_tokens_has_a_record_too():
    given = answer(reason='abort')
    assert decode_record(encode_record(CALL, given), given.tokens, CALL.columns, VOCABULARY) == ([], 'abort', '2')


def test_a_long_answer_does_not_fit_the_trailing_metadata():
    # 4 bytes a log-prob and 4 for its column: 8 n bytes and a header of about 150
    short, long = (answer(piece([1] * n, '1')) for n in (600, 700))
    assert len(encode_record(CALL, short)) <= LARGEST_TRAILER < len(encode_record(CALL, long))


def spoil(record, **fields):
    (length,) = struct.unpack_from('<I', record)
    header = json.dumps(json.loads(record[4 : 4 + length]) | fields).encode()
    return struct.pack('<I', len(header)) + header + record[4 + length :]


GIVEN = answer(piece([1, 2, 3], '1'))
RECORD = encode_record(CALL, GIVEN)
NAN, POSITIVE = (np.array([value], '<f4').tobytes() for value in (np.nan, 0.5))


@pytest.mark.parametrize(
    ('record', 'message'),
    [
        (b'', 'the record of an answer has no header'),
        (RECORD[:20], 'the record of an answer has no header'),
        (RECORD[:-1], 'sampling_logprobs in the record of the server has 11 bytes, and 3 tokens need 12'),
        (RECORD + b'1234', 'logprobs in the record of the server has 4 bytes more than 3 tokens need'),
        (RECORD[:-12] + NAN + RECORD[-8:], 'sampling_logprobs in the record of the server has a value that no'),
        (RECORD[:-24] + POSITIVE + RECORD[-20:], 'logprobs in the record of the server has a value that no log-prob'),
        (spoil(RECORD, finish_reason='tired'), "finish_reason in the record of the server has 'tired'"),
        (spoil(RECORD, weight_versions=[{'version': '1', 'start': 0, 'end': 2}]), 'weight_versions'),
    ],
)  # fmt: skip
def test_a_broken_record_is_refused_as_a_whole(record, message):
    with pytest.raises(ReplyError, match=message):
        decode_record(record, GIVEN.tokens, CALL.columns, VOCABULARY)


def test_tokens_that_are_not_in_the_vocabulary_are_refused():
    with pytest.raises(ReplyError, match='a token outside of the vocabulary of 3'):
        decode_record(RECORD, GIVEN.tokens, CALL.columns, 3)


def header_of(record):
    (length,) = struct.unpack_from('<I', record)
    return json.loads(record[4 : 4 + length]), record[4 + length :]


def with_header(header, arrays):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack('<I', len(text)) + text + arrays


@pytest.mark.parametrize('most', [pytest.param(200, id='some'), pytest.param(None, id='all', marks=pytest.mark.slow)])
def test_a_record_with_a_changed_field_is_read_or_refused(most):
    given = answer(piece([1, 2, 3], '1', seed=1), piece([4, 49], '2', seed=2))
    header, arrays = header_of(encode_record(CALL, given))
    records = [with_header(one, arrays) for one in changed(header, most)]
    records += [with_header(text.encode(), arrays) for text in broken_texts(json.dumps(header))]
    refused = 0
    for record in records:
        message = ''
        try:
            pieces, word, version = decode_record(record, given.tokens, CALL.columns, VOCABULARY)
        except ReplyError as error:
            message = str(error)
        if message:
            assert len(message.encode()) < 2000
            refused += 1
            continue
        assert word in ('length', 'stop', 'abort')
        assert isinstance(version, str)
        assert sum(len(one.tokens) for one in pieces) == 5
    assert refused > 40


class Acting:
    """A connection whose second service answers one message."""

    def __init__(self, message):
        self._fields = Reply(control.decode(message))

    async def act(self, method, fields=None):
        return self._fields


def test_replies_of_the_second_service_with_a_changed_field_are_read():
    pause = {'mode': 'abort', 'holder': 'run', 'paused_seconds': 1.5, 'lease_seconds': 88.5}
    content = {'weight_version': '3', 'manifest_hash': 'a', 'pause_seconds': 0.5, 'client': 'run', 'pauses': [pause]}
    messages = [json.dumps(one).encode() for one in changed(content)]
    messages += [text.encode() for text in broken_texts(json.dumps(content))] + [b'\xff']
    for message in messages:
        connection = Acting(message)
        held = asyncio.run(JetstreamDialect().ask(connection))
        for name in (held.version, held.digest, held.client, *(holder for holder, _ in held.pauses)):
            assert name.isprintable()
        assert all(0 <= seconds < 1e30 for _, seconds in held.pauses)
        assert held.find_foreign_pause('another').isprintable()
        assert 0 <= asyncio.run(JetstreamDialect().swap(connection, '3')) < 1e30
