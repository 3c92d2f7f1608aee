"""Connections between the roles of a run: finding each other, listening, connecting, and the check that both fit.

Both ends must have the key of the run; then each names its role, code version and config. Needs no jax.

The learner processes find each other through WORKDIR/registry/learner.json. Every joint start of them is an attempt.
Each process registers. Process 0 waits until all are alive, then invites exactly these processes, by their
incarnations, so no process of an earlier attempt joins, whichever executor starts them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import queue
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from areal_jax import files
from areal_jax.config.addresses import address_family, find_free_port, join_address
from areal_jax.distributed.messages import CodecError, decode, encode
from areal_jax.distributed.peers import (
    Connection,
    WireError,
    WrongKeyError,
    prepare_socket,
    prove_as_client,
    prove_as_server,
    send_all,
)
from areal_jax.errors import LostPeerError, UserError
from areal_jax.installation import read_code_version
from areal_jax.registry import REGISTRY, Entry, Presence, await_living

FILE = 'learner.json'  # in the registry
LOOK_S, REPORT_S = 0.25, 10.0  # between two reads of the registry, between two reports while waiting
_FIX = 'start all learner processes of the run, with one --workdir that they share'


def learner_name(index: int) -> str:
    return f'learner-{index}'


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of all learner processes."""

    number: int  # from 1
    coordinator: str  # 'host:port' of jax.distributed, in process 0
    members: tuple[str, ...]  # Entry.holder of each process, by index


def read_attempt(workdir: pathlib.Path) -> Attempt | None:
    """Reads the newest attempt; None if there is no record, or no complete one."""
    with contextlib.suppress(files.FileError, KeyError, TypeError, ValueError):
        fields = files.read_json(workdir / REGISTRY / FILE)
        return Attempt(int(fields['attempt']), str(fields['coordinator']), tuple(map(str, fields['members'])))
    return None


def lead_attempt(workdir: pathlib.Path, own: Entry, count: int, host: str, deadline_s: float) -> Attempt:
    """Invites the other processes as soon as all are alive; for process 0.

    Args:
      own: the entry of this process.
      host: the address at which the other processes reach this machine.

    Raises LostPeerError that names the processes that have not registered within the deadline.
    """
    before = read_attempt(workdir)
    number = 1 if before is None else before.number + 1
    names = [learner_name(index) for index in range(1, count)]
    what = f'the learner processes of attempt {number}'
    living = await_living(workdir, names, deadline_s, what=what, fix=_FIX)
    members = (own.holder, *(living[name].holder for name in names))
    attempt = Attempt(number, join_address(host, find_free_port(host)), members)
    record = {'attempt': number, 'coordinator': attempt.coordinator, 'count': count, 'members': list(members)}
    files.write_json(workdir / REGISTRY / FILE, record)
    return attempt


def join_attempt(
    workdir: pathlib.Path,
    own: Entry,
    index: int,
    deadline_s: float,
    *,
    say: Callable[[str], None] = lambda sentence: print(sentence, flush=True),
) -> Attempt:
    """Waits for the invitation of process 0; for every other process.

    Raises LostPeerError if it does not come within the deadline.
    """
    presence, began = Presence(workdir), time.monotonic()
    before, reported = read_attempt(workdir), began
    whom = f'learner 0 of attempt {1 if before is None else before.number + 1}'
    while True:
        attempt = read_attempt(workdir)
        if attempt is not None and attempt.members[index : index + 1] == (own.holder,):
            return attempt
        lives = learner_name(0) in presence.look()
        state = 'which is alive and waits for others' if lives else 'which is not alive'
        waited_s = time.monotonic() - began
        if waited_s >= deadline_s:
            raise LostPeerError(f'waited {waited_s:.0f} s for {whom}, {state}: {_FIX}')
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            say(f'waiting for {whom}, {state}, {waited_s:.0f} s')
        time.sleep(LOOK_S)


_MODE = 0o600
_KEY_BYTES = 32
BEING_WRITTEN_S = 5.0  # how long another process may still be writing a file that is too short


class KeyFileError(UserError):
    """A key file is readable by other users, or invalid; the message names the file and the fix."""


def key_path(workdir: pathlib.Path) -> pathlib.Path:
    return workdir.absolute() / 'registry' / 'key'


def load_key(path: pathlib.Path) -> bytes:
    """Loads the key of the run; the first process makes it.

    Raises KeyFileError for a file of another owner, with another mode than 600, or with other content.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another process was first
            _make(path)
    return _read(path)


def _make(path: pathlib.Path) -> None:
    """Writes a new key at the path, whole or not at all; raises FileExistsError if there is a key."""
    content = f'{secrets.token_hex(_KEY_BYTES)}\n'.encode()
    partial = path.with_name(f'.{path.name}.{secrets.token_hex(8)}.partial')
    _write_new(partial, content)
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links; readers do not accept a key that is too short
        _write_new(path, content)
    finally:
        partial.unlink()
    files.sync(path.parent)


def _write_new(path: pathlib.Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    with os.fdopen(descriptor, 'wb') as file:
        os.fchmod(descriptor, _MODE)  # whatever the umask is
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _read(path: pathlib.Path) -> bytes:
    end = time.monotonic() + BEING_WRITTEN_S
    while True:
        content = _read_private(path)
        if len(content) > 2 * _KEY_BYTES or time.monotonic() > end:
            break
        time.sleep(0.05)
    try:
        key = bytes.fromhex(content.decode())
    except ValueError:
        key = b''
    if len(key) != _KEY_BYTES:
        raise KeyFileError(f'{path} holds no key of {_KEY_BYTES} bytes: remove it and start all roles of the run again')
    return key


def _read_private(path: pathlib.Path) -> bytes:
    with path.open('rb') as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            raise KeyFileError(
                f'{path} belongs to user {status.st_uid}, and this process to user {os.geteuid()}: start all roles of '
                'a run as one user'
            )
        if (mode := stat.S_IMODE(status.st_mode)) != _MODE:
            raise KeyFileError(
                f'{path} has mode {mode:o}, so that others may know the key: remove it, or chmod {_MODE:o} if nobody '
                'else can have read it'
            )
        return file.read()


_RETRY_S = 0.1
_BACKLOG = 128
_SHOWN = 12  # characters of a digest in messages
_HELLO_S = 30.0
GUEST_S = 30.0  # for a whole handshake, however slowly the other end sends
MOST_GUESTS = 256  # handshakes under way


class Hello(NamedTuple):
    """A process's description of itself when it connects."""

    role: str  # 'learner 1'
    config: str  # `digest_config` of its config
    code: str = read_code_version()

    def __str__(self) -> str:
        return f'{self.role} (areal_jax {self.code}, config {self.config[:_SHOWN]})'


class Met(NamedTuple):
    """A connection, and the hello of its other end."""

    hello: Hello
    connection: Connection


def digest_config(fields: Mapping[str, object]) -> str:
    """sha256, in hex, of a resolved config as a JSON-able nested dict."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class _Guests:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_s: dict[socket.socket, float] = {}

    def __len__(self) -> int:
        return len(self._began_s)

    def add(self, guest: socket.socket) -> None:
        with self._lock:
            self._began_s[guest] = time.monotonic()

    def discard(self, guest: socket.socket) -> None:
        with self._lock:
            self._began_s.pop(guest, None)

    def turn_away(self, most: int) -> None:
        """Ends handshakes that last too long, and the oldest of more than `most`; their threads close the sockets."""
        with self._lock:
            now_s, surplus = time.monotonic(), len(self._began_s) - most
            for place, (guest, began_s) in enumerate(self._began_s.items()):
                if place < surplus or now_s - began_s > GUEST_S:
                    with contextlib.suppress(OSError):  # it is gone already
                        guest.shutdown(socket.SHUT_RDWR)


class Listener:
    """Accepts connections from other roles of the run at `host`, an address of this machine. A context manager.

    Each handshake has its own thread, so that a process outside the run, which is refused, delays no role.

    Raises UserError if the port is in use, or if the host is no address of this machine.
    """

    def __init__(self, host: str, port: int, key: bytes, hello: Hello):
        self._key, self._hello = key, hello
        self._met: queue.Queue[Met | WireError] = queue.Queue()
        self._refused: list[str] = []
        self._guests, self._is_closed = _Guests(), False
        self._socket = socket.socket(address_family(host), socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise UserError(_describe_bind(host, port, error)) from error
        self.host, self.port = host, int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name='listener', daemon=True).start()

    @property
    def address(self) -> str:
        """'host:port', for `connect`."""
        return join_address(self.host, self.port)

    @property
    def handshakes(self) -> int:
        """The number of handshakes under way: connections that may or may not be of the run."""
        return len(self._guests)

    def accept(self, deadline_s: float) -> Met:
        """Waits for the next role of this run that connects.

        Raises LostPeerError if none comes in time, and WireError for a role of another config or code version.
        """
        try:
            met = self._met.get(timeout=max(deadline_s, 0.0))
        except queue.Empty:
            turned = f'; {len(self._refused)} turned away, the last: {self._refused[-1]}' if self._refused else ''
            raise LostPeerError(
                f'nobody of the run connected to {self._hello.role} at {self.address} for {deadline_s:g} s{turned}: '
                'start all roles of the run, and let them reach this address'
            ) from None
        if isinstance(met, WireError):
            raise met
        return met

    def connect(self, address: str, deadline_s: float) -> Met:
        """Connects to another role that listens; see the function of this name."""
        return connect(address, self._key, self._hello, deadline_s)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                own, address = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                self._make_room()
                continue
            self._guests.add(own)
            try:
                threading.Thread(target=self._meet, args=(own, address[0]), daemon=True).start()
            except RuntimeError:
                self._guests.discard(own)
                own.close()
                self._make_room()
            self._guests.turn_away(MOST_GUESTS)

    def _make_room(self) -> None:
        """Ends half of the handshakes, which hold all file descriptors or threads that this process may have."""
        self._guests.turn_away(len(self._guests) // 2)
        time.sleep(_RETRY_S)

    def _meet(self, own: socket.socket, host: str) -> None:
        try:
            prepare_socket(own)
            connection = prove_as_server(own, self._key)
            met = _exchange(own, connection, self._hello)
        except _OtherRunError as error:
            self._met.put(error)  # the other end has the key, so this is the user's mistake: both ends report it
            own.close()
        except (WireError, EOFError, OSError) as error:
            self._refused.append(f'{host}: {error}')
            own.close()
        else:
            self._met.put(met)
        finally:
            self._guests.discard(own)


def connect(address: str, key: bytes, hello: Hello, deadline_s: float) -> Met:
    """Connects to the role that listens at 'host:port'.

    Raises LostPeerError if no answer comes within `deadline_s`, WrongKeyError if the peer has another key, and
    WireError if it has another config or code version.
    """
    host, _, port = address.rpartition(':')
    own = _open(host.strip('[]'), int(port), hello, deadline_s)
    try:
        prepare_socket(own)
        return _exchange(own, prove_as_client(own, key), hello)
    except WrongKeyError:
        own.close()
        raise WrongKeyError(
            f'who listens at {address} does not have the key of {hello.role}: start all roles of a run with one '
            '--workdir, which they share (the key is in WORKDIR/registry/key)'
        ) from None
    except _OtherRunError:
        own.close()
        raise
    except WireError as error:
        own.close()
        raise WireError(f'{address} is not a role of this run: {error}') from None
    except (EOFError, OSError) as error:
        own.close()
        raise LostPeerError(
            f'{hello.role} could not connect to {address} ({error}): is that role still alive?'
        ) from error


class _OtherRunError(WireError):
    """An authenticated role has another config or code version."""


def _open(host: str, port: int, hello: Hello, deadline_s: float) -> socket.socket:
    end = time.monotonic() + deadline_s
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(end - time.monotonic(), _RETRY_S))
        except OSError as error:
            if time.monotonic() + _RETRY_S > end:
                raise LostPeerError(
                    f'{hello.role} could not connect to {host}:{port} within {deadline_s:g} s ({error}): start the '
                    'role that listens there, and let this machine reach it'
                ) from error
        time.sleep(_RETRY_S)


def _exchange(own: socket.socket, connection: Connection, hello: Hello) -> Met:
    """Sends this process's hello and receives the other end's; raises _OtherRunError if they do not match."""
    if failed := send_all([connection], [encode(tuple(hello))], _HELLO_S):
        raise OSError(f'it {failed[0]}')
    try:
        role, config, code = decode(connection.receive())
        if not all(isinstance(text, str) for text in (role, config, code)):
            raise TypeError('a hello is three texts')
    except (CodecError, ValueError, TypeError):
        raise _OtherRunError(f'{hello} was answered by a role of another code version: start all of one') from None
    other = Hello(role, config, code)
    if (other.code, other.config) != (hello.code, hello.config):
        what = 'code version' if other.code != hello.code else 'config'
        raise _OtherRunError(
            f'{hello} met a role of another {what}, {other}: start all roles of a run from one installation and with '
            'one config'
        )
    own.settimeout(None)
    return Met(other, connection)


def _describe_bind(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f'port {port} of {host} is in use by another process: stop it, or choose another port (0 = any free one)'
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f'--host={host} is no address of this machine ({error.strerror}): name one of its interfaces'
    return f'{host}:{port} cannot be listened at ({error.strerror}): choose another host or port'
