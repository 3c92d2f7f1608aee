"""Roles of one run meet; everybody else is turned away in one sentence that names both sides, and holds nobody up. The
key of a run is made once, whoever is first, and read from a file that is private only."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import threading
import time

import pytest

from areal_jax.distributed import handshake, peers
from areal_jax.distributed.handshake import Hello, KeyFileError, Listener, connect, digest_config, key_path, load_key
from areal_jax.distributed.peers import WireError, WrongKeyError, cut_parts, send_all
from areal_jax.errors import LostPeerError, UserError

_KEY, _CONFIG = bytes(range(32)), digest_config({'run': {'steps': 3}})
_LEARNER, _CONTROLLER = Hello('learner 1', _CONFIG), Hello('controller', _CONFIG)


@pytest.fixture
def listener():
    with Listener('127.0.0.1', 0, _KEY, _LEARNER) as listening:
        yield listening


def test_two_roles_of_a_run_meet_and_speak(listener):
    theirs = connect(listener.address, _KEY, _CONTROLLER, 5)
    ours = listener.accept(5)
    assert (ours.hello, theirs.hello) == (_CONTROLLER, _LEARNER)
    for one, other in ((ours, theirs), (theirs, ours)):
        assert send_all([one.connection], [b'hello'], 5) == {}
        assert other.connection.receive() == b'hello'


def test_each_connection_has_keys_of_its_own(listener):
    first, second = (connect(listener.address, _KEY, _CONTROLLER, 5).connection for _ in range(2))
    accepted = [listener.accept(5).connection for _ in range(2)]
    for senders, receivers in (((first, second), accepted), (accepted, (first, second))):
        assert send_all(senders, [b'hello'], 5) == {}
        assert [one.receive() for one in receivers] == [b'hello'] * 2
    part = next(cut_parts([b'hello'], 5))
    assert len({one.seal(part)[-32:] for one in (first, second, *accepted)}) == 4  # the tags of one part


def test_who_has_another_key_is_turned_away_and_told(listener):
    with pytest.raises(
        WrongKeyError, match=rf'who listens at {listener.address} does not have the key of controller: '
    ):
        connect(listener.address, bytes(32), _CONTROLLER, 5)
    message = (
        r'nobody of the run connected to learner 1 at .*; 1 turned away, the last: 127\.0\.0\.1: it has another key'
    )
    with pytest.raises(LostPeerError, match=message):
        listener.accept(0.3)


def test_who_only_repeats_what_it_has_seen_is_turned_away(listener):
    """A client without the key, which sends the server's own proof back."""
    with socket.create_connection((listener.host, listener.port), timeout=5) as own:
        own.sendall(peers.MAGIC + bytes(32))
        greeting = own.recv(16 + 32 + 32, socket.MSG_WAITALL)
        own.sendall(greeting[-32:])
        assert own.recv(1) == b''
    with pytest.raises(LostPeerError, match='it has another key'):
        listener.accept(0.2)


@pytest.mark.parametrize(
    ('hello', 'what'),
    [(Hello('controller', 'f' * 64), 'config'), (Hello('controller', _CONFIG, '9.9'), 'code version')],
)
def test_a_role_of_another_config_or_code_version_is_named_by_both(listener, hello, what):
    with pytest.raises(WireError) as theirs:
        connect(listener.address, _KEY, hello, 5)
    with pytest.raises(WireError) as ours:
        listener.accept(5)
    assert str(theirs.value).startswith(f'{hello} met a role of another {what}, {_LEARNER}: start all roles')
    assert str(ours.value).startswith(f'{_LEARNER} met a role of another {what}, {hello}: start all roles')
    assert 'areal_jax 9.9' in str(Hello('controller', _CONFIG, '9.9'))


def test_a_stranger_that_keeps_silent_holds_nobody_up(listener):
    began = time.monotonic()
    with contextlib.ExitStack() as open_sockets:
        for _ in range(4):
            open_sockets.enter_context(socket.create_connection((listener.host, listener.port)))
        connect(listener.address, _KEY, _CONTROLLER, 5)
        assert listener.accept(5).hello == _CONTROLLER
    assert time.monotonic() - began < 2


def is_closed(stranger):
    """Whether the other end closes the connection within seconds."""
    stranger.settimeout(5)
    return stranger.recv(1) == b''


def test_the_oldest_of_too_many_strangers_is_turned_away(listener, monkeypatch):
    monkeypatch.setattr(handshake, 'MOST_GUESTS', 2)
    with contextlib.ExitStack() as open_sockets:
        strangers = [
            open_sockets.enter_context(socket.create_connection((listener.host, listener.port))) for _ in range(3)
        ]
        assert is_closed(strangers[0])
        connect(listener.address, _KEY, _CONTROLLER, 5)
        assert listener.accept(5).hello == _CONTROLLER


def test_a_stranger_that_sends_slowly_is_turned_away_when_the_next_one_comes(listener, monkeypatch):
    monkeypatch.setattr(handshake, 'GUEST_S', 0.1)
    with socket.create_connection((listener.host, listener.port)) as stranger:
        for byte in b'areal':  # each one in time
            stranger.send(bytes([byte]))
            time.sleep(0.05)
        connect(listener.address, _KEY, _CONTROLLER, 5)
        assert is_closed(stranger)


def test_strangers_that_hold_all_files_of_the_process_are_turned_away(listener):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as open_sockets:
        open_sockets.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        address = listener.host, listener.port
        strangers = [open_sockets.enter_context(socket.create_connection(address)) for _ in range(4)]
        late = open_sockets.enter_context(socket.socket())
        while listener.handshakes < 4:
            time.sleep(0.01)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))  # no further file
        late.connect(address)
        assert is_closed(strangers[0])
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        connect(listener.address, _KEY, _CONTROLLER, 5)
        assert listener.accept(5).hello == _CONTROLLER


def test_a_stranger_of_another_protocol_is_turned_away(listener):
    with socket.create_connection((listener.host, listener.port), timeout=5) as own:
        own.sendall(b'GET / HTTP/1.1\r\nHost: x\r\n\r\n')
        with contextlib.suppress(ConnectionResetError):
            assert own.recv(1) == b''
    with pytest.raises(LostPeerError, match=r'turned away, the last: 127\.0\.0\.1: it speaks another protocol'):
        listener.accept(0.2)


def test_a_role_that_connects_to_another_service_says_so():
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]

        def answer():
            own, _ = server.accept()
            own.sendall(b'HTTP/1.1 400 Bad Request\r\n\r\n')
            own.recv(64)
            own.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(
            WireError, match=rf'127\.0\.0\.1:{port} is not a role of this run: it speaks another protocol'
        ):
            connect(f'127.0.0.1:{port}', _KEY, _CONTROLLER, 5)


def test_a_port_in_use_and_a_foreign_address_are_one_sentence(listener):
    with pytest.raises(UserError, match=rf'port {listener.port} of 127\.0\.0\.1 is in use by another process'):
        Listener('127.0.0.1', listener.port, _KEY, _LEARNER)
    with pytest.raises(UserError, match=r'--host=192\.0\.2\.1 is no address of this machine'):
        Listener('192.0.2.1', 0, _KEY, _LEARNER)


def test_nobody_who_listens_and_nobody_who_comes_are_one_sentence(listener):
    with socket.create_server(('127.0.0.1', 0)) as server:
        free = server.getsockname()[1]
    with pytest.raises(LostPeerError, match=rf'controller could not connect to 127\.0\.0\.1:{free} within 0\.3 s'):
        connect(f'127.0.0.1:{free}', _KEY, _CONTROLLER, 0.3)
    with pytest.raises(
        LostPeerError, match=r'nobody of the run connected to learner 1 at 127\.0\.0\.1:\d+ for 0\.1 s: '
    ):
        listener.accept(0.1)


def test_only_the_named_interface_is_listened_at():
    with Listener('127.0.0.2', 0, _KEY, _LEARNER) as listening, pytest.raises(LostPeerError):
        connect(f'127.0.0.1:{listening.port}', _KEY, _CONTROLLER, 0.1)


def test_the_digest_of_a_config_does_not_depend_on_the_order_of_fields():
    assert digest_config({'a': {'x': 1, 'y': None}, 'b': 2}) == digest_config({'b': 2, 'a': {'y': None, 'x': 1}})
    assert digest_config({'a': 1}) != digest_config({'a': 2})


def test_a_guest_for_whom_there_is_no_thread_is_turned_away(listener, monkeypatch):
    start = threading.Thread.start
    refused = []

    def refuse_first(thread):
        if 'meet' in thread.name and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, 'start', refuse_first)
    with socket.create_connection((listener.host, listener.port)) as stranger:
        assert is_closed(stranger)
        assert listener.handshakes == 0
    connect(listener.address, _KEY, _CONTROLLER, 5)
    assert listener.accept(5).hello == _CONTROLLER
    assert len(refused) == 1


def test_all_who_come_at_the_same_time_have_one_key_that_nobody_else_can_read(tmp_path):
    path, keys, start = key_path(tmp_path), [], threading.Barrier(8)

    def load():
        start.wait(5)
        keys.append(load_key(path))

    threads = [threading.Thread(target=load) for _ in range(8)]
    mask = os.umask(0)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    finally:
        os.umask(mask)
    assert len(keys) == 8
    assert len(set(keys)) == 1
    assert len(keys[0]) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ['key']
    assert path == tmp_path / 'registry' / 'key'


def test_a_key_is_made_where_files_cannot_be_linked(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, 'Operation not permitted')

    monkeypatch.setattr(os, 'link', refuse)
    assert load_key(key_path(tmp_path)) == load_key(key_path(tmp_path))
    assert [entry.name for entry in (tmp_path / 'registry').iterdir()] == ['key']


def test_another_run_has_another_key(tmp_path):
    assert load_key(key_path(tmp_path / 'one')) != load_key(key_path(tmp_path / 'other'))


@pytest.mark.parametrize('mode', [0o644, 0o660, 0o400])
def test_a_key_that_others_could_read_is_refused(tmp_path, mode):
    path = key_path(tmp_path)
    load_key(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=rf'{path} has mode {mode:o}, .*: remove it, or chmod 600'):
        load_key(path)


def test_a_key_of_another_user_is_refused(tmp_path, monkeypatch):
    path = key_path(tmp_path)
    load_key(path)
    monkeypatch.setattr(os, 'geteuid', lambda: 4242)
    with pytest.raises(KeyFileError, match=r'belongs to user \d+, and this process to user 4242: .* as one user'):
        load_key(path)


@pytest.mark.parametrize('content', [b'short', b'x' * 70, b'ab' * 33])
def test_a_file_that_holds_no_key_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.setattr('areal_jax.distributed.handshake.BEING_WRITTEN_S', 0.1)
    path = key_path(tmp_path)
    load_key(path)
    path.write_bytes(content)
    with pytest.raises(KeyFileError, match=r'holds no key of 32 bytes: remove it'):
        load_key(path)
