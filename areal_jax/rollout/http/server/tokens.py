"""The routes of the tokenizer, in vLLM's form; lists of texts and of token ids are SGLang's."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from aiohttp import web

from areal_jax.files import JsonObject
from areal_jax.rollout.http.server.bridge import Bridge
from areal_jax.rollout.http.server.replies import BODIES, BRIDGE
from areal_jax.rollout.http.wire.exchange import Message, RequestError
from areal_jax.rollout.http.wire.openai import read_messages, read_tools
from areal_jax.rollout.http.wire.request_fields import MOST_PROMPTS, Fields, read_token_ids
from areal_jax.text.chat_template import TokenizerError

_CHAT_UNSERVED = ('continue_final_message', 'chat_template', 'chat_template_kwargs', 'mm_processor_kwargs')


class TokenizeCall(NamedTuple):
    """What /tokenize is asked."""

    texts: str | tuple[str, ...]
    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...]
    adds_special: bool  # texts get what the tokenizer adds around them
    with_strings: bool  # the texts of tokens are wanted


def list_routes() -> list[web.RouteDef]:
    return [
        web.post('/tokenize', tokenize),
        web.post('/detokenize', detokenize),
        web.get('/tokenizer_info', tokenizer_info),
    ]


async def tokenize(request: web.Request) -> web.Response:
    """The ids of a text, of each of a list of texts, or of a conversation in the chat form of the model."""
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
    """The text of ids, or of each list of ids, under both names that servers have for it."""
    bridge = request.app[BRIDGE]
    async with request.app[BODIES].opened(request, parse_detokenize, MOST_PROMPTS) as parsed:
        (lists, is_batch, skip_special), ignored = parsed
        bridge.counts.note_ignored(ignored)
    for tokens in lists:
        if len(tokens) and int(tokens.max()) >= bridge.vocab_size:
            raise RequestError(
                'tokens', f'tokens has token {int(tokens.max())}, and the model {bridge.vocab_size} tokens: use ids of '
                'its own tokenizer',
            )  # fmt: skip
    spell = bridge.texts.spell
    texts = await asyncio.to_thread(lambda: [spell(tokens, skip_special=skip_special) for tokens in lists])
    text = texts if is_batch else texts[0]
    return await request.app[BODIES].reply(lambda: {'prompt': text, 'text': text}, sum(map(len, texts)) // 64)


async def tokenizer_info(request: web.Request) -> web.Response:
    """The special tokens by role, as harnesses ask for them that tokenize here."""
    bridge = request.app[BRIDGE]
    info: JsonObject = {'max_model_len': bridge.context_tokens, 'vocab_size': bridge.vocab_size}
    return web.json_response(info | bridge.texts.special_tokens())


def parse_tokenize(body: object) -> tuple[TokenizeCall, tuple[str, ...]]:
    """See `read_tokenize`; and the fields that have no influence."""
    fields = Fields(body)
    return read_tokenize(fields), fields.ignored


def parse_detokenize(body: object) -> tuple[tuple[list[np.ndarray], bool, bool], tuple[str, ...]]:
    """See `read_detokenize`; and the fields that have no influence."""
    fields = Fields(body)
    return read_detokenize(fields), fields.ignored


def read_tokenize(fields: Fields) -> TokenizeCall:
    """Either texts or messages."""
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
    """(lists of ids, whether they came in a list, whether special tokens are left out)."""
    given = fields.take('tokens')
    is_batch = isinstance(given, list) and bool(given) and isinstance(given[0], list)
    rows = given if is_batch and isinstance(given, list) else [given]
    name = 'tokens[{}]' if is_batch else 'tokens'
    lists = [read_token_ids(name.format(index), row, least=0) for index, row in enumerate(rows)]
    skip_special = fields.take_flag('skip_special_tokens')
    fields.take_ignored('model')
    fields.finish()
    return lists, is_batch, skip_special
