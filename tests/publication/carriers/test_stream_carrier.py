"""Records over sockets: bit for bit through every fault of a connection, and no reader delays the sender."""

import contextlib
import dataclasses
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from areal_jax.distributed.peers import MAGIC, prove_as_client
from areal_jax.publication.carriers import stream_sender
from areal_jax.publication.carriers.stream_receiver import StreamReceiver
from areal_jax.publication.carriers.stream_sender import StreamSender
from areal_jax.publication.carriers.stream_socket import (
    FRAME_BYTES,
    FrameSocket,
    Hello,
    Kind,
    Request,
    connect,
    encode_hello,
    encode_request,
    listen_unix,
    sweep_unix,
)
from areal_jax.publication.record import Record
from areal_jax.publication.versions import ChainFull, PublicationError
from tests.publication.carriers.record_samples import SIZES, Reader, assert_got, held, make_chain, make_record
from tests.publication.carriers.stream_proxy import StreamProxy, prove_reader, prove_sender

ROOT = pathlib.Path(__file__).parents[3]
SMALL = (0, 1, 255, 256, 70_000)
LARGE = (3, 3 * FRAME_BYTES - 5, 1)  # parts of 1, 3 and 1 frames
HUGE = (3, 16_000_000, 1)  # more than the system keeps for a connection


@pytest.fixture
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp('s')  # the address of a Unix socket is short


@pytest.fixture
def sender(directory):
    with contextlib.closing(StreamSender(prove_sender, '127.0.0.1', directory=directory)) as one:
        yield one


def addresses(sender):
    return sender.address.split(',')


@pytest.fixture
def open_reader():
    with contextlib.ExitStack() as opened:

        def open_(address, name='engine 0', prove=prove_reader, **deadlines):
            receiver = StreamReceiver(address.split(',')[0], name, prove, **deadlines)
            return opened.enter_context(contextlib.closing(receiver))

        yield open_


def test_a_part_of_several_frames(sender, open_reader):
    record, reader = make_record(1, (FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 0, 2 * FRAME_BYTES)), Reader()
    sender.send(record)
    open_reader(sender.address).fetch(1, None, reader)
    assert_got(reader, [record])


def test_chains_have_bounds(sender):
    whole = make_record(0, (1000,))
    sender.send(whole)
    with pytest.raises(ChainFull, match='delta of version 1 has 501 bytes, and the buffer of its chain 500 left: send'):
        sender.send(make_record(1, (501,), held(whole)))
    sender.send(make_record(1, (500,), held(whole)))
    with pytest.raises(PublicationError, match=r'delta of version 2 is based on version 0 .* the chain ends with vers'):
        sender.send(make_record(2, (1,), held(whole)))
    for version in (2, 3):
        sender.release(version - 1, pinned=[0, 2])
        sender.send(make_record(version, (1000,)))
    with pytest.raises(PublicationError, match=r'all 3 buffers .* still needs \(\[0, 2\]\)'):
        sender.send(make_record(4, (1000,)))


def test_acknowledgements_are_by_name_and_of_connected_readers(sender, open_reader):
    record = make_record(3, SMALL)
    sender.send(record)
    one, other = open_reader(sender.address, 'engine 0'), open_reader(sender.address, 'engine 1')
    one.acknowledge(held(record))
    assert sender.held() == {'engine 0': held(record)}
    other.acknowledge(held(record))
    assert sender.held() == {'engine 0': held(record), 'engine 1': held(record)}
    one.close()  # as when the connection is lost: the next one says what it has
    one.fetch(3, held(record), Reader())
    assert sender.held()['engine 0'] == held(record)


def test_many_readers_at_the_same_time(sender, open_reader):
    chain = make_chain(0)
    for record in chain:
        sender.send(record)
    readers = [Reader() for _ in range(20)]
    receivers = [open_reader(sender.address, f'engine {index}') for index in range(20)]
    threads = [
        threading.Thread(target=receiver.fetch, args=(2, None, reader))
        for receiver, reader in zip(receivers, readers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for reader in readers:
        assert_got(reader, chain)


def test_what_consume_raises_is_raised_and_views_end_with_it(sender, open_reader):
    sender.send(make_record(0, SMALL))
    receiver, kept = open_reader(sender.address), []

    def fail(record):
        kept.extend(record.parts)
        raise PublicationError('leaf 3 differs')

    with pytest.raises(PublicationError, match='leaf 3 differs'):
        receiver.fetch(0, None, fail)
    with pytest.raises(ValueError, match='released memoryview'):
        bytes(kept[-1])
    reader = Reader()
    receiver.fetch(0, None, reader)
    assert_got(reader, [make_record(0, SMALL)])


def test_parts_begin_where_elements_may(sender, open_reader):
    sender.send(make_record(0, (3, 8, 1, 70_000, 4)))
    starts = []

    def consume(record):
        starts.extend(np.frombuffer(part, np.uint8).ctypes.data for part in record.parts)

    open_reader(sender.address).fetch(0, None, consume)
    assert [start % 16 for start in starts] == [0] * 5


def flip(frame):
    return frame[:-1] + bytes([frame[-1] ^ 1])


def cut_short(frames):
    yield next(frames)
    yield next(frames)[:-1]


def changed(frames):
    yield from (next(frames), next(frames), flip(next(frames)))
    yield from frames


def reordered(frames):
    header, small, one, other = (next(frames) for _ in range(4))
    yield from (header, small, other, one)  # both have 1 MiB
    yield from frames


def repeated(frames):
    header, small, one = (next(frames) for _ in range(3))
    yield from (header, small, one, one)  # where the next one has as many bytes
    yield from frames


def header_twice(frames):
    header = next(frames)
    yield from (header, header)
    yield from frames


def noise(frames):
    next(frames)
    yield b'HTTP/1.1 400 Bad Request and more of this kind'


FAULTS = (cut_short, changed, reordered, repeated, header_twice, noise)


@pytest.mark.parametrize('fault', FAULTS, ids=[fault.__name__ for fault in FAULTS])
def test_a_fault_of_a_connection_is_mended_by_the_next(sender, directory, open_reader, fault):
    def meddle(number, frames):
        yield from fault(frames) if number == 0 else frames

    record, reader = make_record(5, LARGE), Reader()
    sender.send(record)
    proxy = StreamProxy(directory / 'p', addresses(sender)[1], meddle)
    open_reader(proxy.address, record_deadline_s=20.0).fetch(5, None, reader)
    assert_got(reader, [record])
    assert proxy.connections == 2
    proxy.close()


def test_a_broken_connection_goes_on_at_the_frame_that_is_missing(sender, directory, open_reader):
    """Each connection gives two frames of parts. The record has 1 + 3 + 1: no frame is sent twice to the reader."""
    sent = []

    def meddle(number, frames):
        yield next(frames)
        for _ in range(2):
            frame = next(frames)
            sent.append(frame[:36])
            yield frame

    record, reader = make_record(5, LARGE), Reader()
    sender.send(record)
    proxy = StreamProxy(directory / 'p', addresses(sender)[1], meddle)
    open_reader(proxy.address, record_deadline_s=20.0).fetch(5, None, reader)
    assert_got(reader, [record])
    assert (len(sent), len(set(sent)), proxy.connections) == (5, 5, 3)
    proxy.close()


@pytest.mark.parametrize('n_parts', [0, 1], ids=['after the header', 'after a part'])
def test_a_record_that_is_gone_after_a_break_is_not_mixed_with_the_next(sender, directory, open_reader, n_parts):
    """The same version is published again with other bits, as after a resume, while a reader has a part of it."""
    other = make_record(6, LARGE)
    second = Record(dataclasses.replace(other.header, version=5), other.parts)

    def meddle(number, frames):
        if number == 0:
            for _ in range(1 + n_parts):
                yield next(frames)
            sender.release(9)
            sender.send(make_record(4, SMALL))
            sender.send(make_record(4, SMALL))
            sender.send(second)
        else:
            yield from frames

    sender.send(make_record(5, LARGE))
    reader = Reader()
    proxy = StreamProxy(directory / 'p', addresses(sender)[1], meddle)
    open_reader(proxy.address, record_deadline_s=20.0).fetch(5, None, reader)
    assert_got(reader, [second])
    proxy.close()


def test_a_sender_that_always_fails_ends_at_the_deadline(sender, directory, open_reader):
    sender.send(make_record(0, SMALL))
    proxy = StreamProxy(directory / 'p', addresses(sender)[1], lambda number, frames: ())
    receiver = open_reader(proxy.address, record_deadline_s=0.2)
    with pytest.raises(PublicationError, match=r'version 0 was not received from unix:.* within 0.2 s \('):
        receiver.fetch(0, None, Reader())
    assert proxy.connections > 1
    proxy.close()


def test_a_silent_sender_ends_at_the_deadline(directory, open_reader):
    listener, path = listen_unix(directory)  # accepts connections, as a stopped process does, and says nothing
    receiver = open_reader(f'unix:{path}', frame_deadline_s=0.05, record_deadline_s=0.1)
    with pytest.raises(PublicationError, match=r'version 0 was not received from .* within 0.1 s \(timed out\)'):
        receiver.fetch(0, None, Reader())
    listener.close()


def test_a_sender_that_has_gone_is_told_at_once(sender, open_reader):
    sender.send(record := make_record(0, SMALL))
    receivers = [open_reader(address) for address in addresses(sender)]
    receivers[0].fetch(0, None, Reader())
    sender.close()
    for receiver in receivers:
        with pytest.raises(
            PublicationError, match=r'version 0 was not acknowledged: nobody listens at .* learner alive'
        ):
            receiver.acknowledge(held(record))


def test_another_key_is_refused_by_both(sender, open_reader):
    sender.send(make_record(0, SMALL))
    stranger = open_reader(sender.address, prove=lambda own: prove_as_client(own, bytes(32)), record_deadline_s=20.0)
    with pytest.raises(
        PublicationError, match=r'no sender of weights of this run \(it has another key\): start learner'
    ):
        stranger.fetch(0, None, Reader())
    # one that skips the proof gets nothing but the end of the connection
    with connect(addresses(sender)[1], 5.0) as raw:
        raw.settimeout(20.0)
        raw.sendall(MAGIC + bytes(32) + bytes(32))
        answer = b''
        with contextlib.suppress(ConnectionResetError):
            while content := raw.recv(1 << 16):
                answer += content
        assert len(answer) == 80
    reader = Reader()
    open_reader(sender.address, record_deadline_s=20.0).fetch(0, None, reader)
    assert len(reader.records) == 1


def ask_without_reading(address, version):
    """A reader that proves the key, asks for a version and takes nothing in."""
    own = connect(address, 5.0)
    prove_reader(own)
    asking = FrameSocket(own, 5.0)
    asking.send(Kind.HELLO, encode_hello(Hello('slow', None)))
    asking.send(Kind.NEXT, encode_request(Request(version, None)), version)
    asking.receive_prefix()  # the header is on its way, so that the sender reads from the buffer
    return own


def await_no_reader(sender):
    """Until the threads of all readers have seen the ends of their connections."""
    while sender.n_readers:
        time.sleep(0.001)


def drain(own):
    """Reads to the end of the connection; returns how many bytes were left."""
    own.settimeout(30.0)
    n_bytes = 0
    with contextlib.suppress(ConnectionResetError):
        while content := own.recv(1 << 20):
            n_bytes += len(content)
    return n_bytes


@pytest.mark.parametrize('kind', [0, 1], ids=['unix', 'tcp'])
def test_a_slow_reader_delays_nobody(sender, open_reader, kind):
    """Others get five versions while it stays in the middle of the first, whose buffer is then taken from it."""
    sender.send(make_record(0, HUGE))
    slow = ask_without_reading(addresses(sender)[kind], 0)
    receiver, reader = open_reader(sender.address), Reader()
    records = [make_record(version, SMALL) for version in range(1, 6)]
    for record in records:
        sender.send(record)
        receiver.fetch(record.header.version, None, reader)
        sender.release(record.header.version)
    assert_got(reader, records)
    # its buffer was not needed with three of them; it is with both others pinned
    sender.release(5, pinned=[4, 5])
    sender.send(make_record(6, SMALL))
    assert drain(slow) < sum(HUGE)
    slow.close()


def test_a_reader_that_takes_nothing_in_is_cut_off(directory):
    with contextlib.closing(StreamSender(prove_sender, directory=directory, frame_deadline_s=0.05)) as sender:
        sender.send(make_record(0, HUGE))
        slow = ask_without_reading(sender.address, 0)
        slow.settimeout(30.0)
        await_no_reader(sender)
        assert drain(slow) < sum(HUGE)
        slow.close()


def test_strangers_make_room(directory, open_reader, monkeypatch):
    monkeypatch.setattr(stream_sender, 'MOST_CONNECTIONS', 3)
    with contextlib.closing(StreamSender(prove_sender, directory=directory)) as sender:
        sender.send(make_record(0, SMALL))
        strangers = [connect(sender.address, 5.0) for _ in range(3)]
        reader = Reader()
        open_reader(sender.address).fetch(0, None, reader)
        assert len(reader.records) == 1
        assert strangers[0].recv(1) == b''
        for stranger in strangers:
            stranger.close()


def test_a_path_that_is_too_long_is_refused_and_nothing_is_left(tmp_path):
    long = tmp_path / ('x' * 120)
    long.mkdir()
    with pytest.raises(
        PublicationError, match=r'x/areal_jax-weights-\w+/s has \d+ bytes, and the address .* set TMPDIR'
    ):
        listen_unix(long)
    assert list(long.iterdir()) == []


def test_the_unix_socket_is_private_and_goes_with_the_sender(sender, directory):
    path = pathlib.Path(addresses(sender)[0].removeprefix('unix:'))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert sweep_unix(directory) == []  # somebody listens
    sender.close()
    assert list(directory.iterdir()) == []


def test_a_dead_socket_is_swept(directory):
    listener, path = listen_unix(directory)
    listener.close()
    (directory / 'areal_jax-weights-being-made').mkdir()
    assert sweep_unix(directory) == [path]
    assert [left.name for left in directory.iterdir()] == ['areal_jax-weights-being-made']
    os.utime(directory / 'areal_jax-weights-being-made', (0, time.time() - 60))  # its process was killed
    sweep_unix(directory)
    assert list(directory.iterdir()) == []


def test_an_interface_of_another_machine_is_refused(directory):
    with pytest.raises(PublicationError, match=r'publication.listen=203.0.113.7:0 cannot be listened at .*name an'):
        StreamSender(prove_sender, '203.0.113.7', directory=directory)
    with pytest.raises(PublicationError, match=r"publication.listen='::1' must be a host or host:port of this machine"):
        StreamSender(prove_sender, '::1', directory=directory)
    assert list(directory.iterdir()) == []
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen()
        with pytest.raises(PublicationError, match=r'cannot be listened at \(Address already in use\)'):
            StreamSender(prove_sender, f'127.0.0.1:{taken.getsockname()[1]}', directory=directory)


KILLED = ('created', 'header', 'part', 'acknowledging', 'acknowledged')


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
    """Addresses of senders in other processes, by the moment of their deaths; see killed_stream_sender.py."""
    directory = tmp_path_factory.mktemp('k')
    command = [sys.executable, '-m', 'tests.publication.carriers.killed_stream_sender', str(directory), *KILLED]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as senders:
        yield dict(senders.stdout.readline().split() for _ in KILLED)
        senders.stdout.read()
    assert senders.returncode == 0  # each died as it was told
    assert len(sweep_unix(directory)) == len(KILLED)


@pytest.mark.parametrize('moment', KILLED)
def test_a_sender_that_is_killed(killed, open_reader, moment):
    record, reader, receiver = make_record(0, SIZES), Reader(), open_reader(killed[moment])
    if moment.startswith('ack'):
        receiver.fetch(0, None, reader)
        if moment == 'acknowledged':
            receiver.acknowledge(held(record))
        assert_got(reader, [record])
        with pytest.raises(PublicationError, match='version 0 was not acknowledged: nobody listens at unix:'):
            receiver.acknowledge(held(record))
    else:
        with pytest.raises(PublicationError, match='version 0 was not received: nobody listens at unix:'):
            receiver.fetch(0, None, reader)
        assert reader.records == []


READER = """
import sys
from areal_jax.publication.carriers.stream_receiver import StreamReceiver
from tests.publication.carriers.record_samples import held, make_record
from tests.publication.carriers.stream_proxy import prove_reader
receiver = StreamReceiver(sys.argv[1], 'engine 0', prove_reader)
receiver.acknowledge(held(make_record(9, (1,))))
def consume(record):
    print('reads', flush=True)
    sys.stdin.readline()
receiver.fetch(0, None, consume)
"""


def test_a_reader_that_is_killed_is_forgotten(sender):
    sender.send(make_record(0, SMALL))
    command = [sys.executable, '-c', READER, addresses(sender)[0]]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == 'reads\n'
        assert set(sender.held()) == {'engine 0'}
        reader.kill()
    await_no_reader(sender)
    assert sender.held() == {}
