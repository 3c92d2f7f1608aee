"""Sockets for records of weights: addresses, who listens at them, and frames with a deadline each.

A Unix socket is in a directory of its own that only this user may enter, with a short name.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from typing import TypeAlias

from areal_jax.config.addresses import address_family, join_address, split_address
from areal_jax.publication.carriers.stream_socket import (
    PREFIX_BYTES,
    Kind,
    Prefix,
    decode_prefix,
    encode_prefix,
    require_payload,
)
from areal_jax.publication.record import Part
from areal_jax.publication.versions import PublicationError

UNIX, TCP = 'unix:', 'tcp:'
Prove: TypeAlias = Callable[
    [socket.socket], object
]  # proves the key of the run both ways; distributed/peers.py has two
_MOST_PATH_BYTES = 107  # of sockaddr_un, without the zero at the end
_FOLDER, _NAME, _UNBORN = 'areal_jax-weights-', 's', 'b'
_BACKLOG = 128
_LEAST_WAIT_S = 1e-3
_KEEPALIVE = {'TCP_KEEPIDLE': 10, 'TCP_KEEPINTVL': 5, 'TCP_KEEPCNT': 6}  # a host that is gone is noticed in 40 s


class FrameSocket:
    """A connected socket that sends and receives frames, each within `deadline_s`."""

    def __init__(self, own: socket.socket, deadline_s: float):
        self._socket, self._deadline_s = own, deadline_s
        self._prefix = bytearray(PREFIX_BYTES)

    def send(self, kind: Kind, payload: Part = b'', version: int = 0, leaf: int = 0, offset: int = 0) -> None:
        """Raises OSError where the other end is gone or takes nothing in."""
        self.send_encoded(encode_prefix(kind, payload, version, leaf, offset), payload)

    def send_encoded(self, prefix: bytes, payload: Part) -> None:
        """The same of a frame whose prefix is known."""
        self._socket.settimeout(self._deadline_s)  # of sendall, a bound on the whole call
        self._socket.sendall(prefix)
        if len(payload):
            self._socket.sendall(payload)

    def receive_prefix(self, *, waits: bool = False) -> Prefix:
        """The next prefix; `waits`: its first byte may take as long as it likes.

        Raises EOFError where the other end has closed, OSError where it is lost or late, FrameError for other bytes.
        """
        view = memoryview(self._prefix)
        if waits:
            self._socket.settimeout(None)
            view = view[_require_bytes(self._socket.recv_into(view)) :]
        self._read(view)
        return decode_prefix(self._prefix)

    def receive_payload(self, prefix: Prefix, target: memoryview | None = None) -> memoryview:
        """The payload of the prefix that was received last, in `target` if it is given; raises the same errors."""
        payload = memoryview(bytearray(prefix.n_bytes)) if target is None else target
        self._read(payload)
        require_payload(self._prefix, payload)
        return payload

    def shut(self) -> None:
        """Ends the connection, also for a thread that waits in it; `close` must follow."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self._socket.close()

    def _read(self, view: memoryview) -> None:
        end_s = time.monotonic() + self._deadline_s
        while view:
            self._socket.settimeout(max(end_s - time.monotonic(), _LEAST_WAIT_S))
            view = view[_require_bytes(self._socket.recv_into(view)) :]


def _require_bytes(taken: int) -> int:
    if not taken:
        raise EOFError('the connection was closed')
    return taken


def listen_unix(directory: pathlib.Path | None = None) -> tuple[socket.socket, pathlib.Path]:
    """A Unix socket that listens, and its path in a new private directory below `directory`, None = the system's.

    Raises PublicationError where the path does not fit into the address of a socket.
    """
    parent = pathlib.Path(tempfile.gettempdir()) if directory is None else directory
    folder = pathlib.Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))  # mode 700
    path = folder / _NAME
    if (size := len(os.fsencode(path))) > _MOST_PATH_BYTES:
        folder.rmdir()
        raise PublicationError(
            f'{path} has {size} bytes, and the address of a Unix socket {_MOST_PATH_BYTES} at most: set TMPDIR to a '
            'shorter directory'
        )
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound = folder / _UNBORN
    own.bind(os.fspath(bound))
    own.listen(_BACKLOG)
    bound.rename(path)  # `sweep_unix` of another process takes a socket for dead at which nobody listens yet
    return own, path


def remove_unix(path: pathlib.Path) -> None:
    """The socket and its directory."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def sweep_unix(directory: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Removes the sockets of this user at which nobody listens any more; returns their paths."""
    parent, removed = pathlib.Path(tempfile.gettempdir()) if directory is None else directory, list[pathlib.Path]()
    for folder in sorted(parent.glob(f'{_FOLDER}*')):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or _is_listening(folder / _NAME):
                continue
            shutil.rmtree(folder)
            removed.append(folder / _NAME)
    return removed


def _is_listening(path: pathlib.Path) -> bool:
    """Also True for a directory whose socket is not there yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_LEAST_WAIT_S)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def listen_tcp(interface: str) -> tuple[socket.socket, str]:
    """A socket that listens at 'host' or 'host:port' of this machine, and its 'host:port'; raises PublicationError."""
    if (where := split_address(interface)) is None:
        raise PublicationError(f'publication.listen={interface!r} must be a host or host:port of this machine')
    host, port = where
    own = socket.socket(address_family(host), socket.SOCK_STREAM)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((host, port))
        own.listen(_BACKLOG)
    except OSError as error:
        own.close()
        raise PublicationError(
            f'publication.listen={join_address(host, port)} cannot be listened at ({error.strerror}): name an '
            'interface of this machine and a free port, or no port'
        ) from error
    return own, join_address(host, int(own.getsockname()[1]))


def connect(address: str, deadline_s: float) -> socket.socket:
    """A socket connected to 'unix:PATH' or 'tcp:HOST:PORT'; raises OSError."""
    if address.startswith(UNIX):
        own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        own.settimeout(deadline_s)
        try:
            own.connect(address.removeprefix(UNIX))
        except OSError:
            own.close()
            raise
        return own
    host, _, port = address.removeprefix(TCP).rpartition(':')
    own = socket.create_connection((host.strip('[]'), int(port)), timeout=deadline_s)
    prepare(own)
    return own


def prepare(own: socket.socket) -> None:
    """Over TCP small frames leave at once, and a host that is gone is noticed; nothing for a Unix socket."""
    if own.family == socket.AF_UNIX:
        return
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
