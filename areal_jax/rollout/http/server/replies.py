"""Shared by every route: access control, and refusals as replies in the dialect of the path."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Middleware

from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.rollout.http.server.body_parser import BodyParser
from areal_jax.rollout.http.server.body_values import BodyBound, parse_large
from areal_jax.rollout.http.server.bridge import Bridge
from areal_jax.rollout.http.server.limits import (
    NAME,
    PLACE_S,
    SLOW_BODY,
    SMALL_BYTES,
    TOO_LATE,
    TOO_LONG_BODY,
    Limits,
    Places,
)
from areal_jax.rollout.http.wire import messages, sglang, vllm
from areal_jax.rollout.http.wire.exchange import INCARNATION, Message, RequestError
from areal_jax.rollout.http.wire.openai import read_messages, read_tools
from areal_jax.rollout.http.wire.request_fields import MOST_PROMPTS, Fields, parse_json, read_token_ids
from areal_jax.rollout.http.wire.sglang import write_slowly
from areal_jax.text.chat_template import TokenizerError

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


# The routes of the tokenizer, in vLLM's form; lists of texts and of token ids are SGLang's.


_CHAT_UNSERVED = ('continue_final_message', 'chat_template', 'chat_template_kwargs', 'mm_processor_kwargs')


class TokenizeCall(NamedTuple):
    """The contents of a /tokenize request."""

    texts: str | tuple[str, ...]
    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...]
    adds_special: bool  # add the special tokens that the tokenizer puts around texts
    with_strings: bool  # return the texts of tokens


def list_routes() -> list[web.RouteDef]:
    return [
        web.post('/tokenize', tokenize),
        web.post('/detokenize', detokenize),
        web.get('/tokenizer_info', tokenizer_info),
    ]


async def tokenize(request: web.Request) -> web.Response:
    """Answers the ids of a text, of each text of a list, or of a conversation in the model's chat form."""
    bridge = request.app[BRIDGE]
    async with request.app[BODIES].opened(request, parse_tokenize, MOST_PROMPTS) as parsed:
        (texts, messages, tools, adds_special, with_strings), ignored = parsed
        bridge.counts.note_ignored(ignored)
        try:
            if messages:
                found = [await asyncio.to_thread(bridge.texts.apply_template, messages, tools)]
            else:
                listed = [texts] if isinstance(texts, str) else list(texts)
                encode = functools.partial(bridge.texts.encode_prompt, adds_special=adds_special)
                found = await asyncio.to_thread(lambda: [encode(text) for text in listed])
        except TokenizerError as error:
            field = 'messages' if messages else 'prompt'
            raise RequestError(field, f'{field} has no token ids: {error}') from error
    is_batch = not messages and not isinstance(texts, str)
    return await request.app[BODIES].reply(
        lambda: _render_tokens(bridge, found, is_batch, with_strings), sum(map(len, found)) * (2 if with_strings else 1)
    )


def _render_tokens(bridge: Bridge, found: Sequence[np.ndarray], is_batch: bool, with_strings: bool) -> JsonObject:
    ids = [tokens.tolist() for tokens in found]
    strings = [[bridge.texts.token_text(token) for token in tokens] for tokens in ids] if with_strings else None
    counts = [len(tokens) for tokens in ids]
    return {
        'count': counts if is_batch else counts[0],
        'max_model_len': bridge.context_tokens,
        'tokens': ids if is_batch else ids[0],
        'token_strs': strings if is_batch or strings is None else strings[0],
    }


async def detokenize(request: web.Request) -> web.Response:
    """Answers the text of ids, or of each list of ids, under the field names of both vLLM and SGLang."""
    bridge = request.app[BRIDGE]
    async with request.app[BODIES].opened(request, parse_detokenize, MOST_PROMPTS) as parsed:
        (lists, is_batch, skip_special), ignored = parsed
        bridge.counts.note_ignored(ignored)
    for tokens in lists:
        if len(tokens) and int(tokens.max()) >= bridge.vocab_size:
            raise RequestError(
                'tokens',
                f'tokens has token {int(tokens.max())}, and the model {bridge.vocab_size} tokens: use ids of '
                'its own tokenizer',
            )
    spell = bridge.texts.spell
    texts = await asyncio.to_thread(lambda: [spell(tokens, skip_special=skip_special) for tokens in lists])
    text = texts if is_batch else texts[0]
    return await request.app[BODIES].reply(lambda: {'prompt': text, 'text': text}, sum(map(len, texts)) // 64)


async def tokenizer_info(request: web.Request) -> web.Response:
    """Answers the special tokens by role, for harnesses that tokenize with this server."""
    bridge = request.app[BRIDGE]
    info: JsonObject = {'max_model_len': bridge.context_tokens, 'vocab_size': bridge.vocab_size}
    return web.json_response(info | bridge.texts.special_tokens())


def parse_tokenize(body: object) -> tuple[TokenizeCall, tuple[str, ...]]:
    """Returns the result of `read_tokenize`, and the fields that have no influence."""
    fields = Fields(body)
    return read_tokenize(fields), fields.ignored


def parse_detokenize(body: object) -> tuple[tuple[list[np.ndarray], bool, bool], tuple[str, ...]]:
    """Returns the result of `read_detokenize`, and the fields that have no influence."""
    fields = Fields(body)
    return read_detokenize(fields), fields.ignored


def read_tokenize(fields: Fields) -> TokenizeCall:
    """Reads a /tokenize request, which has either texts or messages."""
    messages: tuple[Message, ...] = ()
    tools: tuple[JsonObject, ...] = ()
    adds_special = fields.take_flag('add_special_tokens', not fields.has('messages'))
    if fields.has('messages'):
        messages, asked = read_messages(fields), read_tools(fields)
        tools = asked.tools
        for wish in asked.wishes:
            raise fields.refuse('tool_choice', wish.value, "must be 'auto' or 'none' here")
        fields.take_unserved(*_CHAT_UNSERVED)
        if adds_special:
            raise fields.refuse('add_special_tokens', True, 'is not served: a conversation has those of its template')
        if not fields.take_flag('add_generation_prompt', True):
            raise fields.refuse(
                'add_generation_prompt', False, 'is not served: conversations end where an answer begins'
            )
        texts: str | tuple[str, ...] = ()
    elif isinstance(given := fields.peek('prompt'), list):
        texts = fields.take_texts('prompt')
        if not texts:
            raise fields.refuse('prompt', given, 'has no text: send one or more')
    else:
        if given is None:
            raise fields.refuse('prompt', None, 'is missing: send a text, a list of texts, or messages')
        texts = fields.take_text('prompt')
    with_strings = fields.take_flag('return_token_strs')
    fields.take_ignored('model')
    fields.finish()
    return TokenizeCall(texts, messages, tools, adds_special, with_strings)


def read_detokenize(fields: Fields) -> tuple[list[np.ndarray], bool, bool]:
    """Returns (lists of ids, whether they came in a list, whether special tokens are left out)."""
    given = fields.take('tokens')
    is_batch = isinstance(given, list) and bool(given) and isinstance(given[0], list)
    rows = given if is_batch and isinstance(given, list) else [given]
    name = 'tokens[{}]' if is_batch else 'tokens'
    lists = [read_token_ids(name.format(index), row, least=0) for index, row in enumerate(rows)]
    skip_special = fields.take_flag('skip_special_tokens')
    fields.take_ignored('model')
    fields.finish()
    return lists, is_batch, skip_special
