"""One HTTP server on loopback for all programs of a run: one key per episode; the routes are the server's dialects."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import cast

import numpy as np
from aiohttp import web

from areal_jax.agents.dialogue import Messages, Reply, Tools, Turn
from areal_jax.agents.gateway.session import DIALECTS, Session, read_asked_call, read_count
from areal_jax.agents.programs.program_host import Ending, Job, ProgramHost
from areal_jax.files import JsonObject
from areal_jax.rollout.http.server.connections import ConnectionLimits, ConnectionTable
from areal_jax.rollout.http.server.generation import NamedEvents
from areal_jax.rollout.http.server.limits import BodyBound, Limits, count_connections
from areal_jax.rollout.http.server.replies import BODIES, Bodies, Handler, guard, refuse_pages
from areal_jax.rollout.http.server.thread import bind, describe_url
from areal_jax.rollout.http.wire.encoding import DONE, read_integer
from areal_jax.rollout.http.wire.exchange import (
    MISSED,
    Answer,
    Call,
    Finish,
    FinishWord,
    Piece,
    ReplyInfo,
    RequestError,
    ToolCall,
    name_answers,
)
from areal_jax.rollout.http.wire.openai import Required, find_misses, render_models, require_unread
from areal_jax.types import Prompt, SamplingParams, Segment

MODEL = 'policy'  # the name of the model of a run


def make_answers(call: Call, turns: Sequence[Turn], name: str) -> list[Answer]:
    """The answers that the dialects render; `name` is the id of the reply."""
    names = name_answers(call, name).request_ids
    return [_make_answer(names[index], index, turn) for index, turn in enumerate(turns)]


def render(
    dialect: ModuleType, call: Call, answers: Sequence[Answer], token_text: Callable[[int], str]
) -> web.Response:
    """The whole reply. For a stream: all events in one body, each as it would be sent alone."""
    info = ReplyInfo(MODEL, int(time.time()), token_text)
    misses = find_misses(call, answers)
    headers = {MISSED: ', '.join(misses)} if misses else {}
    if not call.stream:
        return web.json_response(dialect.render(call, answers, info), headers=headers)
    events = [_render_events(dialect, call, answer, info) for answer in answers]
    ending = b'' if isinstance(dialect, NamedEvents) else DONE
    content = b''.join([*events, dialect.render_last(call, answers, info), ending])
    return web.Response(body=content, content_type='text/event-stream', headers=headers)


def _render_events(dialect: ModuleType, call: Call, answer: Answer, info: ReplyInfo) -> bytes:
    pieces, finish = answer.pieces, answer.finish
    answer.pieces, answer.finish, found = [], None, []
    for number, piece in enumerate(pieces, start=1):
        answer.pieces.append(piece)
        answer.finish = finish if number == len(pieces) else None
        found.append(dialect.render_event(call, answer, piece, info))
    return b''.join(found)


def _make_answer(name: str, index: int, turn: Turn) -> Answer:
    pieces = [_make_piece(segment) for segment in turn.answer]
    last = pieces[-1]
    text = turn.reply.text
    calls = tuple(_make_call(call, len(text)) for call in turn.reply.tool_calls)
    reasoning = str(turn.reply.message.get('reasoning_content') or '')
    pieces[-1] = Piece(last.tokens, last.logprobs, last.version, last.columns, text, calls, reasoning)
    return Answer(name, turn.prompt_tokens, index, pieces, Finish(_finish_word(turn.reply)), version=last.version)


def _make_piece(segment: Segment) -> Piece:
    return Piece(segment.tokens, np.asarray(segment.behavior_logprobs, np.float32), str(segment.policy_version))


def _make_call(call: object, after: int) -> ToolCall:
    described = cast(JsonObject, call)
    function = described['function']
    return ToolCall(described['id'], function['name'], function['arguments'], after)


def _finish_word(reply: Reply) -> FinishWord:
    return 'length' if reply.finish_reason == 'length' else 'stop'


_BACKLOG = 1024
_KEY_BYTES = 32  # random
_NAMING_S = 2.0
_MOST_RETRIES = 10**9
_SESSION = 'X-Session-ID'  # header that the server of an environment gives the requests that it relays
_HERE = '127.0.0.1,localhost'  # for NO_PROXY: a proxy of the machine does not reach loopback
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class GatewaySettings:
    """The properties of the model that the gateway reports, and its rules for programs."""

    context_tokens: int
    programs: int  # agent.programs: at once
    required: Required  # agent.required
    render: Callable[[Messages, Tools], np.ndarray]  # int32 [P] of a conversation
    token_text: Callable[[int], str]
    bound: BodyBound  # on the bodies that programs send
    limits: Limits = dataclasses.field(default_factory=Limits)
    reads: Callable[[str], bool] = lambda name: False  # whether the chat template looks at something of this name


class Gateway:
    """The HTTP server: the first program starts it, on its event loop, and it ends with that loop.

    Args:
      host: runs the programs.
    """

    def __init__(self, host: ProgramHost, settings: GatewaySettings):
        self._host, self._settings = host, settings
        self._sessions: dict[str, Session] = {}  # by key
        self._room = asyncio.Semaphore(settings.programs)
        self._starting = asyncio.Lock()
        self._named = asyncio.Event()
        self._url = ''
        self._server: asyncio.Task[None] | None = None

    def open(self, sampling: SamplingParams, prompt: Prompt, sample: int) -> Session:
        """Opens an episode; its program starts when its first event is requested. All its turns use `sampling`."""
        return Session(functools.partial(self._run, prompt, sample), sampling, self._settings.context_tokens)

    # On the I/O loop.

    async def _run(self, prompt: Prompt, sample: int, session: Session) -> Ending:
        async with self._room:
            await self._start()
            key = f'sk-{secrets.token_hex(_KEY_BYTES)}'
            keys: list[str] = []

            def name(other: str) -> None:
                self._sessions[other] = session
                keys.append(other)
                self._named.set()
                self._named.clear()  # those that wait have been woken

            name(key)
            try:
                environment = {**self._environment(key), 'AREAL_EPISODE': f'{prompt.draw}.{sample}'}
                return await self._host.run(Job(environment, dict(prompt.problem), name))
            finally:
                for one in keys:
                    self._sessions.pop(one, None)

    def _environment(self, key: str) -> Mapping[str, str]:
        return {
            'OPENAI_BASE_URL': f'{self._url}/v1', 'OPENAI_API_KEY': key, 'OPENAI_MODEL': MODEL,
            'ANTHROPIC_BASE_URL': self._url, 'ANTHROPIC_API_KEY': key, 'ANTHROPIC_MODEL': MODEL,
            'NO_PROXY': _HERE, 'no_proxy': _HERE,
        }  # fmt: skip

    async def _start(self) -> None:
        async with self._starting:
            if self._server is None:
                started = asyncio.Event()
                self._server = asyncio.get_running_loop().create_task(self._serve(started), name='gateway')
                waiting = asyncio.ensure_future(started.wait())
                await asyncio.wait([self._server, waiting], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if self._server.done():
                    self._server.result()

    async def _serve(self, started: asyncio.Event) -> None:
        limits = self._settings.limits
        listener = bind('127.0.0.1', 0)
        self._url = describe_url(listener)
        connections = ConnectionLimits(count_connections(limits.connections), limits.header_s, limits.write_s)
        app = web.Application(middlewares=[guard(self._admit)], client_max_size=limits.body_bytes)
        app[BODIES] = Bodies(limits, self._settings.bound)
        app.add_routes(self._list_routes())
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        assert runner.server is not None
        try:
            async with ConnectionTable(connections, _log).listening(listener, runner.server, _BACKLOG):
                started.set()
                await asyncio.Event().wait()
        finally:
            app[BODIES].close()
            try:  # the I/O loop cancels slow endings once more; both of these must begin all the same
                await self._host.close()
            finally:
                await runner.cleanup()

    # Routes.

    def _list_routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(path, self._handle(path)) for path in DIALECTS),
            web.post('/v1/messages/count_tokens', self._count_tokens),
            web.get('/v1/models', self._list_models),
        ]

    def _handle(self, path: str) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            session, settings = await self._find_session(request), self._settings
            parse = functools.partial(read_asked_call, path, sampling=session.sampling, required=settings.required)
            try:
                async with request.app[BODIES].opened(request, parse, 1, str(id(session)), any_text=True) as asked:
                    require_unread(asked.call, settings.reads)
            except RequestError:
                session.counts['malformed'] += 1
                raise
            exchange = session.take(asked, _is_retried(request), request.headers.get('Idempotency-Key', ''))
            turns = await session.wait(exchange)
            answers = make_answers(asked.call, turns, f'{exchange.number}')
            if not exchange.is_delivered:  # a retry is not counted again
                session.counts.update(f'missed/{field}' for field in find_misses(asked.call, answers))
            response = render(DIALECTS[path], asked.call, answers, settings.token_text)
            await response.prepare(request)
            await response.write_eof()
            exchange.is_delivered = True
            return response

        return answer

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = await self._find_session(request)
        async with request.app[BODIES].opened(request, read_count, prompts=1, client=str(id(session))) as asked:
            ids = await request.app[BODIES].run(functools.partial(self._settings.render, *asked))
        return web.json_response({'input_tokens': len(ids)})

    async def _list_models(self, request: web.Request) -> web.Response:
        await self._find_session(request)
        return web.json_response(render_models(ReplyInfo(MODEL, 0), self._settings.context_tokens))

    def _admit(self, request: web.Request) -> None:
        """Raises RequestError for a request that a web page may have sent; the routes check the episode's key."""
        refuse_pages(request, frozenset(), is_proven=any(key in self._sessions for key in _list_keys(request)))

    async def _find_session(self, request: web.Request) -> Session:
        """Returns the session of a request's key; raises RequestError if no running episode has the key."""
        keys = _list_keys(request)
        if _SESSION in request.headers:
            with contextlib.suppress(TimeoutError):  # a server may send requests before it has named its episode
                async with asyncio.timeout(_NAMING_S):
                    while not any(key in self._sessions for key in keys):
                        await self._named.wait()
        session = next((self._sessions[key] for key in keys if key in self._sessions), None)
        if session is None:
            raise RequestError(
                'Authorization',
                'Authorization has no key of an episode that runs: use OPENAI_API_KEY of this program',
                401,
            )
        return session


def _list_keys(request: web.Request) -> list[str]:
    """Lists an episode's possible keys: as OpenAI's and Anthropic's clients send them, and joined with X-Session-ID."""
    keys = [request.headers.get('Authorization', '').removeprefix('Bearer '), request.headers.get('x-api-key', '')]
    if (of_trace := request.headers.get(_SESSION)) is not None:
        keys += [f'{key}.{of_trace}' for key in keys]
    return keys


def _is_retried(request: web.Request) -> bool:
    """Whether OpenAI's or Anthropic's client marks the request as a retry."""
    return bool(read_integer(request.headers.get('x-stainless-retry-count', '0'), _MOST_RETRIES))
