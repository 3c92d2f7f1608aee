"""Faults and abuse: a proxy that is slow and cuts, and requests that no client should send with their status."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import random
import socket
import threading
from collections.abc import Callable

from checks.soak.servers import API_KEY

TIMEOUT_S = 60.0
_CHUNK = 4096
_START_S = 10.0
_HEADERS = {'Authorization': f'Bearer {API_KEY}', 'Content-Type': 'application/json'}


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


@dataclasses.dataclass(frozen=True)
class Refusal:
    """`expected` statuses; a server that is dead or stopped gives none."""

    name: str
    expected: tuple[int, ...]
    send: Callable[[int, random.Random], int]  # port -> status


def _post(path: str, content: bytes, headers: dict[str, str] | None = None) -> Callable[[int, random.Random], int]:
    def send(port: int, random: random.Random) -> int:
        connection = http.client.HTTPConnection('127.0.0.1', port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request('POST', path, content, _HEADERS if headers is None else headers)
            return connection.getresponse().status

    return send


def _slow_body(port: int, random: random.Random) -> int:
    """Says that 100 bytes follow, and sends one."""
    with socket.create_connection(('127.0.0.1', port), TIMEOUT_S) as connection:
        connection.settimeout(TIMEOUT_S)
        head = f'POST /generate HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {API_KEY}\r\nContent-Length: 100\r\n\r\n{{'
        connection.sendall(head.encode())
        return int(connection.recv(4096).split(b' ', 2)[1])


def _hang_up(port: int, random: random.Random) -> int:
    """In the middle of a stream; 200 is its status."""
    body = {'input_ids': [1, 2, 1], 'stream': True, 'sampling_params': {'max_new_tokens': 200, 'ignore_eos': True}}
    content = json.dumps(body).encode()
    with socket.create_connection(('127.0.0.1', port), TIMEOUT_S) as connection:
        connection.settimeout(TIMEOUT_S)
        head = f'POST /generate HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {API_KEY}\r\n'
        connection.sendall(f'{head}Content-Length: {len(content)}\r\n\r\n'.encode() + content)
        first = connection.recv(1 + random.randrange(4096))
        return int(first.split(b' ', 2)[1][:3]) if len(first) > 12 else 200


def _json(body: object) -> bytes:
    return json.dumps(body).encode()


_NO_WEIGHTS = _json({'model_path': '/nowhere/v000009', 'weight_version': '9'})
REFUSALS = (
    Refusal('malformed', (400,), _post('/generate', b'{"input_ids": [1, 2')),
    Refusal('malformed, vLLM', (400,), _post('/inference/v1/generate', b'\xff\xfe')),
    Refusal('malformed, OpenAI', (400,), _post('/v1/completions', b'[]')),
    Refusal('a token that is none', (400,), _post('/generate', _json({'input_ids': [10**6]}))),
    Refusal('too long for the context', (400,), _post('/generate', _json({'input_ids': [1] * 5000}))),
    Refusal('oversized', (413,), _post('/generate', b' ' * 100_000)),
    Refusal('slow', (408,), _slow_body),
    Refusal('unauthenticated', (401,), _post('/generate', _json({'input_ids': [1]}), {})),
    Refusal('unknown path', (404,), _post('/nothing', b'{}')),
    Refusal('an update without files', (400,), _post('/update_weights_from_disk', _NO_WEIGHTS)),
    Refusal('hang up in mid-stream', (200, 429, 503), _hang_up),  # more streams than the server's limit are refused
    Refusal('abort everything', (200,), _post('/abort_request', _json({'abort_all': True}))),
)


def send(refusal: Refusal, port: int, random: random.Random) -> int | None:
    """The status; None where no answer came."""
    try:
        return refusal.send(port, random)
    except (OSError, http.client.HTTPException, IndexError, ValueError):
        return None
