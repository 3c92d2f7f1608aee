"""OpenAI's POST /v1/chat/completions: request and reply."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import openai
from areal_jax.rollout.http.wire.exchange import Answer, Call, Piece, Prompt, ReplyInfo
from areal_jax.rollout.http.wire.openai import describe_call, read_format, read_tools
from areal_jax.rollout.http.wire.request_fields import Fields, require_scored
from areal_jax.rollout.http.wire.vllm import ranked_alternatives, render_prompt_logprobs
from areal_jax.types import MOST_ALTERNATIVES

_ROUTE = openai.Route('chatcmpl-', 'chat.completion', 'chat.completion.chunk')
_UNSERVED = (
    'functions', 'function_call', 'audio', 'web_search_options', 'echo', 'chat_template', 'structured_outputs',
    'continue_final_message',
)  # fmt: skip

render_error = openai.render_error


def parse(body: object) -> Call:
    """Parses a request body; raises RequestError."""
    fields = Fields(body)
    ids = openai.token_ids_prompt(fields, 'input_ids')
    if ids is None:
        prompt: Prompt = openai.read_messages(fields)
    else:
        prompt = ids
        fields.take_ignored('messages')  # the ids replace them
    limit = fields.take_optional_integer('max_completion_tokens', least=1)
    older_limit = fields.take_optional_integer('max_tokens', least=1)
    wants_logprobs = fields.take_flag('logprobs')
    alternatives = fields.take_integer('top_logprobs', 0, least=0, most=MOST_ALTERNATIVES)
    if alternatives and not wants_logprobs:
        raise fields.refuse('top_logprobs', alternatives, 'needs logprobs=true')
    asked, wishes = read_tools(fields), read_format(fields, 'response_format', nested=True)
    _read_modalities(fields)
    fields.take_unserved(*_UNSERVED)
    if not fields.take_flag('add_generation_prompt', True):
        raise fields.refuse('add_generation_prompt', False, 'is not served: conversations end where an answer begins')
    field = 'messages' if ids is None else 'input_ids'
    limit = older_limit if limit is None else limit
    call = openai.read_call(fields, (prompt,), field, limit, wants_logprobs, alternatives)
    require_scored(call, 'max_tokens', 'top_logprobs')
    return dataclasses.replace(
        call, tools=asked.tools, one_tool_call=asked.one_tool_call, wishes=(*asked.wishes, *wishes)
    )


def render(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> JsonObject:
    """Renders the reply, with a choice for each of the n answers."""
    choices = []
    for answer in answers:
        choice = _render_choice(call, answer, answer, info, whole=True)
        if call.return_token_ids:
            choice['response_token_ids'] = choice['token_ids']
        choices.append(choice | {'message': _render_message(answer)})
    reply = openai.render_reply(call, answers, info, _ROUTE, choices)
    if call.prompt_logprobs is not None:
        reply['prompt_logprobs'] = render_prompt_logprobs(call, answers[0], info)
    if call.return_prompt_token_ids:
        reply['prompt_token_ids'] = answers[0].prompt_tokens.tolist()
    return reply


def render_event(call: Call, answer: Answer, piece: Piece, info: ReplyInfo) -> bytes:
    """Renders the events of `piece`, the answer's last: one with its text and tokens, and two for each call.

    The first event of an answer names the role, the last one the finish reason.
    """
    first = answer.n_tokens == len(piece.tokens)
    delta: JsonObject = {'role': 'assistant'} if first else {}
    if piece.reasoning:
        delta['reasoning_content'] = piece.reasoning
    if piece.text or not call.tools:
        delta['content'] = piece.text
    deltas = [delta, *_render_deltas(answer, piece)]
    ongoing = dataclasses.replace(answer, finish=None)
    frames = []
    for index, one in enumerate(deltas):
        so_far = ongoing if one is not deltas[-1] else answer
        choice = openai.render_end(call, so_far)
        if not index:
            choice = _render_choice(call, so_far, openai.part_of(so_far, piece), info, whole=first)
        frames.append(openai.render_chunk(call, so_far, info, _ROUTE, choice | {'delta': one}))
    return b''.join(frames)


def render_last(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> bytes:
    """Renders the bytes after the last event of the last answer, before [DONE]."""
    return openai.render_usage(call, answers, info, _ROUTE)


def _read_modalities(fields: Fields) -> None:
    """Refuses modalities other than plain text."""
    given = fields.take('modalities')
    if given not in (None, ['text']):
        raise fields.refuse('modalities', given, 'is not served: answers are plain text')


def _render_message(answer: Answer) -> JsonObject:
    """Renders the message; its content is null if the answer consists of calls alone."""
    message: JsonObject = {'role': 'assistant', 'content': answer.text}
    if answer.calls:
        message = {'role': 'assistant', 'content': answer.text or None}
        message['tool_calls'] = [describe_call(call.id, call.name, call.arguments) for call in answer.calls]
    return message | {'reasoning_content': answer.reasoning} if answer.reasoning else message


def _render_deltas(answer: Answer, piece: Piece) -> list[JsonObject]:
    """Renders two deltas for each call of the answer's last piece: its name, and its arguments."""
    found: list[JsonObject] = []
    for index, call in enumerate(piece.calls, start=len(answer.calls) - len(piece.calls)):
        named, filled = describe_call(call.id, call.name, ''), {'function': {'arguments': call.arguments}}
        found += [{'tool_calls': [{'index': index} | one]} for one in (named, filled)]
    return found


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
    """Renders an entry of log-probs; `bytes` is null for a token that is only a part of a character."""
    return {
        'token': name,
        'bytes': None if '\ufffd' in name else list(name.encode()),
        'logprob': logprob,
    }
