"""The connections of a server: bounds on their number and silence, and the choice of which to close if room is needed.

aiohttp has no such bounds. A connection has a deadline for the head of a request to arrive, and for the peer to read
written bytes. If a new connection needs room, the connection that has been silent for longest is closed, of all for
which no answer is being made. So clients that only connect cannot keep others out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import socket
from collections.abc import AsyncIterator
from typing import cast

from aiohttp import web

from areal_jax.rollout.http.server.replies import answer_http_error, refuse

SWEEP_S = 0.5  # between two checks of the deadlines
_CLOSING_S = 5.0  # for a peer to read the last bytes before its connection was closed
_SPARE = 16  # connections beyond the bound while all are being answered
_BURST = 16  # accepted between two turns of the loop, in which closed ones give their descriptors back
_RETRY_S = 0.05  # after an accept that failed


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Bounds of the connections of one server."""

    most: int
    header_s: float  # for the head of a request to arrive
    write_s: float  # for a peer to read more
    idle_s: float = 75.0  # between two requests


class Connection(web.RequestHandler):
    """One connection; reports its state to the table."""

    def __init__(self, table: ConnectionTable, server: web.Server, idle_s: float, logger: logging.Logger):
        loop = asyncio.get_running_loop()
        no_access_log = cast(logging.Logger, None)  # aiohttp takes None, its types do not
        super().__init__(server, loop=loop, access_log=no_access_log, keepalive_timeout=idle_s, logger=logger)
        self._table, self._clock = table, loop.time
        self._wire: asyncio.Transport | None = None  # aiohttp forgets the transport before all is written
        self._is_served = False  # a request is being received or answered
        self._head_since_s: float | None = None
        self._unread, self._unread_since_s = 0, 0.0  # bytes that the peer has not read, and since when so
        self._closing_since_s: float | None = None

    # What aiohttp calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._wire, self._head_since_s = transport, self._clock()
        self._table.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._wire = None
        self._table.remove(self)

    def data_received(self, data: bytes) -> None:
        if not self._is_served and self._head_since_s is None:
            self._head_since_s = self._clock()
        super().data_received(data)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Writes a reply; replies of aiohttp in plain text become JSON."""
        if isinstance(resp, web.HTTPException):
            resp = answer_http_error(request, resp)
        self._table.note_silent(self)
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._is_served, self._head_since_s = False, None
            self._table.note_silent(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Makes the reply to malformed HTTP and to an error outside the routes; the connection is closed after it."""
        if isinstance(exc, UnicodeError):  # aiohttp writes a header into its own error
            status, message = 400, 'a header is no UTF-8'
        if status >= 500:
            self.logger.error('a request failed outside of its route', exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError('a part of another reply is sent already')
        sentence = ' '.join((message or 'an error of this server').split())
        reply = refuse(request, f'not served: {sentence[:200]}', status)
        reply.force_close()
        return reply

    def log_exception(self, *args: object, **fields: object) -> None:
        """Logs an exception, except for the damaged rest of a body that is read after its request was refused."""
        if not isinstance(fields.get('exc_info'), web.RequestPayloadError):
            super().log_exception(*args, **fields)

    # What routes call.

    def note_request(self, has_body: bool) -> None:
        """Notes that the head of a request has arrived."""
        self._is_served, self._head_since_s = True, None
        if has_body:
            self._table.note_silent(self)
        else:
            self.note_body()

    def note_body(self) -> None:
        """Notes that a whole request has arrived: its answer is being made."""
        self._table.note_busy(self)

    # What the table calls.

    def abort(self) -> None:
        """Closes the connection; bytes written and not yet read are lost."""
        if self._wire is not None:
            self._wire.abort()

    def is_overdue(self, limits: ConnectionLimits, now_s: float) -> bool:
        """Whether a deadline has passed."""
        if self._wire is None:
            return False
        if self._wire.is_closing():
            self._closing_since_s = self._closing_since_s or now_s
            return now_s - self._closing_since_s > _CLOSING_S
        unread = self._wire.get_write_buffer_size()
        if unread != self._unread or not unread:
            self._unread, self._unread_since_s = unread, now_s
        elif now_s - self._unread_since_s > limits.write_s:
            return True
        return self._head_since_s is not None and now_s - self._head_since_s > limits.header_s


class ConnectionTable:
    """All connections of one server; on the HTTP loop alone."""

    def __init__(self, limits: ConnectionLimits, logger: logging.Logger):
        self.limits, self._logger = limits, logger
        self.closed_for_room = 0  # and refused, since the start
        self._all: dict[Connection, None] = {}
        self._silent: dict[Connection, None] = {}  # not being answered, the longest silent first
        self._arriving: set[asyncio.Task[object]] = set()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Connection) -> None:
        self._all[connection] = self._silent[connection] = None

    def remove(self, connection: Connection) -> None:
        self._all.pop(connection, None)
        self._silent.pop(connection, None)

    def note_silent(self, connection: Connection) -> None:
        """Notes that the connection waits for its peer from now on."""
        self._silent.pop(connection, None)
        if connection in self._all:
            self._silent[connection] = None

    def note_busy(self, connection: Connection) -> None:
        self._silent.pop(connection, None)

    @contextlib.asynccontextmanager
    async def listening(self, listener: socket.socket, server: web.Server, backlog: int) -> AsyncIterator[None]:
        """Serves connections to the listener inside the context; closes the listener at its end."""
        listener.setblocking(False)
        listener.listen(backlog)
        loop = asyncio.get_running_loop()
        make = functools.partial(Connection, self, server, self.limits.idle_s, self._logger)
        tasks = [loop.create_task(self._accept(listener, make)), loop.create_task(self._sweep())]
        try:
            yield
        finally:
            for task in (*tasks, *self._arriving):
                task.cancel()
            await asyncio.gather(*tasks, *self._arriving, return_exceptions=True)
            listener.close()

    async def _accept(self, listener: socket.socket, make: functools.partial[Connection]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for _ in range(_BURST):
                try:
                    connected, _ = await loop.sock_accept(listener)
                except OSError as error:  # descriptors are used up elsewhere in the process; or the peer has gone
                    self._logger.warning('a connection was not accepted: %s', error)
                    self._close_silent()
                    await asyncio.sleep(_RETRY_S)
                    continue
                while self._arriving and self._count() >= self.limits.most:
                    await asyncio.sleep(0)  # after a few turns of the loop they are connections, which can be closed
                if not self._has_room():
                    self._logger.warning('all %d connections are in use: another one was closed', len(self._all))
                    connected.close()
                    continue
                task = loop.create_task(self._connect(connected, make))
                self._arriving.add(task)
                task.add_done_callback(self._arriving.discard)
            await asyncio.sleep(0)

    async def _connect(self, connected: socket.socket, make: functools.partial[Connection]) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(make, connected)
        except OSError:  # the peer has gone
            connected.close()

    def _has_room(self) -> bool:
        """Returns whether another connection fits; first closes the longest silent one if there are too many."""
        if self._count() >= self.limits.most:
            self._close_silent()
        return self._count() < self.limits.most + _SPARE

    def _count(self) -> int:
        return len(self._all) + len(self._arriving)

    def _close_silent(self) -> None:
        self.closed_for_room += 1
        for connection in self._silent:
            self._close(connection)
            break

    def _close(self, connection: Connection) -> None:
        self.remove(connection)  # its descriptor is free in the next turn of the loop
        connection.abort()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = asyncio.get_running_loop().time()
            for connection in [one for one in self._all if one.is_overdue(self.limits, now_s)]:
                self._close(connection)
