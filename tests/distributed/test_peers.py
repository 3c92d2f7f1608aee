"""Commands to several processes: serialised once, sent at the same time, answered within a deadline; who is lost is
named."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import pytest

from areal_jax.distributed import peers as module
from areal_jax.distributed.messages import CHECKPOINT, CLOSE, LEARNER, Answer, CodecError, Command
from areal_jax.distributed.peers import CommandError, Peer, Peers, WireError, make_pair
from tests.distributed.sockets import cut, send_raw


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


def test_a_process_that_dies_is_named_at_once_and_later_calls_say_so_too():
    peers, stubs, lost = _peers(lambda _: 'done', lambda _: None, deadline_s=60)
    threading.Timer(0.1, cut, [stubs[1].theirs]).start()
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(CommandError, match='learner 1 is gone'):
            peers.call_all(Command('update'))
    assert time.monotonic() - began < 5
    assert lost == ['learner 1 is gone; the run ends here, go on from the last checkpoint with --resume']


def test_the_loss_of_one_process_ends_the_wait_for_all():
    """The first one waits in a collective that the second will never join."""
    peers, stubs, lost = _peers(lambda _: None, lambda _: None, lambda _: None, deadline_s=60)
    threading.Timer(0.1, cut, [stubs[1].theirs]).start()
    began = time.monotonic()
    with pytest.raises(CommandError, match='learner 1 is gone'):
        peers.call_all(Command('update'))
    assert time.monotonic() - began < 5
    assert len(lost) == 1


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
