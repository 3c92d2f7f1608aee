"""Records through shared memory: bit for bit, never torn, and no reader delays the sender for long."""

import contextlib
import errno
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

from areal_jax.publication.carriers.shm_carrier import ShmReceiver, ShmSender
from areal_jax.publication.carriers.shm_segment import (
    CONTROL_BYTES,
    create_segment,
    remove_with_owner,
    segment_path,
    sweep,
)
from areal_jax.publication.versions import ChainFull, PublicationError
from tests.publication.carriers.record_samples import Reader, assert_got, held, make_chain, make_record

ROOT = pathlib.Path(__file__).parents[3]
SMALL = (0, 1, 255, 256, 70_000)


@pytest.fixture
def path(tmp_path):
    return segment_path('run', '1', tmp_path)


@pytest.fixture
def sender(path):
    with contextlib.closing(ShmSender(path)) as sender:
        yield sender


@pytest.fixture
def narrow(path):
    """A sender that must overwrite a chain that is being read, and does so soon."""
    with contextlib.closing(ShmSender(path, hold_deadline_s=0.01, most_places=2)) as sender:
        yield sender


def open_reader(path, name='engine 0'):
    return ShmReceiver(path, name)


def test_what_consume_raises_is_raised(sender, path):
    sender.send(make_record(0, SMALL))

    def fail(record):
        raise PublicationError('leaf 3 differs')

    with pytest.raises(PublicationError, match='leaf 3 differs'):
        open_reader(path).fetch(0, None, fail)


def test_more_pinned_chains_than_places_are_refused(sender):
    for version in range(3):
        sender.send(make_record(version, SMALL))
        sender.release(version, pinned=[0, 1])
    with pytest.raises(PublicationError, match=r'all 3 places .* still needs \(\[0, 1\]\): evaluate less often'):
        sender.send(make_record(3, SMALL))


def test_a_full_chain_asks_for_a_whole_record(sender, path):
    whole = make_record(0, (100_000,))
    sender.send(whole)
    sender.send(delta := make_record(1, (60_000,), held(whole)))
    big = make_record(2, (10_000_000,), held(delta))
    with pytest.raises(ChainFull, match=r'delta of version 2 needs 100\d+ bytes .* its chain has \d+ left: send the'):
        sender.send(big)
    reader = Reader()
    open_reader(path).fetch(1, None, reader)  # the chain is as it was
    assert_got(reader, [whole, delta])


def test_a_whole_record_that_no_place_holds_is_refused(sender):
    sender.send(make_record(0, (1000,)))
    with pytest.raises(PublicationError, match=r'version 1 needs 100\d+ bytes .* place of .* has 2097152, made for'):
        sender.send(make_record(1, (10_000_000,)))


def test_acknowledgements_are_by_name_and_of_living_readers(sender, path):
    record = make_record(3, SMALL)
    sender.send(record)
    one, other = open_reader(path, 'engine 0'), open_reader(path, 'engine 1')
    assert sender.held() == {}
    one.acknowledge(held(record))
    assert sender.held() == {'engine 0': held(record)}
    other.acknowledge(held(record))
    assert sender.held() == {'engine 0': held(record), 'engine 1': held(record)}
    one.close()
    assert sender.held() == {'engine 1': held(record)}
    with pytest.raises(PublicationError, match=r"reader of weights has 200 bytes, 'e{20}'...: use at most 116"):
        open_reader(path, 'e' * 200)


def test_many_readers_each_have_a_row(sender, path):
    record = make_record(0, SMALL)
    sender.send(record)
    receivers = [open_reader(path, f'engine {index}') for index in range(40)]
    for receiver in receivers:
        reader = Reader()
        receiver.fetch(0, None, reader)
        receiver.acknowledge(held(record))
        assert_got(reader, [record])
    assert len(sender.held()) == 40
    for receiver in receivers:
        receiver.close()


def test_a_reader_that_is_overtaken_reads_again(narrow, path):
    """While it reads version 0 for the first time, two newer versions fill both places."""
    narrow.send(make_record(0, SMALL))
    seen = []

    def consume(record):
        seen.append((record.header.version, [bytes(part) for part in record.parts]))
        if len(seen) == 1:
            for version in (1, 2):
                narrow.send(make_record(version, SMALL))
                narrow.release(version)
            narrow.send(make_record(0, SMALL))  # in the place that is being read
            raise PublicationError('what it read does not have the digest of version 0')

    open_reader(path).fetch(0, None, consume)
    assert [version for version, _ in seen] == [0, 0]
    assert seen[1][1] == list(make_record(0, SMALL).parts)


def test_a_reader_sees_that_its_bytes_are_being_replaced(narrow, path, monkeypatch):
    """The sender is in the middle of the first part of version 2 when the reader has read version 0."""
    narrow.send(make_record(0, SMALL))
    narrow.send(make_record(1, SMALL))
    narrow.release(1)
    begun, go_on, copy = threading.Event(), threading.Event(), np.copyto

    def copyto(target, source):
        begun.set()
        go_on.wait()
        copy(target, source)

    def consume(record):
        assert not begun.is_set()  # once
        monkeypatch.setattr(np, 'copyto', copyto)
        sending.start()
        begun.wait()

    sending = threading.Thread(target=narrow.send, args=(make_record(2, SMALL),))
    try:
        with pytest.raises(PublicationError, match=r'version 0 is not in .*, which has version 1: fetch a version'):
            open_reader(path).fetch(0, None, consume)
    finally:
        go_on.set()
        sending.join()


def test_a_hold_is_waited_for_once(narrow, path, monkeypatch):
    waits, sleep = [], time.sleep
    monkeypatch.setattr(time, 'sleep', lambda seconds: (waits[-1].append(seconds), sleep(seconds)))
    narrow.send(make_record(0, SMALL))
    narrow.release(9)

    def consume(record):
        for version in range(1, 7):
            waits.append([])
            narrow.send(make_record(version, SMALL))
        raise PublicationError('it goes on after all of this')

    with pytest.raises(PublicationError, match='version 0 is not in'):
        open_reader(path).fetch(0, None, consume)
    # versions 2, 4 and 6 go where it reads
    assert [bool(each) for each in waits] == [False, True, False, False, False, False]


def test_a_reader_that_is_always_overtaken_gives_up(narrow, path):
    narrow.send(make_record(0, SMALL))
    narrow.release(9)
    tries = []

    def consume(record):
        tries.append(record)
        for _ in range(2):
            narrow.send(make_record(0, SMALL))

    with pytest.raises(PublicationError, match=r'version 0 in .* was overwritten 5 times while it was read: give this'):
        open_reader(path).fetch(0, None, consume)
    assert len(tries) == 5


def test_after_a_torn_delta_the_whole_record_comes_first(narrow, path):
    chain, seen = make_chain(4, SMALL, 1, (5,)), []

    def send_chain():
        for record in chain:
            narrow.send(record)

    def consume(record):
        seen.append(record.header.version)
        if seen == [5]:
            narrow.send(make_record(6, SMALL))
            send_chain()

    send_chain()
    narrow.release(9)
    open_reader(path).fetch(5, held(chain[0]), consume)
    assert seen == [5, 4, 5]


def test_a_reader_that_is_slow_costs_a_place_before_it_costs_time(path):
    """With a deadline that no test can wait for."""
    sender = ShmSender(path, hold_deadline_s=1000.0)
    sender.send(make_record(0, SMALL))
    seen = []

    def consume(record):
        for version in range(1, 6):
            sender.send(make_record(version, SMALL))
            sender.release(version)
        seen.append([bytes(part) for part in record.parts])

    open_reader(path).fetch(0, None, consume)
    assert seen == [list(make_record(0, SMALL).parts)]
    sender.close()


def test_two_senders_of_one_name_are_refused(sender, path):
    with pytest.raises(
        PublicationError, match=r'run\.1\.weights is in use by another process that sends weights: stop'
    ):
        ShmSender(path)
    sender.send(make_record(0, SMALL))  # the first one goes on


def test_the_owner_removes_the_segment_and_readers_are_told(path):
    sender = ShmSender(path)
    sender.send(record := make_record(0, SMALL))
    receiver, reader = open_reader(path), Reader()
    sender.close()
    sender.close()  # also by who ends the run
    assert not path.exists()
    receiver.fetch(0, None, reader)  # what was complete can be read
    assert_got(reader, [record])
    with pytest.raises(
        PublicationError, match=r'version 1 is not in .* process \d+ that sent weights there has closed'
    ):
        receiver.fetch(1, None, reader)
    with pytest.raises(PublicationError, match=r'version 0 was not acknowledged: the process \d+ .* has closed it'):
        receiver.acknowledge(held(record))
    with pytest.raises(PublicationError, match=r"can not be opened \(No such file.*publication.channel='stream'"):
        open_reader(path)


def test_a_full_file_system_is_told_with_both_sizes(path, monkeypatch, tmp_path):
    """A file system without room, as posix_fallocate says it."""
    sender, real = ShmSender(path), os.posix_fallocate

    def refuse(descriptor, offset, size):
        real(descriptor, offset, size // 2)  # some of it was free
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(os, 'posix_fallocate', refuse)
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: types.SimpleNamespace(free=67_108_864))
    expected = re.escape(f'{tmp_path} has 67108864 bytes free, and the weights need 12582912 more there')
    with pytest.raises(PublicationError, match=f'{expected}.*docker: --shm-size'):
        sender.send(make_record(0))  # 3 MB and half as much again: 6 MiB for each of two places
    assert path.stat().st_size == CONTROL_BYTES  # it keeps nothing of what it got
    monkeypatch.undo()
    sender.send(make_record(0))
    sender.close()


def test_a_full_file_system_does_not_stop_further_versions(sender, path, monkeypatch):
    """No third place can be had, so the chain that a late reader may want goes."""
    sender.send(make_record(0, SMALL))
    sender.send(make_record(1, SMALL))
    monkeypatch.setattr(os, 'posix_fallocate', lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, 'full')))
    sender.send(make_record(2, SMALL))
    with pytest.raises(PublicationError, match='which has versions 1 and 2'):
        open_reader(path).fetch(0, None, Reader())


def test_a_damaged_segment_is_refused(sender, path):
    record = make_record(0, SMALL)
    sender.send(record)
    content = bytearray(path.read_bytes())
    header = content.index(b'{"format"')
    receiver = open_reader(path)
    for position, match in [
        (header + 5, 'the header of version 0 in shared memory is damaged'),
        (header - 120, 'record 0 of a chain of weights in shared memory is damaged'),
    ]:
        with path.open('r+b') as file:
            file.seek(position)
            file.write(bytes([content[position] ^ 1]))
        with pytest.raises(PublicationError, match=match):
            receiver.fetch(0, None, Reader())
    for name, bytes_ in [('short', b'x'), ('other', bytes(1 << 20))]:
        other = path.with_name(name)
        other.write_bytes(bytes_)
        with pytest.raises(PublicationError, match='is no segment of weights'):
            open_reader(other)


def test_a_torn_row_of_a_reader_is_no_acknowledgement(sender, path):
    """As a reader leaves it that is stopped while it writes."""
    record = make_record(3, SMALL)
    sender.send(record)
    receiver = open_reader(path)
    receiver.acknowledge(held(record))
    row = path.read_bytes().index(b'engine 0')
    with path.open('r+b') as file:
        file.seek(row)
        file.write(b'E')
    assert sender.held() == {}
    receiver.acknowledge(held(record))
    assert sender.held() == {'engine 0': held(record)}


def test_a_sweep_leaves_segments_of_living_owners_and_foreign_files(sender, path, tmp_path):
    abandoned = segment_path('run', '0', tmp_path)
    abandoned.write_bytes(b'of a process that died while it made it')
    link = segment_path('run', 'link', tmp_path)
    link.symlink_to(tmp_path / 'elsewhere')
    (tmp_path / 'weights').write_text('of another program')
    assert sweep(tmp_path) == [abandoned]
    assert sorted(tmp_path.iterdir()) == sorted([path, link, tmp_path / 'weights'])


def test_a_name_that_a_dead_process_left_is_taken(tmp_path):
    path = segment_path('a/b c', '0', tmp_path)
    assert path.name == 'areal_jax-a_b_c.0.weights'
    path.write_bytes(b'left behind')
    segment = create_segment(path)
    assert segment.owner_pid == os.getpid()
    segment.end()
    segment.close()


COMPLETE = {'created': [], 'header': [0], 'part': [0], 'delta': [0], 'sent': [0, 1]}  # versions, by moment of death


OWNER = """
import pathlib, subprocess, sys, time
from areal_jax.publication.carriers.shm_segment import create_segment, remove_with_owner

path = pathlib.Path(sys.argv[1])
segment = create_segment(path)
remove_with_owner(path)
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])  # an engine, which has no part in it
print('owns it', flush=True)
time.sleep(600)
"""


def watchers(path):
    """Processes that wait for the end of the segment's owner."""
    found = []
    for command in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
        with contextlib.suppress(OSError):
            if str(path).encode() in command.read_bytes().split(b'\0') and command.parent.name != str(os.getpid()):
                found.append(int(command.parent.name))
    return found


def wait_until(is_true, within_s=60.0):
    end_s = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_a_segment_goes_when_all_processes_of_its_run_are_killed_at_once(path):
    owner = subprocess.Popen(
        [sys.executable, '-c', OWNER, str(path)], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    assert owner.stdout.readline() == b'owns it\n'
    assert path.exists()
    receiver = open_reader(path)
    os.killpg(owner.pid, signal.SIGKILL)
    owner.communicate()
    wait_until(lambda: not path.exists())
    wait_until(lambda: not watchers(path))
    with pytest.raises(PublicationError, match='has no version'):  # what is mapped can be read
        receiver.fetch(1, None, Reader())


def test_what_watches_a_segment_ends_with_it_and_lives_through_signals(path):
    with contextlib.closing(ShmSender(path)):
        remove_with_owner(path)
        (watcher,) = watchers(path)
        for sent in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(watcher, sent)
        assert os.getsid(watcher) == watcher
        assert path.exists()
    wait_until(lambda: not watchers(path))
    other = create_segment(path)  # of the same name: what watched the first has not removed it
    assert path.exists()
    other.end()
    other.close()


def test_a_segment_that_is_not_there_is_not_watched(path):
    with pytest.raises(PublicationError, match='can not be watched: use'):
        remove_with_owner(path)


@pytest.fixture(scope='module')
def killed(tmp_path_factory):
    """The segments of senders that died by SIGKILL, by moment; see killed_sender.py."""
    directory = tmp_path_factory.mktemp('killed')
    command = [sys.executable, '-m', 'tests.publication.carriers.killed_sender', str(directory), *COMPLETE]
    subprocess.run(command, cwd=ROOT, check=True)
    return {moment: segment_path(moment, '0', directory) for moment in COMPLETE}


@pytest.mark.parametrize('moment', COMPLETE)
def test_a_sender_that_is_killed_leaves_whole_versions_only(killed, moment, tmp_path):
    path, complete = killed[moment], COMPLETE[moment]
    copy = pathlib.Path(shutil.copy(path, tmp_path))
    assert sweep(tmp_path) == [copy]
    receiver = open_reader(path)
    for version in (0, 1):
        if version in complete:
            reader = Reader()
            receiver.fetch(version, None, reader)
            assert_got(reader, [make_record(version)])
        else:
            with pytest.raises(PublicationError, match=rf'version {version} is not in .* sent weights there is dead'):
                receiver.fetch(version, None, Reader())
    with pytest.raises(PublicationError, match=r'not acknowledged: the process \d+ that sent weights there is dead'):
        receiver.acknowledge(held(make_record(0)))
    with contextlib.closing(ShmSender(path)) as again:  # the next start owes its readers a whole record
        with pytest.raises(PublicationError, match='the chain ends with no record: send version 1 whole'):
            again.send(make_record(1, base=held(make_record(0))))
        assert again.held() == {}


READER = """
import pathlib, sys
from areal_jax.publication.carriers.shm_carrier import ShmReceiver
from tests.publication.carriers.record_samples import make_record
receiver, seen = ShmReceiver(pathlib.Path(sys.argv[1]), 'engine 0'), []
def consume(record):
    print('reads', flush=True)
    sys.stdin.readline()
    seen.append([bytes(part) for part in record.parts] == list(make_record(0, (0, 1, 255, 256, 70_000)).parts))
receiver.fetch(0, None, consume)
print(*seen, flush=True)
"""


@pytest.mark.parametrize('ending', [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_is_killed_or_stopped_blocks_nobody(path, ending):
    # a stopped reader is waited for once; a dead one never, so that this deadline may not be reached
    sender = ShmSender(path, hold_deadline_s=1000.0 if ending == signal.SIGKILL else 0.02, most_places=2)
    sender.send(make_record(0, SMALL))
    sender.release(9)
    command = [sys.executable, '-c', READER, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout.readline() == 'reads\n'
            reader.send_signal(ending)
            os.waitpid(reader.pid, os.WUNTRACED) if ending == signal.SIGSTOP else reader.wait()
            for version in (1, 2, 3, 4):
                sender.send(make_record(version, SMALL))
            sender.send(make_record(0, SMALL))
            if ending == signal.SIGSTOP:
                reader.send_signal(signal.SIGCONT)
                reader.stdin.write('\n\n')  # it goes on with the parts that were overwritten, and then reads again
                reader.stdin.flush()
                assert reader.stdout.readlines() == ['reads\n', 'False True\n']
                assert reader.wait() == 0
        finally:
            reader.kill()
    sender.close()
