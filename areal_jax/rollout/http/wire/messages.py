"""Anthropic's POST /v1/messages and /v1/messages/count_tokens: request and reply."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire.exchange import Answer, Call, Message, Part, Piece, Reasoning, ReplyInfo, ToolCall
from areal_jax.rollout.http.wire.openai import (
    AskedTools,
    choose,
    describe_call,
    list_tools,
    make_call,
    metadata,
    read_format,
    read_function,
    read_part,
    take_name,
)
from areal_jax.rollout.http.wire.request_fields import Fields
from areal_jax.rollout.http.wire.sglang import frame_named

_MOST_BLOCKS = 4096  # and messages
_MOST_STOP_STRINGS, _STOP_CHARACTERS = 64, 4096
_THOUGHTS = ('thinking', 'redacted_thinking')
_IGNORED = (
    'metadata', 'service_tier', 'thinking', 'cache_control', 'context_management', 'inference_geo', 'betas', 'speed',
)  # fmt: skip
_ERROR_TYPES = {
    401: 'authentication_error', 403: 'permission_error', 404: 'not_found_error', 413: 'request_too_large',
    429: 'rate_limit_error', 503: 'overloaded_error', 504: 'timeout_error',
}  # fmt: skip
_REASONS = {'stop': 'end_turn', 'length': 'max_tokens', 'abort': 'abort'}


def parse(body: object) -> Call:
    """Parses a request body; raises RequestError."""
    fields = Fields(body)
    limit = fields.take_optional_integer('max_tokens', least=1)
    if limit is None:
        raise fields.refuse('max_tokens', None, 'is missing: say how long the answer may be')
    return dataclasses.replace(_parse(fields, limit), fits_limit=True)  # packages always send one, often a large one


def parse_count(body: object) -> Call:
    """Parses a request body whose prompt is to be counted: `max_tokens` may be absent."""
    fields = Fields(body)
    fields.take_ignored('max_tokens')
    return _parse(fields, None)


def render(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> JsonObject:
    """Renders the reply with the blocks of the one answer."""
    answer = answers[0]
    blocks = [_render_block(part) for part in answer.parts]
    return _render_message(call, answer, info) | _render_end(call, answer) | {'content': blocks}


def render_event(call: Call, answer: Answer, piece: Piece, info: ReplyInfo) -> bytes:
    """Renders the events of `piece`, the answer's last; the first event announces the message."""
    written, found = answer.written, []
    if not written.events:
        message = _render_message(call, answer, info)
        found.append({'type': 'message_start', 'message': message | {'usage': _count(answer) | {'output_tokens': 0}}})
    for part in piece.parts:
        found += _add_text(answer, part) if isinstance(part, str) else [*_close(answer), *_add_whole(answer, part)]
    if answer.finish is not None:
        end = _render_end(call, answer)
        delta = {'stop_reason': end.pop('stop_reason'), 'stop_sequence': end.pop('stop_sequence')}
        found += [*_close(answer), {'type': 'message_delta', 'delta': delta, **end}, {'type': 'message_stop'}]
    written.events += len(found)
    return b''.join(frame_named(event) for event in found)


def render_last(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> bytes:
    """Returns no bytes: message_stop was the last event."""
    return b''


def render_error(message: str, status: int, field: str = '') -> JsonObject:
    """Renders the body of a refusal; the sentence names the field."""
    kind = _ERROR_TYPES.get(status, 'api_error' if status >= 500 else 'invalid_request_error')
    return {'type': 'error', 'error': {'type': kind, 'message': message}}


def render_failure(answers: Sequence[Answer], message: str, status: int, field: str) -> bytes:
    """Renders the last event of a stream that fails."""
    return frame_named(render_error(message, status))


# Requests.


def _parse(fields: Fields, limit: int | None) -> Call:
    system = _read_texts(fields, 'system') if fields.has('system') else ''
    messages = [Message('system', system)] if system else []
    messages += _read_messages(fields)
    asked = _read_tools(fields)
    output = fields.take_fields('output_config')
    wishes = (*read_format(output, 'format'), *read_format(fields, 'output_format'))
    output.take_ignored('effort', 'task_budget')
    output.finish()
    stops = fields.take_texts('stop_sequences', _MOST_STOP_STRINGS, _STOP_CHARACTERS)
    fields.take_unserved('container', 'mcp_servers')
    fields.take_ignored(*_IGNORED)
    return make_call(fields, messages, 'messages', limit, asked, wishes, stops)


def _read_messages(fields: Fields) -> list[Message]:
    given = fields.take('messages')
    if not isinstance(given, list) or not given:
        raise fields.refuse('messages', given, 'must be a list of one or more messages')
    fields.require_few('messages', given, _MOST_BLOCKS)
    turns: list[Message] = []
    for index, entry in enumerate(given):
        turns += _read_message(fields.inside(entry, f'messages[{index}]'))
    if turns and turns[-1].role == 'assistant':
        raise fields.refuse(
            f'messages[{len(given) - 1}].role',
            'assistant',
            'is not served as the last turn: an answer can not go on from a text, end with a turn of the user',
        )
    return turns


def _read_message(fields: Fields) -> list[Message]:
    """Reads the turns of a message: one for each tool result, and one for each run of texts between them."""
    role = fields.take_choice('role', ('user', 'assistant', 'system'), default='')
    if not role:
        raise fields.refuse('role', None, "is missing: use 'user' or 'assistant'")
    if isinstance(fields.peek('content'), list) and role != 'system':
        read = _read_assistant_block if role == 'assistant' else _read_user_block
        turns = _read_blocks(fields, role, read)
    else:
        turns = [Message(role, _read_texts(fields, 'content'))]
    fields.take_ignored('cache_control')
    fields.finish()
    return turns


def _read_blocks(fields: Fields, role: str, read: Callable[[Fields], Message | None]) -> list[Message]:
    """Reads the turns of a list of blocks; joins neighbours of the message's role."""
    given = fields.take('content')
    fields.require_few('content', given, _MOST_BLOCKS)
    assert isinstance(given, list)
    found: list[Message] = []
    for index, block in enumerate(given):
        turn = read(fields.inside(block, f'content[{index}]'))
        if turn is None:
            continue
        if found and found[-1].role == turn.role == role:
            last = found[-1]
            found[-1] = Message(role, last.content + turn.content, (*last.tool_calls, *turn.tool_calls))
        else:
            found.append(turn)
    return found or [Message(role, '')]


def _read_user_block(fields: Fields) -> Message:
    if fields.peek('type') != 'tool_result':
        return Message('user', read_part(fields, ('text', 'tool_result')))
    fields.take_choice('type', ('text', 'tool_result'))
    content = _read_texts(fields, 'content') if fields.has('content') else ''
    turn = Message('tool', content, tool_call_id=fields.take_text('tool_use_id'))
    fields.take_ignored('is_error', 'cache_control')
    fields.finish()
    return turn


def _read_assistant_block(fields: Fields) -> Message | None:
    """Reads a block of an assistant's message; None for a thinking block."""
    kinds = ('text', 'tool_use', *_THOUGHTS)
    if fields.peek('type') not in kinds[1:]:
        return Message('assistant', read_part(fields, kinds))
    if (kind := fields.take_choice('type', kinds)) in _THOUGHTS:
        fields.note_ignored(**{kind: True})  # all of the block
        return None
    given = fields.peek('input')
    fields.require_shallow('input', given)
    fields.take_fields('input')
    call_id, name = fields.take_text('id'), take_name(fields)
    fields.take_ignored('cache_control', 'caller')
    fields.finish()
    return Message('assistant', '', (describe_call(call_id, name, given if isinstance(given, dict) else {}),))


def _read_texts(fields: Fields, field: str) -> str:
    """Reads a text, or a list of text blocks."""
    given = fields.peek(field)
    if given is None:
        raise fields.refuse(field, None, 'is missing: send a string or a list of text blocks')
    if not isinstance(given, list):
        return fields.take_text(field, longest=None)
    fields.require_few(field, fields.take(field), _MOST_BLOCKS)
    return ''.join(read_part(fields.inside(block, f'{field}[{i}]')) for i, block in enumerate(given))


def _read_tools(fields: Fields) -> AskedTools:
    tools = []
    for entry in list_tools(fields):
        entry.take_choice('type', ('custom',))
        tools.append({'type': 'function', 'function': read_function(entry, 'input_schema')})
    given = fields.peek('tool_choice')
    choice = fields.take_fields('tool_choice')
    kind = choice.take_choice('type', ('auto', 'any', 'tool', 'none'))
    only_one = choice.take_flag('disable_parallel_tool_use')
    name = take_name(choice) if kind == 'tool' else ''
    choice.finish()
    word = {'auto': 'auto', 'none': 'none'}.get(kind, 'required')
    return choose(fields, given, word, name, tuple(tools), only_one)


# Replies.


def _render_message(call: Call, answer: Answer, info: ReplyInfo) -> JsonObject:
    """Renders the message before its first token."""
    return {
        'id': f'msg_{answer.request_id}', 'type': 'message', 'role': 'assistant', 'model': call.model or info.model,
        'content': [], 'stop_reason': None, 'stop_sequence': None,
    }  # fmt: skip


def _render_end(call: Call, answer: Answer) -> JsonObject:
    """Renders the answer's finish reason and its token counts."""
    finish = answer.finish
    assert finish is not None
    matched = finish.matched if isinstance(finish.matched, str) else None
    reason = _REASONS[finish.reason]
    if finish.reason == 'stop':
        reason = 'tool_use' if answer.calls else 'stop_sequence' if matched else reason
    return {'stop_reason': reason, 'stop_sequence': matched, 'usage': _count(answer), 'metadata': metadata(answer)}


def _count(answer: Answer) -> JsonObject:
    cached = answer.cached_tokens
    return {
        'input_tokens': len(answer.prompt_tokens) - cached,
        'cache_creation_input_tokens': 0,
        'cache_read_input_tokens': cached,
        'output_tokens': answer.n_tokens,
    }


def _render_block(part: Part) -> JsonObject:
    if isinstance(part, str):
        return {'type': 'text', 'text': part}
    if isinstance(part, Reasoning):
        return {'type': 'thinking', 'thinking': part.text, 'signature': ''}
    return {'type': 'tool_use', 'id': part.id, 'name': part.name, 'input': json.loads(part.arguments)}


# Events.


def _add_text(answer: Answer, text: str) -> list[JsonObject]:
    written, found = answer.written, []
    if not written.in_text:
        written.in_text, written.parts = True, written.parts + 1
        found = [_start(answer, {'type': 'text', 'text': ''})]
    return [*found, _delta(answer, {'type': 'text_delta', 'text': text})]


def _add_whole(answer: Answer, part: ToolCall | Reasoning) -> list[JsonObject]:
    """Renders the events of a part that comes all at once."""
    answer.written.parts += 1
    empty: JsonObject = {'input': {}}
    if isinstance(part, Reasoning):
        empty, delta = {'thinking': ''}, {'type': 'thinking_delta', 'thinking': part.text}
    else:
        delta = {'type': 'input_json_delta', 'partial_json': part.arguments}
    return [_start(answer, _render_block(part) | empty), _delta(answer, delta), _stop(answer)]


def _close(answer: Answer) -> list[JsonObject]:
    """Ends the open text block, if there is one."""
    found = [_stop(answer)] if answer.written.in_text else []
    answer.written.in_text = False
    return found


def _start(answer: Answer, block: JsonObject) -> JsonObject:
    return {'type': 'content_block_start', 'index': answer.written.parts - 1, 'content_block': block}


def _delta(answer: Answer, delta: JsonObject) -> JsonObject:
    return {'type': 'content_block_delta', 'index': answer.written.parts - 1, 'delta': delta}


def _stop(answer: Answer) -> JsonObject:
    return {'type': 'content_block_stop', 'index': answer.written.parts - 1}
