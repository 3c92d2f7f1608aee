"""Frames arrive as they were sent, from whom they should come, in order, once, and to many at the same time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from areal_jax.distributed.peers import Connection, Frame, WireError, make_pair, send_all
from tests.distributed.sockets import send_raw

_FRAMES = [Frame.of(body) for body in (b'', b'first', bytes(range(256)) * 5000)]


def test_frames_arrive_in_both_directions():
    ours, theirs = make_pair()
    for one, other in ((ours, theirs), (theirs, ours), (ours, theirs)):
        # the last is larger than what a socket buffers
        received = []
        reader = threading.Thread(
            target=lambda to=other, into=received: into.extend(to.receive().body for _ in _FRAMES)
        )
        reader.start()
        for frame in _FRAMES:
            assert send_all([one], frame, 5) == {}
        reader.join(5)
        assert received == [frame.body for frame in _FRAMES]


@pytest.mark.parametrize(
    'change',
    [
        lambda first, second: first + first,  # again
        lambda first, second: second + first,  # in another order
        lambda first, second: second,  # one is left out
        lambda first, second: first + bytes([second[0], *second[1:79], second[79] ^ 1, *second[80:]]),  # another tag
        lambda first, second: first + second[:7] + bytes([second[7] ^ 1]) + second[8:],  # another length
    ],
    ids=['again', 'swapped', 'left out', 'tag', 'length'],
)
def test_what_the_other_end_did_not_send_next_is_refused(change):
    ours, theirs = make_pair()
    first, second = (ours.seal(frame) + bytes(frame.body) for frame in (_FRAMES[1], Frame.of(b'second')))
    send_raw(ours, change(first, second))
    with pytest.raises(WireError, match='forged, repeated or out of order'):
        [theirs.receive() for _ in range(2)]


def test_a_changed_body_is_refused():
    ours, theirs = make_pair()
    send_raw(ours, ours.seal(_FRAMES[1]) + b'fIrst')
    with pytest.raises(WireError, match='changed on its way'):
        theirs.receive()


def test_a_frame_is_not_accepted_back_or_on_another_connection():
    one_key, other_key, strange_key = (bytes([number]) * 32 for number in range(3))
    sealed = Connection(socket.socket(), one_key, other_key).seal(_FRAMES[1]) + b'first'
    left, right = socket.socketpair()
    right.sendall(sealed)
    assert Connection(left, other_key, one_key).receive().body == b'first'  # the other end
    left, right = socket.socketpair()
    back = Connection(left, one_key, other_key)  # the sender itself
    right.sendall(sealed)
    with pytest.raises(WireError, match='forged'):
        back.receive()
    left, right = socket.socketpair()
    other = Connection(left, other_key, strange_key)
    right.sendall(sealed)
    with pytest.raises(WireError, match='forged'):
        other.receive()


def test_a_frame_above_the_limit_is_refused_by_both_ends_and_no_memory_is_taken():
    ours, theirs = make_pair(most_bytes=100)
    with pytest.raises(
        WireError, match=r'a message of 101 bytes is above the limit of 100: lower learner\.groups_per_update'
    ):
        send_all([ours], Frame.of(bytes(101)), 5)
    assert send_all([ours], Frame.of(b'nothing was sent before'), 5) == {}
    assert theirs.receive().body == b'nothing was sent before'
    send_raw(ours, ours.seal(Frame.of(bytes(101))))  # the body never comes, and is not waited for
    with pytest.raises(WireError, match='a message of 101 bytes is above the limit of 100'):
        theirs.receive()


def test_one_that_reads_nothing_does_not_keep_the_others_waiting():
    pairs = [make_pair() for _ in range(4)]
    frame, times = Frame.of(bytes(20_000_000)), {}
    began = time.monotonic()

    def read(index):
        with contextlib.suppress(OSError):
            assert pairs[index][1].receive().body == frame.body
            times[index] = time.monotonic() - began

    readers = [threading.Thread(target=read, args=(index,), daemon=True) for index in (0, 1, 3)]
    for reader in readers:
        reader.start()
    lost = send_all([ours for ours, _ in pairs], frame, 1.5)
    assert lost == {2: 'took in no message for 1.5 s'}
    for reader in readers:
        reader.join(5)
    assert sorted(times) == [0, 1, 3]
    assert max(times.values()) < 1.4


def test_one_that_is_gone_is_named_and_the_others_get_the_frame():
    pairs = [make_pair() for _ in range(3)]
    pairs[1][1].close()
    assert send_all([ours for ours, _ in pairs], Frame.of(b'x'), 5) == {1: 'is gone'}
    assert [pairs[index][1].receive().body for index in (0, 2)] == [b'x', b'x']
    pairs[0][0].close()
    with pytest.raises(EOFError):
        pairs[0][1].receive()
