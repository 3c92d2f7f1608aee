"""Sockets for records of weights: addresses, listening sockets, and frames with a deadline each.

A Unix socket has a short name in a private directory that only this user may enter.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import pathlib
import reprlib
import shutil
import socket
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVarTuple

import numpy as np

from areal_jax.config.addresses import address_family, join_address, split_address
from areal_jax.files import decode_json
from areal_jax.publication.manifest import sum_content
from areal_jax.publication.record import Held, Part
from areal_jax.publication.versions import PublicationError

# of a part in one frame; the sender computes the checksum of a frame while the reader checks another
FRAME_BYTES = 1 << 20
_MOST_BYTES = 64 << 20  # of any payload; a header has about 100 bytes a leaf
_LEAVES, _BYTES, _VERSIONS = range(1 << 32), range(1 << 64), range(-(1 << 63), 1 << 63)  # values that fit in a prefix
_MAGIC = b'ajw2'
_FIELDS = struct.Struct('!4sB?2xqIIQ')
_CHECK, _SUMS = struct.Struct('!I'), struct.Struct('!II')
_WORD = np.dtype('<u4')
PREFIX_BYTES = _FIELDS.size + _CHECK.size


class FrameError(PublicationError):
    """Bytes are not a frame, or not the next one; the connection cannot be used any more."""


class Kind(enum.IntEnum):
    HELLO = 1  # reader: its name, and the version that it has acknowledged
    NEXT = 2  # reader: asks for the record after the version it has, on the way to another version
    HEADER = 3  # sender: a record begins, or continues at leaf and offset
    PART = 4  # sender
    DONE = 5  # sender: no record is missing
    ACKNOWLEDGE = 6  # reader: holds a version
    NOTED = 7  # sender: answer to ACKNOWLEDGE
    REFUSED = 8  # sender: why it gives no record


class Prefix(NamedTuple):
    """A frame without its payload."""

    kind: Kind
    version: int = 0
    leaf: int = 0
    offset: int = 0
    n_bytes: int = 0
    sums: bool = True  # whether the checksum is of the payload too


class Piece(NamedTuple):
    """Bytes of a part that go in one frame."""

    leaf: int
    offset: int
    n_bytes: int


def encode_prefix(
    kind: Kind, payload: Part = b'', version: int = 0, leaf: int = 0, offset: int = 0, *, sums: bool = True
) -> bytes:
    """Returns the bytes that precede the payload of a frame on the wire; without `sums` no checksum of the payload."""
    fields = _FIELDS.pack(_MAGIC, kind, sums, version, leaf, len(payload), offset)
    return fields + _CHECK.pack(_checksum(fields, payload if sums else b''))


def _checksum(fields: Part, payload: Part) -> int:
    """crc32 of the fields, the two sums of the payload's words and the bytes after the last word.

    The sums (manifest.py) take a quarter of the time of a crc32 of all bytes.
    """
    whole = len(payload) // _WORD.itemsize
    sums = sum_content(np.frombuffer(payload, _WORD, whole)) if whole else (0, 0)
    return zlib.crc32(payload[whole * _WORD.itemsize :], zlib.crc32(_SUMS.pack(*sums), zlib.crc32(fields)))


def decode_prefix(content: Part) -> Prefix:
    """Decodes a prefix; raises FrameError if no frame begins with these bytes. `require_payload` compares checksums."""
    magic, kind, sums, version, leaf, n_bytes, offset = _FIELDS.unpack_from(content)
    if magic != _MAGIC:
        raise FrameError(f'a frame of weights begins with {magic!r}: the other end speaks another protocol')
    try:
        kind = Kind(kind)
    except ValueError:
        raise FrameError(f'a frame of weights has the kind {kind}, which this version does not know') from None
    if n_bytes > _MOST_BYTES:
        raise FrameError(f'a frame of weights has {n_bytes} bytes, and {_MOST_BYTES} is the most')
    return Prefix(kind, version, leaf, offset, n_bytes, sums)


def require_payload(content: Part, payload: Part) -> None:
    """Raises FrameError if the encoded prefix `content`, or the payload that it has sums of, is not as it was sent."""
    summed = payload if decode_prefix(content).sums else b''
    if (_checksum(content[: _FIELDS.size], summed),) != _CHECK.unpack_from(content, _FIELDS.size):
        raise FrameError('a frame of weights was changed on its way (its checksum differs)')


def cut_pieces(sizes: Sequence[int], leaf: int = 0, offset: int = 0) -> Iterator[Piece]:
    """Yields the frames of a record's parts in order, from `offset` in `leaf` on."""
    for index in range(leaf, len(sizes)):
        start = offset if index == leaf else 0
        for at in range(start, sizes[index], FRAME_BYTES):
            yield Piece(index, at, min(FRAME_BYTES, sizes[index] - at))


class Hello(NamedTuple):
    """A reader's description of itself."""

    name: str
    held: Held | None


class Request(NamedTuple):
    """A reader's request for the next record."""

    version: int
    known: Held | None  # the version that the reader holds, or has consumed on the way
    partial: Held | None = None  # the record of which the reader has the bytes before `leaf` and `offset`
    leaf: int = 0
    offset: int = 0


def encode_hello(hello: Hello) -> bytes:
    return json.dumps({'name': hello.name, 'held': hello.held and list(_pair(hello.held))}).encode()


def decode_hello(payload: Part) -> Hello:
    """The inverse of `encode_hello`; raises FrameError for anything else."""
    found = _read_object(payload)
    name = found.get('name')
    if not isinstance(name, str) or not name or not name.isprintable():
        raise FrameError(f'a reader of weights has the name {name!r}')
    return Hello(name, _read_held(found.get('held')))


def encode_request(request: Request) -> bytes:
    pairs = {key: held and list(_pair(held)) for key, held in (('known', request.known), ('partial', request.partial))}
    return json.dumps({'version': request.version, **pairs, 'leaf': request.leaf, 'offset': request.offset}).encode()


def decode_request(payload: Part) -> Request:
    """The inverse of `encode_request`; raises FrameError for anything else."""
    found = _read_object(payload)
    version, leaf, offset = (_read_number(found, key) for key in ('version', 'leaf', 'offset'))
    if version not in _VERSIONS or leaf not in _LEAVES or offset not in _BYTES:
        raise FrameError(
            f'a reader of weights asks for version {_shorten(version)}, the bytes from leaf {_shorten(leaf)}, offset '
            f'{_shorten(offset)} on'
        )
    return Request(version, _read_held(found.get('known')), _read_held(found.get('partial')), leaf, offset)


def encode_held(held: Held) -> bytes:
    return json.dumps(_pair(held)).encode()


def decode_held(payload: Part) -> Held:
    """The inverse of `encode_held`; raises FrameError for anything else."""
    try:
        held = _read_held(decode_json(bytes(payload)))
    except ValueError as error:
        raise FrameError(f'a reader of weights sent no JSON ({error})') from error
    if held is None:
        raise FrameError('a reader of weights acknowledged nothing')
    return held


def _pair(held: Held) -> tuple[int, str]:
    return held.version, held.manifest_hash


def _read_object(payload: Part) -> Mapping[str, object]:
    try:
        found = decode_json(bytes(payload))
    except ValueError as error:
        raise FrameError(f'a reader of weights sent no JSON ({error})') from error
    if not isinstance(found, dict):
        raise FrameError(f'a reader of weights sent a {type(found).__name__}')
    return found


def _read_number(found: Mapping[str, object], key: str) -> int:
    value = found.get(key)
    if type(value) is not int:
        raise FrameError(f'a reader of weights asks with {key}={_shorten(value)}')
    return value


def _read_held(found: object) -> Held | None:
    if found is None:
        return None
    if isinstance(found, list) and [type(value) for value in found] == [int, str]:
        version, digest = found
        if version in _VERSIONS and digest.isascii():
            return Held(version, digest)
    raise FrameError(f'a reader of weights names the version {_shorten(found)}')


def _shorten(value: object) -> str:
    return reprlib.repr(value)


UNIX, TCP = 'unix:', 'tcp:'
Prove: TypeAlias = Callable[
    [socket.socket], object
]  # proves the key of the run in both directions; distributed/peers.py has two such functions
_MOST_PATH_BYTES = 107  # of sockaddr_un, without the zero at the end
_FOLDER, _NAME, _UNBORN = 'areal_jax-weights-', 's', 'b'
_BACKLOG = 128
_UNBORN_S = 10.0
_LEAST_WAIT_S = 1e-3
_TIMEVAL = struct.Struct('@ll')
_KEEPALIVE = {'TCP_KEEPIDLE': 10, 'TCP_KEEPINTVL': 5, 'TCP_KEEPCNT': 6}  # a host that is gone is noticed in 40 s


class FrameSocket:
    """A connected socket that sends and receives frames, each within `deadline_s`.

    The kernel keeps the deadline, since a poll before each piece of a frame costs as much as the piece. What is sent
    through a Unix socket has a deadline for each piece that the socket holds.
    """

    def __init__(self, own: socket.socket, deadline_s: float):
        self._socket, self._deadline_s = own, max(deadline_s, _LEAST_WAIT_S)
        self._prefix = bytearray(PREFIX_BYTES)
        whole, part = divmod(self._deadline_s, 1.0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            own.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(whole), int(part * 1e6)))

    @property
    def is_local(self) -> bool:
        """Whether bytes stay in this host's memory, where the manifest of a version is enough of a check."""
        return self._socket.family == socket.AF_UNIX

    def send(self, kind: Kind, payload: Part = b'', version: int = 0, leaf: int = 0, offset: int = 0) -> None:
        """Sends a frame; raises OSError if the other end is gone or receives nothing."""
        self.send_encoded(encode_prefix(kind, payload, version, leaf, offset), payload)

    def send_encoded(self, prefix: bytes, payload: Part) -> None:
        """Sends a frame whose prefix is already encoded; raises the same errors as `send`."""
        content, at = memoryview(payload), -len(prefix)
        end_s = time.monotonic() + self._deadline_s
        while at < len(content):
            if at < 0:
                at += self._call(self._socket.sendmsg, [memoryview(prefix)[at:], content])
            else:
                at += self._call(self._socket.send, content[at:])
            if at < len(content):
                _require_time(end_s)

    def receive_prefix(self, *, waits: bool = False) -> Prefix:
        """Receives the next prefix; with `waits`, there is no deadline for its first byte.

        Raises EOFError if the other end has closed, OSError if it is lost or late, FrameError for other bytes.
        """
        view = memoryview(self._prefix)
        while waits:
            with contextlib.suppress(TimeoutError):
                view, waits = view[self._take(view[:1]) :], False
        self._read(view)
        return decode_prefix(self._prefix)

    def receive_payload(self, prefix: Prefix, target: memoryview | None = None) -> memoryview:
        """Receives the payload of the last received prefix, into `target` if given; raises the same errors."""
        payload = memoryview(bytearray(prefix.n_bytes)) if target is None else target
        self._read(payload)
        require_payload(self._prefix, payload)
        return payload

    def shut(self) -> None:
        """Ends the connection, also for a thread that waits on it; `close` must follow."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self._socket.close()

    def _read(self, view: memoryview) -> None:
        end_s = time.monotonic() + self._deadline_s
        while view:
            view = view[self._take(view) :]
            if view:
                _require_time(end_s)

    def _take(self, view: memoryview) -> int:
        """Receives all of the view, or less if the deadline or the connection ends before."""
        taken = self._call(self._socket.recv_into, view, 0, socket.MSG_WAITALL)
        if not taken:
            raise EOFError('the connection was closed')
        return taken

    def _call(self, transfer: Callable[[*_Args], int], *args: *_Args) -> int:
        if self._socket.gettimeout() is not None:
            self._socket.settimeout(None)  # else Python polls
        try:
            return transfer(*args)
        except BlockingIOError:
            raise TimeoutError(_LATE) from None


_LATE = 'the other end took too long'
_Args = TypeVarTuple('_Args')


def _require_time(end_s: float) -> None:
    if time.monotonic() > end_s:
        raise TimeoutError(_LATE)


def listen_unix(directory: pathlib.Path | None = None) -> tuple[socket.socket, pathlib.Path]:
    """Opens a listening Unix socket in a new private directory below `directory`; returns it and its path.

    None = the system's directory. Raises PublicationError if the path does not fit into the address of a socket.
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
    bound.rename(path)  # only now: `sweep_unix` of another process takes a socket without a listener for dead
    return own, path


def remove_unix(path: pathlib.Path) -> None:
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def sweep_unix(directory: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Removes this user's sockets that no process listens at any more; returns their paths.

    A directory without a socket belongs to a process that makes or removes it; after `_UNBORN_S` that process is dead.
    """
    parent, removed = pathlib.Path(tempfile.gettempdir()) if directory is None else directory, list[pathlib.Path]()
    for folder in sorted(parent.glob(f'{_FOLDER}*')):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or _is_listening(folder / _NAME):
                continue
            shutil.rmtree(folder)
            removed.append(folder / _NAME)
    return removed


def _is_listening(path: pathlib.Path) -> bool:
    """Whether a process listens at the socket; also True if the directory has had no socket for a short time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_LEAST_WAIT_S)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return False
        except FileNotFoundError:
            return time.time() - path.parent.stat().st_mtime < _UNBORN_S
        except OSError:
            return True
    return True


def listen_tcp(interface: str) -> tuple[socket.socket, str]:
    """Listens at 'host' or 'host:port' of this machine; returns the socket and its 'host:port'.

    Raises PublicationError.
    """
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
    """Connects to 'unix:PATH' or 'tcp:HOST:PORT'; raises OSError."""
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
    """Sets TCP to send small frames at once and to notice a lost host; does nothing for a Unix socket."""
    if own.family == socket.AF_UNIX:
        return
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
