"""A proxy in front of a server that can be made slow, or cut all its connections. On a thread of its own."""

from __future__ import annotations

import asyncio
import threading

_CHUNK = 4096
_START_S = 10.0


class Proxy:
    """`url` leads to 127.0.0.1:`port`; a context manager. `bytes_s` limits each direction of each connection."""

    def __init__(self, port: int):
        self._port = port
        self.bytes_s = 0.0  # 0 = no limit; may be set from any thread
        self._open: set[asyncio.StreamWriter] = set()
        self._end = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f'proxy to {port}', daemon=True)
        self.url = ''

    def __enter__(self) -> Proxy:
        self._thread.start()
        if not self._started.wait(_START_S):
            raise RuntimeError('the proxy did not start')
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_START_S)

    def cut(self) -> None:
        """Every connection, in the middle of whatever it carries."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    def _run(self) -> None:
        asyncio.run(self._serve())  # ends with the connections that are open

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with await asyncio.start_server(self._accept, '127.0.0.1', 0) as server:
            self.url = f'http://127.0.0.1:{server.sockets[0].getsockname()[1]}'
            self._started.set()
            await self._end.wait()
            self._cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection('127.0.0.1', self._port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, server_writer)
        self._open.update(pair)
        try:
            await asyncio.gather(self._carry(reader, server_writer), self._carry(server_reader, writer))
        except OSError:
            pass
        finally:
            self._open.difference_update(pair)
            for one in pair:
                one.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(_CHUNK):
            if self.bytes_s:
                await asyncio.sleep(len(chunk) / self.bytes_s)
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
