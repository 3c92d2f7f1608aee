"""OpenAI's POST /v1/completions: request and reply."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from pydantic import Discriminator, Tag

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import bodies, openai
from areal_jax.rollout.http.wire.encoding import refuse
from areal_jax.rollout.http.wire.exchange import Answer, Call, Piece, ReplyInfo
from areal_jax.rollout.http.wire.vllm import render_prompt_logprobs

_ROUTE = openai.Route('cmpl-', 'text_completion', 'text_completion')

render_error = openai.render_error


def _choose_form(value: object) -> str:
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(value, str):
        return '(text)'
    return '(texts)' if isinstance(first, str) else '(rows)' if isinstance(first, list) else '(ids)'


Prompts: TypeAlias = Annotated[
    Annotated[bodies.Spelled, Tag('(text)')]
    | Annotated[bodies.Ids, Tag('(ids)')]
    | Annotated[bodies.Turns[bodies.Spelled], Tag('(texts)')]
    | Annotated[bodies.Turns[bodies.Ids], Tag('(rows)')],
    Discriminator(_choose_form),
]


class Request(openai.Request):
    unserved = ('suffix', 'response_format', 'structured_outputs')
    prompt: Prompts
    max_tokens: bodies.Natural = 16
    logprobs: bodies.Alternatives | None = None
    echo: bool = False
    add_special_tokens: bool = True
    best_of: bodies.Positive | None = None


def parse(body: object) -> Call:
    """Parses a request body; raises RequestError."""
    request, ignored = bodies.read(Request, body)
    prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    logprobs, echo = request.logprobs, request.echo
    alternatives = 0 if request.stream and logprobs == 1 else logprobs or 0
    call = openai.read_call(request, ignored, prompts, 'prompt', request.max_tokens, logprobs is not None, alternatives)
    if request.best_of not in (None, call.n):
        raise refuse('best_of', request.best_of, f'must be n={call.n}: answers are not ranked')
    call = dataclasses.replace(call, adds_special=request.add_special_tokens)
    if echo:
        starts = (0,) * len(prompts) if logprobs is not None else call.prompt_starts
        call = dataclasses.replace(call, echo=True, prompt_starts=starts)
    if not (echo and not request.max_tokens and logprobs is None):  # an echo alone is an answer too
        bodies.require_scored(call, 'max_tokens', 'logprobs')
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
