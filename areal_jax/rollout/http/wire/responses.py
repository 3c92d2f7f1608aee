"""OpenAI's POST /v1/responses: request and reply. Nothing is stored, so a request has the whole conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal_jax.files import JsonObject
from areal_jax.rollout.http.wire import vllm
from areal_jax.rollout.http.wire.exchange import Answer, Call, Message, Part, Piece, Reasoning, ReplyInfo, ToolCall
from areal_jax.rollout.http.wire.openai import (
    AskedTools,
    choose,
    describe_call,
    join_assistant,
    list_tools,
    make_call,
    metadata,
    read_format,
    read_function,
    read_part,
    take_arguments,
    take_name,
)
from areal_jax.rollout.http.wire.request_fields import Fields
from areal_jax.rollout.http.wire.sglang import frame_named

_MOST_ITEMS = 4096  # of the input, and parts of an item
_TEXT_PARTS = ('input_text', 'output_text', 'text')
_IGNORED = (
    'user', 'metadata', 'store', 'service_tier', 'safety_identifier', 'prompt_cache_key', 'prompt_cache_retention',
    'reasoning', 'truncation', 'include', 'max_tool_calls', 'stream_options',
)  # fmt: skip
_OF_ITEMS = ('id', 'status', 'phase', 'namespace')  # in items that clients send back

render_error = vllm.render_error


def parse(body: object) -> Call:
    """Parses a request body; raises RequestError."""
    fields = Fields(body)
    stored = 'is not served, for nothing is stored: send the whole conversation as input'
    fields.take_unserved('previous_response_id', 'conversation', fix=stored)
    fields.take_unserved('background', 'prompt', 'top_logprobs')
    instructions = fields.take_text('instructions', longest=None)
    messages = [Message('system', instructions)] if instructions else []
    messages += _read_input(fields)
    limit = fields.take_optional_integer('max_output_tokens', least=1)
    asked = _read_tools(fields)
    text = fields.take_fields('text')
    wishes = read_format(text, 'format')
    text.take_ignored('verbosity')
    text.finish()
    fields.take_ignored(*_IGNORED)
    return make_call(fields, messages, 'input', limit, asked, wishes)


def render(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> JsonObject:
    """Renders the reply with the items of the one answer."""
    return _render_response(call, answers[0], info)


def render_event(call: Call, answer: Answer, piece: Piece, info: ReplyInfo) -> bytes:
    """Renders the events of `piece`, the answer's last; the first events announce the response."""
    found: list[JsonObject] = []
    if not answer.written.events:
        begun = _render_response(call, answer, info, begins=True)
        found += [{'type': f'response.{word}', 'response': begun} for word in ('created', 'in_progress')]
    for part in piece.parts:
        found += _add_text(answer, part) if isinstance(part, str) else [*_close(answer), *_add_whole(answer, part)]
    if answer.finish is not None:
        response = _render_response(call, answer, info)
        found += [*_close(answer), {'type': f'response.{response["status"]}', 'response': response}]
    return b''.join(_number(answer, event) for event in found)


def render_last(call: Call, answers: Sequence[Answer], info: ReplyInfo) -> bytes:
    """Returns no bytes: the event that ends a response contains everything."""
    return b''


def render_failure(answers: Sequence[Answer], message: str, status: int, field: str) -> bytes:
    """Renders the last event of a stream that fails."""
    return _number(answers[0], {'type': 'error', 'code': str(status), 'message': message, 'param': field or None})


# Requests.


def _read_input(fields: Fields) -> list[Message]:
    given = fields.take('input')
    if isinstance(given, str) and given:
        return [Message('user', fields.require_characters('input', given))]
    if not isinstance(given, list) or not given:
        raise fields.refuse('input', given, 'must be a text, or a list of one or more items')
    fields.require_few('input', given, _MOST_ITEMS)
    turns = [turn for i, item in enumerate(given) for turn in _read_item(fields.inside(item, f'input[{i}]'))]
    if not turns:
        raise fields.refuse('input', given, 'has no message: send one')
    return join_assistant(turns)


def _read_item(fields: Fields) -> list[Message]:
    """Reads an item as a turn or a part of one; [] for reasoning."""
    kind = fields.take_choice(
        'type', ('message', 'function_call', 'function_call_output', 'reasoning'), default='message'
    )
    if kind == 'reasoning':
        fields.note_ignored(reasoning=True)  # all of the item
        return []
    fields.take_ignored(*_OF_ITEMS)
    if kind == 'function_call':
        call = describe_call(fields.take_text('call_id'), take_name(fields), take_arguments(fields))
        turn = Message('assistant', '', (call,))
    elif kind == 'function_call_output':
        turn = Message('tool', _read_content(fields, 'output'), tool_call_id=fields.take_text('call_id'))
    else:
        role = fields.take_choice('role', ('user', 'assistant', 'system', 'developer'), default='')
        if not role:
            raise fields.refuse('role', None, "is missing: use 'system', 'user' or 'assistant'")
        turn = Message('system' if role == 'developer' else role, _read_content(fields, 'content'))
    fields.finish()
    return [turn]


def _read_content(fields: Fields, field: str) -> str:
    """Reads a text, or a list of text parts."""
    given = fields.peek(field)
    if given is None:
        raise fields.refuse(field, None, 'is missing: send a string or a list of text parts')
    if not isinstance(given, list):
        return fields.take_text(field, longest=None)
    fields.require_few(field, fields.take(field), _MOST_ITEMS)
    return ''.join(read_part(fields.inside(part, f'{field}[{i}]'), _TEXT_PARTS) for i, part in enumerate(given))


def _read_tools(fields: Fields) -> AskedTools:
    only_one = not fields.take_flag('parallel_tool_calls', True)
    tools = []
    for entry in list_tools(fields):
        entry.take_choice('type', ('function',))
        tools.append({'type': 'function', 'function': read_function(entry)})
    given = fields.take('tool_choice')
    word, name = str(given or 'auto'), ''
    if isinstance(given, Mapping):
        inside = fields.inside(given, 'tool_choice')
        inside.take_choice('type', ('function',))
        word, name = 'required', take_name(inside)
        inside.finish()
    elif given not in (None, 'auto', 'none', 'required'):
        raise fields.refuse('tool_choice', given, "must be 'auto', 'none', 'required' or a function")
    return choose(fields, given, word, name, tuple(tools), only_one)


# Replies.


def _render_response(call: Call, answer: Answer, info: ReplyInfo, begins: bool = False) -> JsonObject:
    """Renders the whole response; with `begins`, its state before the first token."""
    sampling, finish = call.sampling[0], None if begins else answer.finish
    reasons = {'stop': None, 'length': 'max_output_tokens', 'abort': 'aborted'}
    reason = reasons[finish.reason] if finish else None
    wish = next((wish.value for wish in call.wishes if wish.field == 'tool_choice'), 'auto')
    parts = [] if begins else answer.parts
    return {
        'id': f'resp_{answer.request_id}',
        'object': 'response',
        'created_at': info.created_s,
        'status': 'in_progress' if finish is None else 'incomplete' if reason else 'completed',
        'error': None,
        'incomplete_details': {'reason': reason} if reason else None,
        'model': call.model or info.model,
        'output': [_render_item(answer, index, part) for index, part in enumerate(parts)],
        'parallel_tool_calls': not call.one_tool_call,
        'previous_response_id': None,
        'store': False,
        'temperature': sampling.temperature,
        'top_p': sampling.top_p,
        'max_output_tokens': sampling.max_new_tokens,
        'tool_choice': wish,
        'tools': [{'type': 'function', 'strict': False, **tool['function']} for tool in call.tools],
        'usage': None if finish is None else _count(answer),
        'metadata': {},
        'weights': metadata(answer),
    }


def _count(answer: Answer) -> JsonObject:
    prompt, new = len(answer.prompt_tokens), answer.n_tokens
    return {
        'input_tokens': prompt,
        'input_tokens_details': {'cached_tokens': answer.cached_tokens},
        'output_tokens': new,
        'output_tokens_details': {'reasoning_tokens': 0},
        'total_tokens': prompt + new,
    }


def _render_item(answer: Answer, index: int, part: Part, begins: bool = False) -> JsonObject:
    """Renders a part of the answer; with `begins`, its state before its first character."""
    status = 'in_progress' if begins else 'completed'
    if isinstance(part, Reasoning):
        return {
            'type': 'reasoning', 'id': f'rs_{answer.request_id}_{index}', 'summary': [], 'status': status,
            'content': [] if begins else [{'type': 'reasoning_text', 'text': part.text}],
        }  # fmt: skip
    if isinstance(part, ToolCall):
        return {
            'type': 'function_call', 'id': f'fc_{part.id}', 'call_id': part.id, 'name': part.name,
            'arguments': '' if begins else part.arguments, 'status': status,
        }  # fmt: skip
    return {
        'type': 'message', 'id': f'msg_{answer.request_id}_{index}', 'role': 'assistant', 'status': status,
        'content': [] if begins else [_render_text(part)],
    }  # fmt: skip


def _render_text(text: str) -> JsonObject:
    return {'type': 'output_text', 'text': text, 'annotations': [], 'logprobs': []}


# Events.


def _number(answer: Answer, event: JsonObject) -> bytes:
    number, answer.written.events = answer.written.events, answer.written.events + 1
    return frame_named(event | {'sequence_number': number})


def _add_text(answer: Answer, text: str) -> list[JsonObject]:
    written, found = answer.written, []
    if not written.in_text:
        written.in_text, written.parts = True, written.parts + 1
        item = _render_item(answer, written.parts - 1, text, begins=True)
        place = _place(answer)
        found = [
            {'type': 'response.output_item.added', 'output_index': written.parts - 1, 'item': item},
            {'type': 'response.content_part.added', **place, 'part': _render_text('')},
        ]
    return [*found, {'type': 'response.output_text.delta', **_place(answer), 'delta': text, 'logprobs': []}]


def _close(answer: Answer) -> list[JsonObject]:
    """Ends the open text, if there is one."""
    written = answer.written
    if not written.in_text:
        return []
    written.in_text, index = False, written.parts - 1
    text, place = answer.parts[index], _place(answer)
    assert isinstance(text, str)
    return [
        {'type': 'response.output_text.done', **place, 'text': text, 'logprobs': []},
        {'type': 'response.content_part.done', **place, 'part': _render_text(text)},
        {'type': 'response.output_item.done', 'output_index': index, 'item': _render_item(answer, index, text)},
    ]


def _add_whole(answer: Answer, part: ToolCall | Reasoning) -> list[JsonObject]:
    """Renders the events of a part that comes all at once."""
    index, answer.written.parts = answer.written.parts, answer.written.parts + 1
    begun, done = (_render_item(answer, index, part, begins=begins) for begins in (True, False))
    place = {'output_index': index, 'item_id': done['id']}
    if isinstance(part, Reasoning):
        place['content_index'] = 0
        filled, text, whole = 'response.reasoning_text', part.text, {'text': part.text}
    else:
        filled, text = 'response.function_call_arguments', part.arguments
        whole = {'name': part.name, 'arguments': part.arguments}
    return [
        {'type': 'response.output_item.added', 'output_index': index, 'item': begun},
        {'type': f'{filled}.delta', **place, 'delta': text},
        {'type': f'{filled}.done', **place, **whole},
        {'type': 'response.output_item.done', 'output_index': index, 'item': done},
    ]


def _place(answer: Answer) -> JsonObject:
    """Returns the place of the open text."""
    index = answer.written.parts - 1
    return {'output_index': index, 'content_index': 0, 'item_id': f'msg_{answer.request_id}_{index}'}
