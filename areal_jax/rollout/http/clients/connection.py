"""The connection to one server over HTTP: JSON out, JSON in. Its coroutines run and decode on the clock's I/O loop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import aiohttp

from areal_jax.files import JsonObject
from areal_jax.rollout.http.pauses import CLIENT
from areal_jax.rollout.http.wire import encoding, reply
from areal_jax.rollout.http.wire.exchange import INCARNATION, Answer, Call, FinishWord, Piece, ReplyError
from areal_jax.types import EngineCapabilities

# aiohttp raises a bare RuntimeError if the connection was closed on our side in the middle of a reply
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError, RuntimeError)
_Part = TypeVar('_Part')
# A request on a connection that the server is closing is lost. uvicorn, under vLLM and SGLang, closes those that were
# idle for 5 s; aiohttp would use one again for 15 s
_IDLE_S = 2.0
_SHOWN = 300  # characters of an error body that an error repeats


class NoReplyError(Exception):
    """No complete reply came: the action may be done, running or not done."""


class StatusError(Exception):
    """A reply with an error status."""

    def __init__(self, method: str, path: str, reply: Reply):
        super().__init__(f'{method} {path} answered {reply.status}: {reply.message()}')
        self.status = reply.status


@dataclasses.dataclass(frozen=True)
class Reply:
    """A server's reply."""

    status: int
    text: str
    content: object  # decoded JSON; None if the text is not JSON

    def message(self) -> str:
        """Returns the sentence of an error body, in any of the fields that servers use for it; else the text."""
        found: object = self.content
        for name in ('error', 'message', 'detail'):
            if isinstance(found, dict) and name in found:
                found = found[name]
        text = found if isinstance(found, str) else self.text
        shown = ' '.join(text[: 2 * _SHOWN].split())[:_SHOWN]
        return shown.encode(errors='replace').decode() or 'nothing'  # no lone surrogate

    def fields(self) -> reply.Reply:
        """Returns the fields of the JSON object; no fields if the content is not an object."""
        return reply.Reply(self.content if isinstance(self.content, dict) else {})


class Connection:
    """Sends requests to one server, any number at the same time. The clock's calls have the deadlines.

    Args:
      url: 'http://host:port'.
      api_key: sent as a bearer token; '' = none.
      holder: the process that requests are meant for, by its entry in the registry; another process at the same
        address answers 409. '' = any process.
      client: name of this process: the server obeys it as long as no other client has registered; '' = no name, like
        clients of SGLang and vLLM.
      idle_s: a connection that was idle for this long is not used again.
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
        """Returns the reply, whatever its status; raises NoReplyError."""
        try:
            async with self._open().request(method, self.url + path, json=body) as reply:
                return _read(reply.status, await reply.text())
        except _BROKEN as error:
            raise NoReplyError(f'{method} {path} had no reply ({type(error).__name__}: {error})') from error

    async def stream(self, path: str, body: JsonObject, take: Callable[[str], None]) -> None:
        """Calls `take` with each line of a reply to POST as it comes.

        Raises StatusError, NoReplyError if the stream is cut off, and errors of `take`.
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
        """Returns a reply with status 200; raises StatusError for another status, NoReplyError without a reply."""
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
    """Closes the session when the loop ends, which cancels its tasks."""
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await session.close()


async def _unbroken(path: str, part: Awaitable[_Part]) -> _Part:
    """Awaits a part of a stream; raises NoReplyError if it does not come."""
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
        content = encoding.load_json(text)
    except ReplyError:
        content = None
    return Reply(status, text, content)


# The interface of a server's protocol. The coroutines run on the I/O loop.


# A pause of the engine returns the generated tokens, and the rest is requested again afterwards. So does a swap of
# weights, unless the server keeps answers over it: either way the KV of answers is rebuilt. The weights of a version
# are loaded in the pause, the server keeps no second copy, and replies have no log-probs of a truncated softmax.
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
    """The server reports a failed update, or another version afterwards: its weights may be old or new."""


class Dialect(Protocol):
    """A client's side of one protocol. Every method raises NoReplyError and StatusError.

    `seeds`: noise can be seeded for each request. `streams`: received parts of an answer outlive its server.
    `keeps_answers`: replies tell the version that drew each token, and `pause` can keep answers on the server; it may
    become true with the first reply.
    """

    seeds: bool
    streams: bool
    keeps_answers: bool

    async def generate(self, connection: Connection, call: Call, vocab_size: int) -> Answer:
        """Returns the one answer of the call; raises wire.exchange.ReplyError if its tokens cannot be trusted."""
        ...

    async def stream(
        self, connection: Connection, call: Call, vocab_size: int, deliver: Callable[[Sequence[Piece]], None]
    ) -> FinishWord:
        """Calls `deliver` with the answer, in parts or at once; returns how it ended.

        Raises ReplyError if the undelivered rest cannot be trusted.
        """
        ...

    async def abort(self, connection: Connection, request_id: str) -> None:
        """Ends the request with its tokens so far; '' = every request. An unknown request is ignored."""
        ...

    async def pause(self, connection: Connection, keeps_answers: bool = False) -> None:
        """Ends every request with its tokens so far; later requests wait for `resume`.

        With `keeps_answers`, if the server can, no request ends: after `resume` each continues under the weights of
        that time, with its KV computed again.
        """
        ...

    async def resume(self, connection: Connection) -> None:
        """Ends a pause, if there is one."""
        ...

    async def update(self, connection: Connection, directory: str, version: str) -> None:
        """Loads the weights while paused, names them, and reads the name back; may be sent again.

        Raises UpdateError.
        """
        ...

    async def ask_version(self, connection: Connection) -> str:
        """Returns the server's name of its weights; '' = they have no name."""
        ...
