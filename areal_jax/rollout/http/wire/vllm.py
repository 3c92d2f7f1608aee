"""vLLM's POST /inference/v1/generate, tokens in and tokens out: request and reply, read and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from areal_jax.columns import declared
from areal_jax.errors import show
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import bodies
from areal_jax.rollout.http.wire.encoding import frame
from areal_jax.rollout.http.wire.exchange import ASKED, Answer, Call, Finish, Piece, ReplyInfo, Span, count_usage
from areal_jax.rollout.http.wire.reply import (
    Reply,
    cut_by_spans,
    parse_columns,
    parse_npy,
    read_logprobs,
    render_columns,
    render_npy,
)

PATH = '/inference/v1/generate'  # at the root, not under /v1
_ERROR_TYPES = {
    400: 'BadRequestError',
    401: 'AuthenticationError',
    403: 'PermissionDeniedError',
    404: 'NotFoundError',
    413: 'BadRequestError',
    429: 'RateLimitError',
}
_TOKEN = 'token_id:'  # before the id, in the `token` of a log-prob entry
_FIRST_ROW = 'routed_experts_prompt_start'


@dataclasses.dataclass(frozen=True)
class Delta:
    """The part that one event adds to the answer `index` of a stream."""

    index: int
    pieces: tuple[Piece, ...]
    finish: Finish | None  # of the answer's last event


class Parameters(bodies.Sampling):
    """The object `sampling_params`."""

    ignored = ('spaces_between_special_tokens',)
    unserved = (
        'bad_words', 'allowed_token_ids', 'structured_outputs', 'prompt_logprob_token_ids',
        'logprob_token_ids', 'flat_logprobs', 'extra_args', 'thinking_token_budget', 'repetition_detection',
    )  # fmt: skip
    max_tokens: bodies.Natural | None = None
    n: bodies.Samples = 1
    logprobs: bodies.Alternatives | None = None
    prompt_logprobs: bodies.Alternatives | None = None
    routed_experts_prompt_start: bodies.Natural = 0
    detokenize: bool = False


class Usage(bodies.Body):
    """The object `stream_options`."""

    ignored = ('continuous_usage_stats',)
    include_usage: bool = False


class Request(bodies.Body):
    unserved = (
        'features', 'content_parts', 'kv_transfer_params', 'ec_transfer_params', 'token_offsets', 'reasoning_ended',
        'reasoning_parser_kwargs',
    )  # fmt: skip
    token_ids: bodies.Ids
    sampling_params: Parameters = bodies.OBJECT
    model: bodies.Text = ''
    request_id: bodies.Text = ''
    output_mode: Literal['tokens'] = 'tokens'
    stream: bool = False
    stream_options: Usage = bodies.OBJECT
    return_token_ids: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] = ''
    priority: bodies.Priority = 0
    draw: bodies.Natural = 0
    sample: bodies.Natural = 0

    @classmethod
    def column_fields(cls) -> Mapping[str, bodies.ColumnField]:
        return bodies.ask_columns(declared())


def parse(body: object) -> Call:
    """Parses a request body; raises RequestError."""
    request, ignored = bodies.read(Request, body)
    given = request.sampling_params
    sampling, asked = given.make(given.max_tokens, 'sampling_params.'), given.logprobs
    seedless = sampling.seed is None  # the server then chooses the noise
    without_influence = {
        'priority': request.priority,
        'draw': seedless and request.draw,
        'sample': seedless and request.sample,
        'stream_options.include_usage': request.stream_options.include_usage and not request.stream,
        'sampling_params.detokenize': given.detokenize and not sampling.stop_strings,  # replies have no text
        'sampling_params.routed_experts_prompt_start': given.routed_experts_prompt_start and not request.has_rows,
    }
    call = Call(
        prompts=(request.token_ids,),
        prompt_field='token_ids',
        sampling=(sampling,),
        request_ids=bodies.number_ids(request.request_id, given.n),
        ignored=bodies.join_ignored(ignored, without_influence),
        model=request.model,
        n=given.n,
        stream=request.stream,
        stream_usage=request.stream_options.include_usage,
        logprobs=asked is not None,
        columns=request.columns,
        first_row=given.routed_experts_prompt_start,
        alternatives=(asked or 0) if (asked or 0) > 1 else 0,  # 1 is the sampled token alone
        prompt_logprobs=given.prompt_logprobs,
        prompt_starts=() if given.prompt_logprobs is None else (0,),
        return_prompt_token_ids=request.return_token_ids,
        cache_salt=request.cache_salt,
        priority=request.priority,
        draw=request.draw,
        sample=request.sample,
    )
    bodies.require_row(f'sampling_params.{_FIRST_ROW}', call.first_row, len(request.token_ids) - 1)
    bodies.require_scored(call, 'sampling_params.max_tokens', 'sampling_params.logprobs')
    return call


def render(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> JsonObject:
    """Renders the reply, with a choice for each of the n answers."""
    scored: JsonObject = {'scored_weight_version': answers[0].scored_version} if answers[0].scored_version else {}
    if call.prompt_logprobs is not None:
        scored['prompt_logprobs'] = render_prompt_logprobs(call, answers[0], info)
    return scored | {
        'request_id': _request_id(answers[0], call),
        'model': call.model or info.model,
        'created': info.created_s,
        'output_mode': 'tokens',
        'usage': count_usage(call, answers),
        'prompt_token_ids': answers[0].prompt_tokens.tolist() if call.return_prompt_token_ids else None,
        'choices': [_render_choice(call, answer, list(answer.pieces), 0) for answer in answers],
    }


def render_event(call: Call, answer: Answer, piece: Piece, info: ReplyInfo) -> bytes:
    """Renders the event of `piece`, the answer's last.

    Each event has the span of its tokens, so that a client can keep its tokens when the server dies; the last event
    has all spans of the answer.
    """
    first = answer.n_tokens - len(piece.tokens)
    event: JsonObject = {
        'request_id': _request_id(answer, call),
        'output_mode': 'tokens',
        'choices': [_render_choice(call, answer, [piece], first)],
        'usage': None,
    }
    if call.return_prompt_token_ids and not first:
        event['prompt_token_ids'] = answer.prompt_tokens.tolist()
    return frame(event)


def render_last(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> bytes:
    """Renders the event after the last answer, before [DONE]: the usage, if the call requests it."""
    if not call.stream_usage:
        return b''
    usage = count_usage(call, answers)
    return frame({
        'request_id': _request_id(answers[0], call), 'output_mode': 'tokens', 'choices': [], 'usage': usage,
    })  # fmt: skip


def render_error(message: str, status: int, field: str = '') -> JsonObject:
    """Renders the body of a refusal, in a form that OpenAI's clients read too."""
    kind = _ERROR_TYPES.get(status, 'InternalServerError' if status >= 500 else 'BadRequestError')
    return {'error': {'message': message, 'type': kind, 'param': field or None, 'code': status}}


def render_request(call: Call) -> JsonObject:
    """Renders a client's request body for the call: one prompt of token ids."""
    prompt, sampling = call.prompts[0], call.sampling[0]
    assert isinstance(prompt, np.ndarray), 'token ids'
    assert len(call.prompts) == 1, 'one prompt'
    parameters = bodies.render_sampling(sampling, Parameters) | {'detokenize': bool(sampling.stop_strings)}
    optional = {
        'max_tokens': sampling.max_new_tokens,
        'logprobs': 0 if call.logprobs else None,
        'n': call.n if call.n > 1 else None,
        _FIRST_ROW: call.first_row or None,
    }
    parameters |= {name: value for name, value in optional.items() if value is not None}
    body: JsonObject = {'token_ids': prompt.tolist(), 'sampling_params': parameters, 'stream': call.stream}
    given = {
        'model': call.model,
        'request_id': call.request_ids[0] if call.n == 1 else call.request_ids[0].removesuffix('_0'),
        'cache_salt': call.cache_salt,
        'priority': call.priority,
        'draw': call.draw,
        'sample': call.sample,
        **{ASKED.format(name): True for name in call.columns},
    }
    return body | {name: value for name, value in given.items() if value}


def parse_reply(body: object, call: Call, vocab_size: int | None = None) -> list[Answer]:
    """Parses the reply to a call with log-probs; raises ReplyError if its tokens can not be trusted."""
    prompt = call.prompts[0]
    assert isinstance(prompt, np.ndarray)
    reply, answers = Reply(body), []
    for index, entry in enumerate(reply.entries('choices', call.n)):
        delta = _parse_choice(Reply(entry, f'choices[{index}]'), call, 0, vocab_size)
        request_id = reply.text('request_id')
        version = delta.pieces[-1].version if delta.pieces else ''
        answers.append(Answer(request_id, prompt, delta.index, list(delta.pieces), delta.finish, version))
    return answers


def parse_event(event: object, call: Call, so_far: Sequence[int], vocab_size: int | None = None) -> list[Delta]:
    """Parses an event of a stream; `so_far` has the number of tokens received of each answer."""
    reply = Reply(event, 'event')
    if 'error' in reply.values:
        raise reply.error('error', show(reply.values['error']))
    found = []
    for entry in reply.entries('choices'):
        choice = Reply(entry, 'choice')
        index = choice.integer('index', call.n - 1)
        found.append(_parse_choice(choice, call, so_far[index], vocab_size))
    return found


def _request_id(answer: Answer, call: Call) -> str:
    """Returns the id of the request: with n answers, each answer's id is this one and its number."""
    return answer.request_id if call.n == 1 else answer.request_id.removesuffix(f'_{answer.index}')


def _render_choice(call: Call, answer: Answer, pieces: list[Piece], first: int) -> JsonObject:
    """Renders the choice of an answer, or of an event that adds `pieces` after `first` tokens."""
    part = Answer(answer.request_id, answer.prompt_tokens, pieces=pieces)
    finish, tokens = answer.finish, part.tokens.tolist()
    spans = answer.spans if finish else [Span(s.version, first + s.start, first + s.end) for s in part.spans]
    choice: JsonObject = {
        'index': answer.index,
        'finish_reason': finish.reason if finish else None,
        'stop_reason': stop_reason(call, answer),
        'token_ids': tokens,
        'logprobs': None,
        'weight_versions': [{'version': span.version, 'start': span.start, 'end': span.end} for span in spans],
        'routed_experts': None,
        'sampling_mask': None,
    }
    if call.logprobs:
        pairs = zip(tokens, part.logprobs.tolist(), strict=True)
        tops = ranked_alternatives(call, answer, len(tokens))
        choice['logprobs'] = {
            'content': [
                _entry(t, logprob, _rank(t, top)) | {'top_logprobs': [_entry(*one, r) for r, one in enumerate(top, 1)]}
                for (t, logprob), top in zip(pairs, tops, strict=True)
            ]
        }
    return choice | render_columns(call, part) | render_npy(call, pieces)


def render_prompt_logprobs(call: Call, answer: Answer, info: ReplyInfo) -> list[JsonObject | None] | None:
    """Renders vLLM's list with an entry for each prompt token: null for the first, else ids with log-prob and rank.

    The whole list is null if the scoring was aborted. The rank is null for a prompt token that is not ranked.
    """
    if answer.prompt_scores is None:
        return None
    k, found = call.prompt_logprobs or 0, answer.prompt_scores
    given = zip(answer.prompt_tokens[1:].tolist(), found.logprobs.tolist(), found.ranked(k), strict=True)
    entries: list[JsonObject | None] = [None]
    for token, logprob, top in given:
        ranks: list[tuple[int, float, int | None]] = [(t, value, rank) for rank, (t, value) in enumerate(top, 1)]
        if token not in [t for t, _, _ in ranks]:
            ranks.append((token, logprob, None))
        entries.append({
            str(t): {'logprob': value, 'rank': rank, 'decoded_token': info.token_text(t) if info.token_text else None}
            for t, value, rank in ranks
        })  # fmt: skip
    return entries


def ranked_alternatives(call: Call, answer: Answer, length: int) -> list[list[tuple[int, float]]]:
    """Lists (token, log-prob) of the alternatives of each of an answer's `length` tokens; empty if unknown."""
    return [[]] * length if answer.alternatives is None else answer.alternatives.ranked(call.alternatives)


def _entry(token: int, logprob: float, rank: int | None) -> JsonObject:
    return {'token_id': token, 'token': f'{_TOKEN}{token}', 'logprob': logprob, 'rank': rank}


def _rank(token: int, top: Sequence[tuple[int, float]]) -> int | None:
    return next((rank for rank, (other, _) in enumerate(top, 1) if other == token), None)


def stop_reason(call: Call, answer: Answer) -> int | str | None:
    """Returns the stop id or string of the call that ended the answer; None for the model's EOS."""
    matched = answer.finish.matched if answer.finish else None
    asked = call.sampling[answer.index // call.n]
    return matched if isinstance(matched, str) or matched in asked.stop_tokens else None


def _parse_choice(choice: Reply, call: Call, first: int, vocab_size: int | None) -> Delta:
    finish = _parse_finish(choice)
    ids = choice.entries('token_ids') if choice.values.get('token_ids') else []
    content = choice.nested('logprobs').entries('content', len(ids)) if ids else []
    pairs = []
    for token, given in zip(ids, content, strict=True):
        entry = Reply(given, 'logprobs.content')
        if entry.values.get('token_id', token) != token or entry.values.get('token', f'{_TOKEN}{token}') != (
            f'{_TOKEN}{token}'
        ):
            raise entry.error('token', f'{show(given)}, which is not the sampled token {show(token)}')
        pairs.append((entry.values.get('logprob'), token))
    tokens, logprobs = read_logprobs(choice, 'logprobs', pairs, vocab_size)
    columns, context = parse_npy(choice, call, len(tokens), first)
    columns = {**parse_columns(choice, call, tokens), **columns}
    pieces = cut_by_spans(choice, tokens, logprobs, columns, first, context)
    return Delta(choice.integer('index', call.n - 1), tuple(pieces), finish)


def _parse_finish(choice: Reply) -> Finish | None:
    reason = choice.values.get('finish_reason')
    if reason is None:
        return None
    if reason == 'stop' or reason == 'length' or reason == 'abort':
        return Finish(reason, choice.values.get('stop_reason'))
    raise choice.error('finish_reason', f'{show(reason)}, which is none of stop, length and abort')
