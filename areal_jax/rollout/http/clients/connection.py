"""One server over HTTP: JSON out, JSON in. Its coroutines run on the I/O loop of the clock, and decode there."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import aiohttp

from areal_jax.files import JsonObject
from areal_jax.rollout.http.pauses import CLIENT
from areal_jax.rollout.http.wire import exchange
from areal_jax.rollout.http.wire.exchange import INCARNATION, Answer, Call, FinishWord, Piece, ReplyError
from areal_jax.types import EngineCapabilities

# aiohttp raises a bare RuntimeError where the connection was closed on our side in the middle of a reply
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError, RuntimeError)
_Part = TypeVar('_Part')
# A request on a connection that the server is closing is lost. uvicorn, under vLLM and SGLang, closes those that were
# idle for 5 s; aiohttp would use one again for 15 s
_IDLE_S = 2.0
_SHOWN = 300  # characters of an error body that an error repeats


class NoReplyError(Exception):
    """No whole reply came: what was asked for may have been done, may be going on, or was not done."""


class StatusError(Exception):
    """A reply with an error status."""

    def __init__(self, method: str, path: str, reply: Reply):
        super().__init__(f'{method} {path} answered {reply.status}: {reply.message()}')
        self.status = reply.status


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    text: str
    content: object  # decoded JSON; None if the text is not JSON

    def message(self) -> str:
        """The sentence of an error body, in whichever place this server has it; else the text."""
        found: object = self.content
        for name in ('error', 'message', 'detail'):
            if isinstance(found, dict) and name in found:
                found = found[name]
        text = found if isinstance(found, str) else self.text
        shown = ' '.join(text[: 2 * _SHOWN].split())[:_SHOWN]
        return shown.encode(errors='replace').decode() or 'nothing'  # no half of a surrogate pair

    def fields(self) -> exchange.Reply:
        """Those of its JSON object, none where it has none."""
        return exchange.Reply(self.content if isinstance(self.content, dict) else {})


class Connection:
    """Requests to one server, any number at the same time. The clock's calls have the deadlines.

    Args:
      url: 'http://host:port'.
      api_key: sent as a bearer token; '' = none.
      holder: the one process that requests are meant for, by its entry in the registry; another one at the same address
        answers 409. '' = any process.
      client: how this process names itself: the server obeys it as long as no other one has registered; '' = it has no
        name, as clients of SGLang and vLLM.
      idle_s: a connection that was idle for so long is not used again.
    """

    def __init__(self, url: str, api_key: str = '', holder: str = '', idle_s: float = _IDLE_S, client: str = ''):
        self.client, self.url, self._idle_s = client, url.rstrip('/'), idle_s
        self._headers = {'Authorization': f'Bearer {api_key}'} if api_key else {}
        if holder:
            self._headers[INCARNATION] = holder
        if client:
            self._headers[CLIENT] = client
        self._session: aiohttp.ClientSession | None = None
        self._guard: asyncio.Task[None] | None = None
        self._is_closed = False

    async def request(self, method: str, path: str, body: JsonObject | None = None) -> Reply:
        """The reply, whatever its status; raises NoReplyError."""
        try:
            async with self._open().request(method, self.url + path, json=body) as reply:
                return _read(reply.status, await reply.text())
        except _BROKEN as error:
            raise NoReplyError(f'{method} {path} had no reply ({type(error).__name__}: {error})') from error

    async def stream(self, path: str, body: JsonObject, take: Callable[[str], None]) -> None:
        """Calls `take` with each line of a reply to POST as it comes.

        Raises StatusError, NoReplyError where it is cut off, and what `take` raises.
        """
        async with await _unbroken(path, self._open().post(self.url + path, json=body)) as reply:
            if reply.status != 200:
                raise StatusError('POST', path, _read(reply.status, await _unbroken(path, reply.text())))
            left = b''
            while chunk := await _unbroken(path, reply.content.readany()):
                *lines, left = (left + chunk).split(b'\n')
                for line in lines:
                    take(_decode(path, line))

    async def require(self, method: str, path: str, body: JsonObject | None = None) -> Reply:
        """The reply where its status is 200; raises StatusError for another, NoReplyError without a reply."""
        reply = await self.request(method, path, body)
        if reply.status != 200:
            raise StatusError(method, path, reply)
        return reply

    def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise NoReplyError(f'the connection to {self.url} is closed')
        if self._session is None:  # made by the first request, since it belongs to the loop that runs it
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None),
                # the engine bounds their number
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._idle_s),
            )
            self._guard = asyncio.create_task(_close_at_end(self._session), name=f'guard of {self.url}')
        return self._session

    async def close(self) -> None:
        self._is_closed, session, self._session = True, self._session, None
        if self._guard is not None:
            self._guard.cancel()
        if session is not None:
            await session.close()


async def _close_at_end(session: aiohttp.ClientSession) -> None:
    """Closes what is still open when the loop ends, which cancels its tasks."""
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await session.close()


async def _unbroken(path: str, part: Awaitable[_Part]) -> _Part:
    """A part of a stream; raises NoReplyError where it does not come."""
    try:
        return await part
    except _BROKEN as error:
        raise _broken_off(path, error) from error


def _decode(path: str, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _broken_off(path, error) from error


def _broken_off(path: str, error: Exception) -> NoReplyError:
    return NoReplyError(f'POST {path}: the stream broke off ({type(error).__name__}: {error})')


def _read(status: int, text: str) -> Reply:
    try:
        content = exchange.load_json(text)
    except ReplyError:
        content = None
    return Reply(status, text, content)


# What the engine asks of a server, in the words of either protocol. The coroutines run on the I/O loop.


# A pause of the engine returns what was generated, and the rest is sent again afterwards. So does a swap of weights,
# unless the server keeps answers over it: either way the KV of answers is rebuilt. The weights of a version are loaded
# in the pause, none are kept beside them, and a cut softmax has no log-probs of its own in the replies.
CAPABILITIES = EngineCapabilities(
    logprobs=('behavior',),
    spans=True,
    abort=True,
    pause_modes=('retract',),
    staging=False,
    update=('recompute',),
    pinned=False,
)


class UpdateError(Exception):
    """The server says that an update failed, or names another version afterwards: its weights may be old or new."""


class Dialect(Protocol):
    """One protocol. Every method raises connection.NoReplyError and StatusError.

    `seeds`: noise can be seeded for each request. `streams`: what came of an answer outlives its server.
    `keeps_answers`: replies say which version drew which token, and `pause` can keep answers on the server; it may
    become true with the first reply.
    """

    seeds: bool
    streams: bool
    keeps_answers: bool

    async def generate(self, connection: Connection, call: Call, vocab_size: int) -> Answer:
        """The one answer of the call; raises wire.exchange.ReplyError where its tokens cannot be trusted."""
        ...

    async def stream(
        self, connection: Connection, call: Call, vocab_size: int, deliver: Callable[[Sequence[Piece]], None]
    ) -> FinishWord:
        """Calls `deliver` with what comes of the answer, in parts or at once; returns how it ended.

        Raises ReplyError where what was not delivered cannot be trusted.
        """
        ...

    async def abort(self, connection: Connection, request_id: str) -> None:
        """Ends the request with what it has; '' = every request. An unknown request is ignored."""
        ...

    async def pause(self, connection: Connection, keeps_answers: bool = False) -> None:
        """Ends every request with what it has; later ones wait for `resume`.

        With `keeps_answers`, for servers that can, none ends: after `resume` each goes on, under the weights of that
        time and with its KV computed again.
        """
        ...

    async def resume(self, connection: Connection) -> None:
        """Ends a pause, if there is one."""
        ...

    async def update(self, connection: Connection, directory: str, version: str) -> None:
        """While paused: loads the weights and names them, and reads the name back; may be sent again.

        Raises UpdateError.
        """
        ...

    async def ask_version(self, connection: Connection) -> str:
        """What the server calls the weights that it serves; '' = it gives them no name."""
        ...
