"""One HTTP server on loopback for all programs of a run: one key per episode; the routes are the server's dialects.

It runs on the I/O loop of the run's clock. A session keeps the calls of one episode's program, in order of arrival, and
their replies: a retry gets the same reply again. The host's loop decides what is sampled for a call
(agent_workflow.py).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import ModuleType
from typing import cast

import numpy as np
from aiohttp import web

from areal_jax.agents.dialogue import Messages, Tools, Turn
from areal_jax.agents.programs.program_host import Ending, Job, ProgramHost, SaidTurn
from areal_jax.errors import UserError, cut_text
from areal_jax.files import JsonObject
from areal_jax.rollout.http.server.connections import ConnectionLimits, ConnectionTable
from areal_jax.rollout.http.server.generation import NamedEvents
from areal_jax.rollout.http.server.limits import BodyBound, Limits, count_connections
from areal_jax.rollout.http.server.replies import BODIES, Bodies, Handler, guard, refuse_pages
from areal_jax.rollout.http.server.thread import bind, describe_url
from areal_jax.rollout.http.wire import chat, messages, responses
from areal_jax.rollout.http.wire.encoding import DONE, read_integer
from areal_jax.rollout.http.wire.exchange import (
    ASKED,
    MISSED,
    Answer,
    Call,
    Finish,
    Message,
    Piece,
    ReplyInfo,
    RequestError,
    ToolCall,
    name_answers,
)
from areal_jax.rollout.http.wire.openai import (
    Required,
    describe_wishes,
    find_misses,
    render_models,
    require_granted,
    require_unread,
)
from areal_jax.text.chat_template import read_arguments
from areal_jax.types import Prompt, SamplingParams, Segment

DIALECTS: Mapping[str, ModuleType] = {
    '/v1/chat/completions': chat,
    '/v1/responses': responses,
    '/v1/messages': messages,
}
_LIMITS = ('max_tokens', 'max_completion_tokens', 'max_output_tokens')  # messages.py needs one
# fields that would change the distribution, cut an answer elsewhere or score a prompt, with the value that has no
# effect
_OVERRIDDEN: Mapping[str, object] = {
    'stop': [], 'stop_sequences': [], 'stop_token_ids': [], 'seed': None, 'logit_bias': {}, 'min_p': 0,
    'presence_penalty': 0, 'frequency_penalty': 0, 'repetition_penalty': 1, 'min_tokens': 0, 'ignore_eos': False,
    'top_logprobs': 0, 'prompt_logprobs': None, 'cache_salt': '', 'skip_special_tokens': True,
    'include_stop_str_in_output': False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AskedCall:
    """One request of a program."""

    call: Call  # for the reply
    messages: tuple[JsonObject, ...]  # as chat templates have them
    wish: str  # additional text for the model; the history that comes back does not have it
    digest: str  # of path and body: a retry has the same
    counts: Mapping[str, int]  # fields by their treatment: 'overridden/temperature', 'ignored/user'


def read_asked_call(path: str, body: object, sampling: SamplingParams, required: Required) -> AskedCall:
    """Reads a request of a program; raises RequestError for a refused body."""
    counts: collections.Counter[str] = collections.Counter()
    call = DIALECTS[path].parse(_override(body, sampling, counts))
    require_granted(call, required)
    if call.model_columns:
        asked = ASKED.format(call.model_columns[0])
        raise RequestError(asked, f'{asked}=True is not served to programs: the run has the routes, leave it out')
    counts.update(f'ignored/{field}' for field in call.ignored)
    (prompt,) = call.prompts
    if not isinstance(prompt, tuple):
        raise RequestError(call.prompt_field, f'{call.prompt_field}: an episode has no prompts of ids: send messages')
    turns = tuple(cast(Message, turn).describe() for turn in prompt)
    return AskedCall(call, turns, describe_wishes(call.wishes), _digest(path, body), counts)


def read_count(body: object) -> tuple[list[JsonObject], list[JsonObject]]:
    """Reads the messages and tools of a request for the length of its prompt."""
    call = messages.parse_count(body)
    (prompt,) = call.prompts
    assert isinstance(prompt, tuple)
    return [turn.describe() for turn in prompt], [dict(tool) for tool in call.tools]


def _override(body: object, sampling: SamplingParams, counts: collections.Counter[str]) -> object:
    if not isinstance(body, Mapping):
        return body
    of_run = {'temperature': sampling.temperature, 'top_p': sampling.top_p, 'top_k': sampling.top_k or -1}
    neutral = {**_OVERRIDDEN, **of_run}
    given = {name: body[name] for name in (*neutral, *_LIMITS) if body.get(name) is not None}
    counts.update(f'overridden/{name}' for name, value in given.items() if value != neutral.get(name))
    return {name: value for name, value in body.items() if name not in neutral}


def _digest(path: str, body: object) -> str:
    return hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()


# Joins the turns that the gateway gave an episode with the turns in the record of its environment.


def join_record(said: Sequence[SaidTurn], turns: Mapping[int, Sequence[Turn]]) -> tuple[list[int], int]:
    """Returns the calls that the record lacks, and the number of recorded turns that the gateway never made.

    A recorded turn matches a turn with the same ids or, if it has no ids, with the same text and tool calls.

    Args:
      turns: the turns that were sampled for each call, by its number.
    """
    left, strangers = dict(turns), 0
    for one in said:
        number = next((number for number, given in left.items() if any(_is_same(one, turn) for turn in given)), None)
        if number is None:
            strangers += 1
        else:
            del left[number]
    return list(left), strangers


def _is_same(said: SaidTurn, turn: Turn) -> bool:
    if said.tokens is not None:
        return np.array_equal(said.tokens, np.concatenate([segment.tokens for segment in turn.answer]))
    functions = [cast(JsonObject, call)['function'] for call in turn.reply.tool_calls]
    # as JSON: a dialect whose arguments are objects serializes them again
    given = [(function['name'], read_arguments(function['arguments'])) for function in functions]
    told = [(name, read_arguments(arguments)) for name, arguments in said.calls]
    return said.text == turn.reply.text and told == given


LEAST_LOGGED_BYTES, LOGGED_BYTES_PER_TOKEN = (
    2**16,
    64,
)  # of one call in the event log: no text within a context has more
_MOST_REFUSED = 8  # calls refused a turn, e.g. because a budget is used up: then the program is ended
_MOST_DETAIL = 2000  # characters
_ENDED = 'the episode of this key has ended'


@dataclasses.dataclass(eq=False)
class AskedExchange:
    """A call and its outcome."""

    number: int
    asked: AskedCall
    key: str  # Idempotency-Key; '' = none
    outcome: asyncio.Future[Sequence[Turn]]
    requests: int = 0  # requests that wait for the outcome
    is_logged: bool = True  # its messages are in the event log, for later calls to refer to
    is_delivered: bool = False  # a reply went out


class Session:
    """One episode. Used on the I/O loop; only `answer`, `refuse` and `close` are called on the host's loop.

    Args:
      run: the program, given this session; it returns when the program has ended.
      context_tokens: most tokens of a row; a call whose messages and tools cannot fit is not logged, and gets no turn.
    """

    def __init__(self, run: Callable[[Session], Awaitable[Ending]], sampling: SamplingParams, context_tokens: int):
        self.counts: collections.Counter[str] = collections.Counter()
        self.sampling = sampling
        self._run = run
        self._most_bytes = max(LEAST_LOGGED_BYTES, LOGGED_BYTES_PER_TOKEN * context_tokens)
        self._events: asyncio.Queue[JsonObject] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None  # None: nothing has begun, as in a replay
        self._runner: asyncio.Task[None] | None = None
        self._program: asyncio.Task[Ending] | None = None
        self._exchanges: list[AskedExchange] = []
        self._refused = 0

    async def next(self) -> JsonObject:
        """Returns the next event, for the log: a call of the program, or its end.

        {event: 'call', number, messages, tools, n, one_tool_call, wish, kept, of}: `messages` follow the first `kept`
        messages of call `of`; {event: 'too_long', number, bytes}: a call that fits in no context, logged without its
        messages; {event: 'end', status, detail, undelivered, counts, outcome}: `outcome` only with an environment;
        {event: 'fault', detail}: no program can run.
        """
        if self._runner is None:
            self._loop = asyncio.get_running_loop()
            self._runner = self._loop.create_task(self._follow(), name='program')
        return await self._events.get()

    # On the host's loop.

    def answer(self, number: int, turns: Sequence[Turn]) -> None:
        """Delivers the turns that were sampled for a call."""
        self._call(self._settle, number, turns, None)

    def refuse(self, number: int, sentence: str) -> None:
        """Refuses a call: no turn was sampled for it."""
        self._call(self._settle, number, (), RequestError('', sentence))

    def close(self) -> None:
        self._call(self._end)

    # On the I/O loop.

    def take(self, asked: AskedCall, retried: bool, key: str) -> AskedExchange:
        """The exchange of the call, or of an earlier one that it repeats: same `key`, or `retried` and same body."""
        repeats = lambda one: one.key == key if key else retried and one.asked.digest == asked.digest
        before = [one for one in self._exchanges if repeats(one)]
        if before:
            self.counts['retried'] += 1
            # of equal calls, one whose reply was not delivered and for which no request waits
            return next((one for one in before if not one.is_delivered and not one.requests), before[-1])
        exchange = AskedExchange(len(self._exchanges), asked, key, asyncio.get_running_loop().create_future())
        exchange.outcome.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._exchanges.append(exchange)
        self.counts.update(asked.counts)
        described = self._describe(exchange)
        size = len(json.dumps(described))
        exchange.is_logged = size <= self._most_bytes
        event = {'event': 'call', **described} if exchange.is_logged else {'event': 'too_long', 'bytes': size}
        self._events.put_nowait({**event, 'number': exchange.number})
        return exchange

    async def wait(self, exchange: AskedExchange) -> Sequence[Turn]:
        """Returns the turns of a call; any number of requests may wait for them and go away. Raises RequestError."""
        exchange.requests += 1
        try:
            return await asyncio.shield(exchange.outcome)
        finally:
            exchange.requests -= 1

    def _describe(self, exchange: AskedExchange) -> JsonObject:
        """Describes the call without its first messages that the most similar logged call has too."""
        turns, call = exchange.asked.messages, exchange.asked.call
        kept, of = 0, None
        for before in filter(lambda one: one.is_logged, self._exchanges[: exchange.number]):
            pairs = enumerate(zip(turns, before.asked.messages, strict=False))
            common = next(
                (index for index, (ours, theirs) in pairs if ours != theirs),
                min(len(turns), len(before.asked.messages)),
            )
            if common > kept:
                kept, of = common, before.number
        return {
            'of': of, 'kept': kept, 'messages': list(turns[kept:]), 'tools': [dict(tool) for tool in call.tools],
            'n': call.n, 'one_tool_call': call.one_tool_call, 'wish': exchange.asked.wish,
        }  # fmt: skip

    async def _follow(self) -> None:
        self._program = asyncio.ensure_future(self._run(self))
        try:
            ending = await self._program
        except UserError as error:
            self._events.put_nowait({'event': 'fault', 'detail': cut_text(str(error), _MOST_DETAIL)})
            return
        except asyncio.CancelledError:
            if not self._program.cancelled():
                raise
            ending = Ending('failed', f'it went on to ask after {self._refused} refusals')
        finally:
            for exchange in self._exchanges:
                if not exchange.outcome.done():
                    exchange.outcome.set_exception(RequestError('', _ENDED, 503))
        self._events.put_nowait({'event': 'end', **self._describe_end(ending)})

    def _describe_end(self, ending: Ending) -> JsonObject:
        undelivered = [exchange.number for exchange in self._exchanges if not exchange.is_delivered]
        outcome = None
        if ending.record is not None:
            unknown, strangers = join_record(ending.record.said, self._list_turns())
            undelivered = sorted({*undelivered, *unknown})
            outcome = ending.record.outcome
            self.counts['joined'] += len(ending.record.said) - strangers
            if strangers and outcome is not None:
                outcome = None
                ending = Ending('lost', f'{strangers} turns in the record of its environment were never sampled')
        counts = {name: n for name, n in sorted(self.counts.items()) if n}
        return {
            'status': ending.status, 'detail': ending.detail, 'undelivered': undelivered, 'counts': counts,
            'outcome': outcome,
        }  # fmt: skip

    def _list_turns(self) -> dict[int, Sequence[Turn]]:
        sampled = [one for one in self._exchanges if one.outcome.done() and one.outcome.exception() is None]
        return {exchange.number: exchange.outcome.result() for exchange in sampled}

    def _settle(self, number: int, turns: Sequence[Turn], error: RequestError | None) -> None:
        outcome = self._exchanges[number].outcome
        if outcome.done():
            return
        if error is None:
            outcome.set_result(turns)
            return
        outcome.set_exception(error)
        self._refused += 1
        self.counts['refused'] += 1
        if self._refused >= _MOST_REFUSED:
            self._end()

    def _end(self) -> None:
        if self._program is not None:
            self._program.cancel()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(function, *arguments)


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
    return Answer(
        name,
        turn.prompt_tokens,
        index,
        pieces,
        Finish('length' if turn.reply.finish_reason == 'length' else 'stop'),
        version=last.version,
    )


def _make_piece(segment: Segment) -> Piece:
    return Piece(segment.tokens, np.asarray(segment.behavior_logprobs, np.float32), str(segment.policy_version))


def _make_call(call: object, after: int) -> ToolCall:
    described = cast(JsonObject, call)
    function = described['function']
    return ToolCall(described['id'], function['name'], function['arguments'], after)


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
