"""Shared by every route: access control, the bodies of requests, and refusals in the dialect of the path."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import ModuleType
from typing import Protocol, TypeVar, runtime_checkable

from aiohttp import hdrs, web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Middleware

from areal_jax.config.addresses import is_loopback, parse_host
from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.rollout.http.server.body_parser import BodyParser
from areal_jax.rollout.http.server.bridge import Bridge
from areal_jax.rollout.http.server.limits import (
    NAME,
    PLACE_S,
    SLOW_BODY,
    SMALL_BYTES,
    TOO_LATE,
    TOO_LONG_BODY,
    BodyBound,
    Limits,
    Places,
    parse_large,
)
from areal_jax.rollout.http.wire import messages, sglang, vllm
from areal_jax.rollout.http.wire.encoding import parse_json, write_slowly
from areal_jax.rollout.http.wire.exchange import INCARNATION, RequestError

BRIDGE: web.AppKey[Bridge] = web.AppKey('bridge', Bridge)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_SGLANG_PATHS = (
    '/generate', '/abort_request', '/pause_generation', '/continue_generation', '/flush_cache',
    '/update_weights_from_disk', '/health_generate', '/model_info', '/get_model_info', '/server_info',
    '/get_server_info',
)  # fmt: skip
_ANTHROPIC_PATHS = ('/v1/messages', '/v1/messages/count_tokens')
_BUSY = (429, 503)

_log = logging.getLogger(NAME)


@runtime_checkable
class Progress(Protocol):
    """A connection that is told the progress of a request on it (connections.py)."""

    def note_request(self, has_body: bool) -> None: ...

    def note_body(self) -> None: ...


def guard(admit: Callable[[web.Request], None], holder: Callable[[], str] = str) -> Middleware:
    """Returns a middleware that takes admitted requests only, and answers refusals in the dialect of the path.

    Args:
      admit: raises RequestError for a sender whom this server does not serve, see callers.py.
      holder: returns the name of this process in the registry of its run; requests that name another one are refused.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if isinstance(request.protocol, Progress):
            request.protocol.note_request(request.body_exists)
        try:
            admit(request)
            _require_meant(request, holder())
            return await handler(request)
        except web.HTTPException as error:
            return answer_http_error(request, error)
        except RequestError as error:
            return refuse(request, str(error), error.status, error.field)
        except UserError as error:
            return refuse(request, str(error), 400)
        except TimeoutError:
            return refuse(request, f'no answer within the time of this server for {request.path}', TOO_LATE)
        except (asyncio.CancelledError, ConnectionResetError):
            raise
        except Exception as error:
            _log.exception('%s %s failed', request.method, request.path)
            return refuse(request, f'{type(error).__name__}: {error}', 500)

    return answer


def answer_http_error(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """Replies in the path's dialect to requests that aiohttp refuses: an unknown path, or a wrong method for a path."""
    reply = refuse(request, f'{request.method[:20]} {request.path[:80]}: {error.reason}', error.status)
    reply.headers.update(_allowed(error))
    return reply


def refuse(request: web.BaseRequest, message: str, status: int, field: str = '') -> web.Response:
    """Returns a refusal in the dialect of the path."""
    dialect: ModuleType = vllm
    if request.path in _SGLANG_PATHS:
        dialect = sglang
    elif request.path in _ANTHROPIC_PATHS:
        dialect = messages
    body: JsonObject = dialect.render_error(message, status, field)
    headers = {'Retry-After': '1'} if status in _BUSY else {}
    if status == 401:
        headers['WWW-Authenticate'] = 'Bearer'
    return web.json_response(body, status=status, headers=headers)


def _require_meant(request: web.Request, holder: str) -> None:
    meant = request.headers.get(INCARNATION, '')
    if holder and meant not in ('', holder):
        raise RequestError(
            INCARNATION, f'{INCARNATION}: {meant} is not this server, which is {holder}: look again', 409
        )


def _allowed(error: web.HTTPException) -> dict[str, str]:
    return {'Allow': error.headers['Allow']} if 'Allow' in error.headers else {}


# Bodies of requests: their size limit, the parsing of large ones, and one place per client for a large body.
#
# A small body, of SMALL_BYTES at most, is parsed on the HTTP loop. A larger one first has to get the place of its
# client: it is read, counted, parsed and made into token ids before the next one of the client is read. So one
# client keeps the others waiting for no more than one body, and the memory of received bodies is bounded.


_MOST_AT_ONCE = 1 << 14  # values of a reply that is written on the loop
_NONE: Mapping[str, str] = {}
_THREADS = 2  # for work on large bodies, so that it takes no thread from small ones
Result = TypeVar('Result')
Parse = Callable[[object], Result]


class Bodies:
    """Reads and parses the bodies sent to a server or a gateway. Used on one loop.

    Args:
      bound: on the values of a body.
      wait_s: for the place of a client; after it 429.
    """

    def __init__(self, limits: Limits, bound: BodyBound, parser: BodyParser | None = None, wait_s: float = PLACE_S):
        self.limits, self.bound, self._parser = limits, bound, parser or BodyParser()
        self._places = Places(wait_s)
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, 'large bodies')

    @contextlib.asynccontextmanager
    async def opened(
        self, request: web.Request, parse: Parse[Result], prompts: int, client: str = '', any_text: bool = False
    ) -> AsyncIterator[Result]:
        """Yields `parse(JSON of the body)`, {} for an empty body; `parse` must be a function of a module (picklable).

        Holds the place of the client inside the context if the body is large.

        Args:
          prompts: the most prompts that the route takes.
          client: the sender; '' = the address of the peer.
          any_text: the handler itself refuses texts that are too long for the context.

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
        """Holds the place of the client inside the context. Raises RequestError if it does not become free in time."""
        return self._places.taken(client)

    @contextlib.asynccontextmanager
    async def parsed(self, message: bytes, parse: Callable[[bytes], Result], client: str) -> AsyncIterator[Result]:
        """Yields `parse(message)` for a whole message; `parse` must be a function of a module (picklable).

        Holds the place of the client inside the context if the message is large. Raises RequestError.
        """
        if len(message) <= SMALL_BYTES:
            yield parse(message)
            return
        async with self.taken(client):
            yield await self.run(functools.partial(self._parser.parse, parse, message))

    async def run(self, function: Callable[[], Result]) -> Result:
        """Runs work on a large body in a thread, and waits for it even if the caller is cancelled.

        Otherwise a client that disconnects could send its next body while this one is still in work.
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
        """Replies with the JSON of `render()`, about `values` values; makes a large one in a thread, piece by piece."""
        if values <= _MOST_AT_ONCE:
            return web.json_response(render(), headers=headers)
        content = await self.run(lambda: ''.join(write_slowly(render())).encode())
        return web.Response(body=content, content_type='application/json', charset='utf-8', headers=headers)

    def close(self) -> None:
        self._parser.close()
        self._threads.shutdown(wait=False)

    async def _read(self, request: web.Request, content: bytearray, most: int) -> bool:
        """Adds the body to `content`; returns False, and reads only a part, if it has more bytes than `most`.

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
    """Reads the JSON body of a route that takes no prompts, {} if it is empty; raises RequestError."""
    async with request.app[BODIES].opened(request, _as_it_is, prompts=0) as body:
        return body


def _as_it_is(body: object) -> object:
    return body


def _too_long(limits: Limits) -> RequestError:
    return RequestError('', f'the body is larger than {limits.body_bytes} bytes: send less at once', TOO_LONG_BODY)


# Access control: callers with the key; without a key the programs of this machine, and no web page.
#
# A page of any address may send this server a POST with the content type of a form, also under a host name that the
# page's owner points at this machine (DNS rebinding). The browser reveals this by Origin, by Sec-Fetch-Site, and by the
# Host that the page used. A form cannot send a body of the type application/json: for it a browser asks for permission
# first (CORS preflight), which this server never gives.


# without key, and with any Host: cluster probes have no key and use pod names, and no such path generates anything
OPEN_PATHS = ('/health', '/ready', '/ping', '/metrics')
ACTING_PATHS = ('/flush_cache', '/health_generate')  # by GET too
READING = ('GET', 'HEAD', 'OPTIONS')
RULE = (
    'No web page of another address is obeyed: what may change something is refused with 403 where Origin or '
    'Sec-Fetch-Site is of another address or Host is no name of this server, and with 415 where a body is not '
    'application/json. With the key of the server any Host and any type will do.'
)  # for people
_OWN_SITES = ('same-origin', 'none')  # 'none': an address that a user has typed
_SITE = 'Sec-Fetch-Site'
_JSON = 'application/json'
_FORBIDDEN, _UNSUPPORTED = 403, 415
_SHOWN = 80  # characters of a header that a sentence repeats


@dataclasses.dataclass(frozen=True)
class Callers:
    """The access rules of one server.

    Args:
      api_key: clients must send it; '' = none.
      hosts: names by which clients without a key may call it, in addition to loopback; see config.addresses.name_hosts.
    """

    api_key: str = ''
    hosts: frozenset[str] = frozenset()

    def admit(self, request: web.Request) -> None:
        """Raises RequestError for a request without the key, and for a request that a web page may have sent."""
        if self.api_key:
            if request.path in OPEN_PATHS:
                return
            if not _has_key(request, self.api_key):
                raise RequestError(
                    'Authorization', 'Authorization must be "Bearer KEY" with the key of this server', 401
                )
        refuse_pages(request, self.hosts, is_proven=bool(self.api_key))


KEYLESS = Callers()


def refuse_pages(request: web.Request, hosts: frozenset[str], *, is_proven: bool) -> None:
    """Raises RequestError for a request that a web page of another address may have sent.

    Args:
      hosts: names of this server, in addition to loopback.
      is_proven: the sender has the key, which no page has; then any Host and any type of body are accepted.
    """
    acts = request.method not in READING or request.path in ACTING_PATHS
    called = {parse_host(authority) for authority in (request.host, *request.headers.getall(hdrs.HOST, ()))}
    if not is_proven and (acts or request.path not in OPEN_PATHS):
        _require_host(request, called, hosts)
    if acts:
        _require_origin(request, hosts | called if is_proven else hosts)
        if request.body_exists and not is_proven:
            _require_json(request)


def _require_host(request: web.Request, called: set[str], own: frozenset[str]) -> None:
    if not all(is_loopback(host) or host in own for host in called):
        raise RequestError(
            hdrs.HOST, f'Host: {request.host[:_SHOWN]!r} is no name of this server, and a web page may have made it '
            'one: ask at 127.0.0.1, or start the server with the name in --config.server.hosts, or with a key in '
            'AREAL_JAX_API_KEY', _FORBIDDEN,
        )  # fmt: skip


def _require_origin(request: web.Request, own: frozenset[str]) -> None:
    for site in request.headers.getall(_SITE, ()):
        if site not in _OWN_SITES:
            raise RequestError(
                _SITE, f'{_SITE}: {site[:_SHOWN]!r} is a web page of another address, which this server does not '
                'obey: send the request from a program', _FORBIDDEN,
            )  # fmt: skip
    for origin in request.headers.getall(hdrs.ORIGIN, ()):
        scheme, _, authority = origin.partition('://')
        host = parse_host(authority) if scheme in ('http', 'https') else ''
        if not host or not (is_loopback(host) or host in own):
            raise RequestError(
                hdrs.ORIGIN, f'Origin: {origin[:_SHOWN]!r} is a web page of another address, which this server does '
                'not obey: send the request from a program, or start the server with the host of the page in '
                '--config.server.hosts', _FORBIDDEN,
            )  # fmt: skip


def _require_json(request: web.Request) -> None:
    """Raises RequestError unless there is one content type, application/json, with any parameters."""
    types = request.headers.getall(hdrs.CONTENT_TYPE, ())
    if [one.partition(';')[0].strip().lower() for one in types] != [_JSON]:
        shown = ', '.join(types)[:_SHOWN]
        raise RequestError(
            hdrs.CONTENT_TYPE, f"Content-Type: {shown!r} is not {_JSON}, and a web page could have sent it: send the "
            f"body with -H 'content-type: {_JSON}'", _UNSUPPORTED,
        )  # fmt: skip


def _has_key(request: web.Request, api_key: str) -> bool:
    # surrogates represent bytes that are not UTF-8, in headers as in environment variables
    encode = lambda text: text.encode('utf-8', 'surrogateescape')
    matches = lambda name, wanted: hmac.compare_digest(encode(request.headers.get(name, '')), encode(wanted))
    return matches('Authorization', f'Bearer {api_key}') or matches('x-api-key', api_key)  # the second is Anthropic's
