"""JetStream's messages, against bytes written by hand and, where it is installed, against JetStream's own classes."""

import functools
import json

import numpy as np
import pytest

from areal_jax.rollout.http.server.body_parser import BodyParser
from areal_jax.rollout.http.server.limits import BodyBound
from areal_jax.rollout.http.wire.exchange import RequestError
from areal_jax.rollout.jetstream.messages import parse_decode, parse_request, render_decode
from areal_jax.rollout.jetstream.server.request_messages import read_control, read_request
from tests.rollout.jetstream.rig import needs_jetstream

# A field is its number times 8 and its wire type (0 = varint, 2 = bytes), then the value or a length and the bytes;
# 300 as a varint is 0b10_0101100: 0xac 0x02
REQUEST = bytes([4 * 8 + 0, 7, 6 * 8 + 2, 6, 1 * 8 + 2, 4, 1, 2, 0xAC, 0x02])  # max_tokens 7, ids 1, 2, 300
TEXT = bytes([5 * 8 + 2, 4, 1 * 8 + 2, 2, ord('h'), ord('i')])
# max_tokens 7, a text of 1,064,960 characters
LONG_TEXT = bytes([4 * 8 + 0, 7, 5 * 8 + 2, 0x84, 0x80, 0x41, 1 * 8 + 2, 0x80, 0x80, 0x41]) + b'a' * (65 << 14)
BOUND = BodyBound(context_tokens=5, in_token=1, longest_token=1)
RESPONSE = bytes([3 * 8 + 2, 7, 1 * 8 + 2, 5, 2 * 8 + 2, 3, 0xAC, 0x02, 5])  # one sample with the ids 300, 5


def test_a_request_is_written_as_the_definition_says():
    assert render_decode([1, 2, 300], 7) == REQUEST


def test_a_response_is_read_as_the_definition_says():
    found = parse_decode(RESPONSE)
    assert found.dtype == np.int32
    assert found.tolist() == [300, 5]
    assert parse_decode(b'').tolist() == []


def test_text_beside_the_ids_and_unknown_fields_are_passed_over():
    sample = bytes([1 * 8 + 2, 2, ord('h'), ord('i'), 2 * 8 + 2, 1, 9, 15 * 8 + 0, 1])
    content = bytes([1 * 8 + 2, len(sample)]) + sample
    assert parse_decode(bytes([3 * 8 + 2, len(content)]) + content).tolist() == [9]


def read(message, settings=None):
    return read_request(BOUND, settings, message)


def test_a_request_is_read_as_the_definition_says():
    call = read(REQUEST)
    (ids,), (sampling,) = call.prompts, call.sampling
    assert (ids.dtype, ids.tolist(), sampling.max_new_tokens, sampling.temperature) == (np.int32, [1, 2, 300], 7, 0.0)
    single = bytes([4 * 8 + 0, 7, 6 * 8 + 2, 4, 1 * 8 + 0, 1, 1 * 8 + 0, 2])  # ids that are not packed
    assert read(single).prompts[0].tolist() == [1, 2]
    assert read(REQUEST, '{"sampling_params": {"temperature": 0.5}}').sampling[0].temperature == 0.5


def test_of_a_text_and_of_ids_the_last_one_counts():
    call = read(REQUEST + TEXT)
    assert (call.prompts, call.prompt_field, call.sampling[0].max_new_tokens) == (('hi',), 'text', 7)
    assert read(TEXT + REQUEST).prompts[0].tolist() == [1, 2, 300]


@pytest.mark.parametrize(
    ('message', 'says'),
    [
        (b'\xff', r'the message is no DecodeRequest \('),
        (bytes([5 * 8 + 2, 3, 1 * 8 + 2, 1, 0xFF]), r'the message is no DecodeRequest \('),  # no UTF-8
        (TEXT, 'max_tokens=0 must be 1 or more'),
        (bytes([4 * 8 + 0, 7]), 'token_ids'),
        (render_decode([1] * 6, 7), 'token_ids of 6 tokens do not fit the context of 5 tokens: shorten it'),
        (
            LONG_TEXT,
            'text of 1064960 char',
        ),
    ],
    ids=['bytes', 'no text', 'no tokens', 'no prompt', 'ids', 'text'],
)
def test_what_is_no_request_and_a_prompt_that_no_context_has_room_for_are_refused(message, says):
    with pytest.raises(RequestError, match=says) as caught:
        read(message)
    assert caught.value.status == 400


def test_a_large_request_is_read_in_a_process_that_has_no_jetstream():
    # a text before what counts, of 2^17 characters: 1 + 3 + 2^17 bytes are 0x20004
    parser, padding = BodyParser(), bytes([5 * 8 + 2, 0x84, 0x80, 0x08, 1 * 8 + 2, 0x80, 0x80, 0x08]) + b'a' * (1 << 17)
    read = functools.partial(read_request, BOUND, None)
    try:
        assert parser.parse(read, padding + REQUEST).prompts[0].tolist() == [1, 2, 300]
        assert parser.parse(read, padding + REQUEST + TEXT).prompts == ('hi',)
        with pytest.raises(RequestError, match='token_ids of 1000000 tokens do not fit'):
            parser.parse(read, render_decode([1] * 1_000_000, 7))
    finally:
        parser.close()


def test_a_message_of_the_second_service_is_bounded_before_anything_parses_it():
    assert read_control(b'') == {}
    assert read_control(b'{"path": "a"}' + b' ' * 65_523) == {'path': 'a'}
    with pytest.raises(RequestError, match='the message has 65537 bytes, and one of this service 65536 at most: send'):
        read_control(b'{"path": "a"}' + b' ' * 65_524)


@needs_jetstream
@pytest.mark.slow
def test_jetstream_reads_and_writes_the_same_bytes():
    from jetstream.core.proto import jetstream_pb2 as theirs

    ids = [0, 1, 49151, 2**31 - 1]
    request = theirs.DecodeRequest(max_tokens=5, token_content=theirs.DecodeRequest.TokenContent(token_ids=ids))
    assert render_decode(ids, 5) == request.SerializeToString()
    assert parse_request(request.SerializeToString()).SerializeToString() == request.SerializeToString()
    text = theirs.DecodeRequest(max_tokens=5, text_content=theirs.DecodeRequest.TextContent(text='hi'))
    assert parse_request(text.SerializeToString()).SerializeToString() == text.SerializeToString()
    sample = theirs.DecodeResponse.StreamContent.Sample(text='t', token_ids=ids)
    content = theirs.DecodeResponse.StreamContent(samples=[sample])
    assert parse_decode(theirs.DecodeResponse(stream_content=content).SerializeToString()).tolist() == ids


@pytest.mark.parametrize(('field', 'number'), [(b'\x08\x01', 1), (b'\x18\x05', 3), (b'\x3a\x01x', 7)])
def test_a_field_of_another_message_is_refused(field, number):
    message = render_decode([1, 2], 3)
    assert read(message).prompts[0].tolist() == [1, 2]
    with pytest.raises(RequestError, match=f'has a field {number} that is not served'):
        read(message + field)


@pytest.mark.parametrize('field', ['priority', 'draw'])
def test_a_setting_without_influence_is_refused_since_nothing_counts_it(field):
    with pytest.raises(RequestError, match=f'{field} has no influence on the answer'):
        read(render_decode([1, 2], 3), json.dumps({field: 3}))
