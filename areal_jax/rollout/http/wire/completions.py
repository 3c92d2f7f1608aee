"""OpenAI's POST /v1/completions: request and reply."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import openai
from areal_jax.rollout.http.wire.exchange import Answer, Call, Piece, Prompt, ReplyInfo
from areal_jax.rollout.http.wire.request_fields import MOST_PROMPTS, Fields, read_token_ids, require_scored
from areal_jax.rollout.http.wire.vllm import render_prompt_logprobs
from areal_jax.types import MOST_ALTERNATIVES

_DEFAULT_NEW_TOKENS = 16
_ROUTE = openai.Route('cmpl-', 'text_completion', 'text_completion')

render_error = openai.render_error


def parse(body: object) -> Call:
    """Parses a request body; raises RequestError."""
    fields = Fields(body)
    prompts = _read_prompts(fields)
    limit = fields.take_integer('max_tokens', _DEFAULT_NEW_TOKENS, least=0)
    logprobs = fields.take_optional_integer('logprobs', least=0, most=MOST_ALTERNATIVES)
    echo = fields.take_flag('echo')
    adds_special = fields.take_flag('add_special_tokens', True)
    fields.take_unserved('suffix', 'response_format', 'structured_outputs')
    best_of = fields.take_optional_integer('best_of', least=1)
    alternatives = 0 if fields.peek('stream') is True and logprobs == 1 else logprobs or 0
    call = openai.read_call(fields, prompts, 'prompt', limit, logprobs is not None, alternatives)
    if best_of not in (None, call.n):
        raise fields.refuse('best_of', best_of, f'must be n={call.n}: answers are not ranked')
    call = dataclasses.replace(call, adds_special=adds_special)
    if echo:
        starts = (0,) * len(prompts) if logprobs is not None else call.prompt_starts
        call = dataclasses.replace(call, echo=True, prompt_starts=starts)
    if not (echo and not limit and logprobs is None):  # an echo alone is an answer too
        require_scored(call, 'max_tokens', 'logprobs')
    return call


def render(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> JsonObject:
    """Renders the reply, with a choice for each answer."""
    choices = [_render_choice(call, answer, answer, info, 0, whole=True) for answer in answers]
    return openai.render_reply(call, answers, info, _ROUTE, choices)


def render_event(call: Call, answer: Answer, piece: Piece, info: ReplyInfo) -> bytes:
    """Renders the event of `piece`, the answer's last; the first event has the echo."""
    first = answer.n_tokens == len(piece.tokens)
    offset = len(answer.text) - len(piece.text) + (0 if first else len(answer.prompt_text)) if call.logprobs else 0
    choice = _render_choice(call, answer, openai.part_of(answer, piece), info, offset, whole=first)
    return openai.render_chunk(call, answer, info, _ROUTE, choice)


def render_last(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> bytes:
    """Renders the bytes after the last event of the last answer, before [DONE]."""
    return openai.render_usage(call, answers, info, _ROUTE)


def _read_prompts(fields: Fields) -> tuple[Prompt, ...]:
    """Reads one prompt or a list of prompts, each a text or ids."""
    given = fields.peek('prompt')
    if isinstance(given, str) and given:
        return fields.take_texts('prompt')
    if not isinstance(given, list) or not given:
        raise fields.refuse('prompt', given, 'must be a text, a list of token ids, or a list of one kind of them')
    if isinstance(given[0], str):
        return fields.take_texts('prompt')
    fields.take('prompt')
    if isinstance(given[0], list):
        fields.require_few('prompt', given, MOST_PROMPTS)
        return tuple(read_token_ids(f'prompt[{index}]', row) for index, row in enumerate(given))
    return (read_token_ids('prompt', given),)


def _render_choice(call: Call, answer: Answer, part: Answer, info: ReplyInfo, offset: int, whole: bool) -> JsonObject:
    """Renders the choice of an answer or of an event; `whole`: it begins with the echo."""
    text = answer.prompt_text + part.text if whole else part.text
    choice = openai.render_choice(call, answer, part, info, whole) | {'text': text}
    if call.prompt_logprobs is not None:
        choice['prompt_logprobs'] = render_prompt_logprobs(call, answer, info)
    if call.logprobs:
        tokens, values, tops = part.tokens.tolist(), part.logprobs.tolist(), _top_logprobs(call, answer, part, info)
        if call.echo and whole:
            prompt = answer.prompt_tokens.tolist()
            tokens, values = prompt + tokens, answer.prompt_logprobs(len(prompt)) + values
            tops = _echoed_tops(call, answer, info) + tops
        names = [openai.token_name(token, call, info) for token in tokens]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        choice['logprobs'] = {
            'tokens': names,
            'token_logprobs': values,
            'top_logprobs': tops if call.alternatives else None,
            'text_offset': offsets,
        }
    return choice


def _top_logprobs(call: Call, answer: Answer, part: Answer, info: ReplyInfo) -> list[JsonObject | None]:
    """Lists for each generated token the likeliest tokens and itself; null if its weights are no longer in use."""
    if answer.alternatives is None:
        return [None] * part.n_tokens
    ranked = answer.alternatives.ranked(call.alternatives)
    pairs = zip(part.tokens.tolist(), part.logprobs.tolist(), strict=True)
    return [_name_all(top, *pair, call, info) for top, pair in zip(ranked, pairs, strict=True)]


def _echoed_tops(call: Call, answer: Answer, info: ReplyInfo) -> list[JsonObject | None]:
    """Lists the likeliest tokens for each prompt token; null for the first."""
    scores, prompt = answer.prompt_scores, answer.prompt_tokens.tolist()
    if scores is None:
        return [None] * len(prompt)
    entries = zip(scores.ranked(call.alternatives), prompt[1:], scores.logprobs.tolist(), strict=True)
    return [None, *(_name_all(top, token, logprob, call, info) for top, token, logprob in entries)]


def _name_all(top: Sequence[tuple[int, float]], token: int, logprob: float, call: Call, info: ReplyInfo) -> JsonObject:
    """Returns log-probs by token name; if tokens share a name (parts of characters), the likeliest counts."""
    found: JsonObject = {}
    for other, value in top:
        found.setdefault(openai.token_name(other, call, info), logprob if other == token else value)
    found.setdefault(openai.token_name(token, call, info), logprob)
    return found
