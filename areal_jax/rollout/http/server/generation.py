"""The routes that generate: one handler, a dialect each."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from aiohttp import web

from areal_jax.files import JsonObject
from areal_jax.rollout.http.server.bridge import Exchange
from areal_jax.rollout.http.server.limits import QUEUE_FULL, TOO_LATE
from areal_jax.rollout.http.server.replies import BODIES, BRIDGE, Handler
from areal_jax.rollout.http.server.scoring import require_scorable, score_answers, score_prompts
from areal_jax.rollout.http.server.state import FACTS
from areal_jax.rollout.http.wire import chat, completions, messages, responses, sglang, vllm
from areal_jax.rollout.http.wire.encoding import DONE, frame
from areal_jax.rollout.http.wire.exchange import MISSED, Answer, Call, Piece, ReplyInfo, RequestError

_ANSWER_VALUES = 32  # of an answer in a reply, in addition to the values of each token
_LAST_WORDS_S = 5.0  # for the reader of a stream to take its last events
Pieces = AsyncIterator[tuple[Answer, Piece]]


class Dialect(Protocol):
    """A module of wire/."""

    def parse(self, body: object) -> Call: ...

    def render(self, call: Call, answers: Sequence[Answer], info: ReplyInfo) -> object: ...

    def render_event(self, call: Call, answer: Answer, piece: Piece, info: ReplyInfo) -> bytes: ...

    def render_last(self, call: Call, answers: Sequence[Answer], info: ReplyInfo) -> bytes: ...

    def render_error(self, message: str, status: int, field: str = '') -> JsonObject: ...


@runtime_checkable
class NamedEvents(Protocol):
    """A dialect whose events have names, the last of which ends a stream: no [DONE] follows."""

    def render_failure(self, answers: Sequence[Answer], message: str, status: int, field: str) -> bytes: ...


ROUTES: dict[str, Dialect] = {
    '/generate': sglang,
    '/inference/v1/generate': vllm,
    '/v1/completions': completions,
    '/v1/chat/completions': chat,
    '/v1/responses': responses,
    '/v1/messages': messages,
}
_BATCHES: tuple[Dialect, ...] = (sglang, completions)  # whose requests may have several prompts


def list_routes(model: str) -> list[web.RouteDef]:
    """Lists the routes; `model` is the model name for calls that name none."""
    generating = [web.post(path, _handle(dialect, model)) for path, dialect in ROUTES.items()]
    return [*generating, web.post('/v1/messages/count_tokens', count_tokens)]


async def count_tokens(request: web.Request) -> web.Response:
    """Answers the length of a conversation's prompt, even if it is too long for the context."""
    async with request.app[BODIES].opened(request, messages.parse_count, prompts=1) as parsed:
        call = await request.app[BRIDGE].encode(parsed)
    request.app[BRIDGE].counts.note_ignored(call.ignored)
    return web.json_response({'input_tokens': len(call.prompts[0])})


def _handle(dialect: Dialect, model: str) -> Handler:
    async def generate(request: web.Request) -> web.StreamResponse:
        if request.app[FACTS].draining:
            raise RequestError('', 'this server is ending: ask another one', QUEUE_FULL)
        bridge, bodies = request.app[BRIDGE], request.app[BODIES]
        prompts = bridge.load.most_answers if dialect in _BATCHES else 1
        async with bodies.opened(request, dialect.parse, prompts) as parsed:
            call = await bridge.tokenize(parsed)
        require_scorable(call, bridge.limits.scored_tokens)
        info = ReplyInfo(model, int(time.time()), bridge.texts.token_text)
        exchange = bridge.open(call)
        try:
            async with asyncio.timeout(bridge.limits.request_s) as deadline:
                if call.stream:
                    await score_prompts(bridge, call, exchange.answers)
                    response = await _stream(request, dialect, call, exchange, info, deadline)
                else:
                    answers = await exchange.finish()
                    await score_answers(bridge, call, answers)
                    misses = exchange.note_misses()
                    headers = {MISSED: ', '.join(misses)} if misses else {}
                    render = functools.partial(dialect.render, call, answers, info)
                    response = await bodies.reply(render, _count_values(call, answers), headers)
            return response
        except TimeoutError:
            raise RequestError('', _describe_late(bridge.limits.request_s), TOO_LATE) from None
        finally:
            exchange.close()

    return generate


async def _stream(
    request: web.Request, dialect: Dialect, call: Call, exchange: Exchange, info: ReplyInfo, deadline: asyncio.Timeout
) -> web.StreamResponse:
    """Answers with server-sent events; an error after the first byte becomes the last event."""
    pieces, limit_s = exchange.pieces(), request.app[BRIDGE].limits.request_s
    first = await anext(pieces, None)  # a refusal by the engine can still set the reply's status
    response = web.StreamResponse(headers={'Content-Type': 'text/event-stream', 'Cache-Control': 'no-cache'})
    try:
        await response.prepare(request)
        failure = await _write_events(response, dialect, call, exchange, pieces, first, info, deadline, limit_s)
        async with asyncio.timeout(_LAST_WORDS_S):
            await response.write(failure if isinstance(dialect, NamedEvents) else failure + DONE)
            await response.write_eof()
    except ConnectionResetError:
        pass  # the reader is gone
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()  # the reader does not read
    return response


async def _write_events(
    response: web.StreamResponse, dialect: Dialect, call: Call, exchange: Exchange, pieces: Pieces,
    first: tuple[Answer, Piece] | None, info: ReplyInfo, deadline: asyncio.Timeout, limit_s: float,
) -> bytes:  # fmt: skip
    """Writes the events of all pieces; returns the bytes of the end, or of a failure."""
    try:
        if first is not None:
            await response.write(dialect.render_event(call, *first, info))
        async for answer, piece in pieces:
            await response.write(dialect.render_event(call, answer, piece, info))
        exchange.note_misses()
        return dialect.render_last(call, exchange.answers, info)
    except RequestError as error:
        return _render_failure(dialect, exchange.answers, str(error), error.status, error.field)
    except asyncio.CancelledError:
        if not deadline.expired():
            raise
        return _render_failure(dialect, exchange.answers, _describe_late(limit_s), TOO_LATE)


def _render_failure(dialect: Dialect, answers: Sequence[Answer], message: str, status: int, field: str = '') -> bytes:
    if isinstance(dialect, NamedEvents):
        return dialect.render_failure(answers, message, status, field)
    return frame(dialect.render_error(message, status, field))


def _count_values(call: Call, answers: Sequence[Answer]) -> int:
    """Estimates the number of values in a reply."""
    each = 2 + call.alternatives + len(call.columns) if call.logprobs else 1
    of_prompts = sum(len(prompt) for prompt in call.prompts) if call.prompt_starts or call.echo else 0
    return (
        len(answers) * _ANSWER_VALUES
        + each * sum(one.n_tokens for one in answers)
        + (max(each, 2 + call.prompt_alternatives) * of_prompts)
    )


def _describe_late(seconds: float) -> str:
    return f'the answer was not complete after {seconds:g} s, the limit of this server: ask for fewer tokens'
