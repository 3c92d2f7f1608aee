"""Receives records of weights over a socket; a broken connection is opened again, and the record continues.

stream_sender.py is the other end, stream_socket.py has their messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from areal_jax.errors import UserError
from areal_jax.publication.carriers.shard_receiver import ShardReceiver
from areal_jax.publication.carriers.shm_carrier import SCHEME as SHM
from areal_jax.publication.carriers.shm_carrier import ShmReceiver
from areal_jax.publication.carriers.stream_socket import (
    TCP,
    UNIX,
    FrameError,
    FrameSocket,
    Hello,
    Kind,
    Prefix,
    Prove,
    Request,
    connect,
    cut_pieces,
    encode_held,
    encode_hello,
    encode_request,
)
from areal_jax.publication.record import Held, Record, RecordHeader, RecordReceiver, decode_header
from areal_jax.publication.versions import SHARDS, PublicationError

_RETRY_S = 0.05
_LINE_BYTES = 64
_GONE = (ConnectionRefusedError, FileNotFoundError)  # no sender, and none will come: addresses are not reused

Result = TypeVar('Result')


class _RefusedError(Exception):
    """The sender answered that it does not have the version."""


class StreamReceiver:
    """record.RecordReceiver over a socket. Calls come from one thread.

    Its parts are views of one buffer, which the next record overwrites.

    Args:
      address: 'unix:PATH' or 'tcp:HOST:PORT'.
      name: of the reader, for `RecordSender.held`; unique among the readers of a sender.
      prove: proves the key of the run as the side that connects; raises UserError, OSError or EOFError.
      frame_deadline_s: for the sender to answer, and for each frame; when it is missed, the connection is opened again.
      record_deadline_s: for a whole record, reconnections included.
    """

    def __init__(
        self,
        address: str,
        name: str,
        prove: Prove,
        *,
        frame_deadline_s: float = 30.0,
        record_deadline_s: float = 600.0,
    ):
        self._address, self._hello, self._prove = address, Hello(name, None), prove
        self._frame_deadline_s, self._record_deadline_s = frame_deadline_s, record_deadline_s
        self._connection: FrameSocket | None = None
        self._partial: _PartialRecord | None = None
        self._buffer = np.empty(0, np.uint8)  # numpy asks the kernel for huge pages

    def fetch(self, version: int, held: Held | None, consume: Callable[[Record], None]) -> None:
        """See RecordReceiver; the deadline does not include the time of `consume`."""
        known = held
        while record := self._repeat(
            lambda: self._next(version, known), f'version {version} was not received', self._record_deadline_s
        ):
            try:
                consume(record)
            finally:
                for part in record.parts:  # kept views raise from now on, instead of showing the next record
                    if isinstance(part, memoryview):
                        with contextlib.suppress(BufferError):  # an array still refers to it
                            part.release()
            known = Held(record.header.version, record.header.manifest_hash)
            if known.version == version:
                return

    def acknowledge(self, held: Held) -> None:
        """See RecordReceiver; raises PublicationError if the sender cannot be reached."""

        def tell() -> None:
            connection = self._connect()
            connection.send(Kind.ACKNOWLEDGE, encode_held(held))
            _require_kind(connection.receive_prefix(), Kind.NOTED)

        # the engine has the version already, so it does not wait for a silent sender
        self._repeat(tell, f'version {held.version} was not acknowledged', self._frame_deadline_s)
        self._hello = self._hello._replace(held=held)  # sent first on a new connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _repeat(self, action: Callable[[], Result], failed: str, deadline_s: float) -> Result:
        """Runs `action`, and runs it again over a new connection if the connection breaks, until the deadline.

        Raises PublicationError, whose message begins with `failed`.
        """
        end_s = time.monotonic() + deadline_s
        while True:
            try:
                return action()
            except _RefusedError as error:
                raise PublicationError(f'{failed}: {error}') from None
            except _GONE as error:
                raise PublicationError(
                    f'{failed}: nobody listens at {self._address} ({error.strerror}): is the learner alive, and on '
                    'a host that reaches this one?'
                ) from error
            except (FrameError, EOFError, OSError) as error:
                self.close()
                if time.monotonic() + _RETRY_S > end_s:
                    raise PublicationError(
                        f'{failed} from {self._address} within {deadline_s:g} s ({error}): look '
                        'at the network between learner and engine, or raise publication.record_deadline_s'
                    ) from error
            except BaseException:
                self.close()
                raise
            time.sleep(_RETRY_S)

    def _connect(self) -> FrameSocket:
        if self._connection is None:
            own = connect(self._address, self._frame_deadline_s)
            connection = FrameSocket(own, self._frame_deadline_s)
            try:
                self._prove(own)
                connection.send(Kind.HELLO, encode_hello(self._hello))
            except UserError as error:
                connection.close()
                raise PublicationError(
                    f'{self._address} is no sender of weights of this run ({error}): start learner and engines with '
                    'one --workdir, which they share'
                ) from error
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _next(self, version: int, known: Held | None) -> Record | None:
        """Receives the record after `known`. If the connection breaks, raises its error and keeps the bytes so far."""
        connection, partial = self._connect(), self._partial
        request = Request(version, known)
        if partial is not None:
            request = Request(version, known, partial.held, partial.leaf, partial.offset)
        connection.send(Kind.NEXT, encode_request(request), version)
        prefix = connection.receive_prefix()
        payload = connection.receive_payload(prefix)
        if prefix.kind is Kind.DONE:
            return None
        if prefix.kind is Kind.REFUSED:
            raise _RefusedError(bytes(payload).decode(errors='replace'))
        _require_kind(prefix, Kind.HEADER)
        partial = self._partial = self._begin(decode_header(payload), prefix)
        partial.receive(connection)
        self._partial = None
        return partial.record()

    def _begin(self, header: RecordHeader, prefix: Prefix) -> _PartialRecord:
        """Returns the record that the next frames belong to: the one received in part, or a new one."""
        partial, held = self._partial, Held(header.version, header.manifest_hash)
        if partial is not None and (partial.held, partial.leaf, partial.offset) == (held, prefix.leaf, prefix.offset):
            return partial
        if (prefix.leaf, prefix.offset) != (0, 0):
            raise FrameError(f'version {header.version} goes on at a place that nobody asked for')
        needed = sum(map(_align, header.sizes))
        if len(self._buffer) < needed:
            try:
                self._buffer = np.empty(needed, np.uint8)
            except (MemoryError, OverflowError, ValueError) as error:
                raise PublicationError(
                    f'version {header.version} has {needed} bytes, and this process has no memory for them: give it '
                    'more, or look what sends weights at that address'
                ) from error
        return _PartialRecord(header, self._buffer.data)


class _PartialRecord:
    """A record whose bytes before `leaf` and `offset` have been received."""

    def __init__(self, header: RecordHeader, buffer: memoryview):
        self._header, self.held = header, Held(header.version, header.manifest_hash)
        self.leaf = self.offset = 0
        self._parts, at = list[memoryview](), 0
        for size in header.sizes:
            self._parts.append(buffer[at : at + size])
            at += _align(size)

    def receive(self, connection: FrameSocket) -> None:
        """Receives the remaining frames; raises FrameError for any frame but the next one, which is not counted."""
        for piece in cut_pieces(self._header.sizes, self.leaf, self.offset):
            prefix = connection.receive_prefix()
            _require_kind(prefix, Kind.PART)
            found, expected = prefix[1:5], (self.held.version, *piece)
            if found != expected:
                raise FrameError(f'a frame has (version, leaf, offset, bytes) {found}, and {expected} is next')
            end = piece.offset + piece.n_bytes
            connection.receive_payload(prefix, self._parts[piece.leaf][piece.offset : end])
            self.leaf, self.offset = piece.leaf, end

    def record(self) -> Record:
        return Record(self._header, [part.toreadonly() for part in self._parts])


def _require_kind(prefix: Prefix, kind: Kind) -> None:
    if prefix.kind is not kind:
        raise FrameError(f'the sender of weights sent {prefix.kind.name}, and {kind.name} is next')


def _align(size: int) -> int:
    return -(-size // _LINE_BYTES) * _LINE_BYTES


# Opens the receiver that an address names: 'shm:PATH', 'unix:PATH', 'tcp:HOST:PORT', or several, separated by commas.
#
# A carrier with a file (shm, unix) is used if that file exists on this host, so one address serves all readers.


@dataclasses.dataclass(frozen=True)
class Reader:
    """The name, the key and the deadlines of a reader."""

    name: str  # unique among the readers of a sender
    prove: Prove | None = None  # proves the key of the run as the side that connects; None: no sockets are used
    frame_deadline_s: float = 30.0
    record_deadline_s: float = 600.0


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A carrier, chosen by the beginning of its addresses."""

    open: Callable[[str, Reader], RecordReceiver]  # (rest of the address, reader)
    is_here: Callable[[str], bool]  # whether this host can reach the rest of the address


def parse_version_name(text: str) -> tuple[str, Held] | None:
    """Returns (address, version) of a text that `name_version` made; None for any other, such as a directory path."""
    address, mark, named = text.rpartition('#')
    version, _, manifest_hash = named.partition('@')
    if not mark or not version.isdecimal() or not address.startswith((SHARDS, *SCHEMES)):
        return None
    return address, Held(int(version), manifest_hash)


def open_receiver(address: str, reader: Reader) -> RecordReceiver:
    """Opens a receiver for the first carrier of an address, or of a version's name, that reaches this host.

    Raises PublicationError for an unknown scheme, an address of other hosts only, and a sender that is not there.
    """
    tried = list[str]()
    named = parse_version_name(address)
    address = address if named is None else named[0]
    if address.startswith(SHARDS):
        return ShardReceiver([open_receiver(each, reader) for each in address.removeprefix(SHARDS).split(';')])
    for choice in address.split(','):
        name, colon, rest = choice.partition(':')
        scheme = SCHEMES.get(f'{name}{colon}')
        if scheme is None:
            raise PublicationError(
                f'{choice!r} is no address of weights; it must begin with one of {", ".join(SCHEMES)}: start learner '
                'and engines from one installation'
            )
        if scheme.is_here(rest):
            return scheme.open(rest, reader)
        tried.append(rest)
    raise PublicationError(
        f'{" and ".join(tried)} is not on this host, where {reader.name} reads weights: start it on the host of the '
        "learner, or use publication.channel='stream' with publication.listen"
    )


def _open_stream(prefix: str) -> Callable[[str, Reader], RecordReceiver]:
    def open_stream(rest: str, reader: Reader) -> RecordReceiver:
        if reader.prove is None:
            raise PublicationError(f'{prefix}{rest} needs the key of the run: start {reader.name} with --workdir')
        return StreamReceiver(
            f'{prefix}{rest}',
            reader.name,
            reader.prove,
            frame_deadline_s=reader.frame_deadline_s,
            record_deadline_s=reader.record_deadline_s,
        )

    return open_stream


def _exists(rest: str) -> bool:
    return pathlib.Path(rest).exists()


SCHEMES: Mapping[str, Scheme] = {
    SHM: Scheme(lambda rest, reader: ShmReceiver(pathlib.Path(rest), reader.name), _exists),
    UNIX: Scheme(_open_stream(UNIX), _exists),
    TCP: Scheme(_open_stream(TCP), lambda rest: True),
}
