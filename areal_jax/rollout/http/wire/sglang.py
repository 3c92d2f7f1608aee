"""SGLang's POST /generate: request and reply, read and written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized

import numpy as np
from pydantic import Field

from areal_jax.columns import of_models, of_tokens
from areal_jax.errors import show
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import bodies
from areal_jax.rollout.http.wire.encoding import frame_text, refuse, write_json
from areal_jax.rollout.http.wire.exchange import (
    ASKED,
    Answer,
    Call,
    CallSampling,
    Finish,
    Piece,
    Prompt,
    ReplyError,
    ReplyInfo,
    RequestError,
    Written,
)
from areal_jax.rollout.http.wire.reply import (
    NO_ROWS,
    Reply,
    cut_by_spans,
    parse_columns,
    parse_raw,
    read_logprobs,
    render_columns,
    render_raw,
)
from areal_jax.types import TokenScores

_MODE, _COLUMN = '{}_mode', 'output_token_{}'  # of columns
_LONGEST_PROMPT = 2**31 - 1  # of a text that is not tokenized yet
_FIRST_ROW = 'routed_experts_start_len'


class Parameters(bodies.Sampling):
    """The object `sampling_params`, one or one for each prompt."""

    ignored = ('spaces_between_special_tokens',)
    unserved = (
        'stop_regex', 'json_schema', 'regex', 'ebnf', 'structural_tag', 'custom_params', 'stream_interval',
    )  # fmt: skip
    max_new_tokens: bodies.Natural = 128
    n: bodies.Samples = 1
    min_tokens: bodies.Natural = Field(0, alias='min_new_tokens')
    seed: bodies.Seed | None = Field(None, alias='sampling_seed')
    include_stop_str_in_output: bool = Field(False, alias='no_stop_trim')


class Request(bodies.Body):
    """The body of a request. Lists have an entry for each prompt."""

    ignored = ('log_metrics', 'background', 'extra_key', 'conversation_id', 'routing_key')
    unserved = (
        'image_data', 'video_data', 'audio_data', 'input_embeds', 'modalities', 'return_hidden_states', 'lora_path',
        'lora_id', 'session_params', 'custom_logit_processor', 'token_ids_logprob',
        'return_indexer_topk', 'return_sampling_mask', 'return_prompt_token_ids',
        'return_flat_raw_output_top_logprobs', 'return_flat_raw_output_top_logprobs_b64', 'bootstrap_host',
        'bootstrap_port', 'bootstrap_room',
    )  # fmt: skip
    text: bodies.OneOrTurns[bodies.Spelled, bodies.Spelled] | None = None
    input_ids: bodies.IdRows | None = None
    sampling_params: bodies.OneOrList[Parameters, Parameters] = bodies.OBJECT
    return_logprob: bodies.OneOrList[bool, bool] = False
    logprob_start_len: bodies.OneOrList[bodies.Start, bodies.Start | None] = -1
    top_logprobs_num: bodies.OneOrList[bodies.Alternatives, bodies.Alternatives] = 0
    return_text_in_logprobs: bool = False
    routed_experts_start_len: bodies.Natural = 0
    rid: bodies.OneOrList[bodies.Text, bodies.Text] = ''
    model: bodies.Text = ''
    stream: bool = False
    session_id: bodies.Text = ''
    cache_salt: bodies.Text = ''
    priority: bodies.Priority = 0

    @classmethod
    def column_fields(cls) -> Mapping[str, bodies.ColumnField]:
        return {**bodies.ask_columns(of_tokens(), _MODE, 'selected'), **bodies.ask_columns(of_models())}


def parse(body: object) -> Call:
    """Parses a request body; raises RequestError."""
    request, ignored = bodies.read(Request, body)
    prompts, prompt_field, is_batch = _list_prompts(request)
    sampling, n = _list_sampling(request.sampling_params, len(prompts))
    wanted = bool(_require_same('return_logprob', request.return_logprob, len(prompts)))
    alternatives = _require_same('top_logprobs_num', request.top_logprobs_num, len(prompts))
    if alternatives and not wanted:
        raise refuse('top_logprobs_num', request.top_logprobs_num, 'needs return_logprob=true')
    starts = _list_starts(request.logprob_start_len, prompts)
    without_influence = {
        'session_id': request.session_id,
        'priority': request.priority,
        'logprob_start_len': not wanted and request.logprob_start_len != -1,
        'return_text_in_logprobs': request.return_text_in_logprobs and not wanted,
        'routed_experts_start_len': request.routed_experts_start_len and not request.has_rows,
    }
    call = Call(
        prompts=prompts,
        prompt_field=prompt_field,
        sampling=sampling,
        request_ids=_list_request_ids(request.rid, len(prompts), n),
        ignored=bodies.join_ignored(ignored, without_influence),
        model=request.model,
        n=n,
        is_batch=is_batch,
        stream=request.stream,
        logprobs=wanted,
        columns=request.columns,
        first_row=request.routed_experts_start_len,
        alternatives=alternatives,
        prompt_starts=starts if wanted else (),
        text_in_logprobs=request.return_text_in_logprobs,
        session=request.session_id,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )
    bodies.require_row(_FIRST_ROW, call.first_row, min(map(_length, prompts)))
    bodies.require_scored(call, 'sampling_params.max_new_tokens', 'top_logprobs_num')
    return call


def render(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> JsonObject | list[JsonObject]:
    """Renders the reply: a list for a batch and for n > 1."""
    found = [_render_answer(call, answer, info) for answer in answers]
    return found if call.is_batch or call.n > 1 else found[0]


def render_event(call: Call, answer: Answer, piece: Piece, info: ReplyInfo) -> bytes:
    """Renders one event of a stream: the whole answer so far, `piece` included.

    The spans are in every event, so that a client can keep its tokens when the server dies. The content of earlier
    events is copied, not rendered again.
    """
    written = _write_on(call, answer, info)
    lists = {field: f'[{written.lists[field]}]' for field in written.lists}
    ids = lists.pop('output_ids')
    event = {
        'text': f'"{written.text}"',
        'output_ids': ids,
        'meta_info': _write(_meta_facts(call, answer, info), lists),
    }
    return frame_text(_write({} if call.n_answers == 1 else {'index': answer.index}, event))


def render_last(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> bytes:
    """Returns no bytes: [DONE] directly follows the last event of the last answer."""
    return b''


def render_error(message: str, status: int, field: str = '') -> JsonObject:
    """Renders the body of a refusal."""
    return {'error': {'message': message}} if status < 500 else {'detail': message}


def meta_info(call: Call, answer: Answer, info: ReplyInfo) -> JsonObject:
    """Renders SGLang's `meta_info` of an answer: everything except its text and ids."""
    return _meta_facts(call, answer, info) | _token_lists(call, answer, info, 0)


def _meta_facts(call: Call, answer: Answer, info: ReplyInfo) -> JsonObject:
    """Renders `meta_info` except the lists of output tokens."""
    spans = answer.spans
    found: JsonObject = {
        'id': answer.request_id,
        'finish_reason': _render_finish(answer),
        'prompt_tokens': len(answer.prompt_tokens),
        'completion_tokens': answer.n_tokens,
        'cached_tokens': answer.cached_tokens,
        'num_retractions': answer.retractions,
        'weight_version': answer.version or (spans[-1].version if spans else ''),
        'weight_versions': [{'version': s.version, 'start': s.start, 'end': s.end} for s in spans],
        'e2e_latency': answer.latency_s,
    }
    if call.logprobs:
        listed = answer.prompt_tokens[call.prompt_start(answer.index) :].tolist()
        values = answer.prompt_logprobs(len(listed))
        found['input_token_logprobs'] = [[v, t, _text(t, call, info)] for v, t in zip(values, listed, strict=True)]
        found['output_token_logprobs_length'] = answer.n_tokens
        if call.alternatives:
            found['input_top_logprobs'] = _top(answer.prompt_scores, len(listed), call, info)
            found['output_top_logprobs'] = _top(answer.alternatives, answer.n_tokens, call, info)
    if answer.scored_version:
        found['scored_weight_version'] = answer.scored_version
    return found | (render_raw(call, answer.pieces) if answer.finish else {})


def _top(scores: TokenScores | None, length: int, call: Call, info: ReplyInfo) -> list[object]:
    """Lists the likeliest tokens at each of `length` tokens; null for leading tokens without scores."""
    ranked = [] if scores is None else scores.ranked(call.alternatives)
    entries: list[list[list[object]] | None] = [
        [[value, token, _text(token, call, info)] for token, value in one] for one in ranked
    ]
    return [*[None] * (length - len(entries)), *entries]


def _token_lists(call: Call, answer: Answer, info: ReplyInfo, first: int) -> JsonObject:
    """Renders the lists of log-probs and columns, for the output tokens from `first` on."""
    found: JsonObject = {}
    if call.logprobs:
        pairs = zip(answer.logprobs[first:].tolist(), answer.tokens[first:].tolist(), strict=True)
        found['output_token_logprobs'] = [[logprob, token, _text(token, call, info)] for logprob, token in pairs]
    return found | render_columns(call, answer, first, _COLUMN)


def _write_on(call: Call, answer: Answer, info: ReplyInfo) -> Written:
    """Adds the new tokens and text to the answer's written content, and returns it."""
    written, tokens, text = answer.written, answer.tokens, answer.text
    new = {'output_ids': tokens[written.tokens :].tolist(), **_token_lists(call, answer, info, written.tokens)}
    for field, values in new.items():
        parts = (written.lists.get(field, ''), write_json(values)[1:-1])
        written.lists[field] = ','.join(part for part in parts if part)
    written.text += write_json(text[written.characters :])[1:-1]
    written.tokens, written.characters = len(tokens), len(text)
    return written


def _write(event: JsonObject, more: Mapping[str, str]) -> str:
    """Renders the object as JSON, with further fields whose values are JSON already."""
    fields = [write_json(event)[1:-1], *(f'"{field}":{value}' for field, value in more.items())]
    return '{' + ','.join(field for field in fields if field) + '}'


def render_request(call: Call) -> JsonObject:
    """Renders a client's request body for the call: one prompt of token ids.

    Log-probs are requested from the last prompt token on: otherwise servers repeat entries of long answers.
    """
    prompt, sampling = call.prompts[0], call.sampling[0]
    assert isinstance(prompt, np.ndarray), 'token ids'
    assert len(call.prompts) == 1, 'one prompt'
    parameters = bodies.render_sampling(sampling, Parameters) | {'n': call.n}
    if sampling.max_new_tokens is not None:
        parameters['max_new_tokens'] = sampling.max_new_tokens
    body: JsonObject = {'input_ids': prompt.tolist(), 'sampling_params': parameters, 'stream': call.stream}
    if call.request_ids[0]:
        body['rid'] = call.request_ids[0] if call.n == 1 else list(call.request_ids)
    if call.logprobs:
        body |= {'return_logprob': True, 'logprob_start_len': len(prompt) - 1}
    body |= {_MODE.format(name): 'selected' for name in call.token_columns}
    body |= {ASKED.format(name): True for name in call.model_columns}
    optional = {
        _FIRST_ROW: call.first_row,
        'session_id': call.session,
        'cache_salt': call.cache_salt,
        'priority': call.priority,
    }
    return body | {name: value for name, value in optional.items() if value}


def parse_reply(body: object, call: Call, vocab_size: int | None = None) -> list[Answer]:
    """Parses the reply to a call with log-probs; raises ReplyError if its tokens can not be trusted.

    Ids and log-probs are read from output_token_logprobs, never from output_ids, which servers truncate and repeat. An
    event of a stream is such a reply too. Answers without spans have pieces of version ''.
    """
    prompt = call.prompts[0]
    assert isinstance(prompt, np.ndarray)
    replies = body if isinstance(body, list) else [body]
    if isinstance(body, list) and len(body) != call.n:
        raise ReplyError(f'the server sent a list of {len(body)} answers, and {call.n} were asked for')
    return [_parse_answer(Reply(reply), index, prompt, call, vocab_size) for index, reply in enumerate(replies)]


def _list_prompts(request: Request) -> tuple[tuple[Prompt, ...], str, bool]:
    """Returns (prompts, the name of their field, whether they came as a list)."""
    given: Prompt | Sequence[Prompt]
    if request.text is not None and request.input_ids is None:
        given, field = request.text, 'text'
    elif request.input_ids is not None and request.text is None:
        given, field = request.input_ids, 'input_ids'
    else:
        raise RequestError('input_ids', 'input_ids or text must be sent, and only one of them')
    return (tuple(given), field, True) if isinstance(given, list) else ((given,), field, False)


def _list_sampling(given: Parameters | list[Parameters], n_prompts: int) -> tuple[tuple[CallSampling, ...], int]:
    """Returns (sampling of each prompt, n)."""
    if not isinstance(given, list):
        return (given.make(given.max_new_tokens, 'sampling_params.'),) * n_prompts, given.n
    n = _require_same('sampling_params.n', [one.n for one in given], n_prompts)
    named = [(one, f'sampling_params[{index}].') for index, one in enumerate(given)]
    return tuple(one.make(one.max_new_tokens, path) for one, path in named), n


def _require_length(field: str, given: Sized, n_prompts: int) -> None:
    if len(given) != n_prompts:
        raise refuse(field, given, f'must have one entry for each of {n_prompts} prompts')


def _require_same(field: str, given: int | Sequence[int], n_prompts: int) -> int:
    """Returns the value that all prompts of a batch must share."""
    if isinstance(given, int):
        return given
    _require_length(field.removesuffix('.n'), given, n_prompts)
    if len(set(given)) != 1:
        raise refuse(field, sorted(set(given)), 'differs between the prompts of a batch: send them one by one')
    return given[0]


def _list_starts(given: int | list[int | None], prompts: Sequence[Prompt]) -> tuple[int, ...]:
    """Returns the first token of each prompt whose log-prob is listed; -1 = none."""
    starts = given if isinstance(given, list) else [given] * len(prompts)
    _require_length('logprob_start_len', starts, len(prompts))
    for start, prompt in zip(starts, prompts, strict=True):
        if start is not None and start > (most := _length(prompt)):
            raise refuse('logprob_start_len', start, f'must be -1 or a position of the prompt, at most {most}')
    return tuple(-1 if start is None else start for start in starts)


def _length(prompt: Prompt) -> int:
    """The number of tokens of a prompt; for a text, the most that it may have."""
    return len(prompt) if isinstance(prompt, np.ndarray) else _LONGEST_PROMPT


def _list_request_ids(given: str | list[str], n_prompts: int, n: int) -> tuple[str, ...]:
    total = n_prompts * n
    if isinstance(given, str):
        return bodies.number_ids(given, total)
    listed = given
    if len(listed) == n_prompts and n > 1:
        listed = [f'{entry}_{sample}' for entry in listed for sample in range(n)]
    if len(listed) != total or len(set(listed)) != total:
        raise refuse('rid', given, f'must be a string, or a list of one for each of {total} answers')
    return tuple(listed)


def _render_answer(call: Call, answer: Answer, info: ReplyInfo) -> JsonObject:
    meta = meta_info(call, answer, info)
    return {'text': answer.text, 'output_ids': answer.tokens.tolist(), 'meta_info': meta}


def _render_finish(answer: Answer) -> JsonObject | None:
    finish = answer.finish
    if finish is None:
        return None
    if finish.reason == 'stop':
        return {'type': 'stop', 'matched': finish.matched}
    if finish.reason == 'length':
        return {'type': 'length', 'length': answer.n_tokens}
    return {'type': 'abort', 'message': finish.message or 'Aborted', 'status_code': None, 'err_type': None}


def _text(token: int, call: Call, info: ReplyInfo) -> str | None:
    return info.token_text(token) if call.text_in_logprobs and info.token_text else None


def _parse_answer(reply: Reply, index: int, prompt: np.ndarray, call: Call, vocab_size: int | None) -> Answer:
    meta = reply.nested('meta_info')
    finish = _parse_finish(meta)
    entries = meta.entries('output_token_logprobs') if meta.values.get('output_token_logprobs') else []
    n_tokens = meta.values.get('completion_tokens', 0 if finish and finish.reason == 'abort' else None)
    if n_tokens != len(entries):
        raise meta.error('output_token_logprobs', f'{len(entries)} entries for completion_tokens={show(n_tokens)}')
    pairs = [entry[:2] if isinstance(entry, list) and len(entry) >= 2 else (math.nan, -1) for entry in entries]
    tokens, logprobs = read_logprobs(meta, 'output_token_logprobs', pairs, vocab_size)
    columns, context = parse_raw(meta, call, len(tokens)) if finish else NO_ROWS
    columns = {**parse_columns(meta, call, tokens, _COLUMN), **columns}
    return Answer(
        request_id=meta.text('id'),
        prompt_tokens=prompt,
        index=reply.integer('index', call.n - 1) if 'index' in reply.values else index,
        pieces=cut_by_spans(meta, tokens, logprobs, columns, 0, context),
        finish=finish,
        version=meta.text('weight_version'),
        cached_tokens=int(meta.number('cached_tokens')),
        retractions=int(meta.number('num_retractions')),
        latency_s=meta.number('e2e_latency'),
    )


def _parse_finish(meta: Reply) -> Finish | None:
    given = meta.values.get('finish_reason')
    if given is None:
        return None
    reason = given.get('type') if isinstance(given, dict) else given
    if reason == 'stop' or reason == 'length' or reason == 'abort':
        end = Reply(given if isinstance(given, dict) else {})
        return Finish(reason, end.values.get('matched'), end.text('message'))
    raise meta.error('finish_reason', f'{show(given)} is none of stop, length and abort')
