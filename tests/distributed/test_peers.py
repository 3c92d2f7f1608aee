"""Messages arrive as they were sent, once and in order, whatever the size of their parts; commands are serialised once,
sent to all or to each, and answered within a deadline; who is lost is named."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

import numpy as np
import pytest

from areal_jax.distributed import peers as module
from areal_jax.distributed.messages import CHECKPOINT, CLOSE, LEARNER, ROWS, Answer, CodecError, Command
from areal_jax.distributed.peers import (
    CommandError,
    Connection,
    Peer,
    Peers,
    WireError,
    cut_parts,
    make_pair,
    send_all,
)
from tests.distributed.sockets import cut, seal, send_raw


class _Stub:
    """The other end of a connection: answers with `answer(command)` on a thread of its own."""

    def __init__(self, answer, **options):
        self.ours, self.theirs = make_pair(**options)
        self.seen, self._answer = [], answer
        self.peer = Peer(self.theirs, 'leader', lambda reason: None)
        for lane in (LEARNER, CHECKPOINT):
            threading.Thread(target=self._serve, args=(lane,), daemon=True).start()

    def _serve(self, lane):
        while True:
            try:
                message = self.peer.take(lane)
            except CommandError:
                return
            self.seen.append(message.content)
            if message.content.name == CLOSE:
                self.peer.close()
                return
            value = self._answer(message.content)
            if value is not None:
                self.peer.answer(lane, message.number, Answer(value))


def _peers(*answers, deadline_s=5.0, **options):
    stubs, lost = [_Stub(answer, **options) for answer in answers], []
    named = [(f'learner {index}', stub.ours) for index, stub in enumerate(stubs)]
    return Peers(named, deadline_s=deadline_s, on_lost=lost.append), stubs, lost


def test_all_get_the_command_and_answers_come_in_the_order_of_the_processes(monkeypatch):
    encoded = []
    encode = module.encode_message
    monkeypatch.setattr(module, 'encode_message', lambda message: encoded.append(message) or encode(message))
    slow = lambda command: time.sleep(0.1) or 'slow'
    peers, stubs, lost = _peers(slow, lambda _: 'one', lambda _: 'two')
    batch = np.arange(1_000_000)
    assert [answer.value for answer in peers.call_all(Command('update', (batch,)))] == ['slow', 'one', 'two']
    assert len([message for message in encoded if isinstance(message.content, Command)]) == 1  # for all three
    for stub in stubs:
        np.testing.assert_array_equal(stub.seen[0].args[0], batch)
    peers.close()
    assert lost == []


def test_a_process_that_takes_its_time_to_read_does_not_keep_the_others_from_working():
    times = {}

    def note(name):
        return lambda _: times.setdefault(name, time.monotonic()) and name

    peers, stubs, _ = _peers(note('quick'), note('other'))
    stubs[0].theirs.sending.acquire()  # the answer of the first one is held up
    wait = peers.start_all(Command('update', (np.zeros(1_000_000),)))
    while len(times) < 2:
        time.sleep(0.01)
    stubs[0].theirs.sending.release()
    assert [answer.value for answer in wait()] == ['quick', 'other']


@pytest.mark.parametrize('other', [lambda _: 'done', lambda _: None], ids=['answers', 'waits for the one that died'])
def test_a_process_that_dies_is_named_at_once_and_later_calls_say_so_too(other):
    peers, stubs, lost = _peers(other, lambda _: None, other, deadline_s=60)
    threading.Timer(0.1, cut, [stubs[1].theirs]).start()
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(CommandError, match='learner 1 is gone'):
            peers.call_all(Command('update'))
    assert time.monotonic() - began < 5
    assert lost == ['learner 1 is gone; the run ends here, go on from the last checkpoint with --resume']


def test_a_process_that_gives_no_answer_is_named_within_the_deadline():
    peers, _, lost = _peers(lambda _: 'done', lambda _: None, deadline_s=0.3)
    with pytest.raises(CommandError, match=r'learner 1 gave no answer for 0\.3 s'):
        peers.call_all(Command('update'))
    assert len(lost) == 1
    assert lost[0].startswith('learner 1 gave no answer')


def test_a_process_that_reads_nothing_is_named_within_the_deadline():
    ours, theirs = make_pair()
    reading = _Stub(lambda _: 'done')
    lost = []
    peers = Peers([('learner 0', reading.ours), ('learner 1', ours)], deadline_s=0.5, on_lost=lost.append)
    with pytest.raises(CommandError, match=r'learner 1 took in no message for 0\.5 s'):
        peers.call_all(Command('update', (np.zeros(4_000_000),)))
    assert len(lost) == 1
    theirs.close()


def test_lanes_go_on_beside_each_other_and_a_late_answer_is_dropped():
    go_on = threading.Event()

    def answer(command):
        if command.lane == CHECKPOINT and command.args == (1,):
            assert go_on.wait(5)
        return [command.name, *command.args]

    peers, _, lost = _peers(answer, deadline_s=0.3)
    first = peers.request(0, Command('write', (1,), CHECKPOINT))
    assert peers.call_all(Command('update', (3,)))[0].value == ['update', 3]
    with pytest.raises(queue.Empty):
        first()
    second = peers.request(0, Command('write', (2,), CHECKPOINT))
    go_on.set()
    assert second().value == ['write', 2]
    assert lost == []


def test_a_command_that_cannot_be_sent_leaves_all_as_they_were():
    peers, stubs, lost = _peers(lambda command: command.name, lambda command: command.name, most_bytes=10_000)
    with pytest.raises(WireError, match='is above the limit of 10000'):
        peers.call_all(Command('update', (np.zeros(10_000),)))
    with pytest.raises(CodecError, match='object does not travel'):
        peers.call_all(Command('update', (object(),)))
    assert [answer.value for answer in peers.call_all(Command('next'))] == ['next', 'next']
    assert [len(stub.seen) for stub in stubs] == [1, 1]
    assert lost == []


def test_an_answer_that_cannot_travel_is_a_failure_and_the_next_one_arrives():
    peers, _, lost = _peers(lambda command: {1} if command.name == 'bad' else 'good')
    (answer,) = peers.call_all(Command('bad'))
    assert str(answer.failure) == 'CodecError: a set does not travel between processes'
    assert peers.call_all(Command('next'))[0].value == 'good'
    assert lost == []


def test_bytes_that_do_not_come_from_the_process_end_the_connection():
    peers, stubs, lost = _peers(lambda _: None, deadline_s=60)
    send_raw(stubs[0].theirs, bytes(200))
    with pytest.raises(CommandError, match='learner 0 cannot be understood: a message is forged'):
        peers.call_all(Command('update'))
    assert len(lost) == 1


def test_closing_lets_the_others_return_and_leaves_no_thread():
    before = set(threading.enumerate())
    peers, stubs, lost = _peers(lambda _: 1, lambda _: 2)
    peers.call_all(Command('update'))
    peers.close()
    peers.close()
    end = time.monotonic() + 5
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < end, left
        time.sleep(0.01)
    assert [stub.seen[-1].name for stub in stubs] == [CLOSE, CLOSE]
    assert lost == []


_MESSAGES = [b'', b'first', bytes(range(256)) * 5000]


@pytest.mark.parametrize('part_bytes', [1 << 30, 100_000, 4_999])
def test_messages_arrive_in_both_directions_whatever_the_size_of_their_parts(part_bytes):
    ours, theirs = make_pair(part_bytes=part_bytes)
    for one, other in ((ours, theirs), (theirs, ours), (ours, theirs)):
        # the last is larger than what a socket buffers
        received = []
        reader = threading.Thread(target=lambda to=other, into=received: into.extend(to.receive() for _ in _MESSAGES))
        reader.start()
        for message in _MESSAGES:
            pieces = [message[:3], b'', memoryview(message)[3:]]
            assert send_all([one], pieces, 5) == {}
        reader.join(5)
        assert received == _MESSAGES


def test_parts_are_the_bytes_of_the_message_in_order_without_a_copy():
    rng = np.random.default_rng(0)
    for _ in range(50):
        buffers = [rng.bytes(int(size)) for size in rng.integers(0, 40, rng.integers(0, 6))]
        most, whole = int(rng.integers(1, 60)), b''.join(buffers)
        parts = list(cut_parts(buffers, most))
        assert b''.join(piece for part in parts for piece in part.content) == whole
        assert [part.size for part in parts] == [sum(map(len, part.content)) for part in parts]
        assert [part.size for part in parts[:-1]] == [most] * (len(parts) - 1)
        assert [part.left for part in parts] == [len(whole) - most * n for n in range(1, len(parts))] + [0]
        assert all(any(piece.obj is buffer for buffer in buffers) for part in parts for piece in part.content)


@pytest.mark.parametrize(
    ('change', 'fault'),
    [
        (lambda one, two, other: one + other, 'does not continue its message'),
        (lambda one, two, other: one + one, 'forged, repeated or out of order'),
        (lambda one, two, other: two, 'forged, repeated or out of order'),
    ],
    ids=['of another message', 'again', 'left out'],
)
def test_a_part_that_does_not_come_next_is_refused(change, fault):
    left, right = socket.socketpair()
    keys = bytes(32), bytes(range(32))
    first, second = (Connection(right, *keys) for _ in range(2))  # both begin to count at 0
    one, two = (seal(first, part) for part in cut_parts([b'firstlast'], 5))
    _, other = (seal(second, next(cut_parts([message], 5))) for message in (b'first', b'other'))
    send_raw(first, change(one, two, other))
    with pytest.raises(WireError, match=fault):
        Connection(left, *reversed(keys)).receive()


def test_a_part_above_the_limit_is_refused():
    ours, theirs = make_pair(part_bytes=5)
    send_raw(ours, ours.seal(next(cut_parts([bytes(6)], 6))))  # the body never comes, and is not waited for
    with pytest.raises(WireError, match='a message of 6 bytes is above the limit of 5'):
        theirs.receive()


def test_a_process_that_dies_between_two_parts_is_noticed():
    ours, theirs = make_pair(part_bytes=5)
    send_raw(ours, seal(ours, next(cut_parts([b'firstlast'], 5))))
    cut(ours)
    with pytest.raises(EOFError):
        theirs.receive()


def test_each_process_gets_its_own_command_and_one_that_dies_is_named():
    peers, stubs, lost = _peers(lambda _: None, lambda _: None, deadline_s=10)
    peers.send_each([Command('rows', (np.full(9_000_000, index),), ROWS) for index in range(2)])
    for index, stub in enumerate(stubs):
        (values,) = stub.peer.take(ROWS, 5).content.args
        assert (values == index).all()
    stubs[1].theirs.sending.acquire()  # its end of the connection stays as it is
    cut(stubs[1].theirs)
    with pytest.raises(CommandError, match='learner 1 is gone'):
        peers.send_each([Command('rows', (np.zeros(9_000_000),), ROWS)] * 2)
    assert len(lost) == 1


def test_the_first_process_gets_the_command_and_the_others_another():
    peers, stubs, _ = _peers(*[lambda command: command.name] * 3)
    answers = peers.call_led(Command('update', (3,)), Command('repeat'))
    assert [answer.value for answer in answers] == ['update', 'repeat', 'repeat']
    assert [stub.seen[0].args for stub in stubs] == [(3,), (), ()]


@pytest.mark.parametrize(
    'change',
    [
        lambda first, second: first + first,  # again
        lambda first, second: second + first,  # in another order
        lambda first, second: second,  # one is left out
        lambda first, second: first + bytes([*second[:87], second[87] ^ 1, *second[88:]]),  # another tag
        lambda first, second: first + second[:7] + bytes([second[7] ^ 1]) + second[8:],  # another length
    ],
    ids=['again', 'swapped', 'left out', 'tag', 'length'],
)
def test_what_the_other_end_did_not_send_next_is_refused(change):
    ours, theirs = make_pair()
    first, second = (seal(ours, next(cut_parts([body], 100))) for body in (b'first', b'second'))
    send_raw(ours, change(first, second))
    with pytest.raises(WireError, match='forged, repeated or out of order'):
        [theirs.receive() for _ in range(2)]


def test_a_changed_body_is_refused():
    ours, theirs = make_pair()
    send_raw(ours, ours.seal(next(cut_parts([b'first'], 5))) + b'fIrst')
    with pytest.raises(WireError, match='changed on its way'):
        theirs.receive()


def test_a_message_is_not_accepted_back_or_on_another_connection():
    one_key, other_key, strange_key = (bytes([number]) * 32 for number in range(3))
    sealed = seal(Connection(socket.socket(), one_key, other_key), next(cut_parts([b'first'], 5)))
    left, right = socket.socketpair()
    right.sendall(sealed)
    assert Connection(left, other_key, one_key).receive() == b'first'  # the other end
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


def test_a_message_above_the_limit_is_refused_by_both_ends_and_no_memory_is_taken():
    ours, theirs = make_pair(most_bytes=100)
    with pytest.raises(
        WireError, match=r'a message of 101 bytes is above the limit of 100: lower learner\.groups_per_update'
    ):
        send_all([ours], [bytes(100), b'x'], 5)
    assert send_all([ours], [b'nothing was sent before'], 5) == {}
    assert theirs.receive() == b'nothing was sent before'
    send_raw(ours, ours.seal(next(cut_parts([bytes(101)], 50))))  # the body never comes, and is not waited for
    with pytest.raises(WireError, match='a message of 101 bytes is above the limit of 100'):
        theirs.receive()


def test_one_that_reads_nothing_does_not_keep_the_others_waiting():
    pairs = [make_pair() for _ in range(4)]
    message, times = [bytes(20_000_000)], {}
    began = time.monotonic()

    def read(index):
        with contextlib.suppress(OSError):
            assert pairs[index][1].receive() == message[0]
            times[index] = time.monotonic() - began

    readers = [threading.Thread(target=read, args=(index,), daemon=True) for index in (0, 1, 3)]
    for reader in readers:
        reader.start()
    lost = send_all([ours for ours, _ in pairs], message, 1.5)
    assert lost == {2: 'took in no message for 1.5 s'}
    for reader in readers:
        reader.join(5)
    assert sorted(times) == [0, 1, 3]
    assert max(times.values()) < 1.4


def test_one_that_is_gone_is_named_and_the_others_get_the_message():
    pairs = [make_pair() for _ in range(3)]
    pairs[1][1].close()
    assert send_all([ours for ours, _ in pairs], [b'x'], 5) == {1: 'is gone'}
    assert [pairs[index][1].receive() for index in (0, 2)] == [b'x', b'x']
    pairs[0][0].close()
    with pytest.raises(EOFError):
        pairs[0][1].receive()
