"""JetStream's messages, against bytes written by hand and, where it is installed, against JetStream's own classes."""

import numpy as np
import pytest

from areal_jax.rollout.jetstream.messages import parse_decode, render_decode
from tests.rollout.jetstream.rig import needs_jetstream

# A field is its number times 8 and its wire type (0 = varint, 2 = bytes), then the value or a length and the bytes;
# 300 as a varint is 0b10_0101100: 0xac 0x02
REQUEST = bytes([4 * 8 + 0, 7, 6 * 8 + 2, 6, 1 * 8 + 2, 4, 1, 2, 0xAC, 0x02])  # max_tokens 7, ids 1, 2, 300
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


@needs_jetstream
@pytest.mark.slow
def test_jetstream_reads_and_writes_the_same_bytes():
    from jetstream.core.proto import jetstream_pb2 as theirs

    ids = [0, 1, 49151, 2**31 - 1]
    request = theirs.DecodeRequest(max_tokens=5, token_content=theirs.DecodeRequest.TokenContent(token_ids=ids))
    assert render_decode(ids, 5) == request.SerializeToString()
    sample = theirs.DecodeResponse.StreamContent.Sample(text='t', token_ids=ids)
    content = theirs.DecodeResponse.StreamContent(samples=[sample])
    assert parse_decode(theirs.DecodeResponse(stream_content=content).SerializeToString()).tolist() == ids
