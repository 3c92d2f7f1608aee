"""What every route has in common: who may ask, and what is refused becomes the reply of the path's dialect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Protocol, runtime_checkable

from aiohttp import web
from aiohttp.typedefs import Middleware

from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.rollout.http.server.bridge import Bridge
from areal_jax.rollout.http.server.limits import NAME, TOO_LATE
from areal_jax.rollout.http.wire import messages, sglang, vllm
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
    """A connection that is told how far a request on it has come (connections.py)."""

    def note_request(self, has_body: bool) -> None: ...

    def note_body(self) -> None: ...


def guard(admit: Callable[[web.Request], None], holder: Callable[[], str] = str) -> Middleware:
    """A middleware: takes no request that is not admitted, and answers every refusal in the dialect of the path.

    Args:
      admit: raises RequestError for a request of somebody whom this server does not serve, see callers.py.
      holder: gives the name of this process in the registry of its run; requests that name another one are refused.
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
    """The reply of the path's dialect to what aiohttp refuses: an unknown path, a method that a path does not have."""
    reply = refuse(request, f'{request.method[:20]} {request.path[:80]}: {error.reason}', error.status)
    reply.headers.update(_allowed(error))
    return reply


def refuse(request: web.BaseRequest, message: str, status: int, field: str = '') -> web.Response:
    """The reply of the path's dialect to what is refused."""
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
