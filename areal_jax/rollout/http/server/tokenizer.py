"""The routes of the tokenizer, in vLLM's form; lists of texts and of token ids are SGLang's."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from aiohttp import web
from pydantic import Discriminator, Field, Tag

from areal_jax.files import JsonObject
from areal_jax.rollout.http.server.bridge import Bridge
from areal_jax.rollout.http.server.replies import BODIES, BRIDGE
from areal_jax.rollout.http.wire import bodies, openai
from areal_jax.rollout.http.wire.chat import Messages, read_tools, read_turns, require_answer
from areal_jax.rollout.http.wire.encoding import MOST_PROMPTS, refuse
from areal_jax.rollout.http.wire.exchange import Message, RequestError
from areal_jax.text.chat_template import TokenizerError

_OF_CHATS = ('continue_final_message', 'chat_template', 'chat_template_kwargs', 'mm_processor_kwargs')


class TokenizeRequest(bodies.Body):
    """The body of /tokenize: texts or messages."""

    ignored = ('model',)
    unserved = _OF_CHATS
    prompt: bodies.OneOrTurns[bodies.Text, bodies.Spelled] | None = None
    messages: Messages | None = None
    tools: openai.Tools[openai.Tool] = Field([])
    tool_choice: openai.WordOr[openai.NamedTool] = 'auto'
    parallel_tool_calls: bool = True
    add_special_tokens: bool | None = None  # around texts
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(bodies.Body):
    ignored = ('model',)
    tokens: Annotated[
        Annotated[bodies.MaybeIds, Tag('(one)')]
        | Annotated[list[bodies.MaybeIds], Tag('(list)'), Field(fail_fast=True)],
        Discriminator(bodies.choose_rows),
    ]
    skip_special_tokens: bool = False


class TokenizeCall(NamedTuple):
    """The contents of a /tokenize request."""

    texts: Sequence[str]
    is_batch: bool  # the texts came in a list
    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...]
    adds_special: bool  # add the special tokens that the tokenizer puts around texts
    with_strings: bool  # return the texts of tokens
    ignored: set[str]  # fields without influence


def list_routes() -> list[web.RouteDef]:
    return [
        web.post('/tokenize', tokenize),
        web.post('/detokenize', detokenize),
        web.get('/tokenizer_info', tokenizer_info),
    ]


async def tokenize(request: web.Request) -> web.Response:
    """Answers the ids of a text, of each text of a list, or of a conversation in the model's chat form."""
    bridge = request.app[BRIDGE]
    async with request.app[BODIES].opened(request, parse_tokenize, MOST_PROMPTS) as asked:
        bridge.counts.note_ignored(asked.ignored)
        try:
            if asked.messages:
                found = [await asyncio.to_thread(bridge.texts.apply_template, asked.messages, asked.tools)]
            else:
                encode = functools.partial(bridge.texts.encode_prompt, adds_special=asked.adds_special)
                found = await asyncio.to_thread(lambda: [encode(text) for text in asked.texts])
        except TokenizerError as error:
            field = 'messages' if asked.messages else 'prompt'
            raise RequestError(field, f'{field} has no token ids: {error}') from error
    values = sum(map(len, found)) * (2 if asked.with_strings else 1)
    return await request.app[BODIES].reply(
        lambda: _render_tokens(bridge, found, asked.is_batch, asked.with_strings), values
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
        lists, is_batch, skip_special, ignored = parsed
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


def parse_tokenize(body: object) -> TokenizeCall:
    """Parses a /tokenize request, which has either texts or messages; raises RequestError."""
    asked, ignored = bodies.read(TokenizeRequest, body)
    adds_special, with_strings = asked.add_special_tokens, asked.return_token_strs
    if asked.messages is None:
        if asked.prompt is None:
            raise refuse('prompt', None, 'is missing: send a text, a list of texts, or messages')
        for name in ('tools', 'tool_choice', 'parallel_tool_calls', 'add_generation_prompt', *_OF_CHATS):
            if name in asked.sent:
                raise refuse(name, asked.sent[name], 'needs messages: leave it out')
        is_batch = isinstance(asked.prompt, list)
        texts = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
        return TokenizeCall(texts, is_batch, (), (), adds_special is not False, with_strings, ignored)
    if asked.prompt is not None:
        raise refuse('prompt', asked.prompt, 'is not served next to messages: leave one of them out')
    tools = read_tools(asked.tools, asked.tool_choice)
    for wish in tools.wishes:
        raise refuse('tool_choice', wish.value, "must be 'auto' or 'none' here")
    if adds_special:
        raise refuse('add_special_tokens', True, 'is not served: a conversation has those of its template')
    require_answer(asked.add_generation_prompt)
    return TokenizeCall((), False, read_turns(asked.messages), tools.tools, False, with_strings, ignored)


def parse_detokenize(body: object) -> tuple[list[np.ndarray], bool, bool, set[str]]:
    """Returns (lists of ids, whether they came in a list, whether special tokens are left out, ignored fields)."""
    asked, ignored = bodies.read(DetokenizeRequest, body)
    rows = asked.tokens if isinstance(asked.tokens, list) else [asked.tokens]
    return rows, isinstance(asked.tokens, list), asked.skip_special_tokens, ignored
