"""The routes that generate: one handler, a dialect each."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from aiohttp import web

from areal_jax.files import JsonObject
from areal_jax.rollout.http.server.bridge import Bridge, Exchange, find_group
from areal_jax.rollout.http.server.limits import FAILED, QUEUE_FULL, TOO_LATE
from areal_jax.rollout.http.server.replies import BODIES, BRIDGE, Handler
from areal_jax.rollout.http.server.state import FACTS
from areal_jax.rollout.http.wire import chat, completions, messages, responses, sglang, vllm
from areal_jax.rollout.http.wire.encoding import DONE, frame
from areal_jax.rollout.http.wire.exchange import MISSED, Answer, Call, Finish, Piece, ReplyInfo, RequestError
from areal_jax.rollout.scoring import Scored, ScoringRequest
from areal_jax.rollout.stream import LogprobError

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


# The scores of calls: of the prompts of the answers, and the alternatives of generated tokens.


def require_scorable(call: Call, most_tokens: int) -> None:
    """Raises RequestError if the prompts to be scored have more tokens than `most_tokens`, this server's limit."""
    indices = range(0, call.n_answers, call.n)
    scored = sum(len(call.prompts[i // call.n]) - call.scored_from(i) for i in indices)
    if scored > most_tokens:
        raise RequestError(
            call.prompt_field,
            f'{call.prompt_field}: log-probs of {scored} prompt tokens in one request, and this '
            f'server computes {most_tokens} at most: send fewer prompts at once',
        )


async def score_prompts(bridge: Bridge, call: Call, answers: Sequence[Answer]) -> None:
    """Sets the scores of all prompts whose log-probs are wanted, before anything is generated."""
    await _score(bridge, call, [answer for answer in answers if answer.index % call.n == 0], with_answers=False)
    _share_prompts(call, answers)


async def score_answers(bridge: Bridge, call: Call, answers: Sequence[Answer]) -> None:
    """Sets the scores of prompts and the alternatives of answers, when the answers are complete.

    Alternatives come from a pass over prompt and answer, which is exact under the weights that drew the answer. If the
    weights changed since the answer began, it gets none.
    """
    if call.alternatives:
        await _score(bridge, call, answers, with_answers=True)
        _share_prompts(call, answers)
    else:
        await score_prompts(bridge, call, answers)


def _share_prompts(call: Call, answers: Sequence[Answer]) -> None:
    """Copies the prompt scores of the first answer to all answers of the same prompt."""
    for answer in answers:
        first = answers[answer.index - answer.index % call.n]
        answer.prompt_scores, answer.scored_version = first.prompt_scores, first.scored_version


async def _score(bridge: Bridge, call: Call, answers: Sequence[Answer], *, with_answers: bool) -> None:
    wanted = [one for one in answers if _wants(call, one, with_answers)]
    requests = [_describe(call, answer, with_answers) for answer in wanted]
    try:
        scored = await asyncio.gather(*(_ask(bridge, request) for request in requests))
    except LogprobError as error:
        bridge.withdraw_scoring(requests)
        raise RequestError(call.prompt_field, str(error), FAILED) from error
    except BaseException:
        bridge.withdraw_scoring(requests)
        raise
    for answer, found in zip(wanted, scored, strict=True):
        if found is None:
            if not answer.n_tokens:
                answer.finish = Finish('abort', None, 'Aborted')
            continue
        _note(call, answer, found)


def _wants(call: Call, answer: Answer, with_answers: bool) -> bool:
    prompt = answer.index // call.n
    listed = call.scored_from(answer.index) < len(answer.prompt_tokens) or call.prompt_logprobs is not None
    scores_prompt = listed or call.sampling[prompt].max_new_tokens == 0
    return bool(call.prompt_starts and scores_prompt and answer.index % call.n == 0) or (
        with_answers and answer.n_tokens > 0
    )


async def _ask(bridge: Bridge, request: ScoringRequest) -> Scored | None:
    return await bridge.act('score', lambda service: service.score(request))


def _describe(call: Call, answer: Answer, with_answers: bool) -> ScoringRequest:
    """Makes the scoring request: prompt tokens at temperature 1, generated ones at the request's temperature."""
    prompt = len(answer.prompt_tokens)
    first = call.scored_from(answer.index) if answer.index % call.n == 0 else prompt
    generated = answer.tokens if with_answers else np.zeros(0, np.int32)
    temperatures = np.ones(prompt + len(generated) - first, np.float32)
    temperatures[prompt - first :] = call.sampling[answer.index // call.n].temperature
    alternatives = max(call.prompt_alternatives if first < prompt else 0, call.alternatives)
    tokens = np.concatenate([answer.prompt_tokens, generated])
    return ScoringRequest(
        answer.request_id, tokens, first, temperatures, alternatives, find_group(call, answer.request_id)
    )


def _note(call: Call, answer: Answer, found: Scored) -> None:
    prompt = len(answer.prompt_tokens)
    first = call.scored_from(answer.index) if answer.index % call.n == 0 else prompt
    scores = found.scores
    if call.prompt_starts and answer.index % call.n == 0:
        answer.prompt_scores, answer.scored_version = scores.part(0, prompt - first), found.version
    if len(scores.logprobs) > prompt - first and found.number == answer.began:
        answer.alternatives = scores.part(prompt - first, len(scores.logprobs))
    if not answer.n_tokens:
        answer.version = found.version
