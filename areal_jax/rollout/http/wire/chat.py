"""OpenAI's POST /v1/chat/completions: request and reply. Calls of tools in an answer stay text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import openai
from areal_jax.rollout.http.wire.exchange import Answer, Call, Piece, Prompt, ReplyInfo
from areal_jax.rollout.http.wire.request_fields import Fields, require_scored
from areal_jax.rollout.http.wire.tools import read_tools
from areal_jax.rollout.http.wire.vllm import ranked_alternatives, render_prompt_logprobs
from areal_jax.types import MOST_ALTERNATIVES

_ROUTE = openai.Route('chatcmpl-', 'chat.completion', 'chat.completion.chunk')
_UNSERVED = (
    'functions', 'function_call', 'audio', 'prediction', 'web_search_options', 'echo',
    'chat_template', 'chat_template_kwargs', 'structured_outputs', 'continue_final_message',
    'reasoning_effort', 'verbosity',
)  # fmt: skip

render_error = openai.render_error


def parse(body: object) -> Call:
    """The call in a request body; raises RequestError."""
    fields = Fields(body)
    ids = openai.token_ids_prompt(fields, 'input_ids')
    if ids is None:
        prompt: Prompt = openai.read_messages(fields)
    else:
        prompt = ids
        fields.take_ignored('messages')  # the ids are what the template would make of them
    limit = fields.take_optional_integer('max_completion_tokens', least=1)
    older_limit = fields.take_optional_integer('max_tokens', least=1)
    wants_logprobs = fields.take_flag('logprobs')
    alternatives = fields.take_integer('top_logprobs', 0, least=0, most=MOST_ALTERNATIVES)
    if alternatives and not wants_logprobs:
        raise fields.refuse('top_logprobs', alternatives, 'needs logprobs=true')
    tools = read_tools(fields)
    _read_format(fields)
    fields.take_unserved(*_UNSERVED)
    fields.take_ignored('add_generation_prompt')
    field = 'messages' if ids is None else 'input_ids'
    limit = older_limit if limit is None else limit
    call = openai.read_call(fields, (prompt,), field, limit, wants_logprobs, alternatives)
    require_scored(call, 'max_tokens', 'top_logprobs')
    return dataclasses.replace(call, tools=tools)


def render(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> JsonObject:
    """The reply, with a choice for each of the n answers."""
    choices = []
    for answer in answers:
        choice = _render_choice(call, answer, answer, info, whole=True)
        if call.return_token_ids:
            choice['response_token_ids'] = choice['token_ids']
        choices.append(choice | {'message': {'role': 'assistant', 'content': answer.text}})
    reply = openai.render_reply(call, answers, info, _ROUTE, choices)
    if call.prompt_logprobs is not None:
        reply['prompt_logprobs'] = render_prompt_logprobs(call, answers[0], info)
    if call.return_prompt_token_ids:
        reply['prompt_token_ids'] = answers[0].prompt_tokens.tolist()
    return reply


def render_event(call: Call, answer: Answer, piece: Piece, info: ReplyInfo) -> bytes:
    """One event of a stream: what `piece`, the answer's last one, adds; the first one names the role."""
    first = answer.n_tokens == len(piece.tokens)
    delta = {'role': 'assistant', 'content': piece.text} if first else {'content': piece.text}
    choice = _render_choice(call, answer, openai.part_of(answer, piece), info, whole=first)
    return openai.render_chunk(call, answer, info, _ROUTE, choice | {'delta': delta})


def render_last(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> bytes:
    """What follows the last event of the last answer, before [DONE]."""
    return openai.render_usage(call, answers, info, _ROUTE)


def _read_format(fields: Fields) -> None:
    """Takes the fields of the format; answers are plain text alone."""
    for field in ('response_format', 'modalities'):
        given = fields.take(field)
        if given not in (None, {'type': 'text'}, ['text']):
            raise fields.refuse(field, given, 'is not served: answers are plain text')


def _render_choice(call: Call, answer: Answer, part: Answer, info: ReplyInfo, whole: bool) -> JsonObject:
    choice = openai.render_choice(call, answer, part, info, whole)
    if call.logprobs:
        pairs = zip(part.tokens.tolist(), part.logprobs.tolist(), strict=True)
        tops = ranked_alternatives(call, answer, len(part.tokens))
        name = lambda token: openai.token_name(token, call, info)
        content = [
            _entry(name(token), logprob) | {'top_logprobs': [_entry(name(other), value) for other, value in top]}
            for (token, logprob), top in zip(pairs, tops, strict=True)
        ]
        choice['logprobs'] = {'content': content, 'refusal': None}
    return choice


def _entry(name: str, logprob: float) -> JsonObject:
    """An entry; a token that is a part of a character has no bytes of its own here."""
    return {
        'token': name,
        'bytes': None if '\ufffd' in name else list(name.encode()),
        'logprob': logprob,
    }
