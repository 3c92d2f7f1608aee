"""SGLang's POST /generate: request and reply, read and written."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from areal_jax.columns import of_models, of_tokens
from areal_jax.errors import show
from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import (
    ASKED,
    Answer,
    Call,
    CallSampling,
    Finish,
    Piece,
    Prompt,
    Reply,
    ReplyError,
    ReplyInfo,
    RequestError,
    Written,
    cut_by_spans,
    load_json,
    parse_columns,
    read_logprobs,
    read_wanted,
    render_columns,
)
from areal_jax.rollout.http.wire.request_fields import (
    MOST_PROMPTS,
    SGLANG,
    Fields,
    read_sampling,
    read_token_ids,
    render_sampling,
    require_same,
    require_scored,
)
from areal_jax.rollout.http.wire.row_fields import NO_ROWS, parse_raw, read_start, render_raw
from areal_jax.types import MOST_ALTERNATIVES, TokenScores

_ENTRIES, _FEW = 256, 2048  # list entries in one piece, and values in a small one
_PREFIX = 'data: '
_LAST = f'{_PREFIX}[DONE]'
DONE = f'{_LAST}\n\n'.encode()  # ends every stream


def frame(event: JsonObject) -> bytes:
    """Renders one event as bytes."""
    return frame_text(write_json(event))


def frame_named(event: JsonObject) -> bytes:
    """Renders one event with its type as the event's name."""
    return f'event: {event["type"]}\n'.encode() + frame(event)


def frame_text(event: str) -> bytes:
    """Renders one event that is JSON already."""
    return f'{_PREFIX}{event}\n\n'.encode()


def write_json(value: object) -> str:
    return json.dumps(value, separators=(',', ':'), allow_nan=False)


def write_slowly(value: object) -> Iterator[str]:
    """Yields `json.dumps(value)` in quick pieces, because the library holds the interpreter for a whole value."""
    if _is_small(value):
        yield json.dumps(value)
    elif isinstance(value, dict):
        for index, (name, inner) in enumerate(value.items()):
            yield f'{", " if index else "{"}{json.dumps(name)}: '
            yield from write_slowly(inner)
        yield '}'
    else:
        assert isinstance(value, list)
        for start in range(0, len(value), _ENTRIES):
            part = value[start : start + _ENTRIES]
            if _is_small(part):
                yield f'{", " if start else "["}{json.dumps(part)[1:-1]}'
                continue
            for index, inner in enumerate(part, start):
                yield ', ' if index else '['
                yield from write_slowly(inner)
        yield ']'


def _is_small(value: object) -> bool:
    """Whether the value has at most _FEW values inside, at any depth."""
    layer, found = [value], 0
    while layer := [one for one in layer if isinstance(one, list | dict)]:
        found += sum(map(len, layer))
        if found > _FEW:
            return False
        layer = [part for one in layer for part in (one.values() if isinstance(one, dict) else one)]
    return True


def parse_event(line: str) -> JsonObject | None:
    """Parses the event in one line of a response; None for [DONE] and for lines without an event."""
    if not line.startswith(_PREFIX) or line.strip() == _LAST:
        return None
    event = load_json(line.removeprefix(_PREFIX))
    if not isinstance(event, dict):
        raise ReplyError(f'the server sent an event that is no JSON object: {line[:80]!r}')
    return event


_MODE, _COLUMN = '{}_mode', 'output_token_{}'  # of columns
_DEFAULT_NEW_TOKENS = 128
_MOST_SAMPLES = 1024  # n: bounds the answers of one body
_LONGEST_ID = 4096  # characters of a rid
_LONGEST_PROMPT = 2**31 - 1  # of a text that is not tokenized yet
_SAMPLING_UNSERVED = (
    'stop_regex', 'json_schema', 'regex', 'ebnf', 'structural_tag', 'custom_params', 'stream_interval',
)  # fmt: skip
_UNSERVED = (
    'image_data', 'video_data', 'audio_data', 'input_embeds', 'modalities', 'return_hidden_states', 'lora_path',
    'lora_id', 'session_params', 'custom_logit_processor', 'token_ids_logprob',
    'return_indexer_topk', 'return_sampling_mask', 'return_prompt_token_ids',
    'return_flat_raw_output_top_logprobs', 'return_flat_raw_output_top_logprobs_b64', 'bootstrap_host',
    'bootstrap_port', 'bootstrap_room',
)  # fmt: skip
_IGNORED = ('log_metrics', 'background', 'extra_key', 'conversation_id', 'routing_key')
_FIRST_ROW = 'routed_experts_start_len'


def parse(body: object) -> Call:
    """Parses a request body; raises RequestError."""
    fields = Fields(body)
    prompts, prompt_field, is_batch = _read_prompts(fields)
    sampling, n = _read_sampling(fields, len(prompts))
    wanted = _read_flag(fields, 'return_logprob', len(prompts))
    is_selected = lambda field: bool(fields.take_choice(field, ('selected',), default=''))
    columns = read_wanted(is_selected, _MODE, of_tokens()) + read_wanted(fields.take_flag, columns=of_models())
    given_start = fields.peek('logprob_start_len')
    starts, alternatives = _read_starts(fields, prompts, wanted), _read_alternatives(fields, len(prompts), wanted)
    call = Call(
        prompts=prompts,
        prompt_field=prompt_field,
        sampling=sampling,
        request_ids=_read_request_ids(fields, len(prompts), n),
        model=fields.take_text('model'),
        n=n,
        is_batch=is_batch,
        stream=fields.take_flag('stream'),
        logprobs=wanted,
        columns=columns,
        first_row=read_start(fields, _FIRST_ROW, min(map(_length, prompts))),
        alternatives=alternatives,
        prompt_starts=starts,
        text_in_logprobs=fields.take_flag('return_text_in_logprobs'),
        session=fields.take_text('session_id'),
        cache_salt=fields.take_text('cache_salt'),
        priority=fields.take_integer('priority', 0, least=-(2**31)),
    )
    fields.take_unserved(*_UNSERVED)
    fields.take_ignored(*_IGNORED)
    fields.note_ignored(
        session_id=call.session,
        priority=call.priority,
        logprob_start_len=not wanted and given_start not in (None, -1),
        return_text_in_logprobs=call.text_in_logprobs and not wanted,
        routed_experts_start_len=call.first_row and not call.model_columns,
    )
    fields.finish()
    require_scored(call, 'sampling_params.max_new_tokens', 'top_logprobs_num')
    return dataclasses.replace(call, ignored=fields.ignored)


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
    parameters = render_sampling(sampling, SGLANG) | {'n': call.n}
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


def _read_prompts(fields: Fields) -> tuple[tuple[Prompt, ...], str, bool]:
    """Reads the prompts; returns (prompts, the name of their field, whether they came as a list)."""
    if fields.has('text') == fields.has('input_ids'):
        raise RequestError('input_ids', 'input_ids or text must be sent, and only one of them')
    if fields.has('text'):
        is_batch, texts = isinstance(fields.peek('text'), list), fields.take_texts('text')
        if not texts:
            raise fields.refuse('text', [], 'is empty: send a prompt')
        return texts, 'text', is_batch
    ids = fields.take('input_ids')
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        fields.require_few('input_ids', ids, MOST_PROMPTS)
        return tuple(read_token_ids(f'input_ids[{i}]', row) for i, row in enumerate(ids)), 'input_ids', True
    return (read_token_ids('input_ids', ids),), 'input_ids', False


def _read_sampling(fields: Fields, n_prompts: int) -> tuple[tuple[CallSampling, ...], int]:
    """Reads the sampling; returns (sampling of each prompt, n)."""
    given = fields.take('sampling_params')
    if not isinstance(given, list):
        one, n = _read_parameters(fields.inside({} if given is None else given, 'sampling_params'))
        return (one,) * n_prompts, n
    if len(given) != n_prompts:
        raise fields.refuse('sampling_params', given, f'must have one entry for each of {n_prompts} prompts')
    read = [_read_parameters(fields.inside(entry, f'sampling_params[{i}]')) for i, entry in enumerate(given)]
    return tuple(sampling for sampling, _ in read), require_same(fields, 'sampling_params.n', [n for _, n in read])


def _read_parameters(fields: Fields) -> tuple[CallSampling, int]:
    limit = fields.take_integer('max_new_tokens', _DEFAULT_NEW_TOKENS, least=0)
    sampling = read_sampling(fields, SGLANG, limit)
    n = fields.take_integer('n', 1, least=1, most=_MOST_SAMPLES)
    fields.take_unserved(*_SAMPLING_UNSERVED)
    fields.take_ignored('spaces_between_special_tokens')
    fields.finish()
    return sampling, n


def _read_flag(fields: Fields, field: str, n_prompts: int) -> bool:
    """Reads one flag, or a list with a flag for each prompt, all equal."""
    given = fields.take(field)
    flags: list[bool] = given if isinstance(given, list) else [False if given is None else typing.cast(bool, given)]
    if not all(isinstance(flag, bool) for flag in flags) or (isinstance(given, list) and len(flags) != n_prompts):
        raise fields.refuse(field, given, 'must be true or false')
    return bool(require_same(fields, field, flags))


def _read_starts(fields: Fields, prompts: Sequence[Prompt], wanted: bool) -> tuple[int, ...]:
    """Reads the first token of each prompt whose log-prob is listed; -1 = none, () = log-probs are not wanted."""
    field = 'logprob_start_len'
    given = fields.take(field)
    starts: list[int | None] = given if isinstance(given, list) else [typing.cast('int | None', given)] * len(prompts)
    if len(starts) != len(prompts):
        raise fields.refuse(field, given, f'must have one entry for each of {len(prompts)} prompts')
    for start, prompt in zip(starts, prompts, strict=True):
        most = _length(prompt)
        if start is not None and (type(start) is not int or not -1 <= start <= most):
            raise fields.refuse(field, start, f'must be -1 or a position of the prompt, at most {most}')
    return tuple(-1 if start is None else typing.cast(int, start) for start in starts) if wanted else ()


def _length(prompt: Prompt) -> int:
    """The number of tokens of a prompt; for a text, the most that it may have."""
    return len(prompt) if isinstance(prompt, np.ndarray) else _LONGEST_PROMPT


def _read_alternatives(fields: Fields, n_prompts: int, wanted: bool) -> int:
    """Reads one number, or a list with a number for each prompt, all equal."""
    field = 'top_logprobs_num'
    given = fields.take(field)
    numbers: list[int] = given if isinstance(given, list) else [0 if given is None else typing.cast(int, given)]
    fits = all(type(number) is int and 0 <= number <= MOST_ALTERNATIVES for number in numbers)
    if not fits or (isinstance(given, list) and len(numbers) != n_prompts):
        raise fields.refuse(field, given, f'must be an integer from 0 to {MOST_ALTERNATIVES}')
    if (found := require_same(fields, field, typing.cast(list[int], numbers))) and not wanted:
        raise fields.refuse(field, given, 'needs return_logprob=true')
    return found


def _read_request_ids(fields: Fields, n_prompts: int, n: int) -> tuple[str, ...]:
    given, total = fields.take('rid'), n_prompts * n
    for name in given if isinstance(given, list) else [given]:
        if isinstance(name, str) and len(name) > _LONGEST_ID:
            raise fields.refuse('rid', name, f'has {len(name)} characters: send {_LONGEST_ID} at most')
    if given is None:
        return ('',) * total
    if isinstance(given, str):
        return (given,) if total == 1 else tuple(f'{given}_{index}' for index in range(total))
    listed = given if isinstance(given, list) and all(isinstance(entry, str) for entry in given) else []
    if len(listed) == n_prompts and n > 1:
        listed = [f'{entry}_{sample}' for entry in listed for sample in range(n)]
    if len(listed) != total or len(set(listed)) != total:
        raise fields.refuse('rid', given, f'must be a string, or a list of one for each of {total} answers')
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
