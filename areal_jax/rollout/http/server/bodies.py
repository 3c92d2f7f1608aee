"""Bodies of requests: how large one may be, where a large one is parsed, and one place for the large ones of a client.

A small body, of SMALL_BYTES at most, is parsed on the loop of HTTP. A larger one first has to get the place of its
client: it is read, counted, parsed and made into token ids there before the next one of the client is read. So one
client keeps the others waiting for no more than one body, and what has arrived is bounded in memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeVar

from aiohttp import web
from aiohttp.http import HttpProcessingError

from areal_jax.rollout.http.server.body_parser import BodyParser
from areal_jax.rollout.http.server.body_values import BodyBound, parse_large
from areal_jax.rollout.http.server.limits import PLACE_S, SLOW_BODY, SMALL_BYTES, TOO_LONG_BODY, Limits, Places
from areal_jax.rollout.http.server.replies import Progress
from areal_jax.rollout.http.wire.exchange import RequestError
from areal_jax.rollout.http.wire.request_fields import parse_json
from areal_jax.rollout.http.wire.sglang import write_slowly

_MOST_AT_ONCE = 1 << 14  # values of a reply that is written on the loop
_NONE: Mapping[str, str] = {}
_THREADS = 2  # for what is done with large bodies, so that it takes no thread from small ones
Result = TypeVar('Result')
Parse = Callable[[object], Result]


class Bodies:
    """What a server, or a gateway, knows of the bodies that it is sent. Used on one loop.

    Args:
      bound: of the values of a body.
      wait_s: for the place of a client; then 429.
    """

    def __init__(self, limits: Limits, bound: BodyBound, parser: BodyParser | None = None, wait_s: float = PLACE_S):
        self.limits, self.bound, self._parser = limits, bound, parser or BodyParser()
        self._places = Places(wait_s)
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, 'large bodies')

    @contextlib.asynccontextmanager
    async def opened(
        self, request: web.Request, parse: Parse[Result], prompts: int, client: str = '', any_text: bool = False
    ) -> AsyncIterator[Result]:
        """What `parse`, a function of a module, makes of the JSON of the body, {} where it is empty.

        Inside, the place of its client is held if the body is large.

        Args:
          prompts: that the route takes at most.
          client: who sends it; '' = the address of the peer.
          any_text: the handler itself refuses a text that no context has room for.

        Raises RequestError.
        """
        content = bytearray()
        if await self._read(request, content, SMALL_BYTES):
            yield parse(parse_json(bytes(content)) if content.strip() else {})
            return
        async with self.taken(client or request.remote or ''):
            await self._read(request, content, self.limits.body_bytes)
            for _ in self.bound.count(content, prompts):
                await asyncio.sleep(0)
            most_text = self.limits.body_bytes if any_text else self.bound.most_text(prompts)
            function = functools.partial(parse_large, parse, self.bound, most_text)
            found = await self.run(functools.partial(self._parser.parse, function, content))
            del content
            yield found

    def taken(self, client: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Inside, the place of the client is held. Raises RequestError where it did not become free in time."""
        return self._places.taken(client)

    @contextlib.asynccontextmanager
    async def parsed(self, message: bytes, parse: Callable[[bytes], Result], client: str) -> AsyncIterator[Result]:
        """What `parse`, a function of a module, makes of a message that has arrived as a whole.

        Inside, the place of its client is held if the message is large. Raises RequestError.
        """
        if len(message) <= SMALL_BYTES:
            yield parse(message)
            return
        async with self.taken(client):
            yield await self.run(functools.partial(self._parser.parse, parse, message))

    async def run(self, function: Callable[[], Result]) -> Result:
        """Runs work on a large body in a thread. It is waited for also where the caller is cancelled.

        Else a client that leaves would have its next body here while this one is worked on.
        """
        work = asyncio.get_running_loop().run_in_executor(self._threads, function)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    async def reply(
        self, render: Callable[[], object], values: int, headers: Mapping[str, str] = _NONE
    ) -> web.Response:
        """The JSON that `render` makes, of about so many values; a large one is made in a thread, piece by piece."""
        if values <= _MOST_AT_ONCE:
            return web.json_response(render(), headers=headers)
        content = await self.run(lambda: ''.join(write_slowly(render())).encode())
        return web.Response(body=content, content_type='application/json', charset='utf-8', headers=headers)

    def close(self) -> None:
        self._parser.close()
        self._threads.shutdown(wait=False)

    async def _read(self, request: web.Request, content: bytearray, most: int) -> bool:
        """Adds the body to `content`; False where it has more bytes than `most`, which are read in part then.

        Raises RequestError.
        """
        limits = self.limits
        if (request.content_length or 0) > limits.body_bytes:
            raise _too_long(limits)
        if (request.content_length or 0) > most:
            return False
        try:
            async with asyncio.timeout(limits.body_s):
                while chunk := await request.content.readany():
                    content += chunk
                    if len(content) > limits.body_bytes:
                        raise _too_long(limits)
                    if len(content) > most:
                        return False
        except TimeoutError:
            raise RequestError(
                '', f'the body did not arrive within {limits.body_s:g} s: send it faster', SLOW_BODY
            ) from None
        except (web.RequestPayloadError, HttpProcessingError) as error:  # invalid chunks or compression
            reason = ' '.join(str(error).split())[:200]
            raise RequestError(
                'body', f'the body can not be read ({reason}): send it plain, or as its headers say'
            ) from None
        if isinstance(request.protocol, Progress):
            request.protocol.note_body()
        return True


BODIES: web.AppKey[Bodies] = web.AppKey('bodies', Bodies)


async def read_body(request: web.Request) -> object:
    """The JSON of the body of a route that takes no prompts, {} where it is empty; raises RequestError."""
    async with request.app[BODIES].opened(request, _as_it_is, prompts=0) as body:
        return body


def _as_it_is(body: object) -> object:
    return body


def _too_long(limits: Limits) -> RequestError:
    return RequestError('', f'the body is larger than {limits.body_bytes} bytes: send less at once', TOO_LONG_BODY)
