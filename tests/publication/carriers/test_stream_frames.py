"""Frames of weights: what they say comes back, and what is no frame is refused."""

import contextlib
import socket
import threading

import pytest

from areal_jax.publication.carriers.stream_socket import (
    FRAME_BYTES,
    PREFIX_BYTES,
    FrameError,
    FrameSocket,
    Hello,
    Kind,
    Prefix,
    Request,
    cut_pieces,
    decode_held,
    decode_hello,
    decode_prefix,
    decode_request,
    encode_held,
    encode_hello,
    encode_prefix,
    encode_request,
    require_payload,
)
from areal_jax.publication.record import Held
from areal_jax.publication.versions import PublicationError

PAYLOAD = b'weights'
PREFIX = encode_prefix(Kind.PART, PAYLOAD, version=7, leaf=3, offset=1 << 40)


def test_a_prefix_comes_back():
    found = decode_prefix(PREFIX)
    assert len(PREFIX) == PREFIX_BYTES == 36
    assert found[:5] == Prefix(Kind.PART, 7, 3, 1 << 40, 7)[:5]
    require_payload(PREFIX, PAYLOAD)


@pytest.mark.parametrize('position', range(PREFIX_BYTES))
def test_a_flipped_bit_of_the_prefix_is_seen(position):
    flipped = bytearray(PREFIX)
    flipped[position] ^= 4
    with pytest.raises(FrameError, match=r'begins with|has the kind|bytes, and|changed on its way'):
        decode_prefix(flipped), require_payload(flipped, PAYLOAD)


def test_a_changed_payload_is_seen():
    for payload in (b'Weights', b'weight', b'weightss', b''):
        with pytest.raises(FrameError, match=r'changed on its way \(its checksum differs\)'):
            require_payload(PREFIX, payload)


@pytest.mark.parametrize('size', [3, 4, 8, 8001])
def test_any_changed_byte_of_a_payload_is_seen(size):
    payload = bytearray(range(256)) * 32
    prefix = encode_prefix(Kind.PART, payload[:size])
    for position in {0, size // 2, size - 1}:
        changed = payload[:size]
        changed[position] ^= 128
        with pytest.raises(FrameError, match='changed on its way'):
            require_payload(prefix, changed)
    if size == 8:  # words that have changed their places
        with pytest.raises(FrameError, match='changed on its way'):
            require_payload(prefix, payload[4:8] + payload[:4])


def test_a_payload_without_sums_is_not_read_again():
    prefix = encode_prefix(Kind.PART, PAYLOAD, sums=False)
    require_payload(prefix, b'Weights')
    with pytest.raises(FrameError, match='changed on its way'):
        require_payload(prefix[:5] + b'\1' + prefix[6:], PAYLOAD)


@pytest.mark.parametrize('family', [socket.AF_UNIX, socket.AF_INET])
def test_only_bytes_that_leave_the_host_have_sums(family):
    with socket.socket(family, socket.SOCK_STREAM) as own:
        assert FrameSocket(own, 1.0).is_local == (family == socket.AF_UNIX)


def test_a_frame_that_trickles_ends_at_its_deadline():
    # a byte comes every 10 ms, so no single wait reaches the deadline of 50 ms
    ours, theirs = socket.socketpair()
    reader, done = FrameSocket(ours, 0.05), threading.Event()

    def trickle():
        with contextlib.suppress(OSError):
            for byte in PREFIX + bytes(10_000):
                if done.wait(0.01):
                    return
                theirs.send(bytes([byte]))

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(TimeoutError, match='took too long'):
        reader.receive_prefix()
    done.set()
    thread.join()
    reader.close(), theirs.close()


def test_an_absurd_length_is_refused_before_it_is_read():
    with pytest.raises(FrameError, match='has 67108865 bytes, and 67108864 is the most'):
        decode_prefix(encode_prefix(Kind.PART, bytes((64 << 20) + 1)))


def test_parts_are_cut_into_frames():
    # 0 bytes: no frame; a frame and a byte: two frames
    sizes = (0, 5, FRAME_BYTES + 1, FRAME_BYTES)
    whole = [(1, 0, 5), (2, 0, FRAME_BYTES), (2, FRAME_BYTES, 1), (3, 0, FRAME_BYTES)]
    assert list(cut_pieces(sizes)) == whole
    assert list(cut_pieces(sizes, 1, 5)) == whole[1:]  # after the first frame
    assert list(cut_pieces(sizes, 2, FRAME_BYTES)) == whole[2:]
    assert list(cut_pieces(sizes, 3, FRAME_BYTES)) == []
    assert list(cut_pieces(sizes, 9, 0)) == []


def test_what_readers_say_comes_back():
    held = Held(3, 'ab')
    for hello in (Hello('engine 0', None), Hello('engine 0', held)):
        assert decode_hello(encode_hello(hello)) == hello
    for request in (Request(4, None), Request(4, held, Held(4, 'cd'), 2, 9)):
        assert decode_request(encode_request(request)) == request
    assert decode_held(encode_held(held)) == held


@pytest.mark.parametrize(
    ('decode', 'payload', 'match'),
    [
        (decode_hello, b'{', 'sent no JSON'),
        (decode_hello, b'[]', 'sent a list'),
        (decode_hello, b'{"name": 3}', 'has the name 3'),
        (decode_hello, b'{"name": "a", "held": [1]}', r'names the version \[1\]'),
        (decode_request, b'{"version": true, "leaf": 0, "offset": 0}', 'asks with version=True'),
        (decode_request, b'{"version": 1, "leaf": 0, "offset": -1}', 'leaf 0, offset -1'),
        (decode_held, b'null', 'acknowledged nothing'),
        (decode_held, b'\xff', 'sent no JSON'),
    ],
)
def test_other_words_are_refused(decode, payload, match):
    with pytest.raises(PublicationError, match=match):
        decode(payload)
