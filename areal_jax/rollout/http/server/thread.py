"""The HTTP thread: an aiohttp application on a separate asyncio loop."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import functools
import logging
import socket
import threading
import urllib.parse
from collections.abc import Callable

from aiohttp import web

from areal_jax.config.addresses import ALL_ADDRESSES, join_address
from areal_jax.errors import UserError
from areal_jax.protocols import Inbox
from areal_jax.rollout.http.server import control, generation, openapi, state, tokenizer
from areal_jax.rollout.http.server.bridge import Bridge, Texts
from areal_jax.rollout.http.server.connections import ConnectionLimits, ConnectionTable
from areal_jax.rollout.http.server.limits import Limits, bounded_log, count_connections
from areal_jax.rollout.http.server.replies import BODIES, BRIDGE, KEYLESS, Bodies, Callers, guard
from areal_jax.rollout.http.server.state import CONNECTIONS, FACTS, Facts
from areal_jax.rollout.http.wire.answer_reader import AnswerParser
from areal_jax.rollout.http.wire.openai import Required

_BACKLOG = 1024  # connections that wait to be accepted
_SHUTDOWN_S = 5.0  # for open connections at the end
_START_S = 30.0
_REQUESTS_PER_CONNECTION = 0.75  # open answers: the other connections are for health checks


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model's facts that the routes need."""

    texts: Texts
    context_tokens: int
    vocab_size: int
    seed: int  # of the noise of requests without a seed
    facts: Facts
    required: Required = 'refuse'  # see wire/openai.py
    parser: AnswerParser | None = None  # for tool calls in another notation than Hermes
    recorded: tuple[str, ...] = ()  # columns of the model (rollout.record_routes)


class HttpThread:
    """A context manager that serves requests inside the context and closes connections at its end.

    Args:
      listener: a bound socket, see `bind`.
      callers: the access rules.
      on_death: called on this thread if the loop ends by an error.
    """

    def __init__(
        self,
        inbox: Inbox,
        model: ServedModel,
        listener: socket.socket,
        *,
        limits: Limits,
        callers: Callers = KEYLESS,
        on_death: Callable[[BaseException], None] = lambda error: None,
    ):
        self._inbox, self._model, self._listener, self._limits = inbox, model, listener, limits
        self._callers, self._on_death = callers, on_death
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name='http', daemon=True)

    def __enter__(self) -> HttpThread:
        self._thread.start()
        if not self._started.wait(_START_S):
            raise RuntimeError(f'the HTTP thread did not start within {_START_S:g} s')
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_SHUTDOWN_S + 1.0)

    def refuse_new(self) -> None:
        """Makes /ready answer 503 from now on; callable from any thread."""
        self._model.facts.draining = True

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
            self._on_death(error)
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        with bounded_log() as log:
            self._loop.set_exception_handler(functools.partial(_complain, log))
            limits = self._fit_limits(log)
            table = ConnectionTable(ConnectionLimits(limits.connections, limits.header_s, limits.write_s), log)
            runner = web.AppRunner(
                self._build_app(limits, table), handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S
            )
            await runner.setup()
            assert runner.server is not None
            try:
                async with table.listening(self._listener, runner.server, _BACKLOG):
                    self._started.set()
                    await self._stop.wait()
            finally:
                await runner.cleanup()

    def _build_app(self, limits: Limits, table: ConnectionTable) -> web.Application:
        model = self._model
        app = web.Application(
            middlewares=[guard(self._callers.admit, lambda: model.facts.holder)], client_max_size=limits.body_bytes
        )
        app[FACTS], app[CONNECTIONS] = model.facts, table
        app[BRIDGE] = Bridge(
            self._inbox, model.texts, limits,
            context_tokens=model.context_tokens, vocab_size=model.vocab_size, seed=model.seed,
            required=model.required, parser=model.parser, recorded=model.recorded,
        )  # fmt: skip
        app[BODIES] = Bodies(limits, app[BRIDGE].bound)
        app.on_cleanup.append(_close_bodies)
        routes = [generation.list_routes(model.facts.model), control.list_routes(), state.list_routes()]
        routes += [tokenizer.list_routes(), openapi.list_routes()]
        app.add_routes([route for listed in routes for route in listed])
        return app

    def _fit_limits(self, log: logging.Logger) -> Limits:
        """Returns the limits, lowered to the descriptors that the process may open."""
        limits = self._limits
        connections = count_connections(limits.connections)
        if connections < limits.connections:
            log.warning(
                'server.max_connections=%d is lowered to %d: the process may open no more files, see ulimit -n',
                limits.connections,
                connections,
            )
        requests = min(limits.requests, max(1, int(_REQUESTS_PER_CONNECTION * connections)))
        return dataclasses.replace(limits, connections=connections, requests=requests)


async def _close_bodies(app: web.Application) -> None:
    app[BODIES].close()


def _complain(log: logging.Logger, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Handles errors on the loop that no coroutine awaits."""
    error = context.get('exception')
    exception = error if isinstance(error, BaseException) else None
    log.error('on the loop of HTTP: %s', context.get('message', ''), exc_info=exception)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to the address; port 0 takes a free one. Raises UserError for an unavailable address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f'--host={host!r} is no address of this machine ({error}): use 127.0.0.1 or 0.0.0.0') from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f'--port={port} is in use on {host}: choose another one, or 0 for a free one') from error
        raise UserError(f'--host={host} --port={port} cannot be bound ({error.strerror}): choose others') from error
    return listener


def describe_url(listener: socket.socket) -> str:
    """Returns the listener's URL, as in 'http://127.0.0.1:8000'."""
    host, port = listener.getsockname()[:2]
    return f'http://{join_address(host, port)}'


# The name of a server in the registry of its run, and the address at which other processes reach it.


def name_server(url: str) -> str:
    """Returns a name like 'host-8000': unique, because no two processes of a host share a port."""
    return f'{socket.gethostname()}-{urllib.parse.urlsplit(url).port}'


def reachable(url: str) -> str:
    """Returns the URL, with the name of this host if the server listens on all addresses."""
    parts = urllib.parse.urlsplit(url)
    if parts.hostname not in ALL_ADDRESSES:
        return url
    return f'http://{socket.gethostname()}:{parts.port}'
