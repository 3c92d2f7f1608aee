"""OpenAI's POST /v1/completions: request and reply."""

from __future__ import annotations

from collections.abc import Sequence

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import openai
from areal_jax.rollout.http.wire.exchange import Answer, Call, Piece, Prompt, ReplyInfo
from areal_jax.rollout.http.wire.fields import MOST_PROMPTS, Fields, read_token_ids

_DEFAULT_NEW_TOKENS = 16
_ROUTE = openai.Route('cmpl-', 'text_completion', 'text_completion')

render_error = openai.render_error


def parse(body: object) -> Call:
    """The call in a request body; raises RequestError."""
    fields = Fields(body)
    prompts = _read_prompts(fields)
    limit = fields.take_integer('max_tokens', _DEFAULT_NEW_TOKENS, least=1)
    wants_logprobs = fields.take_optional_integer('logprobs', least=0, most=1) is not None
    fields.take_unserved('echo', 'suffix', 'prompt_logprobs', 'response_format', 'structured_outputs')
    best_of = fields.take_optional_integer('best_of', least=1)
    call = openai.read_call(fields, prompts, 'prompt', limit, wants_logprobs)
    if best_of not in (None, call.n):
        raise fields.refuse('best_of', best_of, f'must be n={call.n}: answers are not ranked')
    return call


def render(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> JsonObject:
    """The reply, with a choice for each answer."""
    choices = [_render_choice(call, answer, answer, info, 0, whole=True) for answer in answers]
    return openai.render_reply(call, answers, info, _ROUTE, choices)


def render_event(call: Call, answer: Answer, piece: Piece, info: ReplyInfo) -> bytes:
    """One event of a stream: what `piece`, the answer's last one, adds."""
    first = answer.n_tokens == len(piece.tokens)
    offset = len(answer.text) - len(piece.text) if call.logprobs else 0
    choice = _render_choice(call, answer, openai.part_of(answer, piece), info, offset, whole=first)
    return openai.render_chunk(call, answer, info, _ROUTE, choice)


def render_last(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> bytes:
    """What follows the last event of the last answer, before [DONE]."""
    return openai.render_usage(call, answers, info, _ROUTE)


def _read_prompts(fields: Fields) -> tuple[Prompt, ...]:
    """One prompt or a list of them, each a text or ids."""
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
    choice = openai.render_choice(call, answer, part, info, whole) | {'text': part.text}
    if 'behavior' in call.logprobs:
        names = [openai.token_name(token, call, info) for token in part.tokens.tolist()]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        choice['logprobs'] = {
            'tokens': names,
            'token_logprobs': part.logprobs.tolist(),
            'top_logprobs': None,
            'text_offset': offsets,
        }
    return choice
